"""Keeps Ctrl-C, and exceptions thrown into threads, out of the few lines that must run whole.

A KeyboardInterrupt may be raised between any two bytecodes of the main thread, hence between two parts of one message.
While a section runs there, SIGINT's handler is ours and only takes a note; on leaving, the handler that was there
before (whoever installed it, whenever) is back and is called once. Swapping costs 0.5 µs; masking the signal would
not help, since the kernel hands it to any other thread and Python still runs the handler in the main one.
"""

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_signal: Any = import_module("_signal")  # the C functions: those of `signal` cost ten times as much, for their enums
_SIGINT: int = _signal.SIGINT
_swap = _signal.signal
_current = _signal.getsignal
_main = threading.main_thread()
_noted: list[FrameType | None] = []
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)


def _note(signum: int, frame: FrameType | None) -> None:
    _noted.append(frame)


class _Guard:
    """One thread's section: whoever wants to throw into the thread takes `lock` first."""

    __slots__ = ("__weakref__", "deferred", "holding", "inside", "lock", "main", "outer")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.outer = threading.RLock()  # of what is held back for longer; taken before `lock`
        self.inside = self.holding = False
        self.main = threading.current_thread() is threading.main_thread()
        self.deferred: type[BaseException] | None = None  # thrown by the thread itself, while it holds interrupts back


class _Guards(threading.local):
    def __init__(self) -> None:
        self.guard = _Guard()
        _by_thread[threading.get_ident()] = self.guard


_by_thread: "weakref.WeakValueDictionary[int, _Guard]" = weakref.WeakValueDictionary()
_guards = _Guards()


def inside() -> bool:
    """Whether the calling thread is in a section now: true in a finalizer or signal handler that cut into one."""
    return _guards.guard.inside


def uninterrupted(function: Callable[..., T], *args: Any) -> T:
    """Call `function(*args)` with interrupts held back until it has returned. Must be short and must not block."""
    guard = _guards.guard
    if guard.inside:
        return function(*args)
    result: T = _noting(_whole, guard, function, args)
    return result


def _noting(run: Callable[..., Any], guard: _Guard, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs it with SIGINT only noted, where its handler is Python's, which is called once afterwards."""
    handler = _current(_SIGINT) if guard.main else None
    if not callable(handler):  # ignored, deadly, or not Python's: nothing of it runs between bytecodes
        return run(guard, function, *args)
    try:
        _swap(_SIGINT, _note)
        return run(guard, function, *args)
    finally:
        _swap(_SIGINT, handler)  # runs pending handlers first: the last chance for _note
        if _noted:
            frame = _noted.pop()
            _noted.clear()
            handler(_SIGINT, frame)


def _whole(guard: _Guard, function: Callable[..., T], *args: Any) -> T:
    _take(guard.lock)
    try:
        guard.inside = True
        return function(*args)
    finally:
        guard.inside = False
        guard.lock.release()


def _take(lock: Any) -> None:
    """Takes an RLock. From Python 3.14 on, `with lock:` may raise what was thrown before, and keep the lock."""
    try:
        lock.acquire()
    except BaseException:
        if lock._is_owned():
            lock.release()
        raise


def held_back(function: Callable[..., T], *args: Any) -> T:
    """Call `function(*args)` with interrupts held back until it has returned, so that it is done whole.

    Unlike `uninterrupted` it may send and take locks; it must not wait for answers, as Ctrl-C does not end that here.
    """
    guard = _guards.guard
    if guard.inside or guard.holding:
        return function(*args)
    result: T = _noting(_held, guard, function, args)
    return result


def _held(guard: _Guard, function: Callable[..., T], *args: Any) -> T:
    _take(guard.outer)
    try:
        guard.holding = True
        return function(*args)
    finally:
        guard.holding = False
        guard.outer.release()
        if guard.deferred is not None:
            _throw_deferred(guard)


def _throw_deferred(guard: _Guard) -> None:
    exception, guard.deferred = guard.deferred, None
    _set_async_exc(threading.get_ident(), exception)


def throw_into(thread: int, exception: type[BaseException]) -> bool:
    """Raise `exception` in another thread (its ident) as soon as it runs Python outside a section.

    Waits for the end of the section it is in. False if there is no such thread.
    """
    guard = _by_thread.get(thread)
    if guard is None:
        thrown = int(_set_async_exc(thread, exception)) == 1
    elif guard.holding and thread == threading.get_ident():  # it reads messages before it sleeps
        guard.deferred, thrown = exception, True
    else:
        _take(guard.outer)
        try:
            _take(guard.lock)
            try:
                thrown = int(_set_async_exc(thread, exception)) == 1
            finally:
                guard.lock.release()
        finally:
            guard.outer.release()
    if thread != threading.get_ident():
        calm()
    return thrown


def take_back() -> None:
    """An exception that was thrown into the calling thread and has not been raised yet is not raised any more."""
    _set_async_exc(threading.get_ident(), ctypes.py_object())
    calm()


class _Calm(BaseException):
    """Thrown into the thread that raises it, which catches it."""


def calm() -> None:
    """No thread looks for thrown exceptions but the one that has one, which looks when it next runs Python.

    Until Python 3.12 all threads look at each call and loop, from when an exception was thrown or taken back to when
    one is raised; and a thread that is traced, by a debugger, looks for ever and does not go on.
    """
    if sys.version_info < (3, 12):
        uninterrupted(_raise_calm)  # nobody throws anything else into this thread meanwhile


def _raise_calm() -> None:
    for _ in range(2):  # what was thrown into this thread before is raised here
        pass
    thread = threading.get_ident()
    try:
        _set_async_exc(thread, _Calm)
        while True:
            pass
    except _Calm:
        pass
    except BaseException:  # a signal's handler raises
        _set_async_exc(thread, ctypes.py_object())
        raise


def _after_fork() -> None:
    _by_thread.clear()
    _noted.clear()
    _guards.__dict__.clear()
    _guards.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
