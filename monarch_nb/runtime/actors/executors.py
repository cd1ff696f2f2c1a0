"""Executors of an actor's messages: its own thread, its own event loop, or the process's main thread."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from monarch_nb.runtime.actors import sleeping
from monarch_nb.runtime.actors.endpoint import Coro
from monarch_nb.settings import settings

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.transport import Parcel
    from monarch_nb.wire import Header

    Message = tuple[Header, Parcel]


YIELD_AFTER = 64  # messages an async actor handles in a row before its other tasks get a turn


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
            sleeping.enter()
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
        sleeping.leave()

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
        with asyncio.Runner() as runner:
            try:
                runner.run(self._main())
            except BaseException as error:  # also of the user's tasks and callbacks, which end a loop
                _ignore_reported(runner.get_loop(), error)
                if self._cell.thread_lost(error):
                    runner.run(self._finish())

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


def _ignore_reported(loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
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
