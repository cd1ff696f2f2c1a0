"""The table of stopped ranks that a waiting cell shows. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render.groups import FileName, StackGroup, grouped, place, short
from monarch_nb.shape import Extent, places
from monarch_nb.wire import counted


class Missing:
    """Ranks of a mesh that are not stopped, and their activity."""

    def __init__(self, name: str, extent: Extent, activities: Mapping[tuple[int, ...], str]) -> None:
        self.name = name
        self.extent = extent
        self.activities = dict(activities)  # by point

    def by_activity(self) -> dict[str, list[tuple[int, ...]]]:
        """Ranks by their activity."""
        by_activity: dict[str, list[tuple[int, ...]]] = {}
        for point, activity in self.activities.items():
            by_activity.setdefault(activity, []).append(point)
        return by_activity

    def where(self, points: Iterable[tuple[int, ...]]) -> str:
        """Points of the mesh as text: `gpus=0-2`."""
        return places(self.extent.labels, points, self.extent.sizes)

    def lines(self) -> list[str]:
        """`not stopped: trainers gpus=5 (runs step for 3 s, at model.py:88 in forward)`."""
        return [
            f"not stopped: {self.name} {self.where(points)}".rstrip() + (f": {activity}" if activity else "")
            for activity, points in self.by_activity().items()
        ]


def table_text(
    records: Sequence[Stopped],
    *,
    sizes: Mapping[str, int] | None = None,
    missing: Sequence[Missing] = (),
    name: FileName = short,
    source: bool = True,
) -> str:
    """Returns a line for each group, the other ranks, and the source around the line of the largest group.

    `sizes` are those of whole meshes, by uid; `name` gives display names of files.
    """
    groups = grouped(records)
    if not groups:
        return "nothing is stopped"
    stopped = [record for record in records if record.blocks_actor]
    opened = len(records) - len(stopped)
    counts = [f"{counted(len({record.place for record in stopped}), 'rank')} stopped"] if stopped else []
    counts += [f"{counted(opened, 'failed call')} opened"] if opened else []
    lines = [f"■ {', '.join(counts)}"]
    rows = [_row(group, (sizes or {}).get(group.first.mesh), name) for group in groups]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for group, row in zip(groups, rows, strict=True):
        lines.append(
            "  " + "  ".join(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)) + f"  {row[3]}"
        )
        if group.first.note:
            lines.append(f"      {group.first.note}")
    lines += [f"  {line}" for entry in missing for line in entry.lines()]
    if source:
        biggest = max(groups, key=lambda group: group.ranks)
        lines += ["", *source_lines(biggest.first)]
    return "\n".join(line.rstrip() for line in lines)


def _row(group: StackGroup, size: int | None, name: FileName) -> tuple[str, str, str, str]:
    first = group.first
    count = f"{group.ranks} of {size}" if size is not None else str(group.ranks)
    reasons = list(dict.fromkeys(record.reason for record in group.records))
    reason = reasons[0] if len(reasons) == 1 else f"{reasons[0]} and {len(reasons) - 1} other reasons"
    thread = f", thread {group.thread}" if group.thread else ""
    return count, f"at {place(first.frame, name)}", f"{group.where}{thread}", reason


def source_lines(record: Stopped) -> list[str]:
    """Returns the source around its line, which is marked."""
    line = record.selected_frame.line
    last = record.first + len(record.source) - 1
    width = len(str(last))
    return [
        f"  {'→' if number == line else ' '} {number:>{width}}  {text}".rstrip()
        for number, text in enumerate(record.source, record.first)
    ]
