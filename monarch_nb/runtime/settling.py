"""Futures from the side that settles them: for operations of the library. Users only look at theirs."""

from collections.abc import Callable
from typing import TypeVar

from monarch_nb.runtime.future import Future

T = TypeVar("T")
_kept: set[Future[object]] = set()


def pending_future(*, describe: Callable[[], str] | None = None, start: Callable[[], None] | None = None) -> Future[T]:
    """A future without a result yet. `describe` says what is waited for; `start` runs when somebody first looks."""
    return Future._make(start=start, describe=describe)


def resolved_future(value: T) -> Future[T]:
    """A future that has its value already."""
    return Future._resolved(value)


def resolve_future(future: Future[T], value: T) -> bool:
    """Gives a future its value, and calls back whoever waits; False if it was settled before."""
    return future._set(value)


def fail_future(future: Future[object], error: BaseException) -> bool:
    """Ends a future with an error, and calls back whoever waits; False if it was settled before."""
    return future._fail(error)


def when_done(future: Future[T], callback: Callable[[Future[T]], None]) -> None:
    """Calls back once: on the thread that settles the future, or at once where it is settled already."""
    future._on_done(callback)


def error_of(future: Future[object]) -> BaseException | None:
    """The error that a future has failed with so far; this does not count as having looked at it."""
    return future._error


def cancel_with(future: Future[object], cancel: Callable[[Future[object]], bool]) -> None:
    """Sets what `future.cancel()` does."""
    future._cancel = cancel


def hand_out(future: Future[object]) -> None:
    """Has an error of the future reported that its holder never retrieves."""
    future._hand_out()


def reported_elsewhere(future: Future[object]) -> None:
    """Returns the future; an error that nobody retrieves is not reported, since it is reported elsewhere."""
    future._reported_elsewhere()
    _kept.add(future)  # a call that is under way would make another one in its place
    when_done(future, _kept.discard)


def give_up(future: Future[object]) -> bool:
    """Ends a future as cancelled; False if it was settled before."""
    return future._give_up()
