"""A placement as text: words for all front ends, and a picture for terminals and notebooks without HTML."""

import itertools
import math
from collections.abc import Collection, Sequence

from monarch_nb.shape import spans
from monarch_nb.tensor.placement.grid import Grid, Segment, grid_of
from monarch_nb.tensor.placement.placement import OwnValues, Placement, Replicate, Shard, length, shape_text
from monarch_nb.wire import size_text

_DOWN, _ACROSS, _SLABS = 16, 8, 4  # of the picture; more are left out
_PARTED = 8  # rows with lines between them
_WIDE = 14  # characters of a cell
_LISTED = 8  # the most sizes of pieces that are listed


def title(placement: Placement) -> str:
    """Returns shape and dtype."""
    return f"{shape_text(placement.shape)} {placement.dtype}"


def mesh_text(labels: Sequence[str], sizes: Sequence[int]) -> str:
    """Returns a mesh by its dimensions: `data=4 model=2`."""
    return " ".join(f"{label}={size}" for label, size in zip(labels, sizes, strict=True)) or "one rank"


def bytes_text(placement: Placement) -> str:
    """Returns the bytes of the tensor, of each rank, and of all ranks if that is more."""
    total, largest, on_mesh = placement.nbytes, placement.largest, placement.held
    share = f"{size_text(largest)} on each rank" if placement.even else f"at most {size_text(largest)} on a rank"
    more = f", {size_text(on_mesh)} on the mesh" if on_mesh != total else ""
    return f"{size_text(total)}: {share}{more}"


def dimension_rows(placement: Placement) -> list[tuple[str, str, str]]:
    """Returns for each dimension of the mesh its name and size, its placement, and the effect of that."""
    names = zip(placement.labels, placement.sizes, placement.kinds, strict=True)
    return [(f"{label}={size}", str(kind), _effect(placement, dim)) for dim, (label, size, kind) in enumerate(names)]


def cutters(placement: Placement, dim: int) -> list[str]:
    """Returns the mesh dimensions that shard one of the tensor, the outermost first: `data=4`."""
    return [f"{label}={size}" for label, size, kind in placement.dims(Shard) if kind.dim % len(placement.shape) == dim]


def _effect(placement: Placement, mesh_dim: int) -> str:
    size, kind = placement.sizes[mesh_dim], placement.kinds[mesh_dim]
    if size == 1:
        return "one rank: nothing to divide"
    if isinstance(kind, OwnValues):
        return f"{size} ranks, each with a value of its own"
    if isinstance(kind, Replicate):
        return f"{size} copies"
    if not isinstance(kind, Shard):
        return f"{size} parts of every value, not reduced yet ({kind.op})"
    dim = kind.dim % len(placement.shape)
    pieces = _cuts(placement, dim)
    suffix = f" in {size}, {pieces} together" if pieces > size else ""
    return f"cuts dimension {dim}{suffix}: {_pieces(placement, dim)}"


def _cuts(placement: Placement, dim: int) -> int:
    """Returns the number of pieces of a dimension, including empty ones."""
    return math.prod(size for _, size, kind in placement.dims(Shard) if kind.dim % len(placement.shape) == dim)


def _pieces(placement: Placement, dim: int) -> str:
    """Returns the sizes of the pieces of a dimension: `1024 → 4 × 256`, `5 → 2 + 2 + 1 + 0`."""
    total = placement.shape[dim]
    by_spans = {block.spans[dim]: length(block.spans[dim]) for block in placement.blocks}
    lengths = [by_spans[spans] for spans in sorted(by_spans)]
    lengths += [0] * (_cuts(placement, dim) - len(lengths)) if total else []
    if len(set(lengths)) == 1:
        return f"{total} → {len(lengths)} × {lengths[0]}"
    if len(lengths) <= _LISTED:
        return f"{total} → {' + '.join(map(str, lengths))}"
    return f"{total} → {len(lengths)} pieces of {min(lengths)} to {max(lengths)}"


def text_of(placement: Placement, name: str = "", lost: Collection[int] = ()) -> str:
    """Returns shape, effect of each mesh dimension, and the parts of the ranks, with `lost` ranks marked, as text."""
    head = f"{name or 'Tensor'} {title(placement)} on {mesh_text(placement.labels, placement.sizes)}"
    rows = dimension_rows(placement)
    widths = [max(len(row[column]) for row in rows) for column in range(2)] if rows else []
    lines = [f"{head} · {bytes_text(placement)}"]
    lines += [f"  {dim:<{widths[0]}}  {kind:<{widths[1]}}  {effect}" for dim, kind, effect in rows]
    lines += _picture(placement, grid_of(placement, dims=2), frozenset(lost))
    if placement.empty and 0 not in placement.shape:
        lines.append(f"  ranks {spans(placement.empty)} hold nothing of it")
    if lost:
        lines.append(f"  lost: ranks {spans(lost)}")
    return "\n".join(lines)


def _picture(placement: Placement, grid: Grid, lost: frozenset[int]) -> list[str]:
    columns, rows = range(len(grid.columns)), range(len(grid.rows))
    lines: list[str] = []
    for slab in itertools.islice(range(len(grid.slabs)), _SLABS):
        cells = [
            [_cell(placement, grid.at(slab, row, column), lost) for column in columns[:_ACROSS]] for row in rows[:_DOWN]
        ]
        heads = [_span(grid.columns[column]) if grid.across is not None else "" for column in columns[:_ACROSS]]
        sides = [_span(grid.rows[row]) if grid.down is not None else "" for row in rows[:_DOWN]]
        text = ", ".join(
            f"dimension {dim}: {_span(segment)}" for dim, segment in zip(grid.deep, grid.slabs[slab], strict=True)
        )
        lines += ([f"  {text}"] if text else []) + _box(heads, sides, cells)
    hidden = [
        f"{len(items) - limit} more {noun}"
        for noun, items, limit in (("slabs", grid.slabs, _SLABS), ("rows", rows, _DOWN), ("columns", columns, _ACROSS))
        if len(items) > limit
    ]
    return [*lines, f"  … and {', '.join(hidden)}"] if hidden else lines


def _cell(placement: Placement, blocks: Sequence[int], lost: frozenset[int]) -> str:
    ranks = [rank for block in blocks for rank in placement.blocks[block].ranks]
    sign = "Σ " if placement.parts > 1 and ranks else ""
    text = spans(rank for rank in ranks)
    text = text if len(text) <= _WIDE else f"{text[: _WIDE - 1]}…"
    return f"{sign}{text}{' ✕' if lost.intersection(ranks) else ''}"


def _span(segment: Segment) -> str:
    return f"{segment[0][0]}:{segment[-1][1]}" if segment else ""


def _box(heads: Sequence[str], sides: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, (head, *column))) for head, *column in zip(heads, *cells, strict=True)]
    margin = max(map(len, sides), default=0)
    line = ["─" * (width + 2) for width in widths]
    lines = [
        f"  {'':{margin}}  {'   '.join(f'{head:<{width}}' for head, width in zip(heads, widths, strict=True))}".rstrip()
    ]
    lines.append(f"  {'':{margin}} ┌{'┬'.join(line)}┐")
    for index, (side, row) in enumerate(zip(sides, cells, strict=True)):
        if index and len(cells) <= _PARTED:
            lines.append(f"  {'':{margin}} ├{'┼'.join(line)}┤")
        texts = " │ ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        lines.append(f"  {side:>{margin}} │ {texts} │")
    return [*filter(None, lines), f"  {'':{margin}} └{'┴'.join(line)}┘"]
