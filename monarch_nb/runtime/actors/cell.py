"""One actor in its process, from its spawn to its end: its inbox, its object, how its messages run, how it ends."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextvars import Token
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from monarch_nb._deferred import asyncio
from monarch_nb.routing import Gap, Inbox, InboxOverflow
from monarch_nb.runtime.actors.actor import AnyEndpoint, endpoints_of, kind_of, undeclared
from monarch_nb.runtime.actors.executors import FORKS, AsyncExecutor, Cleanup, SyncExecutor, end_fork
from monarch_nb.runtime.actors.interrupts import InterruptWindow, not_run, run_on_loop
from monarch_nb.runtime.calls import EncodedObject
from monarch_nb.runtime.context import Ancestor, Context, Instance, StopRequested, current, point_of, stream_of
from monarch_nb.runtime.ports import ReplyPort
from monarch_nb.runtime.recorder import continued, instrumented
from monarch_nb.runtime.verbs import RunsOn, SpawnActor
from monarch_nb.settings import settings
from monarch_nb.wire import (
    Header,
    OutFrame,
    RemoteException,
    Status,
    decode,
    encode,
    encode_exception,
    error_line,
    format_exception,
    pickle_failure,
    text_of,
    type_name,
)
from monarch_nb.wire.header import SKIP

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.executors import Message
    from monarch_nb.runtime.cause import Cause
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Parcel

logger = logging.getLogger(__name__)

_Wrap = Callable[[Callable[..., object]], Callable[..., object]]
_Opened = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]  # a method and its arguments
_Run = tuple[str, str, float]  # call, endpoint, since when
_Entered = tuple[Token[Context | None], _Run]
State = Literal["starting", "alive", "failed", "stopped"]

EXEC = "__cell__"  # runs a cell's source between messages
HOOK = "__healed__"  # names the re-created ranks to survivors
ANEW = "__anew__"  # makes the object again, of the same arguments
RELOAD = "__reload__"  # gives the actor a new class between messages
INTERRUPT_HOOK = "__interrupted__"  # of actors of the library that decide themselves where an interrupt may raise


class ActorCell:
    """Hosts one actor.

    The reading thread calls `arrive`; all user code runs on the executor's thread. Methods may be called from any
    thread where their section does not say otherwise.
    """

    def __init__(self, process: "Runtime", spec: SpawnActor, header: Header, parcel: "Parcel | None") -> None:
        self.process = process
        self.spec = spec
        self.mesh, self.rank, self.incarnation = header.mesh, header.rank, header.incarnation
        self.obj: Any = None
        self.state: State = "starting"
        self.cause: Cause | None = None  # why it has failed or was stopped, as reported by supervision
        self.endpoints: dict[str, AnyEndpoint] = {}
        self.cell_namespace: dict[str, object] = {"__name__": "__main__"}  # of cells run on this actor
        self.watch: _Wrap | None = None  # wraps methods while a debugger has breakpoints here
        self.inbox: Inbox[Message] = Inbox()
        self._arriving = threading.Lock()
        self._spawn = (header, parcel)
        self.running: _Run | None = None
        self.recorded: _Run | None = None  # the last one that a timeline has
        self.began: tuple[str, float] | None = None  # the last call, and when
        self.constructing: _Run | None = None  # `__init__` runs
        self.calls = 0  # messages that were begun, for statistics
        self.errors = 0  # those that raised
        self.task: asyncio.Task[object] | None = None
        self.async_runs: dict[str, tuple[asyncio.Task[object] | None, _Run]] = {}  # by call
        self._interrupts = InterruptWindow(process.clock)
        self._unanswered: Header | None = None  # the message that a sync endpoint runs
        self._forks = FORKS[0]
        self.ending = False  # the executor takes no more messages
        self.ended = False
        self.end_error: Exception | None = None
        self.left_in = ""  # its unfinished work when it was given up
        self.muted = False  # sends no answers any more
        self._on_end: list[Callable[[], object]] = []
        self.cleanup = Cleanup(self)

        labels, sizes = spec.region.labels, spec.region.sizes
        point = spec.region.region.point_of_base_rank(header.rank)
        shown = f"<{spec.class_name} {spec.name}{point if labels else ''}>"
        itself = Ancestor(shown, spec.name, spec.class_name, labels, sizes, point.rank)
        self.instance = Instance(
            process,
            stream=stream_of(header, process),
            lineage=(*spec.creators, itself),
            rank=point,
            mesh=header.mesh,
            base_rank=header.rank,
            incarnation=header.incarnation,
            cell=self,
        )
        self.executor: SyncExecutor | AsyncExecutor = (
            AsyncExecutor(self, process.node.flush)
            if spec.kind == "async"
            else SyncExecutor(self, process.node.flush, main=spec.runs_on is RunsOn.MAIN_THREAD)
        )

    # -- messages come in: reading thread ---------------------------------------------------------------------------

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Takes a message, which is queued once all of its predecessors have arrived."""
        if self.cause is not None:
            self.refuse(header, parcel)
            return
        with self._arriving:  # the reading thread, and actors of this process that send to it
            if header.seq < 0:
                self._enqueue(header, parcel)
                return
            try:
                ready = self.inbox.arrive(header.sender, header.seq, (header, parcel), self.process.clock.monotonic())
            except InboxOverflow as error:
                self.process.node.consumed(parcel)
                self.process.refuse(header, self.process.supervisor.lost_cause(header, str(error)))
                return
            for message in ready:
                self._enqueue(*message)
            has_gap = self.inbox.waiting
        if has_gap:
            self.process.watch_gap(self)

    def expire_gaps(self, now: float) -> list[Gap]:
        """Skips gaps that have lasted too long; the messages after them are run."""
        with self._arriving:
            gaps = list(self.inbox.expired(now, settings.message_delivery_timeout))
            for gap in gaps:
                for message in self.inbox.skip(gap.sender, now):
                    self._enqueue(*message)
        return gaps

    def queued(self) -> "list[Message]":
        """Returns the messages that wait, for diagnosis."""
        return self.executor.waiting()

    def _enqueue(self, header: Header, parcel: "Parcel") -> None:
        if header.method == SKIP:  # only keeps the numbers whole
            self.process.node.consumed(parcel)
            return
        self.executor.put((header, parcel))
        if self.cause is not None:  # it ended in between: nothing else drains the queue
            self.refuse_queued()

    def refuse(self, header: Header, parcel: "Parcel | None" = None) -> None:
        """Answers a message that will never be run."""
        if parcel is not None:
            self.process.node.consumed(parcel)
        if not self.muted:
            assert self.cause is not None, "it would be run"
            self.process.refuse(header, self.cause)

    def refuse_queued(self) -> None:
        """Refuses all messages that wait."""
        for message in self.executor.drain():
            self.refuse(*message)

    # -- messages are run: the executor's thread --------------------------------------------------------------------

    def construct(self) -> None:
        """Makes the object; on failure the actor fails with the error as its cause."""
        header, parcel = self._spawn
        origin = header.chain[0] if header.chain else header.call
        token = current.set(Context(self.instance, self.instance.rank, cause=origin))
        self.process.log.begin(origin)
        try:
            if header.src != self.process.address:  # meshes that the set-up itself spawns here are a part of it
                self.process.await_setup()
            if self.obj is None and parcel is not None:
                cls, args, kwargs = self.process.decode_spawn(parcel)
                self.endpoints = endpoints_of(cls)
                obj = _new(cls, args, kwargs)
                self.process.arm(self, cls)
                init = obj.__init__ if self.watch is None else self.watch(obj.__init__)
                self.constructing = (header.call, "__init__", time.monotonic())
                self._interrupts.begin()
                init(*args, **kwargs)
                self._interrupts.end()
                self.obj = obj
            else:
                self.endpoints = endpoints_of(type(self.obj))
            if self.cause is None:
                self.state = "alive"
            self._reply(header, Status.VALUE, encode(None))
        except BaseException as error:
            self._interrupts.end()
            if self.cause is None:
                self.fail("init", error, header)
            else:  # it was stopped before it had begun
                self._refuse_call(header)
        finally:
            self.constructing = None
            self._spawn = (header, None)
            self.process.log.end(origin)
            current.reset(token)
            if parcel is not None:
                self.process.node.consumed(parcel)

    def is_concurrent(self, method: str) -> bool:
        """True for endpoints that do not hold up the next message."""
        endpoint = self.endpoints.get(method)
        return endpoint is not None and endpoint._concurrent

    def _open(self, header: Header, parcel: "Parcel") -> "_Opened":
        """Returns the method and arguments of a message."""
        try:
            args, kwargs = decode(parcel.parts, self.process)
        finally:
            self.process.node.consumed(parcel)
        if header.method == EXEC:
            return self.process.run_in_actor, (self.obj, self.cell_namespace, *args), kwargs
        if header.method in (RELOAD, ANEW):
            return self._reload if header.method == RELOAD else self._make_anew, args, kwargs
        if header.method == HOOK:
            return self.obj.__healed__, args, kwargs
        endpoint = self.endpoints.get(header.method)
        if endpoint is None:
            endpoint = undeclared(type(self.obj), header.method)
            if endpoint is None:
                raise AttributeError(f"{self.spec.class_name} has no endpoint {header.method!r} in this process")
            self.endpoints[header.method] = endpoint
        method = endpoint.__get__(self.obj)
        if endpoint._instrument:
            method = instrumented(method, header.method.lstrip("@!"))
        if self.watch is not None:
            method = self.watch(method)
        if endpoint.explicit_response_port:
            method = partial(method, ReplyPort(header))
        if not isinstance(args, tuple):
            return args.bound(method, replies=header.port != 0, is_async=self.spec.kind == "async"), (), {}
        return method, args, kwargs

    def _reload(self, cls: type) -> object:
        """Gives the object a new class; it keeps its state. Its `__reload__(old)` hook runs then, if it has one.

        Raises TypeError where the two cannot be swapped: another kind of actor, or other slots.
        """
        old = type(self.obj)
        kind = kind_of(cls)
        if kind != self.spec.kind:
            raise TypeError(f"{cls.__name__} is {kind} now and was {self.spec.kind}: spawn a new mesh")
        self.obj.__class__ = cls
        self.endpoints = endpoints_of(cls)
        hook = getattr(self.obj, RELOAD, None)
        return hook(old) if hook is not None else None

    def _make_anew(self, cls: type, arguments: EncodedObject) -> None:
        """Replaces the object by another one of the same arguments."""
        args, kwargs = arguments.load(self.process)
        obj = _new(cls, args, kwargs)
        self.constructing = self.running
        try:
            obj.__init__(*args, **kwargs)
        finally:
            self.constructing = None
        self.obj, self.endpoints = obj, endpoints_of(cls)
        self.process.failures.release(self.mesh, self.rank)  # which hold the former object

    def _begin(self, header: Header, parcel: "Parcel") -> "_Entered | None":
        """Enters a message; None if it was cancelled or names a point that does not exist, which its sender gets."""
        extent = header.extent
        try:
            if header.call in self.process.cancelled:
                raise not_run()
            point = point_of(header.index, extent) if extent is not None else self.instance.rank
        except (Exception, asyncio.CancelledError) as error:
            self.process.node.consumed(parcel)
            self._reply(header, Status.EXCEPTION, encode_exception(error))
            return None
        self.running = (header.call, header.method, time.monotonic())
        self.began = (header.call, self.running[2])
        self.calls += 1
        chain = (*header.chain, header.call)
        self.process.log.begin(chain[0])
        return current.set(Context(self.instance, point, header.call, chain, header.trace)), self.running

    def _record(self, header: Header, run: _Run | None) -> None:
        """Records a run, once: before its answer, after which the caller may end the recording."""
        if (recorder := self.process.recorder) is not None and run is not None and run is not self.recorded:
            self.recorded = run
            recorder.ran(self, header, run[2])

    def _leave(self, header: Header, entered: "_Entered") -> None:
        self._record(header, entered[1])
        origin = header.chain[0] if header.chain else header.call
        self.process.log.end(origin, answered=header.port != 0 and not self.is_explicit(header.method))
        current.reset(entered[0])

    def run_sync(self, header: Header, parcel: "Parcel") -> None:
        """Runs one message to its end and answers it."""
        entered = self._begin(header, parcel)
        if entered is None:
            return
        end_span = continued(header.trace) if header.trace else None
        self._unanswered = header
        try:
            if self.on_interrupt is None:
                self._interrupts.begin()
            method, args, kwargs = self._open(header, parcel)
            result = method(*args, **kwargs)
            self._interrupts.end()
            self._answer(header, result, entered[1])
            self._unanswered = None
        except BaseException as error:
            self._interrupts.end()
            self._unanswered = None
            self._raised(header, error, entered[1])
        finally:
            if end_span is not None:
                end_span()
            self.running = None
            self._leave(header, entered)

    def cut_off(self) -> None:
        """Answers a message whose end was itself interrupted."""
        self._interrupts.end()
        header, self._unanswered = self._unanswered, None
        if header is not None:
            self.running = None
            self._raised(header, KeyboardInterrupt(), None)

    async def run_async(self, header: Header, parcel: "Parcel") -> None:
        """Like `run_sync` on the actor's loop."""
        entered = self._begin(header, parcel)
        if entered is None:
            return
        end_span = continued(header.trace) if header.trace else None
        task = asyncio.current_task()
        self.async_runs[header.call] = task, entered[1]
        try:
            method, args, kwargs = self._open(header, parcel)
            window = self._interrupts if self.on_interrupt is None else None
            self._answer(header, await run_on_loop(window, task, method, *args, **kwargs), entered[1])
        except BaseException as error:
            self._raised(header, error, entered[1])
        finally:
            if end_span is not None:
                end_span()
            self.async_runs.pop(header.call, None)
            if self.running is entered[1]:
                self.running = None
            self._leave(header, entered)

    # -- answers: the executor's thread -----------------------------------------------------------------------------

    def is_explicit(self, method: str) -> bool:
        """Returns whether an endpoint answers through an explicit response port, maybe later."""
        return (endpoint := self.endpoints.get(method)) is not None and endpoint.explicit_response_port

    def _reply(self, header: Header, status: Status, frames: Sequence[OutFrame]) -> None:
        if not self.muted:
            self.process.reply(header, status, frames)

    def _answer(self, header: Header, result: object, run: _Run | None) -> None:
        if FORKS[0] != self._forks:
            end_fork(None)
        if header.port == 0 or self.is_explicit(header.method):
            return
        status = Status.VALUE
        frames: Sequence[OutFrame]
        try:
            frames = encode(result, self.process, gpu=self.process.node.shares_gpu(header.src))
            self.process.check_size(header.src, frames)
        except Exception as error:
            failure = pickle_failure(error, result, f"the `result` of {self.spec.name}.{header.method}")
            status, frames = Status.EXCEPTION, encode_exception(failure)
        if self.process.recorder is not None:
            self._record(header, run)
        self._reply(header, status, frames)

    def _raised(self, header: Header, error: BaseException, run: _Run | None) -> None:
        if FORKS[0] != self._forks:
            end_fork(error)
        if isinstance(error, StopRequested):
            self._refuse_call(header)
            return
        if isinstance(error, SystemExit) and error.code in (None, 0):  # a program's regular end
            self._answer(header, None, run)
            return
        self.errors += 1
        stored = None
        try:
            stored = self.process.failures.keep(self.instance, header, error)
            self._record(header, run)
            self._answer_raised(header, error)
        except BaseException as failure:
            self._answer_in_words(header, error, failure)
        if stored is not None:
            try:
                self.process.failures.ease(stored)
            except BaseException:  # of values in the frames; the caller has been answered
                logger.exception("what a failure of %s holds could not be released", self.instance)
        self.process.failures.answered()

    def _answer_raised(self, header: Header, error: BaseException) -> None:
        interrupted = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        # `sys.exit(2)`, as argparse does, ends a program; here that program is the call.
        ordinary = isinstance(error, (Exception, SystemExit)) or (interrupted and not self.ending)
        given_up = isinstance(error, (asyncio.CancelledError, CancelledError))
        cancelled = given_up and header.call in self.process.cancelled
        if ordinary and header.port and (cancelled or not self.is_explicit(header.method)):
            self._reply(header, Status.EXCEPTION, encode_exception(error))
            return
        if interrupted and self.ending:
            self._refuse_call(header)
            return
        self.fail("exception", error, header)

    def _answer_in_words(self, header: Header, error: BaseException, failure: BaseException) -> None:
        """Answers with the text of an error that could not be sent as it is, or whose sending was interrupted."""
        formatted, reason = "".join(format_exception(error)), f"{error_line(failure)} was raised when it was sent"
        answer = RemoteException(type_name(error), text_of(error), formatted, reason)
        if header.port and not self.is_explicit(header.method):
            self._reply(header, Status.EXCEPTION, encode_exception(answer))
        elif self.cause is None:
            self.fail("exception", answer, header)

    def _refuse_call(self, header: Header) -> None:
        if header.port and not self.is_explicit(header.method):
            self.refuse(header)

    # -- interrupts and cancelled calls -----------------------------------------------------------------------------

    def cancel(self, call: str, end_waits: Callable[[], None]) -> None:
        """Cancels an `async def` endpoint that runs for this call, and calls `end_waits` (reading thread).

        A `def` endpoint goes on. `end_waits` ends waits of the endpoint, on its loop: an endpoint that is about to
        reach an `await` would else see the end of that call there, and not its own cancellation.
        """
        if not isinstance(self.executor, AsyncExecutor):
            end_waits()
            return

        def cancel() -> None:
            task, _ = self.async_runs.get(call, (None, None))
            if task is not None:
                task.cancel("the call was cancelled")
            end_waits()

        self.executor.post_control(cancel)

    def running_now(self) -> dict[str, _Run]:
        """Returns the calls whose endpoints run, each with a tuple that no other run of them has."""
        runs = [run for _, run in tuple(self.async_runs.values())]
        return {run[0]: run for run in (*runs, self.running) if run is not None}

    @property
    def on_interrupt(self) -> Callable[[], None] | None:
        """The actor's own `__interrupted__`; None for most. Calls of such an actor are never skipped."""
        return getattr(self.obj, INTERRUPT_HOOK, None)

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the running endpoint, or in `__init__`; best effort where that sits in C code."""
        executor = self.executor
        if self.on_interrupt is not None:
            self.on_interrupt()
        running = None if executor.thread.ident is None else self._interrupts.interrupt(executor.thread)
        if isinstance(executor, AsyncExecutor):
            waiting = [task for task, _ in tuple(self.async_runs.values()) if task is not None and task is not running]
            executor.post_control(lambda: [task.cancel() for task in waiting])

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that `interrupt` may end. On the actor's thread."""
        return self._interrupts.interruptible()

    # -- failures ---------------------------------------------------------------------------------------------------

    def fail(self, kind: str, error: BaseException, header: Header) -> None:
        """Fails the actor; notifies its owner and all waiting callers. On its thread."""
        self._fail(kind, error, header.method)
        if header.port:
            self.refuse(header)
        self.refuse_queued()

    def _fail(self, kind: str, error: BaseException, method: str) -> None:
        cause = self.process.supervisor.cause_of(kind, error, "".join(format_exception(error)), self, method)
        self._failed(cause, error if isinstance(error, Exception) else RuntimeError(error_line(error)))

    def thread_lost(self, error: BaseException) -> bool:
        """Reports an unexpected end of the thread by `error` as a failure of the actor. On that thread.

        False if the clean-up failed; then none is run any more.
        """
        try:
            if self.cause is None:
                failure = RuntimeError(f"the thread that runs {self.instance} has ended: {error_line(error)}")
                failure.__cause__ = error
                self._fail("exception", failure, "")
            self.refuse_queued()
        except Exception:
            logger.exception("the end of %s could not be reported", self.instance)
        self.ending = True
        if self.cleanup.begun:
            self.cleanup.finish(None)
        return not self.cleanup.begun

    def fail_with(self, cause: "Cause", error: Exception) -> None:
        """Fails the actor for a reason from outside: a failure it did not handle."""
        if self.cause is None or self.state == "stopped":
            self._failed(cause, error)
        else:
            self._end_soon()

    def _failed(self, cause: "Cause", error: Exception) -> None:
        self.state, self.cause, self.end_error = "failed", cause, error
        self.process.supervisor.actor_failed(self)
        self._end_soon()

    # -- stops ------------------------------------------------------------------------------------------------------

    def hand_over(self, process: str) -> None:
        """Makes another process its owner."""
        self.spec = msgspec.structs.replace(self.spec, owner_process=process)

    def end_self(self, how: str, reason: str | None) -> None:
        """Ends the actor at its own request, from within an endpoint."""
        if how == "stop":
            self.stop(reason or "it stopped itself")
            return
        error = RuntimeError(reason or "no reason provided")
        self._failed(self.process.supervisor.cause_of("aborted", error, str(error), self, ""), error)
        raise StopRequested

    def stop(self, reason: str, *, cause: "Cause | None" = None, error: Exception | None = None) -> None:
        """Ends the actor after the current message. Later callers get `cause`."""
        if self.cause is None:
            self.state = "stopped" if error is None else "failed"
            self.cause = cause if cause is not None else self.process.supervisor.stopped_cause(self, reason)
            self.end_error = error
        self._end_soon()

    def abandon(self, reason: str) -> None:
        """Ends the actor as if its process were dead: it takes no message, answers none, and is not cleaned up."""
        self.state, self.cause = "failed", self.process.supervisor.stopped_cause(self, reason)
        self.muted = True
        self.executor.drain()
        self._end_soon()

    def give_up(self, doing: str) -> None:
        """Counts the actor as ended, though its thread continues the work described by `doing`."""
        logger.info("%s was stopped, and its %s does not end", self.instance, doing)
        self.left_in = doing
        self.process.actor_ended(self)
        self.finish()

    def _end_soon(self) -> None:
        self.executor.post_control(partial(setattr, self, "ending", True))  # also wakes one that waits for messages

    def on_end(self, function: Callable[[], object]) -> None:
        """Calls back once the actor has ended and cleaned up; at once if it has."""
        with self._arriving:
            if not self.ended:
                self._on_end.append(function)
                return
        function()

    @contextlib.contextmanager
    def acting(self, *, judging: bool = False) -> Iterator[None]:
        """Makes the actor the current one outside of a message: for its hooks."""
        token = current.set(Context(self.instance, self.instance.rank, judging=judging))
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                current.reset(token)

    def finish(self) -> None:
        """Calls the callbacks that wait for the end of the actor."""
        with self._arriving:
            self.ended = True
            waiting, self._on_end = self._on_end, []
        for function in waiting:
            function()


def _new(cls: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Returns an object that is not initialized yet; `object.__new__` takes no arguments."""
    return object.__new__(cls) if cls.__new__ is object.__new__ else cls.__new__(cls, *args, **kwargs)
