"""How the life of an actor ends: by a failure, by a stop, by its own wish; and its clean-up then."""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from monarch_nb.runtime.actors.endpoint import Kind as ActorKind
from monarch_nb.runtime.actors.executors import AsyncExecutor, SyncExecutor, aside
from monarch_nb.runtime.context import Ancestor, Context, Instance, StopRequested, current
from monarch_nb.settings import settings
from monarch_nb.shape import RegionForm
from monarch_nb.wire import Harmless, Header, Status, error_line, format_exception

if TYPE_CHECKING:
    from monarch_nb.runtime.supervising import Supervising
    from monarch_nb.transport import Parcel, Transport

logger = logging.getLogger(__name__)

State = Literal["starting", "alive", "failed", "stopped"]
CLEANUP = "__cleanup__"
OWNED = "wait for the meshes it owns"


class RunsOn(IntEnum):
    """Which thread of its process an actor runs on."""

    ITS_OWN = 0  # or a loop of its own
    MAIN_THREAD = 1


class SpawnActor(Harmless, array_like=True, frozen=True):
    """What a process needs to know to host one rank of an actor mesh; its class and arguments follow, pickled."""

    name: str
    class_name: str
    kind: ActorKind
    region: RegionForm  # on which the mesh was spawned, or that it has grown to
    owner: str  # stream of the owning actor
    owner_process: str
    creators: tuple[Ancestor, ...]  # who spawned whom, the owner last
    runs_on: RunsOn = RunsOn.ITS_OWN
    debug: bytes = b""  # what the debugger wants to know of it: its breakpoints hold in `__init__`, too


class Hosting(Protocol):
    """What an actor's end asks of its process."""

    @property
    def node(self) -> "Transport":
        """The process on the network."""

    @property
    def supervisor(self) -> "Supervising":
        """Who is told of it."""

    def refuse(self, request: Header, cause: object) -> None:
        """Tells the sender of a CALL that nobody will ever run it."""

    def reply(self, request: Header, status: Status, frames: Sequence[Any]) -> None:
        """Answers a CALL, if somebody waits for the answer."""

    def actor_ended(self, actor: "ActorLife") -> None:
        """It is gone; what comes for it later is refused with its cause."""


