"""Keeps signals' handlers, and exceptions thrown into threads, out of short sections that must run whole.

A KeyboardInterrupt may be raised between any two bytecodes of the main thread, hence between two parts of one message.
While a section runs there, SIGINT's handler is ours and only records the signal; on leaving, the previous handler
(whoever installed it, whenever) is restored and called once. Swapping costs 0.5 µs; masking the signal would
not help, since the kernel delivers it to any other thread and Python still runs the handler in the main one.

A program's handlers of other signals may raise as well, as those of time limits do, or call actors and wait, as those
that save a state before a preemption do. They are wrapped when a section first finds them, and the wrapper delays them.
"""

import _thread
import ctypes
import gc
import operator
import os
import select as _select
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import islice, repeat, starmap
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_signal = import_module("_signal")  # the C functions; those of `signal` cost ten times as much, due to enums
_SIGINT: int = _signal.SIGINT
AGAIN_S = 0.003  # after which a thread that must not be interrupted is checked again
_swap = _signal.signal
_current = _signal.getsignal
_main = threading.main_thread()
_noted: list[FrameType | None] = []
_ALRM, _HUP, _TERM = _signal.SIGALRM, _signal.SIGHUP, _signal.SIGTERM
_USR1, _USR2 = _signal.SIGUSR1, _signal.SIGUSR2
_handlers: tuple[object, ...] = ()  # of these signals, when they were last wrapped
_delayed: list[tuple[Callable[[int, FrameType | None], object], int, FrameType | None]] = []
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)


def _note(signum: int, frame: FrameType | None) -> None:
    _noted.append(frame)


class _BetweenSections:
    """A program's handler of a signal, which runs after the section that the signal cuts into."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _current(_SIGINT) is _note:
            _delayed.append((self.handler, signum, frame))
        else:
            self.handler(signum, frame)


def _wrap_handlers() -> None:
    global _handlers
    signals = (_ALRM, _HUP, _TERM, _USR1, _USR2)
    for number in signals:
        handler = _current(number)
        if callable(handler) and type(handler) is not _BetweenSections:
            _swap(number, _BetweenSections(handler))
    _handlers = tuple(map(_current, signals))


def raised_by_handler(error: BaseException) -> bool:
    """Returns whether a program's signal handler has raised an error, between any two lines of the code it passed."""
    handlers: set[object] = {_BetweenSections.__call__.__code__}
    for number in (_SIGINT, _ALRM, _HUP, _TERM, _USR1, _USR2):
        handlers.add(getattr(_current(number), "__code__", None))
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code not in handlers:
        tb = tb.tb_next
    return tb is not None


class _Guard:
    """One thread's section: a thrower into the thread takes `lock` first."""

    __slots__ = ("__weakref__", "deferred", "holding", "inside", "lock", "main", "outer")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.outer = threading.RLock()  # for longer sections; taken before `lock`
        self.inside = self.holding = False
        self.main = threading.current_thread() is threading.main_thread()
        self.deferred: type[BaseException] | None = None  # thrown by the thread itself while it holds interrupts back


class _Guards(threading.local):
    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.guard = _Guard()
        _by_thread[threading.get_ident()] = self.guard


_by_thread: "weakref.WeakValueDictionary[int, _Guard]" = weakref.WeakValueDictionary()
_guards = _Guards()


receivers: set[int] = set()  # threads that receive messages, by ident


def must_not_wait() -> bool:
    """Returns whether no answer could arrive while the calling thread waits: in a finalizer at a bad moment."""
    return _guards.guard.inside or threading.get_ident() in receivers


def inside() -> bool:
    """Returns whether the calling thread is in a section, perhaps in a finalizer or signal handler that cut into it."""
    return _guards.guard.inside


def uninterrupted(function: Callable[..., T], *args: object) -> T:
    """Calls `function(*args)` with interrupts held back until it has returned. Must be short and must not block."""
    guard = _guards.guard
    if guard.inside:
        return function(*args)
    result: T = _noting(_whole, guard, function, args)
    return result


def _noting(run: Callable[..., T], guard: _Guard, function: Callable[..., object], args: tuple[object, ...]) -> T:
    """Calls the function; signals are only recorded if SIGINT's handler is Python's. It is called once afterwards."""
    handler = None
    if guard.main:
        # Written out, it costs 0.1 µs; in a loop three times as much.
        if (_current(_ALRM), _current(_HUP), _current(_TERM), _current(_USR1), _current(_USR2)) != _handlers:
            _wrap_handlers()
        handler = _current(_SIGINT)
    if not callable(handler):  # ignored, deadly, or not Python's: nothing of it runs between bytecodes
        return run(guard, function, *args)
    try:
        _swap(_SIGINT, _note)
        return run(guard, function, *args)
    finally:
        _swap(_SIGINT, handler)  # runs pending handlers first: the last chance for _note
        if (_noted or _delayed) and handler is not _note:
            _call_handlers(handler)


def _call_handlers(handler: Callable[[int, FrameType | None], object]) -> None:
    try:
        while _delayed:
            delayed, number, frame = _delayed.pop(0)
            delayed(number, frame)
    finally:
        if _noted:
            frame = _noted.pop()
            _noted.clear()
            handler(_SIGINT, frame)


def _whole(guard: _Guard, function: Callable[..., T], *args: object) -> T:
    _take(guard.lock)
    try:
        guard.inside = True
        return function(*args)
    finally:
        guard.inside = False
        guard.lock.release()


