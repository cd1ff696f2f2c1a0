"""Seeds of random operations, and the generators from which functions on the ranks draw.

On the workers random numbers are equal on replicas, different on shards, and the same again after a seed. A CPU
mesh has no random state of its own in PyTorch: with equal seeds all shards would draw the same numbers. So each random
operation is seeded by itself, from a number of the controller and the shard that this worker holds. The
process's generators are borrowed for that: its own code, in cells and actors, continues its own sequence.

Functions of the main stream draw from the process's generators. Each other stream of the program has a generator of its
own on each rank, for the CPU. PyTorch's kernels know one generator in a process, whichever thread draws: so the
stream's generator takes its place during an operation that draws, under a lock.
"""

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from monarch_nb.tensor.commands import DrawFrom
from monarch_nb.tensor.lanes import ACTIVE
from monarch_nb.transport import held_back

if TYPE_CHECKING:
    from monarch_nb.tensor.references import StreamGroup
    from monarch_nb.tensor.stream import Stream as CommandStream

_SEED, _DRAWN = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_MASK = (1 << 62) - 1
_WORD = (1 << 64) - 1
_draws = count(1)


def seed_number(seed: int, drawn: int) -> int:
    """Returns the seed of the random operation number `drawn` since the seed was set."""
    return (seed * _SEED + drawn * _DRAWN) & _MASK


def seed_after(number: int, drawn: int) -> int:
    """Returns the seed of the random operation `drawn` later."""
    return (number + drawn * _DRAWN) & _MASK


def mixed(seed: int, index: int) -> int:
    """Returns a different 63-bit seed for each index, such as that of a shard (one step of splitmix64)."""
    value = (seed + (index + 1) * _SEED) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return (value ^ (value >> 31)) >> 1


class StreamDraws:
    """The random numbers of a command stream, in the controller. It does not keep the stream alive."""

    def __init__(self, group: "StreamGroup") -> None:
        self.seed = 0  # of the following random operations, 63 bits
        self.drawn = 0  # random operations since the seed was set
        self._group = group
        self._sent_source: DrawFrom | None = None  # the last one sent to the ranks

    def next(self, stream: "CommandStream", generator: torch.Generator | None = None) -> int:
        """Returns the seed of the next random operation; a given generator of the program provides it."""
        self.announce(stream)
        if generator is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                return (
                    int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
                    & _MASK
                )
        self.drawn += 1
        return seed_number(self.seed, self.drawn)

    def begin(self, stream: "CommandStream", seed: int) -> None:
        """Sets the first seed of random operations; that of a stream beside the main one depends on its name, too."""
        lane = stream.lane
        number = seed if lane is None else mixed(seed, zlib.crc32(lane.name.encode()))
        self.seed, self.drawn = number % (1 << 63), 0
        if lane is not None and lane.number not in self._group.draws:
            self._set(lane.number, self.seed, apart=False)

    def reseed(self, stream: "CommandStream", seed: int) -> None:
        """Sets the seed of the following random operations, and of functions where the program has activated a mesh."""
        self.begin(stream, seed)
        lane = _lane_number(stream)
        source = self._group.draws.get(lane)
        if ACTIVE.has_mesh or (source is not None and source.apart):
            self._set(lane, self.seed if ACTIVE.has_mesh else None, apart=False)

    def draw_apart(self, stream: "CommandStream", *, seeded: bool) -> None:
        """Makes operations draw from the ranks' own generators, which are seeded by this mesh, or are seeded next."""
        lane = _lane_number(stream)
        source = self._group.draws.get(lane)
        if source is None or not source.apart:
            self._set(lane, self.next(stream) if seeded else None, apart=True)

    def _set(self, lane: int, seed: int | None, *, apart: bool) -> None:
        self._group.draws[lane] = DrawFrom(next(_draws), seed, apart)

    def announce(self, stream: "CommandStream") -> None:
        """Sends the ranks the generators of the stream, before an operation draws, if the program has changed them."""
        source = self._group.draws.get(_lane_number(stream))
        if source is not None and source is not self._sent_source:
            stream.issue_object(source)
            self._sent_source = source

    def forget(self) -> None:
        """Records that a new rank does not have the generators yet."""
        self._sent_source = None


def _lane_number(stream: "CommandStream") -> int:
    return 0 if stream.lane is None else stream.lane.number


