"""Interrupts and cancellations of endpoints, requested by other processes; and a `time.sleep` that an interrupt ends.

Python runs signal handlers on the main thread alone, and all other threads resume their sleep: neither a signal nor an
exception thrown into a thread ends the C function there.
"""

import contextlib
import inspect
import linecache
import os
import signal
import sys
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from monarch_nb._deferred import asyncio
from monarch_nb._package import imported
from monarch_nb.runtime.meshes import ActorState
from monarch_nb.runtime.verbs import CANCEL, Cancel, Interrupt, RunningEndpoint, WhatRuns
from monarch_nb.transport import AGAIN_S, Clock, take_back, throw_into
from monarch_nb.wire import Asker

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.runtime.process import Runtime

T = TypeVar("T")
INTERRUPT_INTERVAL = 0.2  # seconds; a sooner interrupt counts as the one before, which may not have arrived yet
FREES_AFTER = 0.2  # seconds from an interrupt until an endpoint that still runs is freed from waits in process groups
FREES_WITHIN = 30.0  # seconds in which it is freed; then it takes another interrupt
REACTS_WITHIN = 0.7  # seconds after which the requester is informed that an interrupt has not ended the endpoint
POLL_INTERVAL = 0.02  # seconds
_REMEMBERED = 64  # interrupts, as each may arrive twice
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
REMEMBERED_CALLS = 4096  # cancelled calls whose messages may still be waiting, or on their way
OWN_THREAD = 256  # ranks from which on a separate thread sends to them
_LONGEST = threading.TIMEOUT_MAX  # seconds of one sleep
_WAKES: signal.Signals | None = getattr(signal, "SIGURG", None)  # ignored by default, and by nearly everybody


