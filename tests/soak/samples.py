"""What the processes of a run hold, looked at again and again, and whether it grows."""

import os
from dataclasses import dataclass, field
from statistics import median

MEGABYTE = 1 << 20
SLACK = {"memory": 8 * MEGABYTE, "descriptors": 3, "threads": 2}  # allocators and pools breathe


@dataclass
class Samples:
    """By process and what is counted: the counts, in order."""

    counts: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def look(self, name: str, pid: int) -> None:
        """Count what a process holds now."""
        for what, count in holdings(pid).items():
            self.counts.setdefault((name, what), []).append(count)

    def grown(self) -> list[str]:
        """What grew from the third to the fourth quarter of the run: what warms up has done so by then."""
        told = []
        for (name, what), counts in self.counts.items():
            quarter = max(1, len(counts) // 4)
            before, after = median(counts[-2 * quarter : -quarter] or counts[:1]), median(counts[-quarter:])
            if after - before > SLACK[what]:
                told.append(f"{what} of {name}: from {before:,.0f} to {after:,.0f} in {quarter} rounds")
        return told

    def table(self) -> str:
        """First, middle and last counts."""
        lines = []
        for (name, what), counts in self.counts.items():
            unit = MEGABYTE if what == "memory" else 1
            first, middle, last = (counts[at] / unit for at in (0, len(counts) // 2, -1))
            lines.append(f"{name:12} {what:12} {first:8.1f} {middle:8.1f} {last:8.1f}  most {max(counts) / unit:8.1f}")
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
