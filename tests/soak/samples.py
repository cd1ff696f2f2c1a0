"""Resources of the processes of a run, counted again and again, and whether they grow."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MEGABYTE = 1 << 20
SLACK = {"memory": 4 * MEGABYTE, "descriptors": 6, "threads": 2}  # allocators, pools and processes that start breathe
WARM = 3  # that part of a run is its warm-up


def slope(counts: Sequence[float]) -> float:
    """Growth in a round: the median of the slopes between all pairs, which a few odd counts do not move."""
    pairs = [
        (end_count - start_count) / (second - first)
        for first, start_count in enumerate(counts)
        for second, end_count in enumerate(counts[first + 1 :], first + 1)
    ]
    return median(pairs) if pairs else 0.0


@dataclass
class Samples:
    """The counts by process and quantity, in order."""

    counts: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def look(self, name: str, pid: int) -> None:
        """Counts the resources of a process now."""
        for quantity, count in holdings(pid).items():
            self.counts.setdefault((name, quantity), []).append(count)

    def grown(self) -> list[str]:
        """Quantities that grew by more than allocators breathe, after the first third of the run, the warm-up."""
        rows = []
        for (name, kind), counts in self.counts.items():
            steady = counts[len(counts) // WARM :]
            growth = slope(steady) * (len(steady) - 1)
            if growth > SLACK[kind]:
                rows.append(f"{kind} of {name}: by {growth:,.0f} in {len(steady)} rounds, {slope(steady):,.1f} a round")
        return rows

    def table(self) -> str:
        """First, middle, last and highest counts, and the growth in a hundred rounds after the warm-up."""
        lines = [f"{'':25} {'first':>8} {'middle':>8} {'last':>8} {'most':>8} {'per 100 rounds':>15}"]
        for (name, kind), counts in self.counts.items():
            unit = MEGABYTE if kind == "memory" else 1
            first, middle, last = (counts[index] / unit for index in (0, len(counts) // 2, -1))
            growth = 100 * slope(counts[len(counts) // WARM :]) / unit
            shown = (
                f"{name:12} {kind:12} {first:8.1f} {middle:8.1f} {last:8.1f} {max(counts) / unit:8.1f} {growth:+15.2f}"
            )
            lines.append(shown)
        return "\n".join(lines)


def holdings(pid: int) -> dict[str, float]:
    """Private bytes, open descriptors and threads of a process."""
    memory = 0
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Private_"):
                memory += int(line.split()[1]) * 1024
    return {
        "memory": memory,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }
