"""What becomes of a failure that nobody handles: a script ends, a notebook shows it."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_nb.runtime import runtime
from monarch_nb.supervision import MeshFailure
from monarch_nb.wire import error_line

# Interrupts whatever the main thread waits for. Ignored by default, and nobody else's business, unlike SIGINT, whose
# KeyboardInterrupt would end the program with another status, or be taken for the user's.
_WAKE = signal.SIGURG

_fatal: list[MeshFailure] = []
_told: list[bool] = []  # the main thread has been told to exit


def exit_on_fault(failure: MeshFailure) -> None:
    """What happens to a failure nobody handles, unless it is replaced: the program ends with status 1."""
    sys.exit(1)


_lookup: Callable[[], Callable[[MeshFailure], None]] = lambda: exit_on_fault  # noqa: E731 - replaced as a whole


def set_hook_lookup(lookup: Callable[[], Callable[[MeshFailure], None]]) -> None:
    """Where the current `unhandled_fault_hook` is found."""
    global _lookup
    _lookup = lookup


def prepare() -> None:
    """Makes it possible to end the program from another thread; for that it has to be called on the main thread."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(_WAKE) is signal.SIG_DFL:
        signal.signal(_WAKE, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    if _fatal and not _told:
        _told.append(True)
        raise SystemExit(1)


def unhandled(failure: MeshFailure) -> None:
    """Scripts fail fast: the hook runs once; unless it returns, the program ends as by `sys.exit(1)`."""

    def run() -> None:
        try:
            _lookup()(failure)
            return
        except SystemExit:
            pass
        except BaseException as error:
            sys.stderr.write(f"unhandled_fault_hook raised {error_line(error)}\n")
        sys.stderr.write(f"Unhandled monarch failure: {failure.report()}\n")
        sys.stderr.flush()
        _fatal.append(failure)
        mine = signal.getsignal(_WAKE) is _leave
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE if mine else signal.SIGINT)

    threading.Thread(target=run, name="monarch-fault", daemon=True).start()


def exit_if_fatal() -> None:
    """The last act of a program that was to end by a failure, where the main thread could not be told by then."""
    if _fatal and not _told:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def notebook_mode(show: Callable[[MeshFailure], None]) -> None:
    """In a notebook a failure must not end the process: it is told by a call that waits for it, else by `show`.

    An `unhandled_fault_hook` that the user has set is still called.
    """

    def tell(failure: MeshFailure) -> None:
        hook = _lookup()
        if hook is exit_on_fault:
            show(failure)
        else:
            threading.Thread(target=_run, args=(hook, failure), name="monarch-fault", daemon=True).start()

    keeper: Any = runtime().keeper
    if keeper.forwarding is not None:
        keeper.forwarding.close()  # cells show what processes write
    driver = keeper.driver
    driver.machine.root_policy = "notebook"
    driver.show = tell


def _run(hook: Callable[[MeshFailure], None], failure: MeshFailure) -> None:
    try:
        hook(failure)
    except BaseException as error:
        sys.stderr.write(f"unhandled_fault_hook raised {error_line(error)}\n{failure.report()}\n")
