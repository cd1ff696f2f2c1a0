"""`%tensors`: the live tensors of each mesh, memory by rank, what the last cell moved, and what it waited for."""

from collections.abc import Sequence

from monarch_nb.runtime import Runtime
from monarch_nb.shape import spans
from monarch_nb.store import store_of
from monarch_nb.tensor.placement.text import mesh_text
from monarch_nb.tensor.summary import Summary, TensorRow, Wait, busy_text, by_dimension, moved_text
from monarch_nb.wire import converted, counted, size_text, text_table

HEADINGS = ("name", "tensor", "placement", "on a rank", "made at")
MOVED = ("mesh dimension", "collective", "times", "bytes of a rank")
WAITED = ("line", "waited for", "times", "source")
_LISTED = 24  # rows of the text form
NOTHING = "There are no sharded tensors. monarch.distribute(tensor, mesh, sharding_spec=[…]) makes one."


class TensorListing:
    """The current tensors by mesh; with `waits`, the lines that waited instead."""

    def __init__(self, runtime: Runtime, *, waits: bool = False) -> None:
        records = store_of(runtime).document().get("tensors", {})
        self.waits = waits
        self.meshes: dict[str, Summary] = {key: converted(record, Summary) for key, record in records.items()}

    def __repr__(self) -> str:
        if not self.meshes:
            return NOTHING
        form = _waits_text if self.waits else _text
        return "\n\n".join(form(summary) for summary in self.meshes.values())


def head(summary: Summary) -> tuple[str, ...]:
    """Its mesh, how many tensors there are, and how much that is."""
    count = f"{counted(summary.count, 'tensor')}"
    mesh = mesh_text(summary.labels, summary.sizes)
    if summary.lost:
        return mesh, f"{count}, lost", size_text(summary.nbytes)
    lost = f"{summary.gone} of them lost" if summary.gone else ""
    return mesh, count, lost, size_text(summary.nbytes), f"{size_text(summary.largest)} on the fullest rank"


def cells(row: TensorRow) -> tuple[str, ...]:
    """Cells of a table row for one tensor."""
    size = "lost" if row.lost else size_text(row.each)
    return row.name or "·", row.title, " ".join(row.placement), size, row.line.at


def live_text(live: Sequence[int]) -> str:
    """Returns bytes of tensors by rank, equal ones together: `12.0 MB on each rank`, `0-5: 12.0 MB  6-7: 8.00 MB`."""
    ranks: dict[str, list[int]] = {}
    for rank, nbytes in enumerate(live):
        ranks.setdefault(size_text(nbytes), []).append(rank)
    if len(ranks) <= 1:
        return f"{next(iter(ranks), '0 B')} on each rank"
    return "  ".join(f"{spans(of)}: {size}" for size, of in ranks.items())


def memory_lines(summary: Summary) -> list[str]:
    """Memory of tensors on ranks, and the memory that processes or devices have."""
    lines = [f"live: {live_text(summary.live)}"]
    if summary.memory is not None:
        label = "memory of the processes" if summary.memory.of == "process" else "memory allocated on the devices"
        lines.append(f"{label}: {live_text(summary.memory.allocated)}, at most {live_text(summary.memory.peak)} so far")
    return lines


def moved_cells(summary: Summary) -> list[tuple[str, ...]]:
    """Moved data by dimension of the mesh."""
    return [(dim, kind, str(count), size_text(nbytes)) for dim, kind, count, nbytes in by_dimension(summary.moved)]


def waited_cells(waits: tuple[Wait, ...]) -> list[tuple[str, ...]]:
    """Returns the lines that waited, most often first."""
    ordered = sorted(waits, key=lambda wait: -wait.count)
    return [(wait.line.at or "·", wait.what, str(wait.count), wait.line.source) for wait in ordered]


def waits_text(summary: Summary) -> str:
    """Returns the number of times that the last cell has waited for the workers."""
    times = sum(wait.count for wait in summary.waits)
    if not times:
        return "the last cell waited for no result"
    return f"the last cell waited {counted(times, 'time')} for a result: %tensors --sync shows where"


def _text(summary: Summary) -> str:
    lines = [" · ".join(filter(None, (summary.name, *head(summary))))]
    if summary.lost:
        lines.append(summary.lost)
    if summary.rows:
        lines.append(text_table([HEADINGS, *map(cells, summary.rows[:_LISTED])]))
    if summary.count > _LISTED:
        lines.append(f"… and {summary.count - _LISTED} smaller ones")
    if summary.lost:
        return "\n".join(lines)
    lines += [*memory_lines(summary), moved_text(summary.moved)]
    if summary.moved:
        lines.append(text_table([MOVED, *moved_cells(summary)]))
    if summary.busy:
        lines.append(busy_text(summary.busy))
    return "\n".join([*lines, waits_text(summary)])


def _waits_text(summary: Summary) -> str:
    if not summary.waits:
        return f"{summary.name}: the last cell waited for no result"
    return f"{summary.name}: what the last cell waited for\n{text_table([WAITED, *waited_cells(summary.waits)])}"