class InterruptWindow:
    """Records whether a thread runs an endpoint, or `__init__`: no other code of it is ever interrupted.

    `begin` and `end` are called on that thread, `interrupt` on any other.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._interruptible = False
        self._thrown = False  # an interrupt is on its way
        self._task: object = None
        self._interrupted_at = float("-inf")  # when the running code was interrupted last

    def begin(self, task: object = None) -> None:
        """Opens the window: from now on an interrupt affects the running code, that of `task` on a loop."""
        self._task = task
        self._interruptible = True

    def end(self) -> bool:
        """Closes the window: an interrupt from now on is too late, and must not cut off the answer.

        Returns whether one has come that could not be raised.
        """
        missed = False
        while self._interruptible:
            try:
                with self._lock:
                    missed = self._interrupted_at > float("-inf") and not self._thrown
                    self._interruptible = False
                    self._task = None
                    self._interrupted_at = float("-inf")
                    if self._thrown:
                        self._thrown = False
                        take_back()
            except KeyboardInterrupt:
                continue
        return missed

    @contextlib.contextmanager
    def interruptible(self, task: object = None) -> Iterator[None]:
        """Opens the window for a block."""
        try:
            self.begin(task)
            yield
        finally:
            self.end()

    def interrupt(self, thread: threading.Thread) -> object:
        """Raises KeyboardInterrupt in the running code, as soon as an exception may end it there. Does not block.

        Returns the task that runs, if any.
        """
        with self._lock:
            task = self._task
            if not self._interruptible or time.monotonic() - self._interrupted_at < INTERRUPT_INTERVAL:
                return task
            interrupted_at = self._interrupted_at = time.monotonic()
            if thread is threading.main_thread():
                # To the thread itself: a signal to the process may be taken by any thread, and wakes only that one.
                signal.pthread_kill(thread.ident or 0, signal.SIGINT)
                return task
        if self._throw(thread.ident or 0, interrupted_at):
            self._clock.every(AGAIN_S, lambda: self._throw(thread.ident or 0, interrupted_at))
        return task

    def _throw(self, thread: int, interrupted_at: float) -> bool:
        """Raises the interrupt in a thread; returns whether to try again."""
        with self._lock:
            if not self._interruptible or self._interrupted_at != interrupted_at:
                return False
            self._thrown = throw_into(thread, KeyboardInterrupt)
            if not self._thrown:
                return True
        wake(thread)
        return False


async def run_on_loop(
    window: InterruptWindow | None,
    task: "asyncio.Task[object] | None",
    method: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    """Runs an endpoint of an async actor, in `task`. Interrupts are raised in what runs, if it has a window."""
    code: types.CodeType | None = getattr(method, "__code__", None)
    if window is None or (code is not None and code.co_flags & inspect.CO_COROUTINE):
        result = method(*args, **kwargs)  # of an `async def`, this runs nothing
    else:
        with window.interruptible(task):
            result = method(*args, **kwargs)
    if window is not None and type(result) is types.CoroutineType:
        return await _EndpointSteps(window, task, result)
    return await result if inspect.isawaitable(result) else result


class _EndpointSteps(Generic[T]):
    """Runs a coroutine whose steps, from one `await` that waits to the next, an interrupt may end.

    An iterator, and no generator, whose attributes lead to the coroutine's frames, as those of a coroutine do.
    """

    def __init__(
        self,
        window: InterruptWindow,
        task: "asyncio.Task[object] | None",
        coroutine: "types.CoroutineType[object, object, T]",
    ) -> None:
        self._window, self._task, self._coroutine = window, task, coroutine

    def __await__(self) -> "Generator[object, object, T]":
        return cast("Generator[object, object, T]", self)

    def __next__(self) -> object:
        return self._step(self._coroutine.send, None)

    def send(self, value: object) -> object:
        """Runs the next step."""
        return self._step(self._coroutine.send, value)

    def throw(self, *error: object) -> object:
        """Runs the next step, which begins with an error."""
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        """Ends the coroutine where it waits."""
        self._coroutine.close()

    @property
    def cr_frame(self) -> FrameType | None:
        """The frame of the coroutine; None once it has ended."""
        return self._coroutine.cr_frame

    @property
    def cr_running(self) -> bool:
        """True during a step."""
        return self._coroutine.cr_running

    @property
    def cr_await(self) -> object:
        """What the coroutine awaits."""
        return self._coroutine.cr_await

    def _step(self, proceed: Callable[..., object], *arguments: object) -> object:
        window, coroutine = self._window, self._coroutine
        while True:
            awaited: object = None
            missed = False
            try:
                try:
                    window.begin(self._task)
                    awaited = proceed(*arguments)
                finally:
                    missed = window.end()
            except KeyboardInterrupt:
                window.end()
                missed = inspect.getcoroutinestate(coroutine) != inspect.CORO_CLOSED
                if not missed:
                    raise
            if not missed:
                return awaited
            # The interrupt came beside the step, or too late for it.
            proceed, arguments = coroutine.throw, (KeyboardInterrupt(),)


class _Interrupted:
    """The outcome of one interrupt, and the requests that wait for it."""

    def __init__(self) -> None:
        self._askers: list[Asker[RunningEndpoint]] = []
        self._outcome: RunningEndpoint | None = None

    @property
    def known(self) -> bool:
        """True once the outcome is known."""
        return self._outcome is not None

    def ask(self, asker: Asker[RunningEndpoint]) -> None:
        """Replies as soon as the outcome is known."""
        self._askers.append(asker)
        if self._outcome is not None:
            self.give(self._outcome)

    def give(self, outcome: RunningEndpoint) -> None:
        """Replies to all requests, waiting and later ones."""
        self._outcome = outcome
        while self._askers:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                self._askers.pop().reply(outcome)


class Interrupts:
    """Executes interrupts that other processes request, and replies with their outcome."""

    def __init__(
        self,
        cells: "Mapping[tuple[str, int], ActorCell]",
        cancelled: "CancelledCalls",
        clock: Clock,
        free: "Callable[[ActorCell], bool]",
    ) -> None:
        """`free` ends an actor's waits in process groups of torch.distributed; True if it did."""
        self._cells, self._cancelled, self._clock, self._free = cells, cancelled, clock, free
        self._outcomes: dict[tuple[str, int], _Interrupted] = {}  # by the number of the interrupt and the rank

    def _cell(self, mesh: str, rank: int) -> "ActorCell | None":
        """Returns the cell of a mesh in this process.

        A process has one rank of a mesh, and requests that reach many processes name none. Only a process that plays
        several others holds more; its hosts put the rank into the request.
        """
        named = self._cells.get((mesh, rank))
        return named or next((cell for (uid, _), cell in tuple(self._cells.items()) if uid == mesh), None)

    def interrupt(self, request: Interrupt, asker: Asker[RunningEndpoint]) -> None:
        """Interrupts an actor of this process (reading thread)."""
        cell = self._cell(request.mesh, asker.header.rank)
        key = request.number, -1 if cell is None else cell.rank
        outcome = self._outcomes.get(key)
        if outcome is None:
            while len(self._outcomes) >= _REMEMBERED:
                self._outcomes.pop(next(iter(self._outcomes)))
            outcome = self._outcomes[key] = _Interrupted()
            self._begin(request, cell, outcome)
        outcome.ask(asker)

    def _begin(self, request: Interrupt, cell: "ActorCell | None", outcome: _Interrupted) -> None:
        running = cell.running_now() if cell is not None else {}
        for call in request.drop if cell is None or cell.on_interrupt is None else ():
            if call not in running:
                self._cancelled.add(call)
        if cell is None or not running:
            outcome.give(RunningEndpoint())
            return
        endpoint = _doing(cell)
        cell.interrupt()
        self._follow(outcome, cell, running, endpoint)

    def _follow(
        self, outcome: _Interrupted, cell: "ActorCell", running: Mapping[str, object], endpoint: RunningEndpoint
    ) -> None:
        began, freed, free_at = time.monotonic(), False, FREES_AFTER

        def poll() -> bool:
            nonlocal freed, free_at
            now, passed = cell.running_now(), time.monotonic() - began
            if not any(now.get(call) is mark for call, mark in running.items()):
                if not outcome.known:
                    outcome.give(msgspec.structs.replace(endpoint, ended=True, freed=freed))
                return False
            if passed >= free_at:  # repeatedly, as the endpoint may reach another collective
                free_at = passed * 1.2
                freed |= imported("torch.distributed") is not None and self._free(cell)
            if passed >= REACTS_WITHIN and not outcome.known:
                outcome.give(msgspec.structs.replace(_doing(cell), freed=freed))
            return passed < FREES_WITHIN

        self._clock.every(POLL_INTERVAL, poll)

    def doing(self, request: WhatRuns, asker: Asker[RunningEndpoint]) -> RunningEndpoint:
        """Replies which endpoint an actor of this process runs (reading thread)."""
        cell = self._cell(request.mesh, asker.header.rank)
        return _doing(cell) if cell is not None else RunningEndpoint()


