"""Search among many ranks by words, each of which a rank must match. Front ends use the same words."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from monarch_nb.store.differing import WORST_FIRST

Fits = Callable[[Mapping[str, object], Sequence[int], int, str], bool]
"""Decides whether a rank matches: its record with its state, its point, its index, the name of its host."""

_SCALES = {"": 1.0, "%": 0.01, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_PLACE = re.compile(r"(\w+)=(\d*)(?:(:)(\d*))?")
_RANKS = re.compile(r"(\d+)(?:-(\d+))?")
_MEASURED = re.compile(r"(cpu|memory|gpu|gpu_memory|queue|rate|errors|calls)([<>])(\d+(?:\.\d+)?)(%|kb|mb|gb)?")


def fitting(query: str, labels: Sequence[str]) -> Fits | None:
    """Parses a query; None for an empty one.

    Words are states ("failed"), places ("hosts=3", "gpus=0:4"), ranks ("12", "4-7"), measurements ("cpu>50%",
    "memory>2GB"), or a part of a host's name, an endpoint or a reason.
    """
    tests = [_fit(word, [label.lower() for label in labels]) for word in query.lower().split()]
    return (lambda *rank: all(fits(*rank) for fits in tests)) if tests else None


def _fit(word: str, labels: Sequence[str]) -> Fits:
    if word in WORST_FIRST:
        return lambda record, point, index, host: record["state"] == word
    place = _PLACE.fullmatch(word)
    if place is not None and place[1] in labels and (place[2] or place[3]):
        dim, begin = labels.index(place[1]), int(place[2] or 0)
        end = (int(place[4]) if place[4] else float("inf")) if place[3] else begin + 1
        return lambda record, point, index, host: begin <= point[dim] < end
    ranks = _RANKS.fullmatch(word)
    if ranks is not None:
        first, last = int(ranks[1]), int(ranks[2] or ranks[1])
        return lambda record, point, index, host: first <= index <= last
    measured = _MEASURED.fullmatch(word)
    if measured is not None:
        what, limit = measured[1], float(measured[3]) * _SCALES[measured[4] or ""]
        if measured[2] == ">":
            return lambda record, point, index, host: _measure(record, what, -math.inf) > limit
        return lambda record, point, index, host: _measure(record, what, math.inf) < limit
    return lambda record, point, index, host: (
        word in host.lower()
        or word in str(record.get("endpoint", "")).lower()
        or word in str(record.get("detail", "")).lower()
    )


def _measure(record: Mapping[str, object], what: str, unknown: float) -> float:
    value = record.get(what)
    return value if isinstance(value, int | float) else unknown