def _take(lock: Any) -> None:
    """Takes an RLock. From Python 3.14 on, `with lock:` may raise an exception thrown before, and keep the lock."""
    try:
        lock.acquire()
    except BaseException:
        if lock._is_owned():
            lock.release()
        raise


def held_back(function: Callable[..., T], *args: object) -> T:
    """Calls `function(*args)` with interrupts held back until it has returned, so that it runs whole.

    Unlike in `uninterrupted`, it may send and take locks; it must not wait for answers, since Ctrl-C does not end that.
    """
    guard = _guards.guard
    if guard.inside or guard.holding:
        return function(*args)
    result: T = _noting(_held, guard, function, args)
    return result


def _held(guard: _Guard, function: Callable[..., T], *args: object) -> T:
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


# Modules that change state of the whole process, or of the thread, while they run: modes of dispatch that are
# entered and left, tables of weak references, compiled code. And callbacks of C++, which may not raise.
_WHOLE = (
    "torch._",  # _ops, _subclasses, _dynamo, _inductor, _functorch, _library, _guards…
    "torch.autograd",
    "torch.cuda.graphs",
    "torch.distributed._",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx",
    "torch.library",
    "torch.overrides",
    "torch.utils._",
    "torch.utils.weak",
    "weakref",
    "_weakrefset",
)
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "monarch_nb"}) - {"__main__"}


def must_run_whole(frame: FrameType | None) -> bool:
    """Returns whether an exception that is raised in this frame would break the state of modules.

    It would in a function of the modules above, in functions that such a function has called (Python's context
    managers), in the callback of a weak reference and in a finalizer, where it would also be lost. It would not in code
    of the program, whoever has called it: errors are raised there anyway, and PyTorch is prepared for them.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if frame.f_code.co_name == "__del__" or module.startswith(_WHOLE):
            return True
        if module.partition(".")[0] not in _LIBRARIES:
            return False
        frame = frame.f_back
    return False


def throw_into(thread: int, exception: type[BaseException]) -> bool:
    """Raises `exception` in another thread (its ident) if it is in code that an exception may end.

    Otherwise nothing is done, and the result is False: the caller tries again a little later. It does not block.

    Python raises a thrown exception when the thread next checks for one: in the frame that is checked here, since the
    exception is thrown only if the thread is still there, and nothing runs between that check and the throw. If the
    thread was in a C function, it is raised behind it, or at the start of the first Python function that this calls:
    before anything was begun that would have to be undone.
    """
    guard = _by_thread.get(thread)
    own = thread == threading.get_ident()
    if own and guard is not None and guard.holding:  # the thread delivers messages itself, as in a memory network
        guard.deferred = exception
        return True
    locks = [] if guard is None else [guard.outer, guard.lock]
    acquired = []
    try:
        for lock in locks:
            if not lock.acquire(blocking=False):  # sections of that thread must run whole, too
                return False
            acquired.append(lock)
        frame = sys._current_frames().get(thread)
        if frame is None or must_run_whole(frame):
            return False
        thrown = _throw_if_there(thread, frame, exception)
    finally:
        for lock in reversed(acquired):
            lock.release()
    if not own:
        calm()
    return thrown


def _throw_if_there(thread: int, frame: FrameType, exception: type[BaseException]) -> bool:
    """Throws if the thread is in that very frame. All in one C call: no other thread runs meanwhile."""
    looked = map(operator.itemgetter(thread), iter(sys._current_frames, None))
    frames = filter(partial(operator.is_, frame), islice(looked, 1))
    at_once: Iterator[tuple[object, int]] = zip(
        frames, starmap(_set_async_exc, repeat((thread, exception))), strict=False
    )
    collects = gc.isenabled()
    gc.disable()  # finalizers are Python code
    try:
        return [threads for _, threads in list(at_once)] == [1]
    except KeyError:  # the thread has ended
        return False
    finally:
        if collects:
            gc.enable()


def interrupt_program(signum: int, frame: FrameType | None) -> None:
    """Handles SIGINT as Python's handler, but delays it while the main thread is in code that must run whole."""
    if must_run_whole(frame):
        signal_again(signum)
        return
    raise KeyboardInterrupt


def signal_again(signum: int) -> None:
    """Sends a signal to the main thread in a moment. Takes no lock; in handlers that come at a bad time."""
    _thread.start_new_thread(_signal_again, (signum,))


def _signal_again(signum: int) -> None:
    _select.select([], [], [], AGAIN_S)  # `time.sleep` may be another function
    _signal.pthread_kill(_main.ident, signum)


def take_back() -> None:
    """Cancels an exception that was thrown into the calling thread and has not been raised yet."""
    _set_async_exc(threading.get_ident(), ctypes.py_object())
    calm()


class _Calm(BaseException):
    """Thrown into the thread that raises it, which catches it."""


def calm() -> None:
    """Stops all threads from checking for thrown exceptions, except one with such an exception, which it raises next.

    Until Python 3.12 all threads check at each call and loop, from when an exception was thrown or cancelled to when
    one is raised; and a thread that is traced, by a debugger, checks forever and does not continue.
    """
    if sys.version_info < (3, 12):
        uninterrupted(_raise_calm)  # nobody throws anything else into this thread meanwhile


def _raise_calm() -> None:
    for _ in range(2):  # exceptions thrown into this thread earlier are raised here
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
    receivers.clear()
    _noted.clear()
    _delayed.clear()
    _guards.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
