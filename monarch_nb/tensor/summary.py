"""Summary of the live tensors, collectives and waits of one mesh, for the store and displays."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from monarch_nb.runtime.tensor_memory import OTHER, HeldMemory, LivingTensors, lines_of, summed, type_and_shape
from monarch_nb.tensor.placement import Placement, place, shape_text
from monarch_nb.tensor.placement.picture import Box, thumbnail
from monarch_nb.tensor.verbs import MemoryUsed
from monarch_nb.wire import size_text

if TYPE_CHECKING:
    from monarch_nb.tensor.errors import ProgramLine
    from monarch_nb.tensor.propagation import MeshLayout, Meta
    from monarch_nb.tensor.references import LiveTensor, Moved, Synchronised
    from monarch_nb.tensor.stream import Stream
    from monarch_nb.tensor.verbs import Failure

ROWS = 60  # tensors that are listed, the largest on a rank first
RANKS = 256  # ranks whose memory is listed one by one

FileName = Callable[[str], str]


class SourceLine(msgspec.Struct, frozen=True):
    """A line of the user's program; empty where it is not known."""

    at: str = ""  # the display name: `Cell In[3]:7`
    source: str = ""


class TensorRow(msgspec.Struct, frozen=True):
    """A tensor. `name` is a variable of the program, if there is one; `lost`: its contents are lost."""

    number: int
    name: str
    title: str
    placement: tuple[str, ...]  # one for each dimension of the mesh
    nbytes: int  # of the whole tensor
    each: int  # of the largest part on a rank
    line: SourceLine
    picture: tuple[Box, ...] = ()
    lost: bool = False


class Movement(msgspec.Struct, frozen=True):
    """Collectives of one kind along one dimension of the mesh that a line has issued."""

    line: SourceLine
    operation: str
    collective: str
    dimension: str
    count: int
    nbytes: int  # input of each rank


class Wait(msgspec.Struct, frozen=True):
    """Number of times that a line has waited for the workers, and the awaited operation."""

    line: SourceLine
    what: str
    count: int


class Busy(msgspec.Struct, frozen=True):
    """Seconds in which ranks moved shards along these dimensions of the mesh, or waited for others to."""

    dimensions: str  # `data`, or `data and model` for both at once
    most: float  # on the slowest rank
    least: float


class MemoryUse(msgspec.Struct, frozen=True):
    """Bytes of processes or of their devices, by rank."""

    allocated: tuple[int, ...]
    peak: tuple[int, ...]  # the most that was allocated so far
    of: str = "process"  # or "device"


class Summary(msgspec.Struct, frozen=True):
    """Summary of one mesh; times and counts are those of the cell that used it last.

    `lost` is the reason if all tensors are lost; `gone` is the number of lost tensors, also after a heal.
    """

    name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    count: int = 0
    nbytes: int = 0  # of all tensors, each once
    lost: str = ""
    gone: int = 0
    live: tuple[int, ...] = ()  # bytes on each rank, of at most RANKS
    largest: int = 0  # bytes on the rank with the most
    rows: tuple[TensorRow, ...] = ()
    moved: tuple[Movement, ...] = ()
    waits: tuple[Wait, ...] = ()
    busy: tuple[Busy, ...] = ()
    memory: MemoryUse | None = None  # None until ranks have replied

    @property
    def record(self) -> dict[str, object]:
        """The summary as JSON."""
        record: dict[str, object] = msgspec.to_builtins(self)
        return record


Liner = Callable[["ProgramLine | None"], SourceLine]


@lru_cache(maxsize=1024)
def placement_of(meta: "Meta") -> Placement:
    """Returns the placement of a tensor with this meta."""
    layout = meta.layout
    dtype = str(meta.dtype).removeprefix("torch.")
    return place(meta.shape, dtype, meta.dtype.itemsize, layout.names, layout.shape, meta.placements)


def live_bytes(metas: "Iterable[Meta]", ranks: int) -> list[int]:
    """Returns the bytes on each rank of tensors with these metas, each with memory of its own."""
    total = [0] * ranks
    for meta, count in Counter(metas).items():
        placement = placement_of(meta)
        for rank in range(ranks):
            total[rank] += count * placement.bytes_on(rank)
    return total


def memory_note(stream: "Stream", failures: "Sequence[Failure]") -> str:
    """Returns the named tensors of a mesh on the rank whose memory ran out, as text; "" without such a failure."""
    full = next((failure for failure in failures if failure.held), None)
    if full is None:
        return ""
    names = {
        reference.number: (kind, name)
        for kind, name, tensor in reversed(LivingTensors().named)
        if (reference := getattr(tensor, "reference", None)) is not None and reference.stream is stream
    }
    metas = {number: entry.meta for number, entry in tuple(stream.held.entries.items())}
    parts = []
    for number, size in full.held:
        meta = metas.get(number)
        unnamed = OTHER, "" if meta is None else type_and_shape(meta.dtype, meta.shape)
        parts.append(HeldMemory(*names.get(number, unnamed), stream.layout.device, size))
    lines = lines_of(summed(parts))
    return "\n  ".join([f"What the tensors of {stream.title} hold on rank {full.rank}, by name:", *lines])


