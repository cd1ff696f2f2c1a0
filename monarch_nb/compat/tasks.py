"""Tasks of torchmonarch's private bindings: coroutines and functions that run outside the threads of the program.

Coroutines share one thread with an event loop, blocking functions have a thread each; all of them see the context of
their creator. A `Handle` observes such work.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Generic, Self, TypeVar

from monarch_nb.runtime import Coro, Future, WouldBlockRuntime, when_done

T = TypeVar("T")
_NAME = "monarch-tasks"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=_NAME, daemon=True).start()
    return loop


def _is_in_tokio_runtime() -> bool:
    """Returns whether this code runs among the coroutines of tasks, where nothing may block."""
    return threading.current_thread().name == _NAME


def _get(future: "concurrent.futures.Future[T]", timeout: float | None) -> T:
    if _is_in_tokio_runtime():
        raise WouldBlockRuntime("a task cannot block for another one: await it, or look at it with poll()")
    done, _ = concurrent.futures.wait([future], timeout)
    if not done:
        raise TimeoutError(f"nothing came within {timeout} s; what was begun goes on")
    return future.result()


class PythonTask(Generic[T]):
    """Work that begins on request, and can be requested once."""

    def __init__(self, begin: Callable[[], Awaitable[T]]) -> None:
        self._begin: Callable[[], Awaitable[T]] | None = begin
        self._context = contextvars.copy_context()

    @staticmethod
    def from_coroutine(coro: Coro[T]) -> "PythonTask[T]":
        """Returns a task of a coroutine, which runs on a loop of its own."""
        return PythonTask(lambda: coro)

    @staticmethod
    def spawn_blocking(fn: Callable[[], T]) -> "Shared[T]":
        """Starts a function that may block, on a thread of its own."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                answer.set_result(context.run(fn))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="monarch-task", daemon=True).start()
        return Shared(answer)

    @staticmethod
    def select_one(tasks: "Sequence[PythonTask[T]]") -> "PythonTask[tuple[T, int]]":
        """Returns the result of the first of several tasks to end, and its index. Raises ValueError without tasks."""
        if not tasks:
            raise ValueError("select_one needs a task at least")
        begun = [task._take() for task in tasks]

        async def first() -> tuple[T, int]:
            running = [asyncio.ensure_future(begin()) for begin in begun]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            winner = min(map(running.index, done))
            for task in running:
                task.cancel()
            return await running[winner], winner

        return PythonTask(first)

    @staticmethod
    def sleep(seconds: float) -> "PythonTask[None]":
        """Returns a task that ends after a number of seconds."""
        return PythonTask(lambda: asyncio.sleep(seconds))

    def with_timeout(self, seconds: float) -> "PythonTask[T]":
        """Returns this task, ended by TimeoutError unless it ends by itself within `seconds`."""
        begin = self._take()
        return PythonTask(lambda: asyncio.wait_for(begin(), seconds))

    def _take(self) -> Callable[[], Awaitable[T]]:
        begin, self._begin = self._begin, None
        if begin is None:
            raise ValueError("this task was asked for before; share it with spawn()")
        return begin

    def _start(self) -> "concurrent.futures.Future[T]":
        begin = self._take()
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        async def run() -> None:
            try:
                answer.set_result(await begin())
            except BaseException as error:
                answer.set_exception(error)

        loop = _loop()

        def start() -> None:
            task = loop.create_task(run())
            _running.add(task)
            task.add_done_callback(_running.discard)

        loop.call_soon_threadsafe(start, context=self._context)
        return answer

    def block_on(self) -> T:
        """Waits for the result. Raises what the task raised, and WouldBlockRuntime within another task."""
        return Shared(self._start()).block_on()

    def spawn(self) -> "Shared[T]":
        """Starts the task; many may await the result."""
        return Shared(self._start())

    def spawn_handle(self) -> "Handle[T]":
        """Starts the task; many may observe it by the result."""
        return Handle(self._start())

    def __await__(self) -> Generator[object, None, T]:
        begin = self._take() if _is_in_tokio_runtime() else self.spawn
        return begin().__await__()


