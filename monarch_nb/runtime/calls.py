"""Calls that wait for replies from every actor they were sent to, together or one by one, and forms of arguments."""

import contextlib
import functools
import heapq
import itertools
import math
import pickle
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from msgspec.structs import replace

from monarch_nb.runtime import unretrieved
from monarch_nb.runtime.actors.failures import RankError, RankNames, actor_error, in_order
from monarch_nb.runtime.future import Future
from monarch_nb.settings import settings
from monarch_nb.transport import raised_by_handler
from monarch_nb.wire import (
    ActorError,
    Folded,
    Header,
    InFrame,
    Kind,
    OutFrame,
    Status,
    decode,
    in_memory,
    unfold,
    unpickle_failure,
)

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Clock, Parcel

PRUNED = 64  # time limits, after which those of answered calls are dropped
R = TypeVar("R", covariant=True)
A = TypeVar("A")


class EncodedObject:
    """The frames of an encoded object, copied so that they do not change. Pickles as it is."""

    __slots__ = ("_frames",)

    def __init__(self, frames: Sequence[OutFrame]) -> None:
        parts = [in_memory(frame) for frame in frames]
        self._frames: tuple[bytes | bytearray, ...] = (*map(bytes, parts[:1]), *map(bytearray, parts[1:]))

    def load(self, context: object = None) -> Any:
        """Decodes and returns the object; its buffers are copies."""
        return decode([self._frames[0], *(bytearray(frame) for frame in self._frames[1:])], context)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(len(frame) for frame in self._frames)

    def __reduce__(self) -> tuple[object, ...]:
        return EncodedObject, ((self._frames[0], *(pickle.PickleBuffer(frame) for frame in self._frames[1:])),)


class LentArguments(ABC):
    """Replaces the arguments of a message: their holder lends them when the call begins, and waits for its end."""

    @abstractmethod
    def bound(self, method: Callable[..., object], *, replies: bool, is_async: bool) -> "Callable[[], object]":
        """Returns the method as a function without arguments: a coroutine function for an actor with an event loop.

        It waits until the arguments are there, and notifies their holder at the end. If they will never be there, it
        raises if the sender wants a reply, else it returns without calling the method.
        """


Thunk = Callable[[], Any]  # decodes one answer


def answered() -> None:
    """Replaces an answer that was passed on."""


def _unchanged(error: ActorError) -> BaseException:
    return error


def _no_future() -> None:
    """Replaces the reference to a future before one is handed out."""


class DeadlockError(RuntimeError):
    """A wait that can never end, since its call waits for the waiting actor."""