def summary_of(
    name: str,
    layout: "MeshLayout",
    live: "Sequence[LiveTensor]",
    moved: "Sequence[Moved]",
    waited: "Sequence[Synchronised]",
    *,
    names: Mapping[int, str] | None = None,
    file_name: FileName = str,
    used: Sequence[MemoryUsed] | None = None,
    cell: int = 0,
    lost: str = "",
    lost_numbers: Container[int] = (),
) -> Summary:
    """Summarises the tensors of a mesh. `live`, `moved` and `waited` are the lists of its TensorTable.

    `used` has the replies of the ranks, of which the times of this `cell` count. The contents of tensors in
    `lost_numbers` are lost, or of all tensors if `lost` is a reason.
    """
    names = names or {}
    missing = {tensor.number for tensor in live if lost or tensor.number in lost_numbers}
    metas = (tensor.meta for tensor in live if tensor.number not in missing)
    sizes = [rank.live for rank in used] if used else live_bytes(metas, layout.size)
    rows = sorted(live, key=lambda row: (-placement_of(row.meta).largest, row.number not in names, row.number))[:ROWS]
    line = _liner(file_name)
    return Summary(
        name,
        tuple(layout.names),
        tuple(layout.shape),
        len(live),
        sum(placement_of(tensor.meta).nbytes for tensor in live),
        lost,
        len(missing),
        tuple(sizes[:RANKS]),
        max(sizes, default=0),
        tuple(_row(row, names.get(row.number, ""), line, row.number in missing) for row in rows),
        tuple(
            Movement(line(row.origin), row.operation, _collective(row.collective), row.dimension, row.count, row.nbytes)
            for row in moved
        ),
        tuple(Wait(line(wait.origin), wait.what, wait.count) for wait in waited),
        _busy(layout.names, used or (), cell) if moved else (),
        None if used is None else _memory(layout, used),
    )


def _busy(names: Sequence[str], used: Sequence[MemoryUsed], cell: int) -> tuple[Busy, ...]:
    ranks = [
        {spent_time.dims: spent_time.seconds for spent_time in rank.spent if spent_time.cell == cell} for rank in used
    ]
    entries = []
    for dims in sorted({dims for spent in ranks for dims in spent}):
        seconds = [spent.get(dims, 0.0) for spent in ranks]
        entries.append(Busy(" and ".join(names[dim] for dim in dims), max(seconds), min(seconds)))
    return tuple(entries)


def _memory(layout: "MeshLayout", used: Sequence[MemoryUsed]) -> MemoryUse:
    of = "device" if layout.device == "cuda" else "process"
    return MemoryUse(tuple(rank.allocated for rank in used), tuple(rank.peak for rank in used), of)


def moved_text(moved: Sequence[Movement]) -> str:
    """Returns the movements as a sentence: `the last cell moved 1.20 GB in 14 all-gathers; 9 of them from line 7`."""
    if not moved:
        return "the last cell moved nothing between ranks"
    kinds: Counter[str] = Counter()
    for movement in moved:
        kinds[movement.collective] += movement.count
    parts = " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.most_common())
    lines: Counter[str] = Counter()
    for movement in moved:
        lines[movement.line.at] += movement.count
    (most, count), *further = lines.most_common()
    source = f"; {count} of them from {most}" if further and most else f", from {most}" if most else ""
    return f"the last cell moved {size_text(sum(movement.nbytes for movement in moved))} in {parts}{source}"


def busy_text(busy: Sequence[Busy]) -> str:
    """Returns times of collectives: `ranks were busy with it for 12.3 ms along data (the fastest 11.0 ms), …`."""
    parts = [
        f"{seconds_text(entry.most)} along {entry.dimensions}"
        + (f" (the quickest {seconds_text(entry.least)})" if entry.least < 0.9 * entry.most else "")
        for entry in busy
    ]
    return f"ranks were busy with it, or waited for each other, for {', '.join(parts)}"


def seconds_text(seconds: float) -> str:
    """Returns `12.3 ms`, `1.20 s`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def by_dimension(moved: Sequence[Movement]) -> list[tuple[str, str, int, int]]:
    """Returns mesh dimension, collective, number and bytes, the most bytes first."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for movement in moved:
        count, nbytes = sums.get((movement.dimension, movement.collective), (0, 0))
        sums[movement.dimension, movement.collective] = (count + movement.count, nbytes + movement.nbytes)
    rows = [(dimension, kind, count, nbytes) for (dimension, kind), (count, nbytes) in sums.items()]
    return sorted(rows, key=lambda row: -row[3])


def _row(tensor: "LiveTensor", name: str, line: Liner, lost: bool) -> TensorRow:
    placement = placement_of(tensor.meta)
    return TensorRow(
        tensor.number,
        name,
        f"{shape_text(placement.shape)} {placement.dtype}",
        tuple(map(str, placement.kinds)),
        placement.nbytes,
        placement.largest,
        line(tensor.origin),
        thumbnail(placement),
        lost,
    )


def _liner(file_name: FileName) -> Liner:
    def line(origin: "ProgramLine | None") -> SourceLine:
        return SourceLine() if origin is None else SourceLine(f"{file_name(origin.file)}:{origin.line}", origin.source)

    return line


def _collective(name: str) -> str:
    """Returns the display name of a collective: all-gather, all-reduce."""
    return (
        name.removesuffix("_")
        .removesuffix("_coalesced")
        .removesuffix("_into_tensor")
        .removesuffix("_tensor")
        .replace("_", "-")
    )
