"""What becomes of one operation: the steps that each worker takes, and what the controller knows of the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .meta import Meta

__all__ = [
    "Call",
    "Collective",
    "Local",
    "Notice",
    "Plan",
    "Program",
    "Redistribute",
    "Result",
    "Scalar",
    "Slot",
    "Step",
    "Write",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """In the arguments of a step: the tensor in this register."""

    register: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """In the arguments of a step: this one of the numbers that come with each call."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """Run an ATen operation on the sharded tensors, as PyTorch's own sharding rules do. One register per result."""

    operation: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    out: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """Run an ATen operation on each rank's own shards; the results are shards of tensors with these metas."""

    operation: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    out: tuple[int | None, ...]
    metas: tuple[Meta | None, ...]


@dataclass(frozen=True, slots=True)
class Redistribute:
    """Place a tensor otherwise: as this meta says, shards laid out in memory in the order of its strides."""

    source: int
    meta: Meta
    out: int


@dataclass(frozen=True, slots=True)
class Write:
    """Copy the shards of one tensor into those of another that is placed alike."""

    target: int
    source: int


Step = Call | Local | Redistribute | Write


@dataclass(frozen=True, slots=True)
class Program:
    """Steps over registers: the tensors of the call first, then one for each intermediate. What travels, once.

    `results` are the registers of new tensors. Where random numbers are drawn, `seeded` has the mesh dimensions along
    which ranks draw different ones, as they hold different shards; along the others they draw the same. Ranks set
    their generators accordingly before they begin.
    """

    inputs: int
    registers: int
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    seeded: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Collective:
    """Ranks along one dimension of the mesh exchange bytes: what each puts in, per call."""

    kind: str
    dim: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning about an operation that works at a cost, or not as written; issued once."""

    operation: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """In the tree that a call returns: a new tensor, or (`given`) one of the tensors that it was called with."""

    index: int
    given: bool = False


@dataclass(slots=True, eq=False)
class Plan:
    """What becomes of an operation on tensors with these metas. Made once, then found in the cache.

    `made` are the metas of the new tensors, in the order of `program.results`. `views` pairs a new tensor with an
    argument that it is a view of (a copy, where its meta says `copied`), `offsets` say where in that it begins, in
    bytes, as long as neither is cut; `writes` are the arguments that change in
    place. `build(made, given)` gives what the call returns, from the new tensors and the tensors among its arguments.
    `value` says that it returns a Python number instead: that of the one new tensor, which is whole on every rank.
    `rebinds` says that the first argument becomes the first new tensor: it was transposed in place, or the like.
    `puts_back` says that it writes to copies of several arguments, which must not be one tensor, then.
    """

    number: int
    operation: str
    program: Program
    made: tuple[Meta, ...]
    build: Callable[[Sequence[object], Sequence[object]], object]
    views: tuple[tuple[int, int], ...] = ()
    offsets: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = ()
    notices: tuple[Notice, ...] = ()
    value: bool = False
    rebinds: bool = False
    puts_back: bool = False


def builder(tree: object) -> Callable[[Sequence[object], Sequence[object]], object]:
    """How to put together what a call returns, from a tree of `Result`s."""
    match tree:
        case Result(index=0, given=False):
            return lambda made, given: made[0]
        case Result(index=at, given=True):
            return lambda made, given: given[at]
        case tuple() if all(isinstance(leaf, Result) and not leaf.given for leaf in tree):
            return lambda made, given: tuple(made)
        case list() if all(isinstance(leaf, Result) and not leaf.given for leaf in tree):
            return lambda made, given: list(made)
    return lambda made, given: _filled(tree, made, given)


def _filled(tree: object, made: Sequence[object], given: Sequence[object]) -> object:
    if isinstance(tree, Result):
        return (given if tree.given else made)[tree.index]
    if isinstance(tree, list | tuple):
        return type(tree)(_filled(leaf, made, given) for leaf in tree)
    return tree
