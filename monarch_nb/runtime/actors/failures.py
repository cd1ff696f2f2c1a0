"""The failures of actors: stored with their frames where they were raised, and combined into one error of a call."""

import contextlib
import ctypes
import functools
import io
import os
import re
import socket
import sys
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_nb._deferred import tempfile
from monarch_nb.gpu import GpuError, driver
from monarch_nb.runtime.context import current
from monarch_nb.runtime.meshes import ActorState, MeshState, ProcState
from monarch_nb.runtime.tensor_memory import is_out_of_memory, out_of_memory_note
from monarch_nb.settings import settings
from monarch_nb.shape import places_of, spans
from monarch_nb.wire import ActorError, ExceptionText, InFrame, decode_exception, exception_text, host_name

if TYPE_CHECKING:
    from monarch_nb.runtime.context import Instance
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.shape import Point
    from monarch_nb.transport import Parcel
    from monarch_nb.wire import Header

ACTORS = 64  # with stored failures; those of the actors that failed longest ago are dropped first
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Groups, worker processes.
_MODULES = ("torch._C._distributed_c10d", "torch.distributed.", "torch.utils.data.dataloader")
_PLAIN = frozenset((int, float, str, bytes, bool, list, tuple, dict, set, type(None), type))

KINDS = 8  # of errors that the error of a call lists
HOSTS = 3  # that it names
WIDTH = 120  # of the text that names ranks
TOGETHER_S = 0.5  # errors that come within this time count as simultaneous, and are in rank order

# Errors of gloo, NCCL and the store of torch.distributed after another member has left.
_LEFT_ALONE = re.compile(
    r"gloo/.*(Connection (closed|reset)|Timed out waiting|Broken pipe|Socket closed|Application timeout)"
    r"|torch\.distributed\.Dist(Network|Store)Error"
    r"|NCCL communicator (was|has been) aborted|ncclRemoteError|remote process exited|Watchdog caught collective"
)
_CHAINED = (
    "\nThe above exception was the direct cause of the following exception:\n",
    "\nDuring handling of the above exception, another exception occurred:\n",
)

ActorKey = tuple[str, int]  # mesh, rank


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
        variables = trace.tb_frame.f_locals if trace is not None else {}
        return (variables["args"], variables["kwargs"]) if "method" in variables else None


