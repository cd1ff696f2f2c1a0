"""Calls that wait for replies: one of them collects the answers of every actor it was sent to."""

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from monarch_nb.runtime import forgotten
from monarch_nb.runtime.features import held_at
from monarch_nb.runtime.future import Future
from monarch_nb.runtime.raised import Raised, Ranks, actor_error
from monarch_nb.settings import settings
from monarch_nb.wire import ActorError, Header, Kind, Status, decode, unfold, unpickle_failure
from monarch_nb.wire.header import CastPlan

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Parcel

Thunk = Callable[[], Any]


def _opened() -> None:
    """In the place of an answer that was handed on."""


def _nobody() -> None:
    """In the place of a future that was handed out."""


class DeadlockError(RuntimeError):
    """A wait that can never end, since what it waits for waits for the waiting actor."""


class PendingCall:
    """Collects `size` replies. Replies come on the reading thread, and are decoded by whoever looks at the result.

    One that some ranks answer with an error waits for the others for `call_error_window` only: all that have raised by
    then are in the error, and a rank that hangs holds up nobody.
    """

    def __init__(
        self,
        runtime: "Runtime",
        title: str,
        mesh: str,
        ranks: Callable[[], Sequence[int]],
        size: int,
        build: Callable[[list[Thunk]], Any],
    ) -> None:
        self.runtime = runtime
        self.title = title  # "trainers.step"
        self.mesh = mesh
        self.call = runtime.new_call()
        self.caller = runtime.context()  # the message whose handling made it
        self.size = size
        self._ranks = ranks
        self._build = build
        self._replies: list[Thunk | None] = [None] * size
        self._raised: dict[int, Raised] = {}
        self.branches: list[CastPlan] = []  # subtrees of several hosts to which it went
        self.kind = ""  # of the actors, where that is known: "sync" or "async"
        self.missing = size
        self.number = runtime.ports.open(self)
        self._future: Future[Any] | None = self._new_future()
        self._handed: Callable[[], Future[Any] | None] = _nobody
        runtime.calls[self.call] = self

    def _new_future(self) -> Future[Any]:
        future: Future[Any] = Future._make(story=self.story)
        future.wait_id = self.call
        return future

    @property
    def future(self) -> Future[Any]:
        """What its answers resolve; another one takes its place where nobody has kept the one that was handed out."""
        future = self._future or self._handed()
        if future is None:
            future = self._future = self._new_future()
            future._hand_out()
        return future

    def hand_out(self) -> Future[Any]:
        """Its future, for somebody who may drop it: an error is told even so."""
        future = self.future
        future._hand_out()
        self._handed, self._future = weakref.ref(future), None
        return future

    # -- reading thread ---------------------------------------------------------------------------------------------

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """A reply, or several folded by a host agent."""
        if header.kind == Kind.FOLDED:
            for one, frames in unfold(header, parcel.frames):
                self._reply(one, frames, None)
            self.runtime.node.consumed(parcel)
        else:
            self._reply(header, None, parcel)

    def _reply(self, header: Header, frames: Sequence[Any] | None, parcel: "Parcel | None") -> None:
        index = header.index
        if not 0 <= index < self.size or self._replies[index] is not None:
            return
        if header.log:
            self.runtime.log_positions[header.src] = header.log
        if header.status == Status.FAILURE:
            opened = frames if parcel is None else parcel.frames
            self.lose((index,), self.runtime.supervision_error(opened or (), self))
            return
        if header.status == Status.VALUE:
            thunk = self._thunk(frames, parcel)
        else:
            thunk = self._failed(index, Raised(frames or (), parcel))
        if self._take(index, thunk):
            self._settle(thunk)

    def _take(self, index: int, thunk: Thunk) -> bool:
        self._replies[index] = thunk
        self.missing -= 1
        return True

    def _thunk(self, frames: Sequence[Any] | None, parcel: "Parcel | None") -> Thunk:
        runtime, title = self.runtime, self.title

        def value() -> Any:
            try:
                body = frames if parcel is None else parcel.parts
                assert body is not None
                try:
                    return decode(body, runtime)
                except Exception as error:
                    raise unpickle_failure(error, f"result of {title}", "calling") from error
            finally:
                if parcel is not None:
                    runtime.node.consumed(parcel)

        return value

    def _failed(self, index: int, raised: Raised) -> Thunk:
        first = not self._raised
        self._raised[index] = raised
        if first and self.missing > 1:
            self._watch_window()
        return _opened  # the error is made of all of them

    def _actor_error(self, raised: dict[int, Raised], size: int, missing: Sequence[int] = ()) -> ActorError:
        ranks = self._ranks()
        where = Ranks(self.runtime, self.mesh, ranks)
        error = actor_error(self.runtime, self.title, raised, size, missing, where)
        error.origin = (self.mesh, ranks[next(iter(raised))], self.call)
        return error

    def _settle(self, thunk: Thunk) -> None:
        if self.missing == 0:
            self._end()

    def _end(self) -> bool:
        self.close()
        future = self.future
        if self._handed is not _nobody:
            self._future = None  # what nobody has kept goes now, and its error is told
        return future._set_lazy(self._result, failed=bool(self._raised))

    def _result(self) -> Any:
        if self._raised:  # the first in rank order is raised, the others are told with it
            raised = dict(sorted(self._raised.copy().items()))
            missing = [place for place, reply in enumerate(self._replies) if reply is None and place not in raised]
            raise self._actor_error(raised, self.size, missing)
        replies = [reply for reply in self._replies if reply is not None]
        value = self._build(replies)
        self._replies = [_opened] * self.size  # they know this call: neither is to wait for a garbage collection
        return value

    def _watch_window(self) -> None:
        me = weakref.ref(self)

        def end() -> None:
            call = me()
            if call is None or not call._waits:
                return
            if any(held_at(call.runtime, call.mesh, rank) for rank in call.missing_ranks()):
                call._watch_window()  # somebody is at them with a debugger
            else:
                call._end()

        self.runtime.later(settings.call_error_window, end)

    # -- failures ---------------------------------------------------------------------------------------------------

    @property
    def watched(self) -> bool:
        """Whether somebody waits for it now, and so learns of a failure from it."""
        return bool(self.future.watched)

    def waits_for(self, ranks: set[int]) -> list[int]:
        """Those of `ranks` whose answer has not come."""
        return [r for r, reply in zip(self._ranks(), self._replies, strict=True) if reply is None and r in ranks]

    def missing_ranks(self) -> list[int]:
        """Base ranks that have not answered yet."""
        return [rank for rank, reply in zip(self._ranks(), self._replies, strict=True) if reply is None]

    def places_of(self, ranks: set[int]) -> list[int]:
        """The places, in the region it was sent to, of those of `ranks` whose answer has not come."""
        each = zip(self._ranks(), self._replies, strict=True)
        return [place for place, (rank, reply) in enumerate(each) if reply is None and rank in ranks]

    def fail(self, error: BaseException) -> bool:
        """Ends the call with an error; True if it was still waiting."""
        if not self._waits:
            return False
        self.close()
        return self.future._fail(error)

    def lose(self, places: Iterable[int], error: BaseException) -> None:
        """Those at `places` will not answer: that ends the call."""
        if self._raised and self._waits and not getattr(error, "__notes__", ()):  # it may well be what they died of
            raised = self._raised.copy()
            where = Ranks(self.runtime, self.mesh, self._ranks())
            for place, one in sorted(raised.items())[:1]:
                others = f", and {len(raised) - 1} more ranks had" if len(raised) > 1 else ""
                error.add_note(f"Before that, {self.title} had raised on {where([place])}: {one.story.line}{others}")
        self.fail(error)

    def cancel(self, _: Future[Any] | None = None) -> bool:
        """Ends the call here, and on the ranks that have not answered; True if it was still waiting."""
        if not self._waits:
            return False
        return self._abandon(CancelledError(f"{self.title}() was cancelled; {self.story()}{self._left_running()}"))

    def limit(self, seconds: float) -> None:
        """Ends it with a TimeoutError, and cancels it on its ranks, unless all have answered in that time."""
        me = weakref.ref(self)  # an answered call and its answers are not kept for that long

        def expire() -> None:
            call = me()
            if call is None or not call._waits:
                return
            if call._raised:  # better than to say that others are late
                missing = call.missing_ranks()
                if call._end():
                    call.runtime.cancels.send(call, missing)
                return
            call._abandon(TimeoutError(call._late(seconds)))

        self.runtime.later(seconds, expire)

    @property
    def _waits(self) -> bool:
        return self.call in self.runtime.calls

    def _late(self, seconds: float) -> str:
        missing = self.missing_ranks()
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        mesh = self.title.partition(".")[0]
        return (
            f"{self.title}() was not answered within {seconds:g} s by rank{'s'[: len(missing) > 1]} {shown} of mesh "
            f"{mesh} ({len(missing)} of {self.size} asked), and was cancelled there{self._left_running()}"
        )

    def _abandon(self, error: BaseException) -> bool:
        missing = self.missing_ranks()
        ended = self.fail(error)
        if ended:
            self.runtime.cancels.send(self, missing)
        return ended

    def _left_running(self) -> str:
        return ". A `def` endpoint that runs already is left to finish" if self.kind == "sync" else ""

    def close(self) -> None:
        """Later replies are dropped."""
        self.runtime.calls.pop(self.call, None)
        self.runtime.ports.close(self.number)

    def story(self) -> str:
        """What is being waited for, in a few words."""
        if self.size == 1:
            return f"{self.title}() has not answered yet"
        failed = f", {len(self._raised)} of them with an error" if self._raised else ""
        return f"{self.size - self.missing} of {self.size} ranks have answered {self.title}(){failed}"


