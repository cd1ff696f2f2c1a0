"""A placement and the values of its tensor as text: words for all front ends, and a picture for those without HTML."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from monarch_nb.shape import spans
from monarch_nb.tensor.placement.placement import (
    OwnValues,
    Partial,
    Placement,
    Replicate,
    Shard,
    Span,
    length,
    shape_text,
)
from monarch_nb.tensor.verbs import Values
from monarch_nb.wire import size_text

Segment = tuple[Span, ...]  # adjacent spans of a dimension that are drawn as one, usually a single span
WHOLE: Segment = ((0, 1),)  # for a dimension that a tensor does not have
WHOLE_ONLY: tuple[Segment, ...] = (WHOLE,)

_DOWN, _ACROSS, _SLABS = 16, 8, 4  # of the picture; more are left out
_PARTED = 8  # rows with lines between them
_WIDE = 14  # characters of a cell
_LISTED = 8  # the most sizes of pieces that are listed

EDGE = 8  # elements shown along each of the last two dimensions
COLUMNS = ("ranks", "elements", "min", "max", "mean", "NaN", "inf")
Number = complex | float | int
_UNKNOWN = "·"  # for an element without a reply


@dataclass(frozen=True, slots=True)
class Grid:
    """Assignment of tensor dimensions to directions, with the blocks."""

    across: int | None  # the dimension of the tensor that runs across; None for a scalar
    down: int | None  # the dimension that runs down; None for one dimension
    deep: tuple[int, ...]  # the dimensions of which each slab has a part, outermost first
    columns: tuple[Segment, ...]
    rows: tuple[Segment, ...]
    slabs: tuple[tuple[Segment, ...], ...]  # a segment for each dimension in `deep`
    blocks: dict[tuple[Span, ...], int]  # by a span of each dimension of the tensor
    full_spans: tuple[Span, ...]  # the whole span of every dimension

    def at(self, slab: int, row: int, column: int) -> tuple[int, ...]:
        """Returns the blocks at a position, usually one."""
        choices: list[Segment] = [(span,) for span in self.full_spans]
        for dim, segment in zip(self.deep, self.slabs[slab], strict=True):
            choices[dim] = segment
        if self.down is not None:
            choices[self.down] = self.rows[row]
        if self.across is not None:
            choices[self.across] = self.columns[column]
        numbers = (self.blocks.get(key, -1) for key in itertools.product(*choices))
        return tuple(dict.fromkeys(block for block in numbers if block >= 0))


def grid_of(placement: Placement, limit: int = 64, dims: int = 3) -> Grid:
    """Lays out a tensor with at most `limit` segments each way, and at least `dims` of its dimensions.

    The last dimension runs across, the one before it down; sharded dimensions are preferred.
    """
    shape = placement.shape
    cuts = [_spans_along(placement, dim) for dim in range(len(shape))]
    drawn = _drawn_dims(shape, cuts, dims)
    across = drawn[-1] if drawn else None
    down = drawn[-2] if len(drawn) > 1 else None
    deep = drawn[:-2]
    blocks = {key: number for number, block in enumerate(placement.blocks) for key in itertools.product(*block.spans)}
    per_dim = max(1, round(limit ** (1 / max(1, len(deep)))))
    return Grid(
        across,
        down,
        tuple(deep),
        WHOLE_ONLY if across is None else _segments(cuts[across], limit),
        WHOLE_ONLY if down is None else _segments(cuts[down], limit),
        tuple(itertools.product(*(_segments(cuts[dim], per_dim) for dim in deep))),
        blocks,
        tuple((0, size) for size in shape),
    )


def _spans_along(placement: Placement, dim: int) -> list[Span]:
    """Returns the spans into which a dimension is divided, in order."""
    return sorted({span for block in placement.blocks for span in block.spans[dim]})


def _drawn_dims(shape: Sequence[int], cuts: Sequence[list[Span]], dims: int) -> list[int]:
    """Returns the dimensions that are drawn: all divided ones, and the largest undivided ones up to `dims`."""
    cut = [dim for dim in range(len(shape)) if len(cuts[dim]) > 1]
    uncut = sorted((dim for dim in range(len(shape)) if dim not in cut), key=lambda dim: (-shape[dim], -dim))
    return sorted(cut + uncut[: max(0, dims - len(cut))])


def _segments(cuts: Sequence[Span], limit: int) -> tuple[Segment, ...]:
    size = math.ceil(len(cuts) / limit) or 1
    return tuple(tuple(cuts[start : start + size]) for start in range(0, len(cuts), size)) or ((),)


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


def values_document(placement: Placement, parts: Sequence[Values | str]) -> dict[str, object]:
    """Returns the view of values as JSON (fields in docs/protocol.md). `parts` are the ranks' replies, in order."""
    answers = {rank: part for rank, part in enumerate(parts) if isinstance(part, Values) and part.state == "there"}
    return {
        "corner": _corner(placement, answers),
        "index": _index(placement),
        "columns": list(COLUMNS),
        "rows": [list(row) for row in _rows(answers)],
        "notes": list(_notes(placement, parts)),
    }


