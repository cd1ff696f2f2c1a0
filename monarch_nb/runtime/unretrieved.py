"""Unretrieved errors of calls: their futures were dropped unread, so the errors are reported."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeGuard

from monarch_nb.wire import ActorError, error_line

if TYPE_CHECKING:
    from monarch_nb.runtime.future import Future

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.05  # after the first error: errors within this time are reported together
CLOSE_SECONDS = 1.0
_QUIET = (CancelledError, KeyboardInterrupt)  # the program requested it


def _log(error: BaseException, count: int) -> None:
    more = f" (and {count - 1} more like it)" if count > 1 else ""
    logger.error("%s (%s)%s: %s", *missing_of(error), more, error_line(error))


def missing_of(error: BaseException) -> tuple[str, str]:
    """Returns why an error was not retrieved, and how to retrieve it."""
    missing: tuple[str, str] = getattr(error, "missing", ("Nobody waited for this call", "`.get()` is missing"))
    return missing


# Called with the first of equal errors, and how many there are; a notebook has its own.
report: Callable[[BaseException, int], None] = _log
leaving = False  # this process leaves the cluster, which causes errors that are not reported
_queue: "SimpleQueue[Callable[[], object] | None]" = SimpleQueue()  # None ends the thread
_thread: threading.Thread | None = None
_starting = threading.Lock()


def ready() -> None:
    """Starts the thread, before a future is handed out: a finalizer that finds an error cannot start one."""
    global _thread
    if _thread is None:
        with _starting:
            if _thread is None:
                _thread = threading.Thread(target=_run, name="monarch-forgotten", daemon=True)
                _thread.start()


def close() -> None:
    """Reports the errors dropped so far; blocks briefly. `ready` starts the thread again."""
    global _thread
    with _starting:
        thread, _thread = _thread, None
    if thread is not None:
        _queue.put(None)
        if thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)


class UnretrievedError:
    """An error that is not retrieved yet; it is reported when its future, the only owner of this, is dropped."""

    __slots__ = ("outcome",)

    def __init__(self, outcome: Callable[[], object]) -> None:
        """`outcome` raises the error; it is None once the error has been retrieved."""
        self.outcome: Callable[[], object] | None = outcome

    def __del__(self) -> None:
        if self.outcome is not None and forget is not None:  # an interpreter that exits has cleared this module
            forget(self.outcome)


def forget(outcome: Callable[[], object]) -> None:
    """Queues the error of a dropped future, which `outcome` raises, to be reported. From any finalizer."""
    if not sys.is_finalizing():
        _queue.put(outcome)


def of_interest(error: BaseException | None) -> TypeGuard[BaseException]:
    """Returns whether an error must be reported: not a cancellation, nor an error that is reported elsewhere."""
    if error is None:
        return False
    inner = error.exception if isinstance(error, ActorError) else error
    name = getattr(inner, "type_name", "")
    intended = isinstance(inner, _QUIET) or type(inner).__name__ == "CancelledError" or name.endswith("CancelledError")
    return not intended and name != "KeyboardInterrupt" and not getattr(error, "reported_elsewhere", False)


def watch(future: "Future[object]", is_held: Callable[[], bool]) -> None:
    """Reports the error of a future that only a cell's output holds, if it fails unread and `is_held` is false then."""
    ready()
    future._on_done(lambda ended: _queue.put(lambda: ended._outcome() if ended._unread and not is_held() else None))


def _run() -> None:
    closing = False
    while not closing:
        outcomes = [_queue.get()]
        time.sleep(GATHER_SECONDS if outcomes[0] is not None else 0.0)
        while not _queue.empty():
            outcomes.append(_queue.get())
        closing = None in outcomes
        _report_each([outcome for outcome in outcomes if outcome is not None])
        outcomes.clear()


def _report_each(outcomes: list[Callable[[], object]]) -> None:
    groups: dict[str, list[BaseException]] = {}
    for error in filter(of_interest, map(_error_of, outcomes)):
        groups.setdefault(error_line(error), []).append(error)
    for errors in groups.values():
        try:
            report(errors[0], len(errors))
        except Exception:
            logger.exception("an error that nobody waited for could not be reported")


def _error_of(outcome: Callable[[], object]) -> BaseException | None:
    try:
        outcome()
    except BaseException as error:
        return error
    return None
