"""View of the values of a tensor: its first elements, and statistics by rank."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from monarch_nb.shape import spans
from monarch_nb.tensor.placement.placement import OwnValues, Partial, Placement
from monarch_nb.tensor.verbs import Values

EDGE = 8  # elements shown along each of the last two dimensions
COLUMNS = ("ranks", "elements", "min", "max", "mean", "NaN", "inf")
Number = complex | float | int
_UNKNOWN = "·"  # for an element without a reply


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
