"""A process's part of profiles: samples of its stacks, by a thread of their own, and traces by PyTorch's profiler."""

import gzip
import inspect
import os
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

from monarch_nb.profiling.verbs import Samples, StackFrame, Weight
from monarch_nb.runtime import ActorCell
from monarch_nb.runtime.actors.executors import runs_of, suspended_frames
from monarch_nb.wire import ENGINE, is_users_file

Step = tuple[int, int]  # number of a frame's code, and its current instruction
Stack = tuple[Step, ...]  # outermost first

_RUNS_ACTORS = os.path.join(ENGINE, "runtime", "actors", "cell.py")
_OWN_PREFIX = "monarch-"  # of the names of the library's threads
_STARTS = frozenset({"_bootstrap", "_bootstrap_inner", "run"})  # functions of threading.py in which threads begin
SEND_S = 1.0
MOST_STACKS = 20_000  # different ones
MOST_COST = 0.03  # of the time: if sampling takes longer, the thread samples less often

StackSource = Callable[[], Iterable[tuple[str, int, Stack]]]


class _Kind(IntEnum):
    OTHER = 0
    ENGINE = 1
    RUNS_ACTORS = 2  # of the engine; the frames below are an actor's
    STARTS = 3  # how a thread begins


class Stacks:
    """Reads the stacks of this process. Frames are numbers here, which makes samples cheap; `frame` describes them."""

    def __init__(self) -> None:
        # By identity: code objects compare by content, so that those of two files may be equal.
        self._codes: dict[int, types.CodeType] = {}
        self._kinds: dict[int, _Kind] = {}

    def samples(self, cells: Iterable[ActorCell], *, threads: bool) -> Iterator[tuple[str, int, Stack]]:
        """Yields the actors, and with `threads` other threads of the process: a name, the thread's native number, the
        stack. The stack of an actor that waits for messages is empty; with `threads`, one stands for the process while
        all of its actors wait. The library's own threads are left out.
        """
        frames = sys._current_frames()
        idents = set()
        actors = []
        for cell in cells:
            thread = cell.executor.thread
            idents.add(thread.ident)
            steps = self._of_actor(cell, frames.get(thread.ident or 0))
            actors.append((cell.spec.name, thread.native_id or 0, steps))
        if not threads:
            yield from actors
            return
        yield from [actor for actor in actors if actor[2]] or actors[:1]
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None or thread.ident in idents or thread.name.startswith(_OWN_PREFIX):
                continue
            stack = self._walk(frame)
            first = next(
                (index for index, (code, _) in enumerate(stack) if self._kinds[code] is not _Kind.STARTS), len(stack)
            )
            if first < len(stack) and self._kinds[stack[first][0]] is _Kind.OTHER:
                yield thread.name, thread.native_id or 0, tuple(stack[first:])

    def _of_actor(self, cell: ActorCell, frame: types.FrameType | None) -> Stack:
        stack = self._user_part(self._walk(frame))
        if not stack and (runs := runs_of(cell)):  # of several the one that has run longest
            stack = self._user_part([self._step(frame) for frame in suspended_frames(runs[-1].task)])
        return tuple(stack)

    def _walk(self, frame: types.FrameType | None) -> list[Step]:
        stack = []
        while frame is not None:
            stack.append(self._step(frame))
            frame = frame.f_back
        return stack[::-1]

    def _step(self, frame: types.FrameType) -> Step:
        code = frame.f_code
        number = id(code)
        if number not in self._codes:
            self._codes[number] = code
            self._kinds[number] = _kind(code)
        return number, frame.f_lasti

    def _user_part(self, stack: list[Step]) -> list[Step]:
        """Returns the user's part of a stack: below the library's frames, to the first call back into the library."""
        kinds = [self._kinds[code] for code, _ in stack]
        runs = [index for index, kind in enumerate(kinds) if kind is _Kind.RUNS_ACTORS]
        first = runs[-1] + 1 if runs else len(kinds)
        while first < len(kinds) and kinds[first] is _Kind.ENGINE:
            first += 1
        last = next((index + 1 for index in range(first, len(kinds)) if kinds[index] is _Kind.ENGINE), len(kinds))
        return stack[first:last]

    def frame(self, step: Step) -> StackFrame:
        """Describes a frame."""
        code, instruction = self._codes[step[0]], step[1]
        file = code.co_filename
        return StackFrame(file, _line(code, instruction), code.co_qualname, code.co_firstlineno, is_users_file(file))


def _kind(code: types.CodeType) -> _Kind:
    file = code.co_filename
    if file == _RUNS_ACTORS:
        return _Kind.RUNS_ACTORS
    if file.startswith(ENGINE):
        return _Kind.ENGINE
    return _Kind.STARTS if file == threading.__file__ and code.co_name in _STARTS else _Kind.OTHER


def _line(code: types.CodeType, instruction: int) -> int:
    first = code.co_firstlineno
    for begin, end, line in code.co_lines():
        if begin <= instruction < end:
            return line or first
    return first


