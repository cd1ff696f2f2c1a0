"""The last failures of each actor of a process: their exceptions, and with them the frames they were raised in."""

import contextlib
import ctypes
import io
import os
import socket
import sys
import tempfile
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_nb.gpu import GpuError, driver
from monarch_nb.runtime.context import current
from monarch_nb.runtime.tensor_memory import is_out_of_memory, out_of_memory_note
from monarch_nb.settings import settings

if TYPE_CHECKING:
    from monarch_nb.runtime.context import Instance
    from monarch_nb.shape import Point
    from monarch_nb.wire import Header

ACTORS = 64  # whose failures are kept; those of actors that failed longest ago go first
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
Place = tuple[str, int]  # mesh, rank


@dataclass(eq=False, slots=True)
class StoredFailure:
    """One failed call, with everything that its frames hold."""

    error: BaseException
    call: str
    endpoint: str
    at: float  # wall clock
    instance: "Instance"
    point: "Point"  # in the slice that was called
    chain: tuple[str, ...]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the call, as they are now; None where they could not be unpickled.

        They are variables of the frame that has run the endpoint, which the exception holds: a call that succeeds
        keeps nothing.
        """
        trace = self.error.__traceback__
        found = trace.tb_frame.f_locals if trace is not None else {}
        return (found["args"], found["kwargs"]) if "method" in found else None


class FailureStore:
    """Keeps them, bounded by number and by size; never those of memory that ran out, which would stay used up."""

    def __init__(
        self, later: Callable[[float, Callable[[], object]], None], freeze: Callable[[BaseException], None]
    ) -> None:
        self._later = later
        self._freeze = freeze
        self._lock = threading.Lock()
        self._kept: OrderedDict[Place, deque[StoredFailure]] = OrderedDict()
        self._measuring = False
        self._freezing: set[Place] = set()  # actors that a debugger wants to see where they fail
        self.on_gpu_lost: list[Callable[[str], None]] = []  # called with why this process cannot use its GPU any more
        self._gpu_lost = ""

    def freeze_at(self, mesh: str, rank: int, *, on: bool) -> None:
        """Whether the failures of an actor stop it, as with `debug_freeze_on_error`."""
        (self._freezing.add if on else self._freezing.discard)((mesh, rank))

    def keep(self, instance: "Instance", header: "Header", error: BaseException) -> StoredFailure | None:
        """An endpoint has raised; on the actor's thread. Blocks while it is frozen there, if that is wished.

        What is kept is to be handed to `ease` once the error has been sent to the caller.
        """
        recorder = instance.process.recorder
        if recorder is not None and instance.cell is not None:
            recorder.raised(instance.cell, header.call)
        self._gpu_lost = self._gpu_lost or gpu_lost(error)
        if not isinstance(error, (Exception, SystemExit)):
            return None
        if settings.debug_freeze_on_error or (instance.mesh, instance.base_rank) in self._freezing:
            self._freeze(error)
        if _out_of_memory(error):
            if note := out_of_memory_note():
                error.add_note(note)
            self.release()  # what others hold is needed
            return None
        if not settings.debug_keep_failures:
            return None
        place = (instance.mesh, instance.base_rank)
        context = current.get()
        point = instance.rank if context is None else context.message_rank
        kept = StoredFailure(error, header.call, header.method, time.time(), instance, point, header.chain)
        with self._lock:
            mine = self._kept.get(place)
            if mine is None:
                mine = self._kept[place] = deque()
            mine.append(kept)
        return kept

    def answered(self) -> None:
        """The caller has the error, which may be the last that this process can send."""
        if self._gpu_lost:
            for listener in self.on_gpu_lost:
                listener(self._gpu_lost)
            self.on_gpu_lost.clear()

    def ease(self, kept: StoredFailure) -> None:
        """Has kept frames forget what must end, and lets go of older ones; on the actor's thread, before its next
        message."""
        release_frame_locals(kept.error, _PACKAGE)
        place = (kept.instance.mesh, kept.instance.base_rank)
        count = settings.debug_keep_failures
        gone: list[StoredFailure] = []  # out of the lock: what they hold may do anything when it ends
        with self._lock:
            mine = self._kept.get(place)
            while mine and len(mine) > count:
                gone.append(mine.popleft())
            if mine:
                self._kept.move_to_end(place)
            while len(self._kept) > ACTORS:
                gone += self._kept.popitem(last=False)[1]
        if not self._measuring:
            self._measuring = True
            self._later(0.05, self._shrink)  # measuring them is not the actor's time

    def of(self, mesh: str, rank: int) -> list[StoredFailure]:
        """The failures of one actor, the newest first."""
        with self._lock:
            return list(reversed(self._kept.get((mesh, rank), ())))

    def release(self, mesh: str | None = None, rank: int | None = None) -> int:
        """Lets go of those of an actor, of a mesh, or of all; gives how many there were."""
        with self._lock:
            places = [p for p in self._kept if mesh in (None, p[0]) and rank in (None, p[1])]
            return sum(len(self._kept.pop(place)) for place in places)

    def _shrink(self) -> None:
        self._measuring = False
        limit = settings.debug_keep_bytes
        with self._lock:
            every = sorted(
                ((kept.at, place, kept) for place, mine in self._kept.items() for kept in mine), key=lambda one: one[0]
            )
        seen: set[int] = set()
        total = 0
        for _, place, kept in reversed(every):  # the newest stay
            total += sum(_size(value, seen) for value in (*_held(kept.error), *(kept.arguments or ())))
            if total > limit:
                with self._lock:
                    mine = self._kept.get(place)
                    if mine is not None and kept in mine:
                        mine.remove(kept)


def frames_of(error: BaseException) -> list[types.TracebackType]:
    """The traceback of an exception without the engine's own frames at its top; all of it if there are no others."""
    every = []
    at = error.__traceback__
    while at is not None:
        every.append(at)
        at = at.tb_next
    first = next((n for n, tb in enumerate(every) if not tb.tb_frame.f_code.co_filename.startswith(_PACKAGE)), 0)
    return every[first:]


