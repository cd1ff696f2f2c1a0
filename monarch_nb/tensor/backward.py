"""Errors that leave a backward pass.

Autograd's engine asks the device for its stream when it leaves a node, also when an error is pending in Python: that
of a hook, or of an operation. PyTorch calls a device that is written in Python then, in C++ code that may not fail, and
Python lets no call succeed while an error is pending: the process would be aborted. So the device takes the error away
before it answers. The engine then fails without an error, and it is raised again where the engine was called.
"""

import ctypes
import sys
import threading
from collections.abc import Iterable
from functools import partial
from itertools import repeat, starmap
from operator import attrgetter, itemgetter
from typing import Any, NoReturn

import torch

__all__ = ["device_guard", "keep_errors"]

_variable: Any = torch.autograd.Variable
_engine: Any = type(_variable._execution_engine)
_Taken = tuple[Any, ...]  # None, the addresses of an error's parts, its thread
_taken: list[_Taken] = []


class _Error(ctypes.Structure):
    """What `PyErr_Fetch` fills in, up to Python 3.11."""

    _fields_ = (("kind", ctypes.c_void_p), ("value", ctypes.c_void_p), ("trace", ctypes.c_void_p))


_PARTS = [name for name, _ in _Error._fields_]


def _taking() -> list[Iterable[Any]]:
    """Iterators: a step of the first two takes away what is pending, the second and the following give the addresses of
    its parts, or None."""
    if sys.version_info >= (3, 12):
        raised = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_GetRaisedException", ctypes.pythonapi))
        return [repeat(None), starmap(raised, repeat(()))]
    fetch, error = ctypes.PYFUNCTYPE(None)(("PyErr_Fetch", ctypes.pythonapi)), _Error()
    into = tuple(ctypes.byref(error, getattr(_Error, name).offset) for name in _PARTS)
    return [starmap(fetch, repeat(into)), *(map(attrgetter(name), repeat(error)) for name in _PARTS)]


def _raise(parts: tuple[int | None, ...]) -> NoReturn:
    """Raises an error that was taken, with the lines where it was raised."""
    name = "PyErr_SetRaisedException" if sys.version_info >= (3, 12) else "PyErr_Restore"
    ctypes.PYFUNCTYPE(None, *(ctypes.c_void_p for _ in parts))((name, ctypes.pythonapi))(*parts)
    raise AssertionError("nothing was raised")


def device_guard() -> Any:
    """What PyTorch asks for the device's type and its streams.

    Its function is all in C: a function of Python would look for signals, and be traced by a debugger, with an error
    pending. It belongs to the class, since Python looks an attribute of an instance up after clearing errors.
    """
    taken = zip(*_taking(), starmap(threading.get_ident, repeat(())), strict=False)
    errors = map(partial(filter, itemgetter(1)), zip(taken, strict=False))
    kind: Any = torch._C._autograd.DeviceType
    answers = zip(map(_taken.extend, errors), repeat(kind.PrivateUse1), strict=False)
    acc: Any = torch._C._acc
    answer = staticmethod(partial(next, map(itemgetter(1), answers)))
    return type("DeviceGuard", (acc.DeviceGuard,), {"type_": answer})()


class _Engine(_engine):  # type: ignore[misc]
    """PyTorch's engine of the backward pass, which raises what the device has taken."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As PyTorch's. Raises what an operation, or a hook, has raised."""
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:
            own = [taken for taken in _taken if taken[-1] == threading.get_ident()]
            if not own:
                raise
        for taken in own:
            _taken.remove(taken)
        _raise(own[-1][1:-1])


def keep_errors() -> None:
    """Has backward passes of this process raise what the device has taken."""
    if not isinstance(_variable._execution_engine, _Engine):
        _variable._execution_engine = _Engine()