class FailureStore:
    """Stored failures, bounded by number and size; never those of memory that ran out, which would stay used up."""

    def __init__(
        self, call_later: Callable[[float, Callable[[], object]], None], freeze: Callable[[BaseException], None]
    ) -> None:
        self._call_later = call_later
        self._freeze = freeze
        self._lock = threading.Lock()
        self._failures: OrderedDict[ActorKey, deque[StoredFailure]] = OrderedDict()
        self._measuring = False
        self._freezing: set[ActorKey] = set()  # actors that a debugger stops where they fail
        self.on_gpu_lost: list[Callable[[str], None]] = []  # called with why this process cannot use its GPU any more
        self._gpu_lost = ""

    def freeze_at(self, mesh: str, rank: int, *, on: bool) -> None:
        """Sets whether failures of an actor stop it, as with `debug_freeze_on_error`."""
        (self._freezing.add if on else self._freezing.discard)((mesh, rank))

    def keep(self, instance: "Instance", header: "Header", error: BaseException) -> StoredFailure | None:
        """Stores the failure of an endpoint; on the actor's thread. Blocks while the debugger has stopped it there.

        Pass the returned failure to `ease` once the error has been sent to the caller.
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
            self.release()  # their memory is needed
            return None
        if not settings.debug_keep_failures:
            return None
        key = (instance.mesh, instance.base_rank)
        context = current.get()
        point = instance.rank if context is None else context.message_rank
        failure = StoredFailure(error, header.call, header.method, time.time(), instance, point, header.chain)
        with self._lock:
            failures = self._failures.get(key)
            if failures is None:
                failures = self._failures[key] = deque()
            failures.append(failure)
        return failure

    def answered(self) -> None:
        """Handles that the caller has the error, which may be the last message that this process can send."""
        if self._gpu_lost:
            for listener in self.on_gpu_lost:
                listener(self._gpu_lost)
            self.on_gpu_lost.clear()

    def ease(self, failure: StoredFailure) -> None:
        """Releases resources from the frames of a failure, and drops older failures; on the actor's thread, before its
        next message."""
        release_frame_locals(failure.error, _PACKAGE)
        key = (failure.instance.mesh, failure.instance.base_rank)
        count = settings.debug_keep_failures
        old: list[StoredFailure] = []  # dropped outside of the lock: finalizers of their values may run any code
        with self._lock:
            failures = self._failures.get(key)
            while failures and len(failures) > count:
                old.append(failures.popleft())
            if failures:
                self._failures.move_to_end(key)
            while len(self._failures) > ACTORS:
                old += self._failures.popitem(last=False)[1]
        if not self._measuring:
            self._measuring = True
            self._call_later(0.05, self._shrink)  # measuring them must not delay the actor

    def of(self, mesh: str, rank: int) -> list[StoredFailure]:
        """Returns the failures of one actor, the newest first."""
        with self._lock:
            return list(reversed(self._failures.get((mesh, rank), ())))

    def release(self, mesh: str | None = None, rank: int | None = None) -> int:
        """Drops the failures of an actor, of a mesh, or all; returns how many there were."""
        with self._lock:
            keys = [key for key in self._failures if mesh in (None, key[0]) and rank in (None, key[1])]
            return sum(len(self._failures.pop(key)) for key in keys)

    def _shrink(self) -> None:
        self._measuring = False
        limit = settings.debug_keep_bytes
        with self._lock:
            entries = [(key, failure) for key, failures in self._failures.items() for failure in failures]
            entries.sort(key=lambda entry: entry[1].at)
        ids: set[int] = set()
        total = 0
        for key, failure in reversed(entries):  # the newest stay
            total += sum(_size(value, ids) for value in (*_frame_values(failure.error), *(failure.arguments or ())))
            if total > limit:
                with self._lock:
                    failures = self._failures.get(key)
                    if failures is not None and failure in failures:
                        failures.remove(failure)


def frames_of(error: BaseException) -> list[types.TracebackType]:
    """Returns the traceback of an exception without the engine's frames at its top; all if there are no others."""
    traces = []
    trace = error.__traceback__
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    first = next((n for n, tb in enumerate(traces) if not tb.tb_frame.f_code.co_filename.startswith(_PACKAGE)), 0)
    return traces[first:]


