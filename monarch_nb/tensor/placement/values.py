"""View of the values of a tensor: its first elements, and statistics by rank."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from monarch_nb.shape import spans
from monarch_nb.tensor.placement.placement import OwnValues, Partial, Placement
from monarch_nb.tensor.verbs import Values

EDGE = 8  # elements that are shown along each of the last two dimensions
COLUMNS = ("ranks", "elements", "min", "max", "mean", "NaN", "inf")
Number = complex | float | int
_UNKNOWN = "·"  # shown for an element without an answer


def values_document(placement: Placement, parts: Sequence[Values | str]) -> dict[str, object]:
    """The view of values as JSON (fields in docs/protocol.md). `parts` are the answers of the ranks, in order."""
    there = {rank: one for rank, one in enumerate(parts) if isinstance(one, Values) and one.state == "there"}
    return {
        "corner": _corner(placement, there),
        "index": _index(placement),
        "columns": list(COLUMNS),
        "rows": [list(row) for row in _rows(there)],
        "notes": list(_notes(placement, parts)),
    }


def edges(shape: Sequence[int], edge: int = EDGE) -> list[int]:
    """Number of elements shown of each dimension; one for dimensions before the last two."""
    return [min(size, edge if dim >= len(shape) - 2 else 1) for dim, size in enumerate(shape)]


def _index(placement: Placement) -> str:
    """Index of the shown elements; "" if all are shown."""
    shape = placement.shape
    shown = edges(shape)
    if shown == list(shape):
        return ""
    last = len(shape) - 2
    each = ["0" if dim < last else ":" if count == shape[dim] else f"0:{count}" for dim, count in enumerate(shown)]
    return f"[{', '.join(each)}]"


def _corner(placement: Placement, there: Mapping[int, Values]) -> list[list[str]]:
    shown = edges(placement.shape)
    found: dict[tuple[int, ...], dict[tuple[int, ...], Number]] = {}  # by element, what each part has
    for rank, values in there.items():
        which = tuple(
            at for at, kind in zip(placement.point(rank), placement.kinds, strict=True) if isinstance(kind, Partial)
        )
        for element, number in _elements(placement, rank, values):
            if all(at < count for at, count in zip(element, shown, strict=True)):
                found.setdefault(element, {}).setdefault(which, number)  # of several copies one is enough
    kinds = [kind for kind in placement.kinds if isinstance(kind, Partial)]
    all_parts = math.prod(
        size for size, kind in zip(placement.sizes, placement.kinds, strict=True) if isinstance(kind, Partial)
    )
    rows: list[list[str]] = []
    across = shown[-1] if shown else 1
    for element in itertools.product(*map(range, shown)):
        parts = found.get(element, {})
        text = _UNKNOWN
        if len(parts) == all_parts:
            whole = _reduced(list(parts.values()), kinds[0].op if kinds else "")
            text = _UNKNOWN if whole is None else number_text(whole, placement.dtype)
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
        numbers = [complex(*values.corner[at : at + 2]) for at in range(0, len(values.corner), 2)]
    along = [
        list(itertools.islice(itertools.chain.from_iterable(range(*span) for span in held), size))
        for held, size in zip(placement.blocks[block].spans, values.shape, strict=True)
    ]
    yield from zip(itertools.product(*along), numbers, strict=False)


def _reduced(parts: list[Number], op: str) -> Number | None:
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
    return None  # what only PyTorch's operations put together


def number_text(value: Number | None, dtype: str = "") -> str:
    """A number in at most five digits, integers whole."""
    if value is None:
        return "–"
    if dtype == "bool":
        return str(bool(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return f"{value:.5g}"


def _rows(there: Mapping[int, Values]) -> Iterable[tuple[str, ...]]:
    """The numbers of the ranks, those that have equal ones together."""
    together: dict[tuple[str, ...], list[int]] = {}
    for rank, one in there.items():
        numbers = map(number_text, (one.least, one.most, one.mean))
        row = (f"{one.count:,}", *numbers, f"{one.nan:,}", f"{one.infinite:,}")
        together.setdefault(row, []).append(rank)
    for row, ranks in together.items():
        yield (spans(ranks), *row)


def _notes(placement: Placement, parts: Sequence[Values | str]) -> Iterable[str]:
    if placement.parts > 1:
        op = next(kind.op for kind in placement.kinds if isinstance(kind, Partial))
        yield f"each rank has a part of every value: the elements are put together ({op}), the numbers are of the parts"
    if any(isinstance(kind, OwnValues) for kind in placement.kinds):
        yield "each rank has a value of its own: the elements are those of the first, the numbers are of each rank"
    reasons: dict[str, list[int]] = {}
    for rank, one in enumerate(parts):
        if isinstance(one, str):
            reasons.setdefault(one, []).append(rank)
        elif one.state == "lost":
            reasons.setdefault(f"the operation that makes it has failed: {one.why}", []).append(rank)
        elif one.state == "coming":
            reasons.setdefault("it has not come to the operation that makes it", []).append(rank)
        elif one.behind:
            reasons.setdefault("it still does what was issued before: these are its values now", []).append(rank)
    for reason, ranks in reasons.items():
        yield f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}: {reason}"
    asked, ranks_in_all = len(parts), math.prod(placement.sizes)
    if asked < ranks_in_all:
        yield f"the first {asked} of {ranks_in_all:,} ranks were asked"
