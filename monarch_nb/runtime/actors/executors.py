"""Executors of an actor's messages: its own thread or event loop, or the main thread; its clean-up ends their work."""

import contextlib
import inspect
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from monarch_nb._deferred import asyncio
from monarch_nb.runtime.actors.actor import Coro
from monarch_nb.runtime.actors.interrupts import enter_actor, leave_actor
from monarch_nb.runtime.context import Context, current
from monarch_nb.settings import settings
from monarch_nb.wire import flush_output, format_exception

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.transport import Parcel
    from monarch_nb.wire import Header

    Message = tuple[Header, Parcel]


logger = logging.getLogger(__name__)

YIELD_AFTER = 64  # messages an async actor handles in a row before its other tasks get a turn
CLEANUP = "__cleanup__"
MOST_QUEUED = 64  # calls that wait behind what an actor runs, for diagnosis
OWNED = "wait for the meshes it owns"


FORKS = [0]  # how many forks lead to this process since the module was imported; cheaper to read than its id


def _count_fork() -> None:
    FORKS[0] += 1


os.register_at_fork(after_in_child=_count_fork)


def end_fork(error: BaseException | None) -> NoReturn:
    """Ends a fork that an endpoint has made, when the endpoint ends in it: the actor stays with the parent."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    flush_output()
    os._exit(status & 0xFF)


class SyncExecutor:
    """A thread without an event loop, on which everything of one sync actor runs; blocking there is legal."""

    def __init__(self, cell: "ActorCell", flush: Callable[[], None], *, main: bool = False) -> None:
        """`flush` sends messages that were held back; it is called before the thread waits."""
        self._cell, self._flush = cell, flush
        self._queue: SimpleQueue[bool] = SimpleQueue()
        self._items: deque[Message] = deque()  # the messages that the queue's tokens stand for, for diagnosis
        self._control: deque[Callable[[], object]] = deque()
        self._main = main
        self._idle = False
        self.thread = (
            threading.main_thread()
            if main
            else threading.Thread(target=self.run, name="monarch-actor-driver", daemon=True)
        )

    def start(self) -> None:
        """Begins with the actor's constructor; one that runs on the main thread is run by its process."""
        if not self._main:
            self.thread.start()

    def put(self, message: "Message") -> None:
        """Queues a message."""
        self._items.append(message)
        self._queue.put(True)

    def post_control(self, control: Callable[[], object]) -> None:
        """Queues a control function before all messages."""
        self._control.append(control)
        self._queue.put(False)

    def waiting(self) -> "list[Message]":
        """Returns the messages that wait, in order."""
        return list(self._items)

    @property
    def resting(self) -> bool:
        """True while its thread waits for the next message and the queue is empty."""
        return self._idle and not self._items and not self._control

    def drain(self) -> "list[Message]":
        """Removes and returns all messages that wait."""
        return _drain(self._items)

    def run(self) -> None:
        """Runs the thread. Reports the end of the actor, whatever ended it."""
        try:
            self._live()
        except BaseException as error:
            if self._cell.thread_lost(error):
                self._cell.cleanup.run()
            if self._main:
                raise

    def _live(self) -> None:
        cell = self._cell
        if not self._main:
            enter_actor()
        cell.process.failures.release(cell.mesh, cell.rank)  # of a former incarnation, whose state they hold
        cell.construct()
        while not cell.ending:
            try:
                try:
                    self._step()
                except KeyboardInterrupt:  # it arrived between two messages, or at the end of one
                    self._queue.put(True)  # replaces a token that may have been taken without its message
                    cell.cut_off()
            except KeyboardInterrupt:
                continue
        cell.cleanup.run()
        leave_actor()

    def _step(self) -> None:
        if not self._items:
            self._flush()
        self._idle = True
        token = self._queue.get()
        self._idle = False
        while self._control and not self._cell.ending:
            self._control.popleft()()
        if token and not self._cell.ending and self._items:
            self._cell.run_sync(*self._items.popleft())


def _drain(items: "deque[Message]") -> "list[Message]":
    messages = []
    while items:
        messages.append(items.popleft())
    return messages