def gpu_lost(error: BaseException) -> str:
    """Why this process cannot use its GPU any more, if that is what `error` says, which gets a note of it; else "".

    After some errors (an illegal access, a failed assertion of a kernel) every later call of CUDA in the process fails.
    """
    if not isinstance(error, RuntimeError) or "CUDA" not in str(error):
        return ""
    gpu = driver()
    try:
        if gpu is not None:
            gpu.check()
    except GpuError as state:
        if state.sticky:
            error.add_note("This process cannot use its GPU any more, and ends: heal_mesh(...) replaces it.")
            return f"it cannot use its GPU any more: {state}"
    return ""


def _out_of_memory(error: BaseException) -> bool:
    return any(is_out_of_memory(cls.__name__, str(one)) for one in chain(error) for cls in type(one).__mro__)


def _held(error: BaseException) -> Iterator[object]:
    for one in chain(error):
        for tb in frames_of(one):
            for name, value in tuple(tb.tb_frame.f_locals.items()):
                if name != "self":  # the actor's own state lives anyway
                    yield value


def _size(value: object, seen: set[int], depth: int = 2) -> int:
    """Bytes that a value holds, roughly: arrays and tensors by what they say, containers a little way down."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    try:
        bytes_of = getattr(value, "nbytes", None)
        total = int(bytes_of) if isinstance(bytes_of, int) else sys.getsizeof(value, 64)
        if depth and isinstance(value, (list, tuple, dict, set)) and len(value) <= 10_000:
            inside = value.values() if isinstance(value, dict) else value
            total += sum(_size(one, seen, depth - 1) for one in tuple(inside))
    except BaseException:  # a value that does not like to be looked at
        return 64
    return total


_ENDS = (
    io.IOBase,  # what was written is flushed when it is closed
    socket.socket,
    tempfile.TemporaryDirectory,
    tempfile._TemporaryFileWrapper,
    types.GeneratorType,  # with what it has opened
    types.CoroutineType,
    types.AsyncGeneratorType,
)
_MODULES = (
    "torch._C._distributed_c10d",
    "torch.distributed.",
    "torch.utils.data.dataloader",
)  # groups, worker processes
_PLAIN = frozenset((int, float, str, bytes, bool, list, tuple, dict, set, type(None), type))


class Discarded:
    """Stands in a kept frame for what is not kept."""

    def __init__(self, value: object) -> None:
        self._what = type(value).__qualname__

    def __repr__(self) -> str:
        return f"<{self._what}: not kept, so that it ends>"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def release_frame_locals(error: BaseException, engine: str) -> None:
    """Has the frames of an exception forget what must end: open files, sockets, generators, process groups; tensors
    stay without their graphs. Frames whose file begins with `engine`, which still run, are left alone.

    The frames of torch.distributed are emptied: what they hold cannot be distinguished from what only they use.
    """
    harmless: set[type] = set(_PLAIN)  # the failing call waits for this: each type is looked at once
    for one in chain(error):
        tb = one.__traceback__
        while tb is not None:
            frame, tb = tb.tb_frame, tb.tb_next
            if frame.f_code.co_filename.startswith(engine):
                continue
            if frame.f_globals.get("__name__", "").startswith("torch.distributed."):
                with contextlib.suppress(RuntimeError):  # one that still runs
                    frame.clear()
            else:
                _release(frame, harmless)


def _release(frame: types.FrameType, harmless: set[type]) -> None:
    found = frame.f_locals
    hard = [
        name for name, value in found.items() if type(value) not in harmless and not _is_harmless(type(value), harmless)
    ]
    if not hard or frame.f_code.co_name == "<module>":
        return
    shared = frame.f_code.co_cellvars + frame.f_code.co_freevars  # other functions would see it change
    changed = {name: _replacement(found[name]) for name in hard if name not in shared}
    if sys.version_info >= (3, 14):  # a frame holds what is overwritten in it until it is cleared
        changed = {**found, **changed}
        with contextlib.suppress(RuntimeError):  # one that still runs
            frame.clear()
    found.update(changed)
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _is_harmless(kind: type, harmless: set[type]) -> bool:
    """Whether values of a type can be kept as they are; then it is added to `easy`."""
    if issubclass(kind, _ENDS) or str(kind.__module__).startswith("torch"):
        return False
    harmless.add(kind)
    return True


def _replacement(value: Any) -> object:
    if isinstance(value, _ENDS) or type(value).__module__.startswith(_MODULES):
        return Discarded(value)
    with contextlib.suppress(Exception):
        return value if value.grad_fn is None else value.detach()
    return value
