"""Commands to the workers of a mesh, their batches in flight, and the thread that sends these.

Operations are short sequences of numbers, everything else objects. A batch is one list of numbers and the objects that
its `OBJECT` commands take, in order. An operation is `[plan, (seed), tensors…, floats…, results…]`: tensors by number,
floats as values. The meaning of a plan, and the lengths of these parts, are sent once, as a `Define`. `[FREE, number]`
frees an unreferenced tensor, in order with the operations, so that workers need no more memory than a program that runs
locally. Requested values are part of the reply to the batch.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Self, TypeVar, cast

import msgspec

from monarch_nb.mesh import ValueMesh
from monarch_nb.runtime import EncodedObject, Future, current_runtime
from monarch_nb.tensor.errors import CallSite
from monarch_nb.tensor.propagation import MeshLayout, Meta, Placements, StepProgram
from monarch_nb.tensor.verbs import Failure
from monarch_nb.wire import encode, msgpack_decoder, pickle_failure

if TYPE_CHECKING:
    import torch

    from monarch_nb.tensor.stream import Stream

T = TypeVar("T")
OBJECT = -1  # the next object of the batch
FREE = -2
WHOLE = -3  # requests a whole tensor: `[WHOLE, number]`; rank 0 of the mesh sends it
NUMBER = -4  # requests the only element of a tensor, in the same way
SHARDS = -5  # requests the shard of each rank
OWN = -7  # requests the value of one rank: `[OWN, number, rank]`
REPLAY = -6  # runs a compiled step: `[REPLAY, program, operations, inputs, outputs, seed, inputs…, outputs…]`
FIRST_MAKING = -16  # plans of factories count down from here, those of operations up from 1
_MAKINGS = 1024  # factory plans that workers store; a new plan replaces the oldest

WAIT_S = 0.004  # delay of a flush, unless the workers have two batches: then the next reply begins it
TICK_S = 0.5  # after which released tensors are freed on workers although nothing else is sent
WINDOW = 4096  # operations in flight above which the controller waits
WINDOW_BYTES = 64 << 20  # the same for bytes of tensors

Number = int | float
# Reply to a batch: operations that failed on the rank, requested values, and the generation of process groups that
# ended before all had run (-1 if none).
Receipt = tuple[list[Failure], list[object], int]

encode_numbers = msgspec.msgpack.Encoder().encode
decode_numbers = msgpack_decoder(list[Number]).decode


@dataclass(frozen=True)
class Open:
    """The first command of a stream: the ranks of its mesh in the process group, row-major."""

    layout: MeshLayout
    ranks: tuple[int, ...]
    lane: int = 0  # the number of the program's stream, 0 for the main one
    in_turn: bool = False  # its groups are created at the first command in which ranks wait for each other


@dataclass(frozen=True)
class Define:
    """Defines a plan. Each call passes `scalars` floats; `made` are the metas of the results."""

    number: int
    operation: str
    program: StepProgram
    scalars: int
    made: tuple[Meta, ...]
    writes: tuple[int, ...] = ()
    own: bool = False  # operates on the ranks' own values: a failed rank loses its result, others continue
    agrees: bool = False  # ranks agree first that each has its inputs


@dataclass(frozen=True)
class Making:
    """Defines a plan that creates a tensor without tensor inputs, placed as `made` says.

    With `in_parts` each worker creates its own part only: the first argument of the operation is the size.
    """

    number: int
    operation: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    made: Meta
    in_parts: bool
    seeded: tuple[int, ...] | None = None  # the mesh dimensions along which ranks draw different numbers


@dataclass(frozen=True)
class PutTensor:
    """Sends a tensor of the controller, of which each worker stores its shard."""

    tensor: "torch.Tensor"
    placements: Placements
    result: int


@dataclass(frozen=True)
class Locals:
    """Sends the shards of a tensor in rank order; equal shards are the same object."""

    tensors: "tuple[torch.Tensor, ...]"
    made: Meta
    result: int


@dataclass(frozen=True)
class Send:
    """Sends the ranks' own values to members of the group: to `targets` for each rank of the mesh; see `Take`."""

    number: int
    targets: tuple[tuple[int, ...], ...]
    tag: int
    lends: bool = False  # passes the memory itself, within the process


@dataclass(frozen=True)
class Take:
    """Creates a tensor of values that members of the group send, one to each rank of the mesh.

    `late`: the process groups of the transfer have ended.
    """

    made: Meta
    sources: tuple[int, ...]
    tag: int
    result: int
    lends: bool = False
    late: bool = False


@dataclass(frozen=True)
class GiveBack:
    """Ends the loan of memory under a tag."""

    tag: int