class AsyncExecutor:
    """A thread with an event loop, on which everything of one async actor runs."""

    def __init__(self, cell: "ActorCell", flush: Callable[[], None]) -> None:
        """`flush` sends messages that were held back; it is called before the loop waits."""
        self._cell, self._flush = cell, flush
        self._items: deque[Message] = deque()
        self._control: deque[Callable[[], object]] = deque()
        self._idle = False
        self._wake = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: set[asyncio.Task[object]] = set()
        self.thread = threading.Thread(target=self._run, name="monarch-actor-loop", daemon=True)

    def start(self) -> None:
        """Begins with the actor's constructor, on the loop."""
        self.thread.start()

    def _soon(self, function: Callable[[], object]) -> None:
        loop = self.loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(function)
            except RuntimeError:  # the loop has ended; `drain` refuses queued messages
                pass

    def put(self, message: "Message") -> None:
        """Queues a message."""
        self._items.append(message)
        if self._idle:
            self._soon(self._wake.set)

    def post_control(self, control: Callable[[], object]) -> None:
        """Runs a control function on the loop soon; a coroutine that it returns becomes a task."""
        self._control.append(control)
        self._soon(self._controls)

    def waiting(self) -> "list[Message]":
        """Returns the messages that wait, in order."""
        return list(self._items)

    def drain(self) -> "list[Message]":
        """Removes and returns all messages that wait."""
        return _drain(self._items)

    def spawn(self, coroutine: Coro[object]) -> "asyncio.Task[object]":
        """Runs a coroutine as a task that is cancelled when the actor ends. On the loop only."""
        assert self.loop is not None
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _run(self) -> None:
        enter_actor()
        with asyncio.Runner() as runner:
            try:
                self._run_main(runner.get_loop())
            except BaseException as error:  # also of the user's tasks and callbacks, which end a loop
                _ignore_reported(runner.get_loop(), error)
                if self._cell.thread_lost(error):
                    runner.run(self._finish())
        leave_actor()

    def _run_main(self, loop: "asyncio.AbstractEventLoop") -> None:
        main = loop.create_task(self._main())
        while not main.done():
            try:
                loop.run_until_complete(main)
            except KeyboardInterrupt:  # of a task that an endpoint has made: whoever waits for that task gets it, too
                logger.debug("an interrupt has left the loop of %s", self._cell.instance, exc_info=True)
        main.result()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=settings.cleanup_timeout)
        await self._cell.cleanup.run_async()

    def _controls(self) -> None:
        while self._control and not self._cell.ending:
            result = self._control.popleft()()
            if asyncio.iscoroutine(result):
                self.spawn(result)
        if self._cell.ending:
            self._wake.set()

    async def _next(self) -> None:
        """Sleeps until there is a message, or the actor is to end."""
        self._flush()
        self._idle = True
        while not self._items and not self._cell.ending:
            await self._wake.wait()
            self._wake.clear()
        self._idle = False

    async def _main(self) -> None:
        cell = self._cell
        self.loop = asyncio.get_running_loop()
        cell.process.failures.release(cell.mesh, cell.rank)  # of a former incarnation, whose state they hold
        cell.construct()
        self._controls()
        in_a_row = 0
        while not cell.ending:
            if not self._items:
                await self._next()
                in_a_row = 0
                continue
            message = self._items.popleft()
            if cell.is_concurrent(message[0].method):
                self.spawn(cell.run_async(*message))
                await asyncio.sleep(0)  # the body starts before the next message is taken
            else:
                cell.task = self.loop.create_task(cell.run_async(*message))
                await asyncio.wait((cell.task,))
            in_a_row += 1
            if in_a_row >= YIELD_AFTER:
                in_a_row = 0
                await asyncio.sleep(0)
        outstanding = [task for task in self.tasks if not task.done()]
        for task in outstanding:
            task.cancel()
        await asyncio.gather(*outstanding, return_exceptions=True)
        await cell.cleanup.run_async()


