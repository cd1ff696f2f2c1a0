"""Sharding of one dimension by the rule of torch.chunk, repeatedly."""

from collections.abc import Iterable

Span = tuple[int, int]  # from, to: half open
Spans = tuple[Span, ...]  # ascending and apart; empty where a rank has nothing


def length(spans: Iterable[Span]) -> int:
    """Total length of the spans."""
    return sum(stop - start for start, stop in spans)


def cut(spans: Spans, pieces: int, at: int, factor: int = 1) -> Spans:
    """Piece number `at` of so many, by the rule of PyTorch's Shard; with a `factor`, of its _StridedShard."""
    if factor == 1:
        return _chunk(spans, pieces, at)
    found: list[Span] = []
    for part in range(factor):
        found += _chunk(_chunk(spans, factor, part), pieces, at)
    return _joined(found)


def _chunk(spans: Spans, pieces: int, at: int) -> Spans:
    total = length(spans)
    size = -(-total // pieces)
    return _taken(spans, at * size, min((at + 1) * size, total))


def _taken(spans: Spans, first: int, last: int) -> Spans:
    """The sub-spans from index `first` to `last` in the concatenated spans."""
    found: list[Span] = []
    before = 0
    for start, stop in spans:
        begin, end = max(first - before, 0), min(last - before, stop - start)
        if begin < end:
            found.append((start + begin, start + end))
        before += stop - start
    return tuple(found)


def _joined(spans: Iterable[Span]) -> Spans:
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
