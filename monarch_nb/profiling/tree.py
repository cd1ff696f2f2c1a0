"""The tree of functions in the stacks of many ranks. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_nb.profiling.samples import RankProfile, Stack
from monarch_nb.profiling.verbs import StackFrame

WAITS = StackFrame("", 0, "waits for messages", 0, True)
CIRCLE = 4  # functions in the longest cycle of mutual recursion that is folded, such as a tree's walk
Key = tuple[str, str, int]


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