@dataclass(frozen=True)
class Await:
    """Waits until another stream has run so many operations on the rank: those before a borrow, or before its end.

    All of them were sent earlier. With `members`, those of the group that execute that stream, the others go on.
    """

    stream: int
    operations: int
    members: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DrawFrom:
    """Sets the generators from which a stream of the program draws on the ranks; a larger `number` is newer.

    With a `seed`, the generators of functions are seeded, differently on each rank. `apart`: operations draw from
    these generators, too, instead of the seed of the mesh.
    """

    number: int
    seed: int | None
    apart: bool


@dataclass(frozen=True)
class Revive:
    """Allocates a tensor whose contents are lost, before all of it is overwritten."""

    made: Meta
    result: int


@dataclass(frozen=True)
class PackedFunction:
    """The encoded function and arguments of a command, in place of the function; a rank decodes them to run it."""

    title: str
    body: EncodedObject

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Always raises TypeError."""
        raise TypeError(f"{self.title} is encoded: a rank calls what `unpack` returns")


@dataclass(frozen=True)
class FunctionCommand:
    """A command that runs a function of the program: its errors name it, and have its traceback."""

    function: Callable[..., object] | str

    @property
    def name(self) -> str:
        """The name of the function."""
        if isinstance(self.function, PackedFunction):
            return self.function.title
        return self.function if isinstance(self.function, str) else getattr(self.function, "__name__", "a function")

    def pack(self, stream: "Stream") -> Self:
        """Returns the command for a stream with its function and arguments encoded, unless the stream is simulated.

        So what cannot be sent is an error of this command before it is issued, and what a rank cannot load is one of
        this command on the ranks; either would fail a whole batch. Raises PickleFailure and errors of the objects' own
        pickling.
        """
        if stream.is_simulated:
            return self
        content: dict[str, Any] = {
            name: getattr(self, name) for name in ("function", "args", "kwargs") if hasattr(self, name)
        }
        try:
            body = EncodedObject(encode(content, current_runtime()))
        except Exception as error:
            failure = pickle_failure(error, content, f"the `call` of {self.name}")
            raise failure from failure.__cause__
        content = dict.fromkeys(content, ())
        return replace(self, **content | {"function": PackedFunction(self.name, body)})

    def unpack(self) -> Self:
        """Returns the command with its function and arguments, packed or not."""
        if not isinstance(self.function, PackedFunction):
            return self
        return replace(self, **self.function.body.load(current_runtime()))


@dataclass(frozen=True)
class RunFunction(FunctionCommand, Generic[T]):
    """Runs a function on each rank, with the shards of tensors among its arguments."""

    function: Callable[..., T]
    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(frozen=True)
class CallRemote(FunctionCommand):
    """Calls a function, or the one at a path such as "math.sqrt", with the values of tensors among its arguments.

    The tensors that it returns are stored under the numbers `results`; without these under `bundle`, until `Name` names
    them, and a description of them is the reply. `replies`: its result is the reply. `writes` are tensors that it
    changes. `only` one rank of the mesh runs it. `joined`: ranks wait for each other in it.
    """

    function: Callable[..., object] | str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    results: tuple[int, ...] = ()
    bundle: int | None = None
    replies: bool = False
    writes: tuple[int, ...] = ()
    only: int | None = None
    joined: bool = False

    @property
    def has_reply(self) -> bool:
        """True if the reply has a value."""
        return self.replies or self.bundle is not None


@dataclass(frozen=True)
class Name:
    """Names the tensors that a call has returned."""

    bundle: int
    results: tuple[int, ...]


@dataclass(frozen=True)
class GroupOf:
    """Placeholder of a process group in the arguments of a call: of the ranks along dimensions of the mesh."""

    dims: tuple[int, ...]


@dataclass(frozen=True)
class MakeParts(FunctionCommand):
    """Creates a tensor from `function(part, *args)` on each rank; `part` has a slice for each dimension."""

    function: Callable[..., object]
    args: tuple[object, ...]
    made: Meta
    result: int


@dataclass(frozen=True)
class TensorOf:
    """Placeholder of a tensor in the arguments of a `RunFunction`, replaced by a shard or a DTensor."""

    number: int
    sharded: bool = False  # as a DTensor


@dataclass(frozen=True)
class Cell:
    """Starts the commands of another cell of the program."""

    number: int


def mapped(value: T, function: Callable[[Any], object]) -> T:
    """Returns a tree of lists, tuples and dicts of any kind, with `function(leaf)` in place of each leaf."""
    result: Any
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)([mapped(item, function) for item in value])
    if isinstance(value, dict):
        result = copy(value)  # keeps an OrderedDict or a defaultdict
        result.update({key: mapped(item, function) for key, item in value.items()})
    else:
        result = function(value)
    return cast(T, result)


class Turn(NamedTuple):
    """The part of a batch in which ranks may wait for each other: its numbers from `begin` to `end`.

    It begins after the latest such parts before it: `after` has for each its stream, the number of operations
    that the stream has run then, and the members of the group that wait for it; None for all.
    """

    begin: int
    end: int
    after: tuple[tuple[int, int, tuple[int, ...] | None], ...]


def meeting(
    commands: Sequence[Sequence[object]], objects: Sequence[object], meets: Callable[[object], bool], first: int
) -> tuple[int, int, int] | None:
    """Returns begin and end, in a batch's numbers, of the part in which ranks may wait, and the next operation.

    `meets` returns whether ranks may wait for each other in a plan's number, `REPLAY` command or object. `first` is the
    """
    position, number, pending = 0, first, iter(objects)
    bounds: tuple[int, int, int] | None = None
    for command in commands:
        code, begin = command[0], position
        position += len(command)
        if code == FREE:
            continue
        number += cast(int, command[2]) if code == REPLAY else 1
        if code in (SHARDS, OWN):
            continue
        item = next(pending) if code == OBJECT else command if code == REPLAY else code
        if code in (WHOLE, NUMBER) or meets(item):
            bounds = (begin if bounds is None else bounds[0], position, number)
    return bounds


def nbytes_of(command: object) -> int:
    """Returns the bytes of local tensors in a command."""
    match command:
        case PutTensor():
            return command.tensor.nbytes
        case Locals():
            return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in command.tensors}.values())
    return 0


Command = (
    Open
    | Define
    | Making
    | PutTensor
    | Locals
    | MakeParts
    | Send
    | Take
    | GiveBack
    | Await
    | DrawFrom
    | Revive
    | RunFunction[object]
    | CallRemote
    | Name
    | Cell
)


class Makings:
    """Numbers of the factory plans that the workers of a stream store."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._keys: dict[int, object] = {}
        self._count = count()

    def find(self, key: object) -> int | None:
        """Returns the number of a stored plan, or None."""
        return self._numbers.get(key)

    def next_number(self) -> int:
        """Returns a number for a new plan, which replaces the plan that had it before."""
        number = FIRST_MAKING - next(self._count) % _MAKINGS
        self._numbers.pop(self._keys.pop(number, None), None)
        return number

    def add(self, key: object, number: int) -> None:
        """Records that workers store a plan under a number."""
        self._numbers[key], self._keys[number] = number, key