def gpu_lost(error: BaseException) -> str:
    """Returns why this process cannot use its GPU any more, if `error` says so, and notes it on `error`; else "".

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
    return any(is_out_of_memory(cls.__name__, str(link)) for link in chain(error) for cls in type(link).__mro__)


def _frame_values(error: BaseException) -> Iterator[object]:
    for link in chain(error):
        for tb in frames_of(link):
            for name, value in tuple(tb.tb_frame.f_locals.items()):
                if name != "self":  # the actor's own state lives anyway
                    yield value


def _size(value: object, ids: set[int], depth: int = 2) -> int:
    """Returns the rough size of a value in bytes: `nbytes` of arrays and tensors, elements of containers to `depth`."""
    if id(value) in ids:
        return 0
    ids.add(id(value))
    try:
        bytes_of = getattr(value, "nbytes", None)
        total = int(bytes_of) if isinstance(bytes_of, int) else sys.getsizeof(value, 64)
        if depth and isinstance(value, (list, tuple, dict, set)) and len(value) <= 10_000:
            elements = value.values() if isinstance(value, dict) else value
            total += sum(_size(element, ids, depth - 1) for element in tuple(elements))
    except BaseException:  # a value whose methods raise
        return 64
    return total


class Discarded:
    """Replaces a value that is dropped from a stored frame."""

    def __init__(self, value: object) -> None:
        self._type_name = type(value).__qualname__

    def __repr__(self) -> str:
        return f"<{self._type_name}: not kept, so that it ends>"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, and its causes and contexts."""
    ids: set[int] = set()
    while error is not None and id(error) not in ids:
        ids.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def release_frame_locals(error: BaseException, engine: str) -> None:
    """Releases resources in the frames of an exception: open files, sockets, generators, process groups; tensors stay
    without their graphs. Frames whose file begins with `engine`, which still run, are left alone.

    The frames of torch.distributed are emptied: resources that only they use cannot be distinguished from others.
    """
    harmless: set[type] = set(_PLAIN)  # each type is checked once, as the failing call waits for this
    for link in chain(error):
        tb = link.__traceback__
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
    variables = frame.f_locals
    types_by_name = {name: type(value) for name, value in variables.items()}
    names = [name for name, kind in types_by_name.items() if kind not in harmless and not _is_harmless(kind, harmless)]
    if not names or frame.f_code.co_name == "<module>":
        return
    shared = frame.f_code.co_cellvars + frame.f_code.co_freevars  # other functions would see it change
    changed = {name: _replacement(variables[name]) for name in names if name not in shared}
    if sys.version_info >= (3, 14):  # a frame holds overwritten values until it is cleared
        changed = {**variables, **changed}
        with contextlib.suppress(RuntimeError):  # one that still runs
            frame.clear()
    variables.update(changed)
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


@functools.cache
def _kinds_with_an_end() -> tuple[type, ...]:
    """Returns the types whose instances do something when they are collected, such as to close a file."""
    return (
        io.IOBase,  # buffered writes are flushed when it is closed
        socket.socket,
        tempfile.TemporaryDirectory,
        tempfile._TemporaryFileWrapper,
        types.GeneratorType,  # with the files that it has opened
        types.CoroutineType,
        types.AsyncGeneratorType,
    )


def _is_harmless(kind: type, harmless: set[type]) -> bool:
    """Returns whether values of a type can be stored unchanged; adds such a type to `harmless`."""
    if issubclass(kind, _kinds_with_an_end()) or str(kind.__module__).startswith("torch"):
        return False
    harmless.add(kind)
    return True


def _replacement(value: Any) -> object:
    if isinstance(value, _kinds_with_an_end()) or type(value).__module__.startswith(_MODULES):
        return Discarded(value)
    with contextlib.suppress(Exception):
        return value if value.grad_fn is None else value.detach()
    return value


class RankError:
    """An error as it arrived from one rank: its text, and the exception, which is unpickled on request."""

    __slots__ = ("_frames", "_parcel", "_text", "since")

    def __init__(self, frames: Sequence[InFrame], parcel: "Parcel | None", since: float = 0.0) -> None:
        self._frames = frames if parcel is None else parcel.parts
        self._parcel = parcel
        self._text: ExceptionText | None = None
        self.since = since  # seconds of the receiver's clock

    @property
    def text(self) -> ExceptionText:
        """Text of the remote exception, with its traceback."""
        if self._text is None:
            self._text = exception_text(self._frames)
        return self._text

    @property
    def is_interrupt(self) -> bool:
        """True if the call was interrupted on the rank, even where that needed more than the interrupt."""
        return self.text.type_name == "KeyboardInterrupt"

    @property
    def follows(self) -> bool:
        """True if it only reports that another rank has left a collective. If it was raised after an error of this
        rank's own, that error counts."""
        first = "".join(self.text.formatted)
        for between in _CHAINED:
            first = first.partition(between)[0]
        return _LEFT_ALONE.search(first) is not None

    def exception(self, receiver: "Runtime") -> BaseException:
        """Unpickles the exception, and releases the message that carried it."""
        parcel, self._parcel = self._parcel, None
        try:
            return decode_exception(self._frames, receiver)
        finally:
            if parcel is not None:
                receiver.node.consumed(parcel)


