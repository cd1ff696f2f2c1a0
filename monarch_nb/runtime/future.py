"""The result of a call that is under way: block for it, await it, or check it later."""

import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

from monarch_nb._deferred import asyncio
from monarch_nb.runtime import unretrieved, waiting
from monarch_nb.transport import held_back, must_not_wait
from monarch_nb.wire import ActorError, error_line

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", covariant=True)


class WouldBlockRuntime(RuntimeError):
    """A wait that could never end: it would block the thread that has to do the work. Use `await` there."""


class Driving(threading.local):
    """State of a thread: `now` is True while it runs the body of a future, on its own loop."""

    now = False


driving = Driving()


def check_may_wait() -> None:
    """Raises WouldBlockRuntime on a thread that runs a body, or must not wait for messages now."""
    if driving.now:
        raise WouldBlockRuntime(
            "this .get() is inside a @returns_future body that another .get() runs on this thread: use `await` here"
        )
    if must_not_wait():
        raise WouldBlockRuntime(
            "this .get() is in a finalizer that has begun while a message is sent or received, and no answer could "
            "arrive: call without .get() in __del__, or use `with` blocks"
        )


# Held for a few instructions only: two threads may resolve one future, a third may add a callback. A finalizer that
# runs within them may use other futures.
_transitions = threading.RLock()


class _NoNumberError(TypeError, ValueError):
    """A timeout is no number."""


