"""Functions written as `async def` that return a Future: the body runs on the loop of its first observer."""

import atexit
import contextlib
import contextvars
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Generator
from typing import ParamSpec, TypeVar

from monarch_nb._deferred import asyncio
from monarch_nb.runtime.actors.actor import Coro
from monarch_nb.runtime.future import Future, WouldBlockRuntime, check_may_wait, driving

P = ParamSpec("P")
R = TypeVar("R")
_Body = tuple[Callable[[], Coro[R]], contextvars.Context]


class _Runner:
    """The loop of one thread, used for one body after the other and closed when the thread ends."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.close = weakref.finalize(self, _close, self.runner)
        self.close.atexit = False
        if threading.current_thread() is threading.main_thread():
            atexit.register(self.close)


def _close(runner: "asyncio.Runner") -> None:
    with contextlib.suppress(Exception):
        runner.close()


class _ThreadState(threading.local):
    """The state of the calling thread."""

    runner: _Runner | None = None


_thread_state = _ThreadState()
_started: set["asyncio.Task[None]"] = set()  # loops hold their tasks weakly


class BodyFuture(Future[R]):
    """The result of a body that begins to run when it is first observed; at most once."""

    __slots__ = ("_body", "_thread")
    _body: _Body[R] | None
    _thread: int  # whose loop runs the body

    @classmethod
    def _of(cls, body: Callable[[], Coro[R]], context: contextvars.Context) -> "BodyFuture[R]":
        self: BodyFuture[R] = BodyFuture._make()
        self._body = (body, context)
        self._cancel = BodyFuture._leave_out
        self._thread = 0
        return self

    @staticmethod
    def _leave_out(future: Future[object]) -> bool:
        """Cancels a body that has not begun; a running one goes on."""
        assert isinstance(future, BodyFuture)
        return future._take() is not None and future._give_up()

    def _take(self) -> _Body[R] | None:
        with _taking:
            body, self._body = self._body, None
            if body is not None:
                self._thread = threading.get_ident()
        return body

    def _wait(self, timeout: float | None) -> bool:
        if self._done:
            return True
        check_may_wait()
        body = self._take()
        if body is not None:
            self._drive(body, timeout)
            return True
        if self._thread == threading.get_ident():
            raise WouldBlockRuntime("the body of this future runs on this thread's event loop: use `await`")
        return super()._wait(timeout)

    def __await__(self) -> Generator[object, None, R]:
        """Suspends the running task until the body is done, which runs on the same loop."""
        body = self._take()
        if body is not None:
            begin, context = body
            task = context.run(asyncio.get_running_loop().create_task, self._run(begin))
            _started.add(task)
            task.add_done_callback(_started.discard)
        return super().__await__()

    # -- running it -------------------------------------------------------------------------------------------------

    async def _run(self, begin: Callable[[], Coro[R]]) -> None:
        try:
            self._set(await begin())
        except asyncio.CancelledError:
            self._fail(asyncio.CancelledError())
            raise
        except KeyboardInterrupt:  # raised in the body: it interrupts the waiting thread
            self._fail(asyncio.CancelledError())
            raise
        except BaseException as error:
            self._fail(error)

    async def _main(self, begin: Callable[[], Coro[R]], timeout: float | None) -> None:
        task = asyncio.create_task(self._run(begin))
        try:
            await asyncio.wait({task}, timeout=timeout)
            if not task.done():
                self._fail(_timeout_error(timeout))
        except asyncio.CancelledError:  # an interrupt
            self._fail(asyncio.CancelledError())
            raise
        finally:
            unfinished = [other for other in asyncio.all_tasks() if other is not asyncio.current_task()]
            for other in unfinished:
                other.cancel()
            await asyncio.gather(task, *unfinished, return_exceptions=True)

    def _drive(self, body: _Body[R], timeout: float | None) -> None:
        """Runs the body to its end; at a time-out or an interrupt it is cancelled first."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._drive_inline(body, timeout)
        else:
            self._drive_on_thread(body, timeout)

    def _drive_inline(self, body: _Body[R], timeout: float | None) -> None:
        begin, context = body
        owner = _thread_state.runner
        if owner is None:
            owner = _thread_state.runner = _Runner()
        loop = owner.runner.get_loop()
        main = context.run(loop.create_task, self._main(begin, timeout))
        driving.now = True
        try:
            # Not by the runner, which holds an interrupt back until the body awaits something.
            loop.run_until_complete(main)
        except BaseException:
            self._fail(asyncio.CancelledError())
            _thread_state.runner = None  # its clean-up may be interrupted
            main.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(main)
            owner.close()
            raise
        finally:
            driving.now = False

    def _drive_on_thread(self, body: _Body[R], timeout: float | None) -> None:
        """Runs the body on a thread of its own, since this thread's loop is running already."""
        loop: asyncio.AbstractEventLoop | None = None
        main: asyncio.Task[None] | None = None
        ready = threading.Event()

        async def run() -> None:
            nonlocal loop, main
            loop, main = asyncio.get_running_loop(), asyncio.current_task()
            ready.set()
            await self._main(body[0], None)

        def drive() -> None:
            self._thread = threading.get_ident()
            driving.now = True
            with asyncio.Runner() as runner, contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
                runner.run(run(), context=body[1])

        def cancel() -> None:
            ready.wait()
            if loop is not None and main is not None:
                with contextlib.suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(main.cancel)

        helper = threading.Thread(target=drive, name="monarch-body", daemon=True)
        helper.start()
        try:
            if not super()._wait(timeout):
                self._fail(_timeout_error(timeout))
                cancel()
            helper.join()
        except BaseException:
            self._fail(asyncio.CancelledError())
            cancel()
            raise


_taking = threading.Lock()


def _timeout_error(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"not done within {timeout:g} s: it was cancelled")


def returns_future(function: Callable[P, Coro[R]]) -> Callable[P, Future[R]]:
    """Turns an `async def` into a function that returns a Future, for callers with and without an event loop.

    The body starts when the future is first observed: `await` runs it on the awaiting loop, `.get()` on the calling
    thread, where its time-out cancels the body. Inside the body use `await`: `.get()` raises WouldBlockRuntime there.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"returns_future wants an `async def`, not {function!r}")

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Future[R]:
        signature.bind(*args, **kwargs)  # wrong ones raise here
        return BodyFuture._of(functools.partial(function, *args, **kwargs), contextvars.copy_context())

    return call


def _from_coro(body: Coro[R]) -> Future[R]:
    """Returns a future of a coroutine that begins when it is observed; private, but used by torchmonarch's programs."""
    return BodyFuture._of(lambda: body, contextvars.copy_context())


setattr(Future, _from_coro.__name__, staticmethod(_from_coro))
