"""What torchmonarch's private bindings break on purpose, so that programs can try how they take it."""

import ctypes
import threading


class PanicException(BaseException):
    """What `panicking_function` raises: no Exception, so it ends the actor."""


def panicking_function() -> None:
    """Raises what nobody expects. Always PanicException."""
    raise PanicException("this function always panics")


def blocking_function() -> None:
    """Never comes back; its thread holds no lock of the interpreter."""
    threading.Event().wait()


def sleep_indefinitely_for_unit_tests() -> None:
    """Never comes back, but for KeyboardInterrupt."""
    threading.Event().wait()


def hold_gil_for_test(delay_secs: float, hold_secs: float) -> None:
    """Holds the interpreter's lock for `hold_secs`, from `delay_secs` on: no other thread runs Python meanwhile."""
    held = ctypes.PyDLL(None)  # unlike CDLL, it keeps the lock during a call

    def hold() -> None:
        held.usleep(ctypes.c_uint(int(hold_secs * 1e6)))

    timer = threading.Timer(delay_secs, hold)
    timer.daemon = True
    timer.start()


__all__ = ["PanicException", "blocking_function", "hold_gil_for_test", "panicking_function"]
