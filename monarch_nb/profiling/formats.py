"""Profiles in the formats of other programs. Pure."""

from collections.abc import Mapping
from typing import Any

from monarch_nb.profiling.messages import Place
from monarch_nb.profiling.seen import SeenRank, Stack
from monarch_nb.profiling.tree import WAITS

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(name: str, labels: Mapping[int, str], ranks: Mapping[int, SeenRank]) -> dict[str, Any]:
    """One profile for each rank, in seconds, as speedscope.app reads them (its "sampled" profiles)."""
    frames: dict[Place, int] = {}

    def numbers(stack: Stack) -> list[int]:
        return [frames.setdefault(place, len(frames)) for place in stack or (WAITS,)]

    profiles = []
    for rank, seen in ranks.items():
        stacks = sorted(seen.stacks.items(), key=lambda each: [(p.file, p.function, p.line) for p in each[0]])
        weights = [weight[0] for _, weight in stacks]
        profiles.append(
            {
                "type": "sampled",
                "name": labels[rank],
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [numbers(stack) for stack, _ in stacks],
                "weights": weights,
            }
        )
    shared = [{"name": p.function, **({"file": p.file, "line": p.line} if p.file else {})} for p in frames]
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": "monarch-nb",
        "shared": {"frames": shared},
        "profiles": profiles,
    }


def folded(labels: Mapping[int, str], ranks: Mapping[int, SeenRank]) -> str:
    """A line for each stack of each rank, as flamegraph.pl reads it: functions, `;` between them, and milliseconds."""
    lines = []
    for rank, seen in ranks.items():
        for stack, weight in seen.stacks.items():
            names = [labels[rank], *(place.function for place in stack or (WAITS,))]
            lines.append(f"{';'.join(name.replace(';', ',') for name in names)} {round(1000 * weight[0])}")
    return "\n".join(sorted(lines)) + "\n" if lines else ""
