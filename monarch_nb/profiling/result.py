"""The result of a profile: groups of ranks, differences between them, and files for other programs."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from monarch_nb.profiling.groups import (
    WAITS,
    CallNode,
    Difference,
    ProfileSamples,
    RankProfile,
    Stack,
    differences,
    grouped,
    tree,
)
from monarch_nb.profiling.verbs import Samples, StackFrame
from monarch_nb.shape import Region, places_of
from monarch_nb.wire import counted

LEAST_SHARE = 0.02  # of the time, below which functions are left out of texts
DEEP = 12  # levels of functions in texts
FEW = 20  # samples of a rank, below which shares are rough
SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class Profile:
    """The sampled time of the ranks of a mesh. `repr` and displays show it, also during sampling.

    `seconds` is its duration, `notes` says what is missing and why, `trace` is the file with PyTorch's own traces if
    they were requested.
    """

    def __init__(self, name: str, region: Region, hz: float, samples: ProfileSamples) -> None:
        self.name = name
        self.region = region
        self.hz = hz
        self.seconds = 0.0
        self.notes: list[str] = []
        self.trace: Path | None = None
        self._samples = samples

    @property
    def ranks(self) -> dict[int, RankProfile]:
        """Samples by rank of the mesh (row-major in the whole mesh, also of a slice)."""
        return self._samples.ranks()

    def add(self, samples: Samples) -> None:
        """Adds samples."""
        self._samples.add(samples)

    @property
    def samples(self) -> int:
        """Number of samples of all ranks."""
        return sum(rank.samples for rank in self.ranks.values())

    @property
    def cost(self) -> float:
        """The largest share of a processor's time that sampling took in any process: 0.01 is one percent."""
        return max((rank.cost / rank.seconds for rank in self.ranks.values() if rank.seconds), default=0.0)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Groups of ranks that spent their time alike, the largest first."""
        return grouped(self.ranks)

    @property
    def differences(self) -> list[Difference]:
        """The functions in which these groups spent different shares of their time, the largest difference first."""
        return differences(self.ranks, self.groups)

    def tree(self, ranks: Sequence[int] | None = None) -> CallNode:
        """Returns the tree of functions and their callees, of all ranks or some. The root is all the sampled time."""
        profiles = self.ranks
        return tree(profiles if ranks is None else {rank: profiles[rank] for rank in ranks if rank in profiles})

    def where(self, ranks: Sequence[int]) -> str:
        """Returns ranks by their coordinates, as in `gpus=0-6`."""
        return places_of(self.region, ranks) or "it"

    def save(self, path: "str | os.PathLike[str]") -> Path:
        """Writes the profile to a file: `.json` for speedscope.app, `.txt` or `.folded` (`stack milliseconds`) for
        flamegraph.pl. Raises ValueError for another ending, OSError if the file cannot be written.
        """
        target = Path(path)
        labels = {rank: f"{self.name} {self.where([rank])}" for rank in self.ranks}
        if target.suffix == ".json":
            text = json.dumps(speedscope(self.name, labels, self.ranks))
        elif target.suffix in (".txt", ".folded"):
            text = folded(labels, self.ranks)
        else:
            raise ValueError(f"{target.name}: profiles are written as .json (speedscope) or .txt (folded stacks)")
        target.write_text(text, encoding="utf-8")
        return target

    # -- as text -------------------------------------------------------------------------------------------------------

    def heading(self) -> list[str]:
        """Returns a few facts as words."""
        ranks, groups = len(self.ranks), len(self.groups)
        facts = [f"{self.seconds:.1f} s", f"{self.samples:,} samples of {counted(ranks, 'rank')}"]
        if groups > 1:
            facts.append(f"{groups} groups")
        if self.cost:
            facts.append(f"sampling took {self.cost:.1%} of each")
        if (total := self.tree().total) >= 1 + LEAST_SHARE:
            facts.append(f"threads ran side by side: shares add up to {total:.0%}")
        return facts

    def warnings(self) -> list[str]:
        """Returns limits of the data that a reader must know: missing ranks, few samples, dropped stacks."""
        notes = list(self.notes)
        if self.samples < FEW * max(1, len(self.ranks)):
            notes.append(
                f"{self.samples} samples are few: let it run longer, or look more often with hz={2 * self.hz:g}"
            )
        if dropped := sum(rank.dropped for rank in self.ranks.values()):
            notes.append(f"{dropped} samples of very many different stacks are left out")
        if self.trace is not None:
            notes.append(f"PyTorch's traces of all ranks: {self.trace} (open it at https://ui.perfetto.dev)")
        return notes

    def text(self, name: Callable[[str], str] = os.path.basename) -> str:
        """Returns the profile as text, with display names of files from `name`."""
        lines = [f"profile of {self.name}: {', '.join(self.heading())}", *(f"! {note}" for note in self.warnings())]
        groups, differences = self.groups, self.differences
        if differences:
            lines.append("what differs")
            paths = [
                f"{difference.names}  {line_text(difference.file, difference.line, name)}".rstrip()
                for difference in differences
            ]
            for path, difference in zip(paths, differences, strict=True):
                shares = "  ".join(
                    f"{share:4.0%} {self.where(group)}"
                    for share, group in sorted(zip(difference.shares, groups, strict=True), reverse=True)
                )
                lines.append(f"  {path.ljust(max(map(len, paths)))}  {shares}")
        for group in groups:
            lines.append(self.where(group))
            lines += _lines(self.tree(group), group, name, "  ", DEEP)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()


def line_text(file: str, line: int, name: Callable[[str], str] = os.path.basename) -> str:
    """Returns `train.py:28`; "" for a frame without a file."""
    return f"{name(file)}:{line}" if file else ""


def _lines(node: CallNode, ranks: Sequence[int], name: Callable[[str], str], indent: str, deep: int) -> list[str]:
    lines = []
    for child in node.children(ranks):
        share = child.share(ranks)
        if share < LEAST_SHARE or not deep:
            continue
        location = line_text(child.place.file, child.line, name)
        lines.append(f"{indent}{share:4.0%}  {child.name}  {location}".rstrip())
        lines += _lines(child, ranks, name, f"{indent}  ", deep - 1)
    return lines


def speedscope(name: str, labels: Mapping[int, str], ranks: Mapping[int, RankProfile]) -> dict[str, object]:
    """Returns a profile for each rank, in seconds, in speedscope.app's format (its "sampled" profiles)."""
    frames: dict[StackFrame, int] = {}

    def numbers(stack: Stack) -> list[int]:
        return [frames.setdefault(frame, len(frames)) for frame in stack or (WAITS,)]

    profiles = []
    for rank, profile in ranks.items():
        stacks = sorted(profile.stacks.items(), key=lambda item: [(p.file, p.function, p.line) for p in item[0]])
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


def folded(labels: Mapping[int, str], ranks: Mapping[int, RankProfile]) -> str:
    """Returns a line for each stack of each rank, in flamegraph.pl's format: functions joined by `;`, milliseconds."""
    lines = []
    for rank, profile in ranks.items():
        for stack, weight in profile.stacks.items():
            names = [labels[rank], *(frame.function for frame in stack or (WAITS,))]
            lines.append(f"{';'.join(name.replace(';', ',') for name in names)} {round(1000 * weight[0])}")
    return "\n".join(sorted(lines)) + "\n" if lines else ""
