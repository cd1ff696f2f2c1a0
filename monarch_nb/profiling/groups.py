"""The samples of the ranks of a profile: their tree of functions, and groups of ranks that spend their time alike."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_nb.profiling.verbs import Samples, StackFrame, Weight

WAITS = StackFrame("", 0, "waits for messages", 0, True)
CIRCLE = 4  # functions in the longest cycle of mutual recursion that is folded, such as a tree's walk
GROUP_DIFFERENCE = 0.15  # of the time in different functions, above which two ranks are in different groups
NOISE = 1.5  # standard errors of the difference of two sampled profiles, which are added to it
NOTABLE = 0.05  # of the time

Stack = tuple[StackFrame, ...]  # outermost first

Key = tuple[str, str, int]


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


@dataclass
class CallNode:
    """A function, called from its parent: the share of the time that each rank was in it, its callees included.

    A share is seconds in it by sampled seconds, so that 1.0 is all of the time. Direct or mutual recursion is folded
    into one node.
    """

    place: StackFrame
    shares: dict[int, float] = field(default_factory=dict)
    computing: dict[int, float] = field(default_factory=dict)  # of these seconds on a processor
    lines: dict[int, float] = field(default_factory=dict)  # seconds by executed line, of all ranks
    below: "dict[Key, CallNode]" = field(default_factory=dict)
    deep: int = 1  # the most nested calls of itself that were seen

    @property
    def name(self) -> str:
        """`Tree.walk`; `Tree.walk ×7` if it calls itself."""
        return f"{self.place.function} ×{self.deep}" if self.deep > 1 else self.place.function

    def share(self, ranks: Sequence[int]) -> float:
        """Returns the mean share over some ranks."""
        return sum(self.shares.get(rank, 0.0) for rank in ranks) / len(ranks) if ranks else 0.0

    @property
    def total(self) -> float:
        """The largest share of a rank; of a root it is above 1.0 where threads ran side by side."""
        return max(self.shares.values(), default=0.0)

    def on_processor(self, ranks: Sequence[int]) -> float:
        """Returns the share of its time that was spent computing: 0.0 to 1.0."""
        shares = sum(self.shares.get(rank, 0.0) for rank in ranks)
        return min(1.0, sum(self.computing.get(rank, 0.0) for rank in ranks) / shares) if shares else 0.0

    @property
    def line(self) -> int:
        """The line that it executed for the longest time."""
        return max(self.lines, key=lambda line: (self.lines[line], -line), default=self.place.line)

    def children(self, ranks: Sequence[int]) -> "list[CallNode]":
        """Returns the functions that it calls on some ranks, the longest first."""
        return sorted(
            (node for node in self.below.values() if node.share(ranks)),
            key=lambda node: (-node.share(ranks), node.place.function),
        )


def tree(ranks: Mapping[int, RankProfile], cut: Callable[[Stack], Stack] = lambda stack: stack) -> CallNode:
    """Returns the tree of some ranks' stacks, each reduced by `cut`. Its root stands for all sampled time."""
    root = CallNode(StackFrame("", 0, "all", 0, True))
    for rank, profile in ranks.items():
        if not profile.seconds:
            continue
        for stack, (seconds, computing, _) in profile.stacks.items():
            _add(root, rank, cut(stack) or (WAITS,), seconds / profile.seconds, computing / profile.seconds)
    return root


def _add(root: CallNode, rank: int, stack: Stack, share: float, computing: float) -> None:
    node = root
    root.shares[rank] = root.shares.get(rank, 0.0) + share
    root.computing[rank] = root.computing.get(rank, 0.0) + computing
    for frame, deep in recursion_folded(stack):
        node = node.below.setdefault(_key(frame), CallNode(frame))
        node.shares[rank] = node.shares.get(rank, 0.0) + share
        node.computing[rank] = node.computing.get(rank, 0.0) + computing
        node.lines[frame.line] = node.lines.get(frame.line, 0.0) + share
        node.deep = max(node.deep, deep)


def recursion_folded(stack: Stack) -> Iterator[tuple[StackFrame, int]]:
    """Yields a stack with recursive calls once, each with its count: `f g f g f g h` is `f`×3, `g`×3, `h`.

    The innermost call stands for all of them, as it spends the time.
    """
    keys = [_key(frame) for frame in stack]
    index = 0
    while index < len(stack):
        length, times = _circle(keys, index)
        last = index + length * (times - 1)
        for frame in stack[last : last + length]:
            yield frame, times
        index = last + length