def _doing(cell: "ActorCell") -> RunningEndpoint:
    running = cell.running
    if running is None:
        return RunningEndpoint()
    call, endpoint, since = running
    file, line, source = "", 0, ""
    frame = _user_frame(sys._current_frames().get(cell.executor.thread.ident or 0))
    if frame is not None:
        # Between two lines a frame may have no line number.
        file, line = frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno
        source = linecache.getline(file, line).strip()
    return RunningEndpoint(call, endpoint, time.monotonic() - since, file=file, line=line, source=source)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of the user's program, or of a library if there is none."""
    first = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            if first is not None and file != __file__ and not file.endswith("future.py"):
                break  # frames above the endpoint
        elif not file.startswith((_LIBRARY, "<frozen")):
            return frame
        elif first is None:
            first = frame
        frame = frame.f_back
    return first


class CancelledCalls:
    """The ids of the latest cancelled calls."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, call: str) -> bool:
        return call in self._calls

    def add(self, call: str) -> None:
        """Keeps a call that has not begun here from beginning; its message may still arrive, by another route."""
        self._calls[call] = None
        while len(self._calls) > REMEMBERED_CALLS:
            self._calls.popitem(last=False)


def not_run() -> "asyncio.CancelledError":
    """Returns the answer to a message that is never run, so that agents stop waiting for its answer."""
    return asyncio.CancelledError("the call was cancelled before it ran")


class Cancellation:
    """Requests that other processes cancel calls of this one, and executes such requests of others.

    Calls that an endpoint itself waits for are cancelled with it, and so on: an `async def` is cancelled, a `def` sees
    the call that it waits for end with a CancelledError.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime

    def send(self, call: str, mesh: str, ranks: list[int]) -> None:
        """Sends a request to each of `ranks` once, without retries: dead ones have nothing to cancel. Never blocks."""
        runtime = self._runtime
        state = runtime.meshes.get(mesh)
        if not isinstance(state, ActorState):
            return
        procs = state.procs

        def send() -> None:
            for rank in ranks:
                try:
                    runtime.post(procs.address(rank), CANCEL, Cancel(call, mesh, rank))
                except Exception:  # ended, or unreachable: its supervision handles that
                    continue

        if len(ranks) < OWN_THREAD:
            send()
        else:
            threading.Thread(target=send, name="monarch-cancel", daemon=True).start()

    def arrive(self, cancel: Cancel, asker: Asker[None]) -> None:
        """Cancels a call to an actor of this process (reading thread)."""
        runtime = self._runtime
        runtime.cancelled.add(cancel.call)
        cell = runtime.cells.get((cancel.mesh, cancel.rank))
        if cell is None:
            return

        def cancel_nested() -> None:
            for nested in tuple(runtime.calls.values()):
                made_by = nested.caller
                if made_by.call == cancel.call and made_by.actor_instance.cell is cell:
                    nested.cancel()

        cell.cancel(cancel.call, cancel_nested)