def in_order(raised: dict[int, RankError]) -> dict[int, RankError]:
    """Sorts errors by position in their call: causes before consequences of other ranks' errors, each by time."""
    batch, began = 0, float("-inf")
    keys: dict[int, tuple[bool, int, int]] = {}
    for position, error in sorted(raised.items(), key=lambda item: item[1].since):
        if error.since - began > TOGETHER_S:
            batch, began = batch + 1, error.since
        keys[position] = (error.follows, batch, position)
    return dict(sorted(raised.items(), key=lambda item: keys[item[0]]))


class RankNames:
    """Names ranks of the mesh that a call was made on, by their positions in the call."""

    def __init__(self, state: MeshState | None, ranks: Sequence[int]) -> None:
        self._region = state.region if state is not None else None
        procs = state.procs if isinstance(state, ActorState) else state
        self._layout = procs.layout if isinstance(procs, ProcState) else None
        self._ranks = ranks
        self.of_procs = isinstance(state, ProcState)

    def __call__(self, positions: Iterable[int]) -> str:
        """Returns the ranks as text."""
        ranks = [self._ranks[position] for position in positions]
        region = self._region
        in_region = region is not None and all(rank in region.ndslice for rank in ranks)
        text = places_of(region, ranks) if region is not None and in_region else f"ranks {spans(ranks)}"
        return text if len(text) <= WIDTH else f"{text[:WIDTH].rpartition(',')[0]},…"

    def hosts(self, positions: Iterable[int]) -> str:
        """Returns their hosts as text, such as "host node7"; "" if they are unknown."""
        if self._layout is None:
            return ""
        hosts = list(dict.fromkeys(host_name(self._layout.host_of(self._ranks[position])) for position in positions))
        more = f" and {len(hosts) - HOSTS} more" if len(hosts) > HOSTS else ""
        return f"host{'s'[: len(hosts) > 1]} {', '.join(hosts[:HOSTS])}{more}"


def actor_error(
    receiver: "Runtime", title: str, raised: dict[int, RankError], size: int, missing: Sequence[int], names: RankNames
) -> ActorError:
    """Returns the error of a call: `raised` by position, as `in_order` sorts them, `missing` are without an answer."""
    failures = {position: error.exception(receiver) for position, error in raised.items()}
    name, _, method = title.partition(".")
    headline, of = f"Actor call {title} failed", ""
    if title.endswith("[cell]") or (names.of_procs and method == "cell"):
        headline, of = "The cell failed", f" of {name.removesuffix('[cell]')}"
    return ActorError.of_ranks(failures, f"{headline}.", _summary(headline, of, raised, size, missing, names))


def _summary(
    headline: str, of: str, raised: dict[int, RankError], size: int, missing: Sequence[int], names: RankNames
) -> str:
    followed = [position for position, error in raised.items() if error.follows]
    if len(followed) < len(raised):
        raised = {position: error for position, error in raised.items() if position not in followed}
    else:  # ranks that left are not among them
        followed = []
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for position, error in raised.items():
        kinds.setdefault(error.text.likeness, []).append(position)
    ranks = names(raised)
    if size > 1:
        headline += f" on {len(raised)} of {size} ranks{of}" + (f": {ranks}" if ranks else "")
    elif ranks:
        headline += f" on {ranks}{of}"
    if len(raised) > 1:
        headline += "; the same error" if len(kinds) == 1 else f"; {len(kinds)} different errors"
    if followed:
        headline += f"; in consequence the collectives of {names(followed)} broke off"
    if missing:
        headline += f"; {names(missing)} had not answered"
    hosts = names.hosts(raised)
    lines = [f"{headline} ({hosts})" if hosts else headline]
    if len(kinds) > 1:
        ranks_by_kind = list(kinds.values())
        lines += [f"  {names(positions)}: {raised[positions[0]].text.line}" for positions in ranks_by_kind[:KINDS]]
        if len(ranks_by_kind) > KINDS:
            lines.append(f"  and {len(ranks_by_kind) - KINDS} more, in `failures` of this error")
    return "\n".join(lines)