class Generators:
    """The generators of a stream of the program in this process: the process's own ones, or one of the stream's.

    If `is_apart`, operations draw from these, too, instead of the seed of the mesh.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.state = None if shared else torch.Generator().get_state()  # own state for the CPU; None for the process's
        self.is_apart = False
        self._source_number = 0

    def follow(self, source: DrawFrom) -> None:
        """Applies a setting of the program, unless a newer one was applied."""
        if source.number <= self._source_number:
            return
        self._source_number, self.is_apart = source.number, source.apart
        if source.seed is None:
            return
        seed = mixed(source.seed, torch.distributed.get_rank())
        with BORROWED:
            BORROWED.give_back()
            if self.state is None:
                torch.manual_seed(seed)
            else:
                self.state = torch.Generator().manual_seed(seed).get_state()


class _Thread(threading.local):
    """`runs_operations`: the thread runs operations of a mesh; it seeds this rank, not the program.

    `generators` are those of the running stream.
    """

    runs_operations = False
    generators = Generators()


THREAD = _Thread()


class Borrowed:
    """Borrows the generators of the process for random operations of a mesh, and for functions of its streams.

    An operation is seeded and draws in a `with` block, so that operations of several streams draw the same numbers as
    alone.
    """

    def __init__(self) -> None:
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        self._borrower: Generators | None = None  # whose state is in place
        self._lock = threading.RLock()
        self.is_shared = False  # functions of other streams draw meanwhile: operations return generators at once

    def share(self) -> None:
        """Returns borrowed generators at once from now on, since streams draw at the same time."""
        with self._lock:
            if not self.is_shared:
                _watch_draws()
                self.is_shared = True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.is_shared:
                self.give_back()
        finally:
            self._lock.release()

    def seed(self, value: int, *, cuda: bool) -> None:
        """Seeds the generators for one operation, after saving their states on the first."""
        if THREAD.generators.is_apart:
            self.lend(THREAD.generators)
            return
        generators = [torch.default_generator]
        if cuda:
            device = torch.cuda.current_device()  # initializes CUDA, which makes the generators
            generators.append(torch.cuda.default_generators[device])
        if not self._states:
            self._states = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            generator.manual_seed(value)

    def lend(self, generators: Generators) -> None:
        """Makes the next operations draw from these generators."""
        self.give_back()
        if generators.state is not None:
            self._states = [(torch.default_generator, torch.default_generator.get_state())]
            self._borrower = generators
            torch.default_generator.set_state(generators.state)

    def give_back(self) -> None:
        """Restores the saved states."""
        with self._lock:
            borrower, self._borrower = self._borrower, None
            if borrower is not None:
                borrower.state = torch.default_generator.get_state()
            states, self._states = self._states, []
            for generator, state in states:
                generator.set_state(state)


BORROWED = Borrowed()  # those of this process

# A key of PyTorch's dispatcher that is otherwise unused. In a thread that includes it, operations that draw are called
# through here; other operations and other threads are not slowed down.
_KEY = "TESTING_ONLY_GenericMode"
# Parts of the names of operations that draw, since checking each operation would take longer.
_NAME_PARTS = (
    *("attention", "bernoulli", "binomial", "cauchy", "dirichlet", "dropout", "exponential", "gamma", "geometric"),
    *("lstm", "gru", "rnn", "multinomial", "normal", "poisson", "rand", "rrelu", "sdp", "softmax_with", "uniform"),
)
_libraries: list[torch.library.Library] = []


def drawing_operations() -> list[OpOverload]:
    """Returns PyTorch's operations that draw from a generator."""
    operations = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, qualified = name.partition("::")
        base, _, overload = qualified.partition(".")
        if namespace == "aten" and any(part in base for part in _NAME_PARTS):
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            if torch.Tag.nondeterministic_seeded in operation.tags:
                operations.append(operation)
    return operations


def _watch_draws() -> None:
    """Makes operations that functions of streams run draw from the generators of their stream."""
    make: Any = torch.library.Library  # without types
    wildcard, kernels = make("_", "IMPL"), make("aten", "IMPL")
    wildcard.fallback(torch.library.fallthrough_kernel, _KEY)
    for operation in drawing_operations():
        kernels.impl(operation, partial(_draw_held_back, operation), _KEY)
    _libraries.extend((wildcard, kernels))
    vars(torch.random)["default_generator"] = _GeneratorOfStream()


def _draw_held_back(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Calls a function that draws, or seeds, with the generator of the stream in place."""
    return held_back(_draw, function, args, kwargs)


def _draw(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))), BORROWED:
        BORROWED.lend(THREAD.generators)
        return function(*args, **kwargs)


class _GeneratorOfStream:
    """Takes the place of the process's generator in `torch.manual_seed`, `torch.get_rng_state` and the like."""

    def __getattr__(self, name: str) -> object:
        attribute = getattr(torch.default_generator, name)
        return partial(_draw_held_back, attribute) if callable(attribute) else attribute


@contextmanager
def drawn_by_function() -> Iterator[None]:
    """Makes a function of the program that runs in a `with` block draw from the generators of its stream."""
    BORROWED.give_back()
    if not BORROWED.is_shared:
        yield
        return
    with torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse(_KEY)):
        yield


def seeder(mesh: DeviceMesh, dims: Sequence[int]) -> Callable[[int], None]:
    """Returns a function that seeds a random operation; its argument is the number from the controller.

    Ranks draw different numbers along the mesh dimensions `dims`, and equal ones along the others.
    """
    shard, coordinates = 0, mesh.get_coordinate() or ()  # groups may be made later
    for dim in dims:
        shard = shard * mesh.size(dim) + coordinates[dim]
    cuda = mesh.device_type == "cuda"

    def seed(number: int) -> None:
        BORROWED.seed(mixed(number, shard), cuda=cuda)

    return seed
