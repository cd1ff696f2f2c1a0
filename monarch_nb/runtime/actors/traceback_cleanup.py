"""Cleans frames that are kept: they must not hold open files and the like, nor memory that nobody sees."""

import contextlib
import ctypes
import io
import socket
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

_ENDS = (
    io.IOBase,  # what was written is flushed when it is closed
    socket.socket,
    tempfile.TemporaryDirectory,
    tempfile._TemporaryFileWrapper,
    types.GeneratorType,  # with what it has opened
    types.CoroutineType,
    types.AsyncGeneratorType,
)
_MODULES = (
    "torch._C._distributed_c10d",
    "torch.distributed.",
    "torch.utils.data.dataloader",
)  # groups, worker processes
_PLAIN = frozenset((int, float, str, bytes, bool, list, tuple, dict, set, type(None), type))


class Discarded:
    """Stands in a kept frame for what is not kept."""

    def __init__(self, value: object) -> None:
        self._what = type(value).__qualname__

    def __repr__(self) -> str:
        return f"<{self._what}: not kept, so that it ends>"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def release_frame_locals(error: BaseException, engine: str) -> None:
    """Has the frames of an exception forget what must end: open files, sockets, generators, process groups; tensors
    stay without their graphs. Frames whose file begins with `engine`, which still run, are left alone.

    The frames of torch.distributed are emptied: what they hold cannot be distinguished from what only they use.
    """
    harmless: set[type] = set(_PLAIN)  # the failing call waits for this: each type is looked at once
    for one in chain(error):
        tb = one.__traceback__
        while tb is not None:
            frame, tb = tb.tb_frame, tb.tb_next
            if frame.f_code.co_filename.startswith(engine):
                continue
            if frame.f_globals.get("__name__", "").startswith("torch.distributed."):
                with contextlib.suppress(RuntimeError):  # one that still runs
                    frame.clear()
            else:
                _release(frame, harmless)


def _release(frame: types.FrameType, harmless: set[type]) -> None:
    found = frame.f_locals
    hard = [
        name for name, value in found.items() if type(value) not in harmless and not _is_harmless(type(value), harmless)
    ]
    if not hard or frame.f_code.co_name == "<module>":
        return
    shared = frame.f_code.co_cellvars + frame.f_code.co_freevars  # other functions would see it change
    changed = {name: _replacement(found[name]) for name in hard if name not in shared}
    if sys.version_info >= (3, 14):  # a frame holds what is overwritten in it until it is cleared
        changed = {**found, **changed}
        with contextlib.suppress(RuntimeError):  # one that still runs
            frame.clear()
    found.update(changed)
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _is_harmless(kind: type, harmless: set[type]) -> bool:
    """Whether values of a type can be kept as they are; then it is added to `easy`."""
    if issubclass(kind, _ENDS) or str(kind.__module__).startswith("torch"):
        return False
    harmless.add(kind)
    return True


def _replacement(value: Any) -> object:
    if isinstance(value, _ENDS) or type(value).__module__.startswith(_MODULES):
        return Discarded(value)
    with contextlib.suppress(Exception):
        return value if value.grad_fn is None else value.detach()
    return value