class PendingCall(Generic[R]):
    """Collects `size` replies. They arrive on the reading thread, and are decoded when the result is first read.

    A call that some ranks answer with an error waits for the others for `call_error_window` only: the error includes
    all ranks that have raised by then, and a rank that hangs delays no caller.
    """

    _releasing = False  # whether ranks that wait for ranks which have raised are being freed
    unread: tuple[int, ...] = ()  # `Header.unread`, where its ranks store their answers
    kind = ""  # of the actors, where that is known: "sync" or "async"
    _finding = ""

    def __init__(
        self,
        process: "Runtime",
        title: str,
        mesh: str,
        ranks: Callable[[], Sequence[int]],
        size: int,
        build: Callable[[list[Thunk]], R],
    ) -> None:
        self._process = process
        self.title = title  # "trainers.step"
        self.mesh = mesh
        self.call = process.new_call()
        self.began = time.monotonic()
        self.caller = process.context()  # the message whose handling made it
        self.size = size
        self._ranks = ranks
        self._build = build
        self._replies: list[Thunk | None] = [None] * size
        self._raised: dict[int, RankError] = {}
        self.sent: list[Header] = []  # headers of messages to one actor of another host each, or to a subtree of hosts
        self.on_read: Callable[[], object] = answered  # called when its result is read
        self.restated: Callable[[ActorError], BaseException] = _unchanged  # replaces errors of ranks
        self.missing = size
        self.number = process.ports.open(self)
        self._future: Future[R] | None = self._new_future()
        self._handed: Callable[[], Future[R] | None] = _no_future
        process.calls[self.call] = self
        if process.recorder is not None:
            process.recorder.sent(self)

    def _new_future(self) -> Future[R]:
        future: Future[R] = Future._make(describe=self.describe)
        future.wait_id = self.call
        return future

    def may_be_cancelled(self) -> None:
        """Makes `cancel` of its future cancel it. Called before it is sent."""
        self.future._cancel = self.cancel

    @property
    def future(self) -> Future[R]:
        """The future that its answers resolve; a new one if the former one was dropped."""
        future = self._future or self._handed()
        if future is None:
            future = self._future = self._new_future()
            future._hand_out()
        return future

    def hand_out(self) -> Future[R]:
        """Returns its future to a caller that may discard it: an error is reported even so."""
        future = self._future or self.future
        future._hand_out()
        self._handed, self._future = weakref.ref(future), None
        return future

    # -- reading thread ---------------------------------------------------------------------------------------------

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Handles a reply, or several folded by a host agent."""
        if header.kind == Kind.FOLDED:
            for folded in unfold(header, parcel.frames):
                self._reply_folded(folded)
            self._process.node.consumed(parcel)
        else:
            self._reply(header, None, parcel)

    def _reply_folded(self, folded: Folded[InFrame]) -> None:
        self._process.log_positions.update(folded.logs)
        values = folded.header.status == Status.VALUE
        for span in folded.places:
            positions = range(span.start, min(span.stop, self.size))
            if not (values and self._take_all(positions, self._thunk(folded.frames, None))):
                for position in positions:
                    self._reply(replace(folded.header, index=position), folded.frames, None)

    def _take_all(self, positions: range, thunk: Thunk) -> bool:
        """Takes one answer for all positions; False, and none is taken, unless all are awaited."""
        if len(positions) < 2 or self._replies[positions.start : positions.stop].count(None) < len(positions):
            return False
        self._replies[positions.start : positions.stop] = [thunk] * len(positions)
        self.missing -= len(positions)
        self._settle(thunk)
        return True

    def _reply(self, header: Header, frames: Sequence[InFrame] | None, parcel: "Parcel | None") -> None:
        index = header.index
        if not 0 <= index < self.size or self._replies[index] is not None:
            return
        if header.log:
            self._process.log_positions[header.src] = header.log
        if header.status == Status.FAILURE:
            opened = frames if parcel is None else parcel.frames
            self.lose((index,), self._process.failure(opened or (), self))
            return
        if header.status == Status.VALUE:
            thunk = self._thunk(frames, parcel)
        else:
            thunk = self._failed(index, RankError(frames or (), parcel, self._process.clock.monotonic()))
        if self._take(index, thunk):
            self._settle(thunk)

    def _take(self, index: int, thunk: Thunk) -> bool:
        self._replies[index] = thunk
        self.missing -= 1
        return True

    def _thunk(self, frames: Sequence[InFrame] | None, parcel: "Parcel | None") -> Thunk:
        process, title = self._process, self.title

        def value() -> object:
            try:
                body = frames if parcel is None else parcel.parts
                assert body is not None
                try:
                    return decode(body, process)
                except Exception as error:
                    if raised_by_handler(error):
                        raise
                    raise unpickle_failure(error, f"result of {title}", "calling") from error
            finally:
                if parcel is not None:
                    process.node.consumed(parcel)

        return value

    def _failed(self, index: int, raised: RankError) -> Thunk:
        first = not self._raised
        self._raised[index] = raised
        if first and self.missing > 1:
            self._watch_window()
        return answered  # the error is made of all of them

    def _actor_error(self, raised: dict[int, RankError], size: int, missing: Sequence[int] = ()) -> ActorError:
        ranks = self._ranks()
        names = RankNames(self._process.meshes.get(self.mesh), ranks)
        error = actor_error(self._process, self.title, raised, size, missing, names)
        error.origin = (self.mesh, ranks[next(iter(raised))], self.call)
        error.base_ranks = {position: ranks[position] for position in raised}
        error.reproducer = self._process.reproduce
        return error

    def _settle(self, thunk: Thunk) -> None:
        if self.missing or self._releasing:
            return
        if self._raised and self.is_broken_off:
            self._release()
        else:
            self._end()

    def _release(self) -> None:
        """Frees ranks that wait for ranks which have raised, before the call ends, so that the next call can run."""
        if not self._releasing:
            self._releasing = True
            self._process.release(self, self._released)

    def _released(self) -> None:
        if self.waits:
            self._end()

    @property
    def is_broken_off(self) -> bool:
        """True if ranks were interrupted in it, or lost others in a collective."""
        return any(error.follows or error.is_interrupt for error in tuple(self._raised.values()))

    def broken_off(self) -> list[int]:
        """Returns base ranks that have raised because another has left a collective."""
        ranks = self._ranks()
        return [ranks[position] for position, error in tuple(self._raised.items()) if error.follows]

    def base_ranks(self) -> Sequence[int]:
        """Returns the base ranks that it was sent to."""
        return self._ranks()

    def _end(self) -> bool:
        self.close()
        future = self.future
        if self._handed is not _no_future:
            self._future = None  # a discarded future reports its error now
        return future._set_lazy(self._result, failed=bool(self._raised))

    def _result(self) -> R:
        self.on_read()
        if self._raised:  # the first cause is raised, with notes of the others
            raised = in_order(self._raised.copy())
            missing = [index for index, reply in enumerate(self._replies) if reply is None and index not in raised]
            raise self._explained(self.restated(self._actor_error(raised, self.size, missing)))
        replies = [reply for reply in self._replies if reply is not None]
        value = self._build(replies)
        self._replies = [answered] * self.size  # they know this call: neither is to wait for a garbage collection
        return value

    def _watch_window(self) -> None:
        me = weakref.ref(self)

        def end() -> None:
            call = me()
            if call is None or not call.waits:
                return
            if any(call._process.held_at(call.mesh, rank) for rank in call.missing_ranks()):
                call._watch_window()  # a debugger has stopped them
            else:
                call._release()

        self._process.later(settings.call_error_window, end)

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def watched(self) -> bool:
        """True while a thread or task waits for it, and so learns of a failure from it."""
        return bool(self.future.watched)

    def waits_for(self, ranks: set[int]) -> list[int]:
        """Returns those of `ranks` that have not answered."""
        return [r for r, reply in zip(self._ranks(), self._replies, strict=True) if reply is None and r in ranks]

    def missing_ranks(self) -> list[int]:
        """Returns the base ranks that have not answered yet."""
        return [rank for rank, reply in zip(self._ranks(), self._replies, strict=True) if reply is None]

    def unanswered(self, positions: Iterable[int]) -> list[int]:
        """Returns the `positions`, in the region it was sent to, without an answer."""
        return [position for position in positions if self._replies[position] is None]

    def places_of(self, ranks: set[int]) -> list[int]:
        """Returns the positions, in the region it was sent to, of those of `ranks` that have not answered."""
        pairs = zip(self._ranks(), self._replies, strict=True)
        return [position for position, (rank, reply) in enumerate(pairs) if reply is None and rank in ranks]

    def fail(self, error: BaseException) -> bool:
        """Ends the call with an error; True if it was still waiting."""
        if not self.waits:
            return False
        self.close()
        return self.future._fail(self._explained(error))

    @property
    def finding(self) -> str:
        """The last reason, found by a diagnosis, why ranks have not answered; "" if none was made."""
        return self._finding

    @finding.setter
    def finding(self, text: str) -> None:
        self._finding = text
        future = self._future or self._handed()
        if future is not None:
            future.finding = text

    def _explained(self, error: BaseException) -> BaseException:
        """Adds an earlier finding to an error, and returns it."""
        note = f"Before that, {self._finding}"
        if self._finding and self._finding not in str(error) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return error

    def lose(self, positions: Iterable[int], error: BaseException) -> None:
        """Ends the call, as the ranks at `positions` will not answer."""
        if self._raised and self.waits and not getattr(error, "__notes__", ()):  # it may be the cause of their end
            raised = in_order(self._raised.copy())
            names = RankNames(self._process.meshes.get(self.mesh), self._ranks())
            for position, cause in tuple(raised.items())[:1]:
                suffix = f", and {len(raised) - 1} more ranks had" if len(raised) > 1 else ""
                place = names([position])
                error.add_note(f"Before that, {self.title} had raised on {place}: {cause.text.line}{suffix}")
        self.fail(error)

    def cancel(self, _: Future[object] | None = None) -> bool:
        """Ends the call here, and on the ranks that have not answered; True if it was still waiting."""
        if not self.waits:
            return False
        return self._abandon(CancelledError(f"{self.title}() was cancelled; {self.describe()}{self._left_running()}"))

    def expire(self, seconds: float) -> None:
        """Ends it with a TimeoutError, and cancels it on its ranks, unless all have answered in these seconds."""
        if not self.waits:
            return
        if not self._raised:
            self._abandon(TimeoutError(self._timeout_text(seconds)))
            return
        missing = self.missing_ranks()  # what has been raised is more useful than a report that others are late
        if self._end():
            self._process.cancel_on_ranks(self.call, self.mesh, missing)

    @property
    def waits(self) -> bool:
        """True while answers are awaited."""
        return self.call in self._process.calls

    def _timeout_text(self, seconds: float) -> str:
        missing = self.missing_ranks()
        ranks = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        mesh = self.title.partition(".")[0]
        return (
            f"{self.title}() was not answered within {seconds:g} s by rank{'s'[: len(missing) > 1]} {ranks} of mesh "
            f"{mesh} ({len(missing)} of {self.size} asked), and was cancelled there{self._left_running()}"
        )

    def _abandon(self, error: BaseException) -> bool:
        missing = self.missing_ranks()
        ended = self.fail(error)
        if ended:
            self._process.cancel_on_ranks(self.call, self.mesh, missing)
        return ended

    def _left_running(self) -> str:
        return ". A `def` endpoint that runs already is left to finish" if self.kind == "sync" else ""

    def close(self) -> None:
        """Closes its port: later replies are dropped."""
        self._process.calls.pop(self.call, None)
        self._process.ports.close(self.number)
        if self._process.recorder is not None:
            self._process.recorder.answered(self.call)

    def describe(self) -> str:
        """Returns the progress of the call, in a few words."""
        if self.size == 1:
            return f"{self.title}() has not answered yet"
        errors = f", {len(self._raised)} of them with an error" if self._raised else ""
        return f"{self.size - self.missing} of {self.size} ranks have answered {self.title}(){errors}"


def _waits(call: PendingCall[Any] | None) -> bool:
    return call is not None and call.waits


class CallLimits:
    """The time limits of calls, on one timer. An answered call is not kept for that long, nor its limit."""

    def __init__(self, clock: "Clock") -> None:
        self._clock, self._lock = clock, threading.RLock()  # a finalizer may call within it
        self._limits: list[tuple[float, int, float, weakref.ref[PendingCall[Any]]]] = []  # a heap; when due
        self._numbers = itertools.count()
        self._prune_at = PRUNED
        self._next = math.inf  # when the timer runs

    def add(self, call: PendingCall[Any], seconds: float) -> None:
        """Limits a call to `seconds` from now."""
        with self._lock:
            if len(self._limits) >= self._prune_at:
                limits, self._limits = self._limits, []
                self._limits += [limit for limit in limits if _waits(limit[3]())]
                heapq.heapify(self._limits)
                self._prune_at = PRUNED + 2 * len(self._limits)
            due = self._clock.monotonic() + seconds
            heapq.heappush(self._limits, (due, next(self._numbers), seconds, weakref.ref(call)))
            self._set_timer()

    def _set_timer(self) -> None:
        if self._limits and self._limits[0][0] < self._next:
            self._next = self._limits[0][0]
            self._clock.later(max(0.0, self._next - self._clock.monotonic()), self._expire)

    def _expire(self) -> None:
        late = []
        with self._lock:
            now = self._clock.monotonic()
            while self._limits and self._limits[0][0] <= now:
                late.append(heapq.heappop(self._limits)[2:])
            if self._next <= now:
                self._next = math.inf
            self._set_timer()
        for seconds, reference in late:
            call = reference()
            if call is not None:
                call.expire(seconds)


class _Unclaimed:
    """Placeholder of an answer that is an error, without a reference to the call, which reports it when discarded."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self) -> NoReturn:
        raise AssertionError("an error is claimed from its call")