class _Unclaimed:
    """In the place of an answer that is an error: it does not hold the call, which may go, and tell of it then."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self) -> Any:
        raise AssertionError("an error is claimed from its call")


class StreamCall(PendingCall):
    """Hands each reply to the next future that is looked at, in the order of arrival."""

    def __init__(
        self, runtime: "Runtime", title: str, mesh: str, ranks: Callable[[], Sequence[int]], size: int
    ) -> None:
        super().__init__(runtime, title, mesh, ranks, size, lambda replies: None)
        self.future.story = None  # nobody waits for this one, and neither is to wait for a garbage collection
        self._ready: deque[Thunk] = deque()
        self._claims: deque[Future[Any]] = deque()
        self._error: BaseException | None = None
        self._looked = False  # at an error
        forgotten.ready()
        self._taking = threading.Lock()  # answers come on the reading thread, failures on any

    @property
    def watched(self) -> bool:
        """Whether somebody waits for one of its futures."""
        return any(future.watched for future in tuple(self._claims))

    def _take(self, index: int, thunk: Thunk) -> bool:
        with self._taking:
            if self._replies[index] is not None:
                return False
            return super()._take(index, _opened)

    def _failed(self, index: int, raised: Raised) -> Thunk:
        self._raised[index] = raised
        return _Unclaimed(index)

    def _look(self, index: int) -> Any:
        """Somebody looks at what one has raised, and need not be told of it, nor of others that are left."""
        self._looked = True
        raise self._actor_error({index: self._raised[index]}, 1)

    def __del__(self) -> None:
        if self._raised and not self._looked:
            forgotten.forget(functools.partial(self._look, min(self._raised)))

    def lose(self, places: Iterable[int], error: BaseException) -> None:
        """One future each gets the error; the others' answers are still awaited."""

        def lost() -> Any:
            raise error

        for place in places:
            if 0 <= place < self.size and self._take(place, lost):
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
                thunk = functools.partial(self._look, thunk.index)
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
        """Replies that have come stay; the futures still waiting get the error."""
        self._error = error
        self.close()
        self._match()
        return True

    def cancel(self, one: Future[Any] | None = None) -> bool:
        """The future asked ends, unless its answer is here, and what has not been answered is cancelled."""
        if one is None:
            return super().cancel()
        one._observe()
        return not one._done and super().cancel()

    def futures(self) -> Iterator[Future[Any]]:
        """Exactly as many as there are actors."""
        for _ in range(self.size):
            future: Future[Any] = Future._make(story=self.story)
            future.wait_id = self.call
            future._cancel = self.cancel

            future._start = functools.partial(self._claim, weakref.ref(future))
            yield future

    def _claim(self, future: "weakref.ref[Future[Any]]") -> None:
        found = future()
        if found is not None:
            self._claims.append(found)
            self._match()
