"""Futures from the side that settles them: for operations of the library. Users only look at theirs."""

from collections.abc import Callable
from typing import Any, TypeVar

from monarch_nb.runtime.future import Future

R = TypeVar("R")
_kept: set[Future[Any]] = set()


def pending_future(
    *, describe: Callable[[], str] | None = None, start: Callable[[], None] | None = None
) -> Future[Any]:
    """A future without a result yet. `describe` says what is waited for; `start` runs when somebody first looks."""
    return Future._make(start=start, describe=describe)


def resolved_future(value: R) -> Future[R]:
    """A future that has its value already."""
    return Future._resolved(value)


def resolve_future(future: Future[R], value: R) -> bool:
    """Gives a future its value, and calls back whoever waits; False if it was settled before."""
    return future._set(value)


def fail_future(future: Future[Any], error: BaseException) -> bool:
    """Ends a future with an error, and calls back whoever waits; False if it was settled before."""
    return future._fail(error)


def when_done(future: Future[R], callback: Callable[[Future[R]], None]) -> None:
    """Calls back once: on the thread that settles the future, or at once where it is settled already."""
    future._on_done(callback)


def error_of(future: Future[Any]) -> BaseException | None:
    """The error that a future has failed with so far; this does not count as having looked at it."""
    return future._error


def cancel_with(future: Future[Any], cancel: Callable[[Future[Any]], bool]) -> None:
    """Sets what `future.cancel()` does."""
    future._cancel = cancel


def hand_out(future: Future[Any]) -> None:
    """Has an error of the future reported that its holder never retrieves."""
    future._hand_out()


def reported_elsewhere(future: Future[Any]) -> None:
    """Returns the future; an error that nobody retrieves is not reported, since it is reported elsewhere."""
    future._reported_elsewhere()
    _kept.add(future)  # a call that is under way would make another one in its place
    when_done(future, _kept.discard)


def give_up(future: Future[Any]) -> bool:
    """Ends a future as cancelled; False if it was settled before."""
    return future._give_up()