class CommandBatch:
    """Commands that were sent together: number of the first operation, and the call site of each, if there are any.

    `number` counts batches. `first_byte` counts the bytes of tensors that were sent before.
    """

    def __init__(
        self, number: int, first: int, sites: list[CallSite | None], first_byte: int, future: Future[ValueMesh[Receipt]]
    ) -> None:
        self.number, self.first, self.sites, self.first_byte, self.future = number, first, sites, first_byte, future


class BatchesInFlight(deque[CommandBatch]):
    """The batches of a stream whose replies are not processed yet, the oldest first. Any thread adds and removes."""

    @property
    def unanswered(self) -> int:
        """The number of batches that some rank has not replied to, or 2 if there are more."""
        count = 0
        with suppress(IndexError):
            for latest in (-1, -2):
                count += not self[latest].future.done()
        return count

    def exceed_window(self, issued: int, nbytes: int) -> bool:
        """Returns whether the controller has to wait before it sends more, given the operations and bytes so far."""
        try:
            oldest = self[0]
        except IndexError:
            return False
        return issued - oldest.first > WINDOW or nbytes - oldest.first_byte > WINDOW_BYTES


class Flusher:
    """Flushes streams on a thread of its own, which starts on first use and sleeps while idle.

    Each batch costs the controller as much as dozens of operations. So operations issued while workers are busy are
    collected until the workers are about to run out of work.
    """

    def __init__(self) -> None:
        self._scheduled: deque[tuple[float, Stream]] = deque()
        self._registered: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def register(self, stream: "Stream") -> None:
        """Adds a stream for periodic ticks, by weak reference."""
        self._registered.add(stream)

    def schedule(self, stream: "Stream") -> None:
        """Schedules a flush of a stream, in place of an earlier schedule."""
        stream.due = time.monotonic() + WAIT_S
        self._scheduled.append((stream.due, stream))
        self._wake.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="monarch-tensor-flush", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        pending: list[tuple[float, Stream]] = []
        while True:
            pause = min(due for due, _ in pending) - time.monotonic() if pending else TICK_S
            if pause > 0 and self._wake.wait(pause):
                self._wake.clear()
            elif not pending:
                for stream in tuple(self._registered):
                    stream.tick()
            pending += [self._scheduled.popleft() for _ in range(len(self._scheduled))]
            now = time.monotonic()
            ready = [stream for due, stream in pending if due <= now and due == stream.due]
            pending = [entry for entry in pending if entry[0] > now]
            for stream in ready:
                if stream.in_flight < 2:
                    stream.flush_nowait()
                else:
                    stream.awaits_reply = True
                    if stream.in_flight < 2:  # the reply has just come
                        stream.awaits_reply = False
                        self.schedule(stream)


FLUSHER = Flusher()