_c_sleep = time.sleep
_wakers: dict[int, threading.Lock] = {}  # by thread of an actor; locked until it must wake up


def enter_actor() -> None:
    """Notes that the calling thread runs an actor."""
    waker = _wakers[threading.get_ident()] = threading.Lock()
    waker.acquire()


def leave_actor() -> None:
    """Notes that the calling thread runs no actor any more."""
    _wakers.pop(threading.get_ident(), None)


def wake(thread: int) -> None:
    """Ends a sleep of that thread (its ident), and C code that gives up at a signal.

    Most of Python's own blocking calls resume after a signal: those are not woken.
    """
    waker = _wakers.get(thread)
    if waker is None:
        return
    with contextlib.suppress(RuntimeError):  # it was woken already
        waker.release()
    if _WAKES is not None and callable(signal.getsignal(_WAKES)):  # else it would not interrupt anything
        signal.pthread_kill(thread, _WAKES)


def sleep(seconds: Any, /) -> None:
    """Delays execution for a number of seconds, which may be a fraction."""
    waker = _wakers.get(threading.get_ident())
    if waker is None or type(seconds) not in (int, float) or not 0 < seconds < _LONGEST:
        _c_sleep(seconds)
        return
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0:
        waker.acquire(timeout=remaining)  # exceptions that woke it are raised here


def install_sleep() -> None:
    """Replaces `time.sleep` by `sleep`, in a process that was started to hold actors. On the main thread."""
    sleep.__module__ = "time"  # it is pickled by that name
    time.sleep = sleep
    if _WAKES is not None and signal.getsignal(_WAKES) is signal.SIG_DFL:
        signal.signal(_WAKES, lambda number, frame: None)
        signal.siginterrupt(_WAKES, True)
