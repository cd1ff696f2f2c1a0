"""Groups of ranks that spend their time alike, and the differences between groups. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch_nb.profiling.samples import RankProfile
from monarch_nb.profiling.tree import WAITS, CallNode, tree, users_part
from monarch_nb.profiling.verbs import StackFrame

GROUP_DIFFERENCE = 0.15  # of the time in different functions, above which two ranks are in different groups
NOISE = 1.5  # standard errors of the difference of two sampled profiles, which are added to it
NOTABLE = 0.05  # of the time


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