def _circle(keys: Sequence[Key], index: int) -> tuple[int, int]:
    """Returns the length of the shortest cycle of calls from an index, and its repetitions: (1, 1) if there is none."""
    for length in range(1, min(CIRCLE, (len(keys) - index) // 2) + 1):
        once = keys[index : index + length]
        times = 1
        while keys[index + times * length : index + (times + 1) * length] == once:
            times += 1
        if times > 1:
            return length, times
    return 1, 1


def _key(frame: StackFrame) -> Key:
    return frame.file, frame.function, frame.first


def users_part(stack: Stack) -> Stack:
    """Returns the part of a stack for users: their functions, and the library's that the last of these called."""
    last = next((index for index in range(len(stack) - 1, -1, -1) if stack[index].users), None)
    if last is None:
        return stack
    return (*(frame for frame in stack[: last + 1] if frame.users), *stack[last + 1 : last + 2])


@dataclass(frozen=True)
class Difference:
    """A function in which ranks spend different shares of the time."""

    path: tuple[
        StackFrame, ...
    ]  # from the endpoint to it: the user's functions, and the library's that the last one called
    file: str  # of the user's line that it executes, or that calls it
    line: int
    shares: tuple[float, ...]  # by group
    names: str  # of the path: `Trainer.step → load → sleep`, and `walk ×7` for recursion

    @property
    def spread(self) -> float:
        """The difference between the largest and the smallest share."""
        return max(self.shares) - min(self.shares)


def grouped(ranks: Mapping[int, RankProfile]) -> list[tuple[int, ...]]:
    """Returns groups of ranks that spend their time in the same functions, the largest first; unsampled ranks in none.

    Two ranks differ by half the sum of the differences of their shares (the total variation distance): the part of the
    time that they spend in different functions.
    """
    shares = {rank: _shares(profile) for rank, profile in ranks.items() if profile.samples}
    groups: list[list[int]] = []
    for rank in shares:
        distances = [(_distance(shares[rank], shares[group[0]]), group) for group in groups]
        best = min(distances, key=lambda pair: pair[0], default=None)
        if best is not None and best[0] <= GROUP_DIFFERENCE + _noise(
            ranks[rank], ranks[best[1][0]], shares[rank], shares[best[1][0]]
        ):
            best[1].append(rank)
        else:
            groups.append([rank])
    return sorted((tuple(group) for group in groups), key=lambda group: (-len(group), group))


def _shares(profile: RankProfile) -> dict[tuple[str, str, int], float]:
    """Returns a rank's share of the time by function: the innermost of the stack's user part."""
    shares: dict[tuple[str, str, int], float] = {}
    for stack, weight in profile.stacks.items():
        last = (users_part(stack) or (WAITS,))[-1]
        key = (last.file, last.function, last.first)
        shares[key] = shares.get(key, 0.0) + weight[0] / profile.seconds
    return shares


def _distance(first: Mapping[tuple[str, str, int], float], second: Mapping[tuple[str, str, int], float]) -> float:
    return sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys()) / 2


def _noise(
    first: RankProfile,
    second: RankProfile,
    mine: Mapping[tuple[str, str, int], float],
    theirs: Mapping[tuple[str, str, int], float],
) -> float:
    """Returns the expected random distance of two profiles of one program: sampled shares have binomial errors."""
    least = min(first.samples, second.samples)
    mean = [(mine.get(key, 0.0) + theirs.get(key, 0.0)) / 2 for key in mine.keys() | theirs.keys()]
    return NOISE * sum(math.sqrt(share * max(0.0, 1 - share) * 2 / least) for share in mean) / 2


def differences(ranks: Mapping[int, RankProfile], groups: Sequence[Sequence[int]]) -> list[Difference]:
    """Returns the functions in which groups spend different shares of the time, the largest difference first.

    Waiting for messages comes last: mostly it is the rest of the time, for work that differs. Of functions that call
    each other the innermost with the same difference is named: not the endpoint, but the call in it that makes it
    slow.
    """
    if len(groups) < 2:
        return []
    differences: list[Difference] = []
    root = tree(ranks, users_part)

    def shares(node: CallNode) -> tuple[float, ...]:
        return tuple(node.share(group) for group in groups)

    def visit(node: CallNode, path: tuple[CallNode, ...], caller: tuple[str, int]) -> None:
        below = {key: shares(child) for key, child in node.below.items()}
        if path:
            total = shares(node)
            own = tuple(
                share - sum(child_shares[index] for child_shares in below.values()) for index, share in enumerate(total)
            )
            if max(own) - min(own) >= NOTABLE:
                frames, names = tuple(step.place for step in path), " → ".join(step.name for step in path)
                differences.append(Difference(frames, *caller, total if not below else own, names))
        for key, parts in below.items():
            if max(parts) >= NOTABLE:
                child = node.below[key]
                location = (child.place.file, child.line) if child.place.users or not caller[0] else caller
                visit(child, (*path, child), location)

    visit(root, (), ("", 0))
    return sorted(
        differences, key=lambda difference: (difference.path == (WAITS,), -difference.spread, difference.names)
    )