class ActorLife:
    """The state of one actor from its spawn to its end, and what ends it. Methods from any thread, if not said."""

    instance: Instance
    mesh: str
    rank: int
    incarnation: int
    executor: SyncExecutor | AsyncExecutor
    running: tuple[str, str, float] | None  # (call id, endpoint, since)

    def __init__(self, process: Hosting, spec: SpawnActor) -> None:
        self._hosting = process
        self.spec = spec
        self.obj: Any = None
        self.state: State = "starting"
        self.cause: object = None  # why it has failed or was stopped, as supervision says it
        self.ending = False  # the executor is to look at no more messages
        self.ended = False
        self._cleaning = ""  # how far its clean-up is
        self._cleaning_since = 0.0
        self._hurried = ""  # what was interrupted so that it ends
        self.left_in = ""  # what it still was in when it was given up
        self.muted = False
        self.end_error: Exception | None = None
        self._arriving = threading.Lock()
        self._on_end: list[Callable[[], object]] = []

    # -- messages that will never be run ----------------------------------------------------------------------------

    def hand_over(self, process: str) -> None:
        """Its owner is another process from now on."""
        self.spec = msgspec.structs.replace(self.spec, owner_process=process)

    def interrupt(self) -> None:
        """Breaks off what it is doing, as far as that can be done."""

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Around what `interrupt` breaks off; on its thread."""
        return contextlib.nullcontext()

    def refuse(self, header: Header, parcel: "Parcel") -> None:
        """Answers a message that will never be run."""
        self._hosting.node.consumed(parcel)
        self._refuse(header)

    def refuse_queued(self) -> None:
        """Answers all that waits."""
        for message in self.executor.drain():
            self.refuse(*message)

    def _refuse(self, header: Header) -> None:
        if not self.muted:
            self._hosting.refuse(header, self.cause)

    def _reply(self, header: Header, status: Status, frames: list[Any]) -> None:
        if not self.muted:
            self._hosting.reply(header, status, frames)

    # -- failures ---------------------------------------------------------------------------------------------------

    def fail(self, kind: str, error: BaseException, header: Header) -> None:
        """The actor has failed: its owner is told, all that wait for it are told. On its thread."""
        self._fail(kind, error, header.method)
        if header.port:
            self._refuse(header)
        self.refuse_queued()

    def _fail(self, kind: str, error: BaseException, method: str) -> None:
        cause = self._hosting.supervisor.cause_of(kind, error, "".join(format_exception(error)), self, method)
        self._failed(cause, error if isinstance(error, Exception) else RuntimeError(error_line(error)))

    def thread_lost(self, error: BaseException) -> bool:
        """Its thread ends of `error`, though the actor was not to end: that is told as a failure. On that thread.

        False where the clean-up was what failed; then there is none any more.
        """
        try:
            if self.cause is None:
                lost = RuntimeError(f"the thread that runs {self.instance} has ended: {error_line(error)}")
                lost.__cause__ = error
                self._fail("exception", lost, "")
            self.refuse_queued()
        except Exception:
            logger.exception("the end of %s could not be told", self.instance)
        self.ending = True
        if self._cleaning:
            self._cleaned(None)
        return not self._cleaning

    def fail_with(self, cause: object, error: Exception) -> None:
        """The actor fails for a reason from outside: a failure it did not handle."""
        if self.cause is None or self.state == "stopped":
            self._failed(cause, error)
        else:
            self._end_soon()

    def _failed(self, cause: object, error: Exception) -> None:
        self.state = "failed"
        self.cause = cause
        self.end_error = error
        self._hosting.supervisor.actor_failed(self)
        self._end_soon()

    # -- stops ------------------------------------------------------------------------------------------------------

    def end_self(self, how: str, reason: str | None) -> None:
        """The actor asks for its own end, from within an endpoint."""
        if how == "stop":
            self.stop(reason or "it stopped itself")
            return
        told = RuntimeError(reason or "no reason provided")
        self._failed(self._hosting.supervisor.cause_of("aborted", told, str(told), self, ""), told)
        raise StopRequested

    def stop(self, reason: str, *, cause: object = None, error: Exception | None = None) -> None:
        """Ends it after the current message. `cause` is what later callers are told."""
        if self.cause is None:
            self.state = "stopped" if error is None else "failed"
            self.cause = cause if cause is not None else self._hosting.supervisor.stopped_cause(self, reason)
            self.end_error = error
        self._end_soon()

    def abandon(self, reason: str) -> None:
        """Its process would be dead now: it takes no message any more, answers none, and is not cleaned up."""
        self.state, self.cause = "failed", self._hosting.supervisor.stopped_cause(self, reason)
        self.muted = True
        self.executor.drain()
        self._end_soon()

    @property
    def patience(self) -> float:
        """Seconds that a stop gives what the actor is doing before it is interrupted: less where it has not begun."""
        return settings.cleanup_timeout if self.obj is None else settings.stop_actor_timeout

    @property
    def doing(self) -> str:
        """What it is in, in a word or two."""
        running = self.running
        if self._cleaning or self.obj is None:
            return self._cleaning or "__init__"
        return f"endpoint {running[1]}" if running is not None else "tasks"

    def hurry(self) -> float | None:
        """It was to end and had its time: what it is in is interrupted, once. Seconds until the next look.

        None where that did not help: nobody waits for it any more, though its thread goes on with what it is in.
        """
        doing = self.doing
        if self.ended:
            return None
        if doing == OWNED:  # stops have bounds of their own
            return settings.cleanup_timeout
        if doing != self._hurried:
            had = time.monotonic() - self._cleaning_since
            if doing == CLEANUP and had < settings.stop_actor_timeout:
                return settings.stop_actor_timeout - had
            self._hurried = doing
            self.interrupt()
            return settings.cleanup_timeout
        logger.info("%s was stopped, and its %s does not end", self.instance, doing)
        self.left_in = doing
        self._hosting.actor_ended(self)
        self._ended()
        return None

    def _end_soon(self) -> None:
        self.executor.urge(self._end)  # also wakes one that waits for messages

    def _end(self) -> None:
        self.ending = True

    def on_end(self, function: Callable[[], object]) -> None:
        """Calls back once the actor has ended and cleaned up; at once if it has."""
        with self._arriving:
            if not self.ended:
                self._on_end.append(function)
                return
        function()

    # -- the executor's thread --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def acting(self, *, judging: bool = False) -> Iterator[None]:
        """The actor is the one who acts, outside a message: its hooks."""
        token = current.set(Context(self.instance, self.instance.rank, judging=judging))
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                current.reset(token)

    def finish(self) -> None:
        """The thread's last act: owned meshes first, then the user's clean-up."""
        self._clean(OWNED)
        error: BaseException | None = None
        try:
            with self.acting():
                self._hosting.supervisor.stop_children(self.instance)
                hook = self._cleanup_hook()
                if hook is not None:
                    self._clean(CLEANUP)
                    with self.interruptible():
                        hook(self.end_error)
        except BaseException as raised:
            error = raised
        self._cleaned(error)

    async def finish_async(self) -> None:
        """The same on a loop."""
        self._clean(OWNED)
        error: BaseException | None = None
        current.set(Context(self.instance, self.instance.rank))
        try:
            await aside(self._hosting.supervisor.stop_children, self.instance)
            hook = self._cleanup_hook()
            if hook is not None:
                self._clean(CLEANUP)
                result = hook(self.end_error)
                if inspect.isawaitable(result):
                    await asyncio.wait_for(result, settings.cleanup_timeout)
        except BaseException as raised:
            error = raised
        self._cleaned(error)

    def _clean(self, what: str) -> None:
        self._cleaning, self._cleaning_since = what, time.monotonic()

    def _cleanup_hook(self) -> Callable[..., Any] | None:
        hook = getattr(self.obj, "__cleanup__", None)
        return None if hook is None or self.muted or getattr(hook, "_monarch_default", False) else hook

    def _cleaned(self, error: BaseException | None) -> None:
        with contextlib.ExitStack() as steps:  # each is taken, whatever comes of those before it
            steps.callback(self._ended)
            steps.callback(self._hosting.actor_ended, self)
            steps.callback(self.refuse_queued)
            self.obj = None
            if error is not None and not isinstance(error, asyncio.CancelledError):
                text = "".join(format_exception(error))
                logger.error("%s: __cleanup__ failed:\n%s", self.instance, text)
                self.cause = self._hosting.supervisor.cause_of("cleanup", error, text, self, "__cleanup__")
                self._hosting.supervisor.actor_failed(self)  # of no interest to the owner if it is the one who stops it

    def _ended(self) -> None:
        with self._arriving:
            self.ended = True
            waiting, self._on_end = self._on_end, []
        for function in waiting:
            function()