async def aside(function: Callable[..., None], *args: object) -> None:
    """Runs a blocking function on a new thread: asyncio's pool cannot be used while the interpreter ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error = None
        try:
            function(*args)
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="monarch-aside", daemon=True).start()
    await done


def _ignore_reported(loop: "asyncio.AbstractEventLoop", error: BaseException) -> None:
    """Keeps asyncio from logging the error that has ended a loop when it discards the task that raised it."""
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if context.get("exception") is error:
            return
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class Cleanup:
    """The clean-up of one actor. It runs on the actor's thread; time-outs may be checked on any thread."""

    def __init__(self, cell: "ActorCell") -> None:
        self._cell = cell
        self._step = ""
        self._since = 0.0
        self._interrupted = ""  # the step that was interrupted last

    @property
    def begun(self) -> bool:
        """True once the clean-up of the actor has begun."""
        return bool(self._step)

    # -- on the actor's thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Stops the owned meshes, then runs the user's clean-up: the thread's last act."""
        cell = self._cell
        self._enter(OWNED)
        error: BaseException | None = None
        try:
            with cell.acting():
                cell.process.supervisor.stop_children(cell.instance)
                hook = self._hook()
                if hook is not None:
                    self._enter(CLEANUP)
                    with cell.interruptible():
                        hook(cell.end_error)
        except BaseException as raised:
            error = raised
        self.finish(error)

    async def run_async(self) -> None:
        """Like `run`, on the actor's loop."""
        cell = self._cell
        self._enter(OWNED)
        error: BaseException | None = None
        current.set(Context(cell.instance, cell.instance.rank))
        try:
            await aside(cell.process.supervisor.stop_children, cell.instance)
            hook = self._hook()
            if hook is not None:
                self._enter(CLEANUP)
                result = hook(cell.end_error)
                if inspect.isawaitable(result):
                    await asyncio.wait_for(result, settings.cleanup_timeout)
        except BaseException as raised:
            error = raised
        self.finish(error)

    def _enter(self, step: str) -> None:
        self._step, self._since = step, time.monotonic()

    def _hook(self) -> Callable[..., object] | None:
        hook = getattr(self._cell.obj, "__cleanup__", None)
        return None if hook is None or self._cell.muted or getattr(hook, "_monarch_default", False) else hook

    def finish(self, error: BaseException | None) -> None:
        """Drops the object and counts the actor as ended; an `error` of the clean-up is reported."""
        cell = self._cell
        with contextlib.ExitStack() as steps:  # each runs, even if an earlier one fails
            steps.callback(cell.finish)
            steps.callback(cell.process.actor_ended, cell)
            steps.callback(cell.refuse_queued)
            cell.obj = cell.end_error = None  # the frames of the error hold the object, too
            if error is not None and not isinstance(error, asyncio.CancelledError):
                text = "".join(format_exception(error))
                logger.error("%s: __cleanup__ failed:\n%s", cell.instance, text)
                cell.cause = cell.process.supervisor.cause_of("cleanup", error, text, cell, "__cleanup__")
                cell.process.supervisor.actor_failed(cell)  # ignored by an owner that stops it

    # -- time-outs --------------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds from a stop until the actor's present step is interrupted: fewer before its construction."""
        return settings.cleanup_timeout if self._cell.obj is None else settings.stop_actor_timeout

    @property
    def doing(self) -> str:
        """The present step of the actor, in one or two words."""
        running = self._cell.running
        if self._step or self._cell.obj is None:
            return self._step or "__init__"
        return f"endpoint {running[1]}" if running is not None else "tasks"

    def interrupt_overdue(self) -> float | None:
        """Interrupts an actor that is late with its stop, each step once; returns the seconds to the next check.

        None if that did not help: the actor counts as ended, though its thread goes on.
        """
        cell, doing = self._cell, self.doing
        if cell.ended:
            return None
        if doing == OWNED:  # stops of meshes have their own time-outs
            return settings.cleanup_timeout
        if doing != self._interrupted:
            elapsed = time.monotonic() - self._since
            if doing == CLEANUP and elapsed < settings.stop_actor_timeout:
                return settings.stop_actor_timeout - elapsed
            self._interrupted = doing
            cell.interrupt()
            return settings.cleanup_timeout
        cell.give_up(doing)
        return None


# -- what an actor runs, for those who look from other threads ---------------------------------------------------------


class ActorRun(NamedTuple):
    """An endpoint under way, or `__init__`."""

    call: str
    endpoint: str
    since: float  # monotonic
    task: "asyncio.Task[object] | None" = None  # of an async endpoint


def runs_of(cell: "ActorCell") -> list[ActorRun]:
    """Returns what an actor runs: of concurrent endpoints several, the newest first."""
    if (construction := cell.constructing) is not None:
        return [ActorRun(*construction)]
    runs = {run[0]: ActorRun(*run, task) for task, run in tuple(cell.async_runs.values())}
    if (running := cell.running) is not None:
        runs.setdefault(running[0], ActorRun(*running))
    return sorted(runs.values(), key=lambda run: -run.since)


def queued_calls(cell: "ActorCell") -> tuple[str, ...]:
    """Returns the first calls that wait for an answer behind what an actor runs."""
    return tuple(islice((header.call for header, _ in cell.queued() if header.port), MOST_QUEUED))


def frames_of(run: ActorRun, innermost: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a run, innermost first; `innermost` is that of its actor's thread."""
    coroutines = suspended_frames(run.task)
    yield from reversed(coroutines)
    frame = None if coroutines else innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def suspended_frames(task: "asyncio.Task[object] | None") -> list[FrameType]:
    """Returns the frames of a suspended task, outermost first: its coroutine's, and those that it awaits."""
    waiting = task.get_coro() if task is not None and not task.done() else None
    frames: list[FrameType] = []
    while waiting is not None and not getattr(waiting, "cr_running", False):
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return frames