_running: set["asyncio.Task[None]"] = set()  # strong references, since a loop holds tasks weakly


class Shared(Generic[T]):
    """The result of a started task, for any number of readers."""

    def __init__(self, future: "concurrent.futures.Future[T]") -> None:
        self._future = future

    @classmethod
    def from_value(cls, value: T) -> Self:
        """Returns a result that is known already."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_result(value)
        return cls(future)

    def block_on(self) -> T:
        """Waits for the result. Raises what the task raised, and WouldBlockRuntime within another task."""
        return _get(self._future, None)

    def poll(self) -> T | None:
        """Returns the result, None before the task has ended. Raises what the task raised."""
        return self._future.result() if self._future.done() else None

    def task(self) -> PythonTask[T]:
        """Returns a task that ends as this one does."""
        return PythonTask(lambda: asyncio.wrap_future(self._future))

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.wrap_future(self._future).__await__()


def shared_when(value: T, done: "Future[object]") -> Shared[T]:
    """Returns a result that is `value` once a future is done, or the error of that future."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def settle(done: "Future[object]") -> None:
        error = done.exception(0)
        answer.set_result(value) if error is None else answer.set_exception(error)

    when_done(done, settle)
    return Shared(answer)


class Handle(Generic[T]):
    """Observes work in the background; neither waiting nor giving up changes the work."""

    def __init__(self, future: "concurrent.futures.Future[T]") -> None:
        self._future = future

    def get(self, timeout: float | None = None) -> T:
        """Waits for the result, `timeout` in seconds. Raises what the work raised, TimeoutError, WouldBlockRuntime."""
        return _get(self._future, timeout)

    def poll(self) -> T | None:
        """Returns the result, None before the work has ended. Raises what the work raised."""
        return self._future.result() if self._future.done() else None

    def as_asyncio(self) -> "asyncio.Future[T]":
        """Returns an asyncio future of the running loop that follows this handle. Raises RuntimeError without one."""
        loop = asyncio.get_running_loop()
        if not self._future.done():
            # Cancelling the asyncio future does not cancel the work.
            follower: concurrent.futures.Future[T] = concurrent.futures.Future()
            self._future.add_done_callback(functools.partial(_follow, follower))
            return asyncio.wrap_future(follower, loop=loop)
        future: asyncio.Future[T] = loop.create_future()
        error = self._future.exception()
        future.set_result(self._future.result()) if error is None else future.set_exception(error)
        return future

    def __await__(self) -> Generator[object, None, T]:
        return self.as_asyncio().__await__()


def _follow(follower: "concurrent.futures.Future[T]", done: "concurrent.futures.Future[T]") -> None:
    if not follower.set_running_or_notify_cancel():
        return
    error = done.exception()
    follower.set_result(done.result()) if error is None else follower.set_exception(error)


class _HandleCompleter(Generic[T]):
    """Settles a handle, once; the handle fails if this is dropped before."""

    def __init__(self, future: "concurrent.futures.Future[T]") -> None:
        self._future = future

    def set_result(self, value: T) -> None:
        """Sets the result. Raises RuntimeError if there is one."""
        self._settle(lambda: self._future.set_result(value))

    def set_exception(self, error: BaseException) -> None:
        """Fails the handle. Raises RuntimeError if there is a result."""
        self._settle(lambda: self._future.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> None:
        try:
            settle()
        except concurrent.futures.InvalidStateError:
            raise RuntimeError("this handle has a result already") from None

    def __del__(self) -> None:
        if not self._future.done():
            self._future.set_exception(RuntimeError("whoever was to give this handle a result ended without one"))


def _new_handle_pair() -> tuple[Handle[T], _HandleCompleter[T]]:
    """Returns a handle, and the object that settles it."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    return Handle(future), _HandleCompleter(future)


__all__ = ["Handle", "PythonTask", "Shared"]
