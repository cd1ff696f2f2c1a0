"""A thread that samples the stacks of its process many times a second, and sends the samples once a second."""

import threading
import time
from collections.abc import Callable, Iterable

from monarch_nb.profiling.stacks import Stack, Step
from monarch_nb.profiling.verbs import Samples, StackFrame, Weight

StackSource = Callable[[], Iterable[tuple[str, int, Stack]]]

SEND_S = 1.0
MOST_STACKS = 20_000  # different ones
MOST_COST = 0.03  # of the time: if sampling takes longer, the thread samples less often


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
