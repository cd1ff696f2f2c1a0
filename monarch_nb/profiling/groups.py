"""Ranks that do the same, drawn together; and where ranks differ. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch_nb.profiling.samples import RankProfile
from monarch_nb.profiling.tree import WAITS, CallNode, tree, users_part
from monarch_nb.profiling.verbs import StackFrame

GROUP_DIFFERENCE = 0.15  # of the time that two ranks spend in different functions, from which on they are of two groups
NOISE = 1.5  # standard errors of the difference of two sampled profiles, which comes on top
NOTABLE = 0.05  # of the time


@dataclass(frozen=True)
class Difference:
    """A function that ranks spend different shares of the time in."""

    path: tuple[
        StackFrame, ...
    ]  # from the endpoint to it: the user's functions, and what of a library the last one called
    file: str  # the line of the user's code that it is at, or that calls it
    line: int
    shares: tuple[float, ...]  # by group
    names: str  # of the path: `Trainer.step → load → sleep`, and `walk ×7` for what calls itself

    @property
    def spread(self) -> float:
        """Between the group that spends most in it and the one that spends least."""
        return max(self.shares) - min(self.shares)


def grouped(ranks: Mapping[int, RankProfile]) -> list[tuple[int, ...]]:
    """Ranks whose time goes to the same functions, the largest group first; those that nothing is known of in none.

    Two ranks differ by half the sum of the differences of their shares (the total variation distance): the part of the
    time in which they do something else.
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
    """The share of the time by the function that a rank was in, as its users know them."""
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
    """Expected random distance of two profiles of the same program: sampled shares have binomial errors."""
    least = min(first.samples, second.samples)
    mean = [(mine.get(key, 0.0) + theirs.get(key, 0.0)) / 2 for key in mine.keys() | theirs.keys()]
    return NOISE * sum(math.sqrt(share * max(0.0, 1 - share) * 2 / least) for share in mean) / 2


def differences(ranks: Mapping[int, RankProfile], groups: Sequence[Sequence[int]]) -> list[Difference]:
    """The functions that groups spend different shares of the time in, by how much, the most first.

    What they wait for messages comes last: mostly it is what is left of the time, for work that differs. Of functions
    that call each other the innermost that still differs as much is named: not the endpoint, but the call in it that
    makes it slow.
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
