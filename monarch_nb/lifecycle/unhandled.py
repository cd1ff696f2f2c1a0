"""Unhandled failures: a script ends, a notebook shows them."""

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_nb.runtime import current_runtime, fault_hook, unretrieved
from monarch_nb.supervision import Driver, MeshFailure, log_failure
from monarch_nb.transport import inside, signal_again
from monarch_nb.wire import error_line

# Interrupts any wait of the main thread. Ignored by default and not used elsewhere, unlike SIGINT, whose
# KeyboardInterrupt would end the program with another status, or be taken for the user's.
_WAKE = signal.SIGURG

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_statuses: list[int] = []  # exit statuses of the program, the first one counts
_notebook = False
_exiting: list[bool] = []  # not empty once the main thread raises SystemExit


def exit_on_fault(failure: MeshFailure) -> None:
    """The default hook for unhandled failures: ends the program with status 1."""
    sys.exit(1)


def prepare() -> None:
    """Makes it possible to end the program from another thread; must be called on the main thread."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(_WAKE) is signal.SIG_DFL:
        signal.signal(_WAKE, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    # A clean-up under way is not cut off: it ends with that status itself.
    if not _statuses or _exiting or unretrieved.leaving:
        return
    if inside():  # a message is half written
        signal_again(number)
        return
    error, previous = SystemExit(_statuses[0]), sys.unraisablehook

    def ignored(args: Any) -> None:
        if args.exc_value is not error:
            previous(args)
            return
        sys.unraisablehook = previous
        _exiting.clear()
        signal_again(number)  # a finalizer, or a callback of C code, has ended by it, and the program has not

    sys.unraisablehook = ignored
    _exiting.append(True)
    raise error


def end_program(status: int) -> bool:
    """Ends the program, from any thread, as `sys.exit(status)` on the main thread does; returns whether it can.

    It fails if `prepare` was not called on the main thread, or another library uses its signal.
    """
    _statuses.append(status)
    prepared = signal.getsignal(_WAKE) is _leave
    if prepared:
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
    return prepared


def unhandled(failure: MeshFailure) -> None:
    """Ends a script: the hook runs once and, unless it returns, the program ends as by `sys.exit(1)`.

    Where no thread can be started for the hook, which may block, the program ends without it.
    """
    hook = fault_hook(exit_on_fault)

    def run() -> None:
        try:
            hook(failure)
            return
        except SystemExit:
            pass
        except BaseException as error:
            sys.stderr.write(f"unhandled_fault_hook raised {error_line(error)}\n")
        end()

    def end() -> None:
        sys.stderr.write(f"Unhandled monarch failure: {failure.report()}\n")
        sys.stderr.flush()
        if not end_program(1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    _on_thread(run, hook, otherwise=end)


def report(failure: MeshFailure, show: Callable[[MeshFailure], None] = log_failure) -> None:
    """Passes a failure that does not end the program to the user's hook, or shows it."""
    hook = fault_hook(exit_on_fault)
    if hook is exit_on_fault:
        show(failure)
    else:
        _on_thread(lambda: _call_hook(hook, failure), hook, otherwise=lambda: show(failure))


def _on_thread(run: Callable[[], None], hook: object, *, otherwise: Callable[[], None]) -> None:
    """Runs a hook on a thread of its own, or `otherwise` here if the system has no thread left."""
    try:
        threading.Thread(target=run, name="monarch-fault", daemon=True).start()
    except RuntimeError as error:
        if hook is not exit_on_fault:
            sys.stderr.write(f"unhandled_fault_hook was not called: no thread could be started for it: {error}\n")
        otherwise()


def end_quietly() -> None:
    """Silences errors of the library's other threads, whose calls end with the program."""
    unretrieved.leaving = True
    previous = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(args.exc_traceback)]
        if not frames or not frames[-1].f_code.co_filename.startswith(_PACKAGE):
            previous(args)

    threading.excepthook = report
    unretrieved.logger.setLevel(logging.ERROR)  # earlier failures are still reported
    logging.getLogger("monarch_nb").setLevel(logging.CRITICAL)


def exit_if_fatal() -> None:
    """Ends a program with a fatal failure if its main thread could not be interrupted."""
    if _statuses and _statuses[0] and not _exiting:
        leave_now(_statuses[0])


def leave_now(status: int) -> None:
    """Ends the process at once, after flushing its output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def in_notebook() -> bool:
    """Returns whether this process is a notebook's kernel, or IPython's shell, which only the user may end."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return _notebook or (shell is not None and shell() is not None)


def in_marimo() -> bool:
    """Returns whether marimo runs this code: its process, or server, must not end, though no extension is loaded."""
    check = getattr(sys.modules.get("marimo"), "running_in_notebook", None)
    return check is not None and bool(check())


def notebook_mode(show: Callable[[MeshFailure], None]) -> None:
    """Keeps failures from ending a notebook: a call that waits for the failed rank raises it, else `show` shows it.

    A user's `unhandled_fault_hook` is still called.
    """
    global _notebook
    _notebook = True
    current_runtime().part(Driver).in_notebook(lambda failure: report(failure, show))


def _call_hook(hook: Callable[[MeshFailure], None], failure: MeshFailure) -> None:
    try:
        hook(failure)
    except BaseException as error:
        sys.stderr.write(f"unhandled_fault_hook raised {error_line(error)}\n{failure.report()}\n")