class StreamCall(PendingCall[None], Generic[A]):
    """Passes each reply to the next future that is observed, in the order of arrival."""

    def __init__(
        self, process: "Runtime", title: str, mesh: str, ranks: Callable[[], Sequence[int]], size: int
    ) -> None:
        super().__init__(process, title, mesh, ranks, size, lambda replies: None)
        self.future.describe = None  # no caller waits for it, and a cycle would wait for a garbage collection
        self._ready: deque[Thunk] = deque()
        self._claims: deque[Future[A]] = deque()
        self._error: BaseException | None = None
        self._retrieved = False  # True once an error was retrieved
        unretrieved.ready()
        self._taking = threading.Lock()  # answers arrive on the reading thread, failures on any

    @property
    def watched(self) -> bool:
        """True while a thread or task waits for one of its futures."""
        return any(future.watched for future in tuple(self._claims))

    def _take(self, index: int, thunk: Thunk) -> bool:
        with self._taking:
            if self._replies[index] is not None:
                return False
            return super()._take(index, answered)

    def _take_all(self, positions: range, thunk: Thunk) -> bool:
        return False  # each answer resolves its own future

    def _failed(self, index: int, raised: RankError) -> Thunk:
        self._raised[index] = raised
        return _Unclaimed(index)

    def _raise(self, index: int) -> NoReturn:
        """Raises the error of one rank; errors of other ranks are not reported any more."""
        self._retrieved = True
        raise self.restated(self._actor_error({index: self._raised[index]}, 1))

    def __del__(self) -> None:
        if self._raised and not self._retrieved:
            unretrieved.forget(functools.partial(self._raise, min(self._raised)))

    def lose(self, positions: Iterable[int], error: BaseException) -> None:
        """Fails one future for each of `positions`; the others' answers are still awaited."""

        def lost() -> NoReturn:
            raise error

        for position in positions:
            if 0 <= position < self.size and self._take(position, lost):
                self._settle(lost)

    def _settle(self, thunk: Thunk) -> None:
        self._ready.append(thunk)
        if self.missing == 0:
            self.close()
        self._match()

    def _match(self) -> None:
        while self._claims:
            try:
                thunk = self._ready.popleft()
            except IndexError:
                break
            if isinstance(thunk, _Unclaimed):
                thunk = functools.partial(self._raise, thunk.index)
            try:
                self._claims.popleft()._set_lazy(thunk)
            except IndexError:  # another thread matched the last claim
                self._ready.appendleft(thunk)
                continue  # a claim made meanwhile found nothing ready
        if self._error is not None and not self._ready:
            with contextlib.suppress(IndexError):  # another thread may fail the last
                while True:
                    self._claims.popleft()._fail(self._error)

    def fail(self, error: BaseException) -> bool:
        """Fails the futures that still wait; replies that have arrived stay."""
        self._error = error
        self.close()
        self._match()
        return True

    def cancel(self, future: Future[object] | None = None) -> bool:
        """Ends a future, unless it has its answer, and cancels the calls that have no answer yet."""
        if future is None:
            return super().cancel()
        future._observe()
        return not future._done and super().cancel()

    def futures(self) -> Iterator[Future[A]]:
        """Yields one future for each actor."""
        for _ in range(self.size):
            future: Future[A] = Future._make(describe=self.describe)
            future.wait_id = self.call
            future._cancel = self.cancel

            future._start = functools.partial(self._claim, weakref.ref(future))
            yield future

    def _claim(self, reference: "weakref.ref[Future[A]]") -> None:
        future = reference()
        if future is not None:
            self._claims.append(future)
            self._match()
