"""Regroups batches of any size into batches of a given size. Without I/O, and without copies if a batch lies in one
piece."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Column = Any  # an array, a tensor or a list
Batch = dict[str, Column]  # columns by name, of one length


def rows_of(batch: Mapping[str, Column]) -> int:
    """Returns the number of rows of a batch. Raises ValueError if its columns differ."""
    counts = {name: len(column) for name, column in batch.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the columns of a batch have one length, and not {counts}")
    return next(iter(counts.values()), 0)


def batches_of(source: Any) -> Iterator[Batch]:
    """Yields the batches of an object with the Arrow PyCapsule interface, or of an iterable of mappings of columns.

    A torch data set that yields single samples yields batches of one row.
    """
    if hasattr(source, "collect") and not hasattr(source, "__arrow_c_stream__"):
        if hasattr(source, "collect_batches"):
            for frame in source.collect_batches(lazy=True):  # may be larger than memory
                yield from batches_of(frame)
            return
        source = source.collect()  # a lazy frame of an older version, read as a whole
    if hasattr(source, "__arrow_c_stream__"):
        from monarch_nb.data.arrow import batches_of_stream

        yield from batches_of_stream(source)
        return
    for item in source:
        if isinstance(item, Mapping):
            yield {name: _column(value) for name, value in item.items()}
        elif isinstance(item, tuple | list):
            yield {str(index): _column(value) for index, value in enumerate(item)}
        else:
            yield {"0": _column(item)}


def _column(value: Any) -> Column:
    """Returns a column: single numbers and texts, and arrays without dimensions, become one row."""
    if isinstance(value, list):
        return value
    shape = getattr(value, "shape", None)
    if shape is None:
        return [value] if isinstance(value, str) else _array([value])
    return value if len(shape) else value.reshape(1)


def _array(values: list[object]) -> Column:
    import numpy as np

    return np.asarray(values)


class Rows:
    """Takes rows from batches of any size."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._partial: deque[tuple[Batch, int]] = deque()  # batches, and the rows already taken from them

    def skip(self, count: int) -> int:
        """Skips rows; returns the number of rows skipped."""
        return sum(size for _, _, size in self._pieces(count))

    def take(self, count: int) -> Batch | None:
        """Returns the next rows, fewer at the end; None after it."""
        pieces = [
            {name: column[start : start + size] for name, column in batch.items()}
            for batch, start, size in self._pieces(count)
        ]
        if len(pieces) < 2:
            return pieces[0] if pieces else None
        return {name: _joined([piece[name] for piece in pieces]) for name in pieces[0]}

    def _pieces(self, count: int) -> Iterator[tuple[Batch, int, int]]:
        while count:
            if not self._partial:
                batch = next(self._batches, None)
                if batch is None:
                    return
                self._partial.append((batch, 0))
                continue
            batch, start = self._partial.popleft()
            size = min(count, rows_of(batch) - start)
            if start + size < rows_of(batch):
                self._partial.appendleft((batch, start + size))
            if size:
                yield batch, start, size
            count -= size


def _joined(columns: list[Column]) -> Column:
    if isinstance(columns[0], list):
        return [value for column in columns for value in column]
    join: Callable[[list[Column]], Column]
    if type(columns[0]).__module__.startswith("torch"):
        import torch

        join = torch.cat
    else:
        import numpy as np

        join = np.concatenate
    return join(columns)