def edges(shape: Sequence[int], edge: int = EDGE) -> list[int]:
    """Returns the numbers of elements shown of each dimension; one for dimensions before the last two."""
    return [min(size, edge if dim >= len(shape) - 2 else 1) for dim, size in enumerate(shape)]


def _index(placement: Placement) -> str:
    """Returns the index of the shown elements; "" if all are shown."""
    shape = placement.shape
    shown = edges(shape)
    if shown == list(shape):
        return ""
    last = len(shape) - 2
    parts = ["0" if dim < last else ":" if count == shape[dim] else f"0:{count}" for dim, count in enumerate(shown)]
    return f"[{', '.join(parts)}]"


def _corner(placement: Placement, answers: Mapping[int, Values]) -> list[list[str]]:
    shown = edges(placement.shape)
    numbers: dict[tuple[int, ...], dict[tuple[int, ...], Number]] = {}  # by element, the value of each part
    for rank, values in answers.items():
        coordinates = zip(placement.point(rank), placement.kinds, strict=True)
        part = tuple(index for index, kind in coordinates if isinstance(kind, Partial))
        for element, number in _elements(placement, rank, values):
            if all(index < count for index, count in zip(element, shown, strict=True)):
                numbers.setdefault(element, {}).setdefault(part, number)  # one of several copies is enough
    kinds = [kind for kind in placement.kinds if isinstance(kind, Partial)]
    all_parts = math.prod(
        size for size, kind in zip(placement.sizes, placement.kinds, strict=True) if isinstance(kind, Partial)
    )
    rows: list[list[str]] = []
    across = shown[-1] if shown else 1
    for element in itertools.product(*map(range, shown)):
        parts = numbers.get(element, {})
        text = _UNKNOWN
        if len(parts) == all_parts:
            value = _reduce(list(parts.values()), kinds[0].op if kinds else "")
            text = _UNKNOWN if value is None else number_text(value, placement.dtype)
        if not rows or len(rows[-1]) == across:
            rows.append([])
        rows[-1].append(text)
    return rows


def _elements(placement: Placement, rank: int, values: Values) -> Iterable[tuple[tuple[int, ...], Number]]:
    """Yields the global index and value of the first elements of a rank."""
    block = placement.block_of[rank]
    if block < 0:
        return
    pairs = placement.dtype.startswith("complex")
    numbers: list[Number] = [*values.corner]
    if pairs:
        numbers = [complex(*values.corner[start : start + 2]) for start in range(0, len(values.corner), 2)]
    along = [
        list(itertools.islice(itertools.chain.from_iterable(range(*span) for span in ranges), size))
        for ranges, size in zip(placement.blocks[block].spans, values.shape, strict=True)
    ]
    yield from zip(itertools.product(*along), numbers, strict=False)


def _reduce(parts: list[Number], op: str) -> Number | None:
    if len(parts) == 1:
        return parts[0]
    if op == "sum":
        return sum(parts)
    if op == "avg":
        return sum(parts) / len(parts)
    if op == "product":
        return math.prod(parts)
    real = [part for part in parts if not isinstance(part, complex)]
    if op in ("max", "min") and len(real) == len(parts):
        return math.nan if any(part != part for part in real) else max(real) if op == "max" else min(real)
    return None  # only PyTorch's operations reduce it


def number_text(value: Number | None, dtype: str = "") -> str:
    """Returns a number in at most five digits, integers whole."""
    if value is None:
        return "–"
    if dtype == "bool":
        return str(bool(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return f"{value:.5g}"


def _rows(answers: Mapping[int, Values]) -> Iterable[tuple[str, ...]]:
    """Yields the statistics of the ranks; ranks with equal ones share a row."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, values in answers.items():
        numbers = map(number_text, (values.least, values.most, values.mean))
        row = (f"{values.count:,}", *numbers, f"{values.nan:,}", f"{values.infinite:,}")
        ranks_of.setdefault(row, []).append(rank)
    for row, ranks in ranks_of.items():
        yield (spans(ranks), *row)


def _notes(placement: Placement, parts: Sequence[Values | str]) -> Iterable[str]:
    if placement.parts > 1:
        op = next(kind.op for kind in placement.kinds if isinstance(kind, Partial))
        yield f"each rank has a part of every value: the elements are put together ({op}), the numbers are of the parts"
    if any(isinstance(kind, OwnValues) for kind in placement.kinds):
        yield "each rank has a value of its own: the elements are those of the first, the numbers are of each rank"
    reasons: dict[str, list[int]] = {}
    for rank, answer in enumerate(parts):
        if isinstance(answer, str):
            reasons.setdefault(answer, []).append(rank)
        elif answer.state == "lost":
            reasons.setdefault(f"the operation that makes it has failed: {answer.why}", []).append(rank)
        elif answer.state == "coming":
            reasons.setdefault("it has not come to the operation that makes it", []).append(rank)
        elif answer.behind:
            reasons.setdefault("it still does what was issued before: these are its values now", []).append(rank)
    for reason, ranks in reasons.items():
        yield f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}: {reason}"
    count, ranks_in_all = len(parts), math.prod(placement.sizes)
    if count < ranks_in_all:
        yield f"the first {count} of {ranks_in_all:,} ranks were asked"
