"""Samples of the ranks of one profile: messages in, weights of stacks out. No I/O."""

import threading
import time
from dataclasses import dataclass, field

from monarch_nb.profiling.verbs import Samples, StackFrame, Weight

Stack = tuple[StackFrame, ...]  # outermost first


@dataclass
class RankProfile:
    """Samples of one rank. The empty stack is that of an actor that waits for messages."""

    stacks: dict[Stack, list[float]] = field(default_factory=dict)  # seconds, seconds on a processor, samples
    seconds: float = 0.0  # sampled time
    cost: float = 0.0  # processor time of sampling
    dropped: int = 0
    last_seen: float = 0.0  # time of the last message, on this process's monotonic clock

    @property
    def samples(self) -> int:
        """Number of samples with a stack."""
        return int(sum(weight[2] for weight in self.stacks.values()))


class ProfileSamples:
    """Samples of all ranks of one profile, by base rank. Messages of one rank may overtake each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames: dict[int, dict[int, StackFrame]] = {}
        self._waiting: dict[int, list[Weight]] = {}
        self._ranks: dict[int, RankProfile] = {}

    def add(self, samples: Samples) -> None:
        """Adds a message."""
        with self._lock:
            frames = self._frames.setdefault(samples.rank, {})
            frames.update(enumerate(samples.places, samples.first))
            rank = self._ranks.setdefault(samples.rank, RankProfile())
            rank.seconds += samples.seconds
            rank.cost += samples.cost
            rank.dropped += samples.dropped
            rank.last_seen = time.monotonic()
            waiting = self._waiting.pop(samples.rank, [])
            for weight in (*waiting, *samples.weights):
                if all(number in frames for number in weight.stack):
                    stack = tuple(frames[number] for number in weight.stack)
                    total = rank.stacks.setdefault(stack, [0.0, 0.0, 0.0])
                    total[0] += weight.seconds
                    total[1] += weight.computing
                    total[2] += weight.samples
                else:
                    self._waiting.setdefault(samples.rank, []).append(weight)

    def ranks(self) -> dict[int, RankProfile]:
        """Returns a copy of the current samples, by base rank."""
        with self._lock:
            return {
                number: RankProfile(
                    {stack: list(weight) for stack, weight in rank.stacks.items()},
                    rank.seconds,
                    rank.cost,
                    rank.dropped,
                    rank.last_seen,
                )
                for number, rank in sorted(self._ranks.items())
            }