class Sampler:
    """The sampler of one actor or process for one profile.

    A stack counts for the time since the previous sample. No sample can be taken while one long call into C holds the
    interpreter's lock: the next stack, mostly with the line that made the call, then counts for all of that time.
    """

    def __init__(
        self,
        source: StackSource,
        describe: Callable[[Step], StackFrame],
        *,
        number: int,
        rank: int,
        hz: float,
        named: bool,
        send: Callable[[Samples], bool],
    ) -> None:
        """`source` yields a name, the thread's number and the stack of each thread; `named` puts the name above the
        stack. `describe` turns a step into a frame. `send` takes the samples each second, and returns whether to go on.
        """
        self._source, self._describe, self._send = source, describe, send
        self._number, self._rank, self._named = number, rank, named
        self._period = 1.0 / hz
        self._step_numbers: dict[Step | str, int] = {}
        self._stacks: set[tuple[str, Stack]] = set()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._weights: dict[tuple[str, Stack], list[float]] = {}
        self._new: list[StackFrame] = []
        self._seconds = self._cost = 0.0
        self._dropped = 0
        self._computed: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monarch-profile", daemon=True)

    def start(self) -> None:
        """Starts the sampling thread."""
        self._thread.start()

    def stop(self) -> Samples:
        """Stops sampling; returns the unsent samples. Thread-safe."""
        with self._sending:  # nothing is sent after this result
            self._over.set()
            return self._take()

    def _run(self) -> None:
        tuple(self._source())  # the first sample fills caches: its cost is not typical
        before = sent_at = time.monotonic()
        pause, costs = self._period, 0.0
        while not self._over.wait(pause):
            ran = time.thread_time()
            now = time.monotonic()
            self._note(now - before)
            before = now
            if now - sent_at >= SEND_S:
                sent_at = now
                with self._sending:
                    if self._over.is_set() or not self._send(self._take()):
                        return
            cost = time.thread_time() - ran
            with self._lock:
                self._cost += cost
            costs = (costs + cost) / 2  # one expensive sample must not make the thread miss short calls
            pause = max(self._period - (time.monotonic() - now), costs / MOST_COST)

    def _note(self, seconds: float) -> None:
        """Takes one sample, which counts for the time since the previous one."""
        samples = [(name, stack, self._on_processor(thread, seconds)) for name, thread, stack in self._source()]
        with self._lock:
            if self._over.is_set() or not samples:  # without threads, no time is counted
                return
            self._seconds += seconds
            for name, stack, computing in samples:
                key = (name if self._named else "", stack)
                if key not in self._stacks:
                    if len(self._stacks) >= MOST_STACKS:
                        self._dropped += 1
                        continue
                    self._stacks.add(key)
                weight = self._weights.setdefault(key, [0.0, 0.0, 0])
                weight[0] += seconds
                weight[1] += computing
                weight[2] += 1

    def _on_processor(self, thread: int, seconds: float) -> float:
        """Returns a thread's processor time since the last sample; 0.0 where the system does not measure it."""
        try:
            # Linux' clock of a thread by its number: unlike pthread_getcpuclockid, it fails cleanly for an ended one.
            now = time.clock_gettime((~thread << 3) | 6)
        except (OSError, OverflowError):
            return 0.0
        before = self._computed.get(thread)
        self._computed[thread] = now
        return 0.0 if before is None else min(seconds, now - before)

    def _take(self) -> Samples:
        with self._lock:
            weights = tuple(
                Weight(self._numbers(name, stack), seconds, computing, int(samples))
                for (name, stack), (seconds, computing, samples) in self._weights.items()
            )
            new, self._new = tuple(self._new), []
            first = len(self._step_numbers) - len(new)
            samples = Samples(self._number, self._rank, new, first, weights, self._seconds, self._cost, self._dropped)
            self._weights = {}
            self._seconds = self._cost = 0.0
            self._dropped = 0
        return samples

    def _numbers(self, name: str, stack: Stack) -> tuple[int, ...]:
        steps: tuple[Step | str, ...] = (name, *stack) if name and stack else stack
        return tuple(self._number_of(step) for step in steps)

    def _number_of(self, step: Step | str) -> int:
        number = self._step_numbers.get(step)
        if number is None:
            number = self._step_numbers[step] = len(self._step_numbers)
            self._new.append(StackFrame("", 0, step, 0, True) if isinstance(step, str) else self._describe(step))
        return number


_running: dict[int, Any] = {}


def begin_trace(number: int, *, every_thread: bool = False) -> None:
    """Begins to trace this thread, or with `every_thread` all threads where PyTorch can (since 2.7).

    Raises RuntimeError where PyTorch is not installed.
    """
    try:
        from torch import profiler
        from torch._C._profiler import _ExperimentalConfig
    except ImportError:
        raise RuntimeError("PyTorch is not installed there: pip install torch") from None
    options: dict[str, Any] = {}
    if every_thread and "profile_all_threads" in (inspect.getdoc(_ExperimentalConfig.__init__) or ""):
        options["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
    traced = profiler.profile(**options)
    traced.start()
    _running[number] = traced


def end_trace(number: int) -> bytes:
    """Ends the trace and returns it, in Chrome's JSON, gzipped. Raises RuntimeError if none runs."""
    traced = _running.pop(number, None)
    if traced is None:
        raise RuntimeError("its process is a new one, in which no trace was begun")
    traced.stop()
    with tempfile.TemporaryDirectory(prefix="monarch-trace-") as folder:
        file = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(file))
        return gzip.compress(file.read_bytes(), 3)