def _checked(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 <= timeout < math.inf:
        error = ValueError if is_number else _NoNumberError
        raise error(f"timeout must be None or a finite number of seconds >= 0, not {timeout!r}")
    return None if timeout > threading.TIMEOUT_MAX else float(timeout)


class Future(Generic[R]):
    """The result of a call, which was sent when the adverb returned this object.

    `get` blocks, `await` suspends; both may be used any number of times and from any thread.
    A time-out leaves the operation running. Made by the library only.
    """

    __slots__ = (
        "__dict__",  # attributes that programs set on a future
        "__weakref__",
        "_callbacks",
        "_cancel",
        "_decoding",
        "_done",
        "_error",
        "_handed",
        "_lock",
        "_resolve",
        "_restart",
        "_start",
        "_unread",
        "_unretrieved",
        "_value",
        "describe",
        "finding",
        "wait_id",
        "watched",
    )
    describe: Callable[[], str] | None  # describes what is awaited, for progress and interrupts
    wait_id: str  # the id of its call
    finding: str  # why it has no result, according to the last diagnosis; "" if none was made
    watched: int  # the number of present waiters
    _lock: threading.Lock  # held until there is a result; a waiter may be interrupted while it holds it
    _decoding: threading.Lock  # held while the result is decoded
    _done: bool
    _value: R | None
    _error: BaseException | None
    _resolve: Callable[[], R] | None  # decodes on the first thread that reads it
    _start: Callable[[], None] | None  # lazy receives begin when first observed
    _restart: Callable[[], None] | None  # replaces `_start` once its only waiter was interrupted or cancelled
    _callbacks: "list[Callable[[Future[R]], None]] | None"
    _handed: bool  # to a caller that may discard it
    _unread: bool  # it ended with an error that was not retrieved
    _unretrieved: "unretrieved.UnretrievedError | None"  # reports that error if the future is dropped
    _cancel: "Callable[[Future[object]], bool] | None"  # behind `cancel`; None if others rely on the operation

    def __init__(self) -> None:
        raise TypeError("a Future is returned by a call on a mesh; it cannot be made by hand")

    @classmethod
    def _make(cls, *, start: Callable[[], None] | None = None, describe: Callable[[], str] | None = None) -> Self:
        self = cls.__new__(cls)
        self._lock = threading.Lock()
        self._lock.acquire()
        self._done = False
        self._value = None
        self._error = None
        self._resolve = None
        self._start = start
        self._callbacks = self._cancel = self._restart = None
        self._handed = self._unread = False
        self._unretrieved = None
        self.describe = describe
        self.wait_id = self.finding = ""
        self.watched = 0
        return self

    @classmethod
    def _resolved(cls, value: T) -> "Future[T]":
        self: Future[T] = Future._make()
        self._set(value)
        return self

    # -- the side that resolves -------------------------------------------------------------------------------------

    def _finish(
        self: "Future[T]", value: T | None, error: BaseException | None, resolve: Callable[[], T] | None, failed: bool
    ) -> bool:
        decoding = None if resolve is None else threading.Lock()  # may collect garbage
        with _transitions:
            if self._done:
                return False
            self._value, self._error, self._resolve = value, error, resolve
            if decoding is not None:
                self._decoding = decoding
            self._done = True
            self._unread = failed and not unretrieved.leaving
            callbacks, self._callbacks = self._callbacks, None
            # Not needed any more; they refer to the call and its answers, or to a port.
            self.describe = self._cancel = self._restart = None
        self._lock.release()
        if failed and self._handed:
            self._keep_unretrieved()
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:  # an error of one callback must not prevent the others
                logger.exception("a callback of %r failed", self)
        return True

    def _set(self: "Future[T]", value: T) -> bool:
        return held_back(self._finish, value, None, None, False)

    def _set_lazy(self, resolve: Callable[[], R], *, failed: bool = False) -> bool:
        """Resolves with a function that computes the value, once, at the first read; or `failed`: it raises."""
        return held_back(self._finish, None, None, resolve, failed)

    def _fail(self, error: BaseException) -> bool:
        return held_back(self._finish, None, error, None, True)

    def _hand_out(self) -> None:
        """Enables the report of an error that the holder of the future never retrieves: see `unretrieved`."""
        unretrieved.ready()
        self._handed = True
        if self._unread:
            self._keep_unretrieved()

    def _reported_elsewhere(self) -> None:
        """Keeps an unread error from being reported: its holder learns of it in another way."""
        self._handed = False
        self._noticed()

    def _keep_unretrieved(self) -> None:
        with _transitions:
            if self._unread and self._unretrieved is None:
                error = self._error
                self._unretrieved = unretrieved.UnretrievedError(self._resolve or (lambda: _raise(error)))

    def _noticed(self) -> None:
        """Notes that the error was retrieved."""
        with _transitions:
            self._unread = False
            error, self._unretrieved = self._unretrieved, None
        if error is not None:
            error.outcome = None

    def _on_done(self, callback: Callable[["Future[R]"], None]) -> None:
        """Calls back once, on the resolving thread, or at once when resolved already."""
        held_back(self._call_back, callback)

    def _call_back(self, callback: Callable[["Future[R]"], None]) -> None:
        with _transitions:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self)

    def _give_up(self) -> bool:
        return self._fail(CancelledError("it was cancelled"))

    def _observe(self) -> None:
        if self._start is not None:
            held_back(self._begin)

    def _begin(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            start()

    # -- the side that reads ----------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Returns True once there is a value or an error. Does not block."""
        return self._done

    def cancel(self) -> bool:
        """Gives the operation up: waiters get `concurrent.futures.CancelledError`. Does not block.

        A call is also cancelled on every rank that has not answered: there it is dropped if it waits for its turn, an
        `async def` that runs is cancelled, a `def` that runs is left to finish, and its answer dropped. A future of a
        `stream` cancels the rest of the stream. Returns False, and does nothing, once there is a result, and for
        futures of shared operations: a spawn, a stop, a heal.
        """
        cancel = self._cancel
        return False if self._done or cancel is None else cancel(self)

    def progress_text(self) -> str:
        """Returns what is still awaited, in a few words; "" once there is a result, or if nothing is known."""
        describe = self.describe
        return describe() if describe is not None else ""

    def cancelled(self) -> bool:
        """Returns True if it was ended by `cancel`. Does not block."""
        return self._done and isinstance(self._error, CancelledError)

    def _outcome(self) -> R:
        if self._unread:
            self._noticed()
        if self._resolve is not None:
            with self._decoding:  # two threads may read it at once; the first decodes the value
                resolve = self._resolve
                if resolve is not None:
                    try:
                        self._value = resolve()
                    except KeyboardInterrupt:
                        raise  # interrupts the reader: the next read decodes again
                    except BaseException as error:
                        self._error = error
                    # These refer to the call, which refers to this future: a cycle would wait for a garbage collection.
                    self._resolve = self._cancel = self.describe = None
        if self._error is not None:
            raise self._error
        return cast(R, self._value)

    def _wait(self, timeout: float | None) -> bool:
        """Blocks until resolved or timed out; interruptible on the main thread."""
        self._observe()
        if self._done:
            for show in waiting.observers.no_wait:
                show()
            return True
        if timeout != 0:
            check_may_wait()
        lock = self._lock
        entered: list[waiting.Leave] = []
        self.watched += 1
        try:
            waiting.enter(self, timeout, entered)
            begun = time.monotonic()
            deadline = None if timeout is None else begun + timeout
            while True:
                tick = waiting.TICK  # also without observers: one may join
                if deadline is not None:
                    tick = min(tick, max(0.0, deadline - time.monotonic()))
                if lock.acquire(timeout=tick):
                    lock.release()
                    return True
                if self.done():  # another waiter holds the lock for an instant
                    return True
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    return False
                for show_tick in waiting.observers.tick:
                    show_tick(self, now - begun)
        except BaseException as stop:
            if self.watched == 1 and not self._done:
                self._start = self._restart
            if isinstance(stop, KeyboardInterrupt):
                explain_stop(self, stop)
            raise
        finally:
            self.watched -= 1
            waiting.end(entered)

    def wait(self, timeout: float) -> bool:
        """Blocks until it is settled, up to `timeout` seconds, without any display; returns whether it is settled."""
        self._observe()
        if not self._done and self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            self._lock.release()
        return self._done

    def get(self, timeout: float | None = None) -> R:
        """Returns the result; blocks up to `timeout` seconds.

        Raises TimeoutError when time is up (the operation goes on), ActorError when the endpoint raised,
        SupervisionError when the actor to answer is gone, ValueError for a timeout that is no number of seconds.
        """
        limit = _checked(timeout)
        if self._wait(limit):
            return self._outcome()
        try:
            raise self._timeout_error(limit)
        finally:
            del self  # the traceback would keep this future alive, and a receive would take a value

    result = get

    def _timeout_error(self, timeout: float | None) -> TimeoutError:
        progress = f"; {text}" if (text := self.progress_text()) else ""
        error = TimeoutError(f"no result within {timeout:g} s{progress}. The call goes on: .get() again waits longer")
        if self.finding:
            error.add_note(self.finding)
        return error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the error it ended with, or None for a value. Blocks like `get`.

        Returns a TimeoutError when time is up (the operation goes on, and `done()` is False).
        """
        limit = _checked(timeout)
        if not self._wait(limit):
            return self._timeout_error(limit)
        try:
            self._outcome()
        except BaseException as error:
            return error
        return None

    def __await__(self) -> Generator[object, None, R]:
        """Suspends the running task until there is a result."""
        if not self._done:
            loop = asyncio.get_running_loop()
            signal: asyncio.Future[None] = loop.create_future()

            def wake(_: "Future[R]") -> None:
                def finish() -> None:
                    if not signal.done():
                        signal.set_result(None)

                try:
                    loop.call_soon_threadsafe(finish)
                except RuntimeError:  # the loop was closed while the call ran
                    pass

            self._on_done(wake)
            self._observe()
            entered = waiting.enter_await(self, signal)
            self.watched += 1
            try:
                yield from signal.__await__()
            finally:
                self.watched -= 1
                if not (self.watched or self._done):  # the task was cancelled
                    self._start = self._restart
                waiting.end_await(signal, entered)
        else:
            for show in waiting.observers.no_wait:
                show()
        return self._outcome()

    def as_asyncio(self) -> "asyncio.Future[R]":
        """Returns an asyncio future of the running loop that follows this one. Raises RuntimeError without a loop."""

        async def follow() -> R:
            return await self

        return asyncio.get_running_loop().create_task(follow())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future stays where its call was made: send its result, .get()")

    def __repr__(self) -> str:
        if not self._done:
            progress = f": {text}" if (text := self.progress_text()) else ""
            return f"<Future pending{progress}>"
        if self._resolve is not None and self._unread:
            try:
                self._outcome()
            except BaseException:  # which the future stores
                pass
        if self._error is None:
            return "<Future done>"
        self._noticed()  # the reader of this learns of the error
        return f"<Future failed: {_first_line(self._error)}>"

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a Future has no {name!r}")
        raise AttributeError(f"a Future has no {name!r}, its result may have: `.get()` is missing, as in .get().{name}")


def explain_stop(future: Future[Any], stop: KeyboardInterrupt) -> None:
    """Adds to Ctrl-C what becomes of the operation that was waited for; may raise it anew with that."""
    for stop_text in waiting.observers.stop_text:
        if text := stop_text(future):
            raise KeyboardInterrupt(text) from stop
    if progress := future.progress_text():
        stop.add_note(f"stopped waiting; {progress}. The future stays valid: .get() waits again")
    if future.finding:
        stop.add_note(future.finding)


def _first_line(error: BaseException) -> str:
    """Returns `ValueError: …`, of the error on the ranks rather than of the one that wraps it."""
    return error_line(error.exception) if isinstance(error, ActorError) else error_line(error)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _refuses(name: str) -> Callable[..., object]:
    def operate(self: Future[object], *_: object) -> NoReturn:
        raise TypeError(f"a Future cannot be used with {name}: `.get()` is missing")

    return operate


# Operations on a future without `.get()` raise an error that says so.
for _name, _usage in {
    "iter": "`for`, `list` and the like", "getitem": "[...]", "len": "len()", "contains": "`in`",
    **{f"{_side}{_operator}": _sign for _side in ("", "r") for _operator, _sign in {
        "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    }.items()},
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "float": "float()", "int": "int()",
}.items():  # fmt: skip
    setattr(Future, f"__{_name}__", _refuses(_usage))


_unfinished: set[Future[object]] = set()


def pending_future(*, describe: Callable[[], str] | None = None, start: Callable[[], None] | None = None) -> Future[T]:
    """Returns a future without a result. `describe` says what is awaited; `start` runs when it is first observed."""
    return Future._make(start=start, describe=describe)


def resolved_future(value: T) -> Future[T]:
    """Returns a future that is resolved with a value."""
    return Future._resolved(value)


def resolve_future(future: Future[T], value: T) -> bool:
    """Resolves a future with a value, and wakes its waiters; False if it was settled before."""
    return future._set(value)


def resolve_later(future: Future[T], resolve: Callable[[], T]) -> None:
    """Settles a future with a function that computes its value, once, at the first read, and may raise."""
    future._set_lazy(resolve)


def derived_future(
    source: "Future[object]", compute: Callable[[], T], describe: Callable[[], str] | None = None
) -> Future[T]:
    """Returns a future of `compute()`, a value derived from `source`, on the first thread that reads it; it may raise.

    A waiter waits for the same call. `describe` describes what is awaited, else the other future does.
    """
    future: Future[T] = pending_future(describe=describe or source.progress_text)
    future.wait_id = source.wait_id
    when_done(source, lambda _: resolve_later(future, compute))
    return future


def fail_future(future: Future[object], error: BaseException) -> bool:
    """Ends a future with an error, and wakes its waiters; False if it was settled before."""
    return future._fail(error)


def when_done(future: Future[T], callback: Callable[[Future[T]], None]) -> None:
    """Calls back once: on the thread that settles the future, or at once if it is settled already."""
    future._on_done(callback)


def error_of(future: Future[object]) -> BaseException | None:
    """Returns the error that a future has failed with so far, which does not count as retrieved by this."""
    return future._error


def cancel_with(future: Future[object], cancel: Callable[[Future[object]], bool]) -> None:
    """Sets the function that `future.cancel()` calls."""
    future._cancel = cancel


def hand_out(future: Future[object]) -> None:
    """Enables the report of an error of the future that its holder never retrieves."""
    future._hand_out()


def reported_elsewhere(future: Future[object]) -> None:
    """Returns the future; an unretrieved error of it is not reported, since it is reported elsewhere."""
    future._reported_elsewhere()
    _unfinished.add(future)  # a call that is under way would make another future instead
    when_done(future, _unfinished.discard)


def give_up(future: Future[object]) -> bool:
    """Ends a future as cancelled; False if it was settled before."""
    return future._give_up()
