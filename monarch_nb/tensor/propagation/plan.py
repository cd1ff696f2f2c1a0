"""The plan of an operation: the steps of each worker, and the metas of the results. Errors for one without a plan."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch

from monarch_nb._package import more
from monarch_nb.code.modules import name_of
from monarch_nb.tensor.propagation.meta import Meta

_MORE = more("manual/tensors.md#what-goes-wrong")
_INSIDE = (os.path.dirname(torch.__file__) + os.sep, __file__.rpartition(os.sep + "tensor" + os.sep)[0] + os.sep)


class PropagationError(RuntimeError):
    """An operation on sharded tensors was refused. The text has the operation, the line, the reason and a remedy."""

    def __init__(self, operation: str, reason: str, instead: str = "", line: str = "") -> None:
        self.operation, self.reason, self.instead, self.line = operation, reason, instead, line
        location = f" (at {line})" if line else ""
        super().__init__(f"{operation}{location}: {reason}" + (f". {instead}" if instead else "") + _MORE)


class DataDependentShapeError(PropagationError):
    """The shape of the result depends on the values of a tensor, which the controller does not have."""


class NoRuleError(PropagationError):
    """The operation has no sharding rule, and settings forbid gathering its inputs."""


class ViewWriteError(PropagationError):
    """A write through a view that is a copy, because it cuts a sharded dimension: the write would be lost."""


def user_line() -> str:
    """Returns `file:line` of the innermost frame that is neither PyTorch's nor ours; empty if there is none.

    In a backward pass this is the line that called `backward()`, if autograd runs on the calling thread.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) and not name.startswith("<frozen"):
            return f"{name_of(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder in the arguments of a step: the tensor in a register."""

    register: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """Placeholder in the arguments of a step: a number that is passed with each call."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """Runs an ATen operation on DTensors, by PyTorch's sharding rules. One register per result."""

    operation: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    out: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Runs an ATen operation on the shards of each rank; results are shards of tensors with these metas."""

    operation: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    out: tuple[int | None, ...]
    metas: tuple[Meta | None, ...]


@dataclass(frozen=True, slots=True)
class Redistribute:
    """Redistributes a tensor to the placements of a meta; shards are laid out in the order of its strides.

    Successive ones share collectives if possible. A `pending` one is only begun: its result must only be used by the
    `Finish` of a later program.
    """

    source: int
    meta: Meta
    out: int
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """Waits for a pending redistribution along these mesh dimensions. The result has the source's memory."""

    source: int
    meta: Meta
    out: int
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Copies the shards of a tensor into those of another with equal placements."""

    target: int
    source: int


Step = Call | LocalStep | Redistribute | Finish | Write


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Steps over registers, which hold the tensor arguments and then intermediates. Sent to the workers once.

    `results` are the registers of new tensors. For random operations, `seeded` has the mesh dimensions along which
    ranks draw different numbers for their shards; along others they draw equal numbers. Ranks seed their generators
    before the steps.
    """

    inputs: int
    registers: int
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    seeded: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective along one mesh dimension, with the bytes that each rank contributes per call."""

    kind: str
    dim: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanNotice:
    """A warning about an operation that is costly, or does not work as written; issued once."""

    operation: str
    text: str


@dataclass(frozen=True, slots=True)
class ResultSlot:
    """Placeholder in the result of a call: a new tensor, or (`given`) one of its tensor arguments."""

    index: int
    given: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class OperationPlan:
    """The plan of an operation on tensors with given metas, made once and cached.

    `made` are the metas of the new tensors, in the order of `program.results`. `views` pairs a new tensor with the
    argument of which it is a view (a copy if its meta is `copied`), `offsets` are its byte offsets there, ignoring
    sharding. `writes` are the arguments that change in place. `build(tensors, arguments)` makes the call's result from
    the new tensors and the tensor arguments. `value`: the call returns the Python number of the only new tensor, which
    is replicated. `rebinds`: the first argument becomes the first new tensor, e.g. transposed in place. `puts_back`:
    the operation writes to copies of several arguments, which must be different tensors. `own`: some argument, and so
    each result, has own values of the ranks. `agrees`: ranks agree first that each has its inputs, which may be lost on
    one of them alone. `changes`: some argument is another one afterwards.
    """

    number: int
    operation: str
    program: StepProgram
    made: tuple[Meta, ...]
    build: Callable[[Sequence[object], Sequence[object]], object]
    views: tuple[tuple[int, int], ...] = ()
    offsets: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = ()
    notices: tuple[PlanNotice, ...] = ()
    value: bool = False
    rebinds: bool = False
    puts_back: bool = False
    own: bool = False
    agrees: bool = False
    changes: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", bool(self.writes) or self.puts_back or self.rebinds)


def builder(tree: object) -> Callable[[Sequence[object], Sequence[object]], object]:
    """Returns a function that builds the result of a call from a tree of `ResultSlot`s."""
    match tree:
        case ResultSlot(index=0, given=False):
            return lambda tensors, arguments: tensors[0]
        case ResultSlot(index=index, given=True):
            return lambda tensors, arguments: arguments[index]
        case tuple() if all(isinstance(leaf, ResultSlot) and not leaf.given for leaf in tree):
            return lambda tensors, arguments: tuple(tensors)
        case list() if all(isinstance(leaf, ResultSlot) and not leaf.given for leaf in tree):
            return lambda tensors, arguments: list(tensors)
    return lambda tensors, arguments: _filled(tree, tensors, arguments)


def _filled(tree: object, tensors: Sequence[object], arguments: Sequence[object]) -> object:
    if isinstance(tree, ResultSlot):
        return (arguments if tree.given else tensors)[tree.index]
    if isinstance(tree, list | tuple):
        return type(tree)(_filled(leaf, tensors, arguments) for leaf in tree)
    return tree
