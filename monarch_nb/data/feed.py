"""`Feed`: batches of a source for the ranks of a mesh."""

from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

from monarch_nb.data.rows import Batch, Rows, batches_of
from monarch_nb.data.server import FeedServer, Progress, ServedFeed, server
from monarch_nb.runtime import Future, current_runtime
from monarch_nb.shape import Extent, Point

_PATIENCE_S = 600.0


class Feed:
    """The batches of a source, for the ranks of a mesh: send it to them, and have each iterate over it, once.

    `source` is anything with the Arrow PyCapsule interface (a Polars frame, a DuckDB relation, a pyarrow table or
    reader), or an iterable of mappings of columns, such as a torch IterableDataset. It is read in this process, at most
    `prefetch` steps ahead of the slowest rank.

    Each step has `batch_size` rows for every part; there is a part for each coordinate along `split` (dimensions of the
    mesh; by default all of them), and ranks that differ only in other dimensions get the same part. The last step may
    have fewer rows, and none for the last parts; `drop_last` leaves it out, so that all ranks have equally many.
    `state` continues where `state_dict()` was taken.

    A rank gets dicts of tensors, or of NumPy arrays with `arrays`, and lists for texts. A rank that is healed, or
    iterates again, continues with the first batch that it has not finished. Waiting for a slow rank ends with
    TimeoutError after `patience` seconds.
    """

    def __init__(
        self,
        source: Any,
        mesh: Any,
        *,
        batch_size: int,
        split: str | Sequence[str] | None = None,
        prefetch: int = 2,
        drop_last: bool = False,
        state: Mapping[str, int] | None = None,
        arrays: Literal["torch", "numpy"] = "torch",
        patience: float = _PATIENCE_S,
    ) -> None:
        if arrays not in ("torch", "numpy"):
            raise ValueError(f"arrays is torch or numpy, not {arrays!r}")
        if batch_size < 1 or prefetch < 1:
            raise ValueError("batch_size and prefetch are at least 1")
        self._extent: Extent = mesh.extent
        labels = self._extent.labels
        self._split = tuple(labels) if split is None else (split,) if isinstance(split, str) else tuple(split)
        unknown = [name for name in self._split if name not in labels]
        if unknown:
            raise ValueError(f"the mesh has no dimension {unknown[0]}; it has {', '.join(labels) or 'none'}")
        self._prefetch, self._arrays = prefetch, arrays
        rows = Rows(batches_of(source))
        self._before = int((state or {}).get("rows", 0))
        if rows.skip(self._before) < self._before:
            raise ValueError(f"the state is of {self._before:,} rows, and the source has fewer: it is another source")
        parts = prod(self._extent[name] for name in self._split) if self._split else 1
        self._number = next(ServedFeed.numbers)
        self._server = server()
        FeedServer.open[self._number] = ServedFeed(
            rows,
            ranks=self._extent.nelements,
            parts=parts,
            batch_size=batch_size,
            ahead=prefetch,
            drop_last=drop_last,
            patience=patience,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the batches of this rank. Blocks for the next batch."""
        rank, part = self._mine()
        step = self._server.begin.call_one(self._number, rank).get()
        pending = deque(self._ask(rank, part, number, step) for number in range(step, step + self._prefetch))
        while (batch := pending.popleft().get()) is not None:
            yield _tensors(batch) if self._arrays == "torch" else batch
            step += 1
            pending.append(self._ask(rank, part, step + self._prefetch - 1, step))
        self._server.finish.call_one(self._number, rank).get()

    async def __aiter__(self) -> AsyncIterator[Batch]:
        """As `__iter__`, without blocking the event loop of an actor."""
        rank, part = self._mine()
        step = await self._server.begin.call_one(self._number, rank)
        pending = deque(self._ask(rank, part, number, step) for number in range(step, step + self._prefetch))
        while (batch := await pending.popleft()) is not None:
            yield _tensors(batch) if self._arrays == "torch" else batch
            step += 1
            pending.append(self._ask(rank, part, step + self._prefetch - 1, step))
        await self._server.finish.call_one(self._number, rank)

    def state_dict(self) -> dict[str, int]:
        """Returns the value for `state=`: the number of rows that all ranks have finished. Blocks briefly."""
        return {"rows": self._before + self._progress()[3]}

    def stop(self) -> None:
        """Stops the feed and releases its source; ranks that iterate over it fail."""
        self._server.close.call_one(self._number).get()

    def __repr__(self) -> str:
        try:
            done, ended, held, rows, size = self._progress()
        except Exception as error:
            return f"<Feed, which is not to be reached: {error}>"
        steps = f"{min(done)}" if min(done) == max(done) else f"{min(done)} to {max(done)}"
        of = "" if ended is None else f" of {ended}"
        return (
            f"<Feed, step {steps}{of}; {rows + self._before:,} rows done, {size / 1e6:,.1f} MB read, {held} steps held>"
        )

    def _progress(self) -> Progress:
        return self._server.progress.call_one(self._number).get()

    def _ask(self, rank: int, part: int, step: int, done: int) -> Future[Batch | None]:
        pull: Any = self._server.pull  # typed as encoded; arrives decoded
        future: Future[Batch | None] = pull.call_one(self._number, rank, part, step, done)
        return future

    def _mine(self) -> tuple[int, int]:
        """Returns the rank and part of the calling actor."""
        context = current_runtime().context()
        point = next((p for p in (context.message_rank, context.actor_instance.rank) if p.extent == self._extent), None)
        if point is None:
            raise ValueError(
                f"this feed is for a mesh of {dict(self._extent)}, and this actor is one of "
                f"{dict(context.message_rank.extent)}: make the feed for the mesh that iterates over it"
            )
        return point.rank, _part(point, self._split)


def _part(point: Point, split: Sequence[str]) -> int:
    part = 0
    for name in split:
        part = part * point.extent[name] + point[name]
    return part


def _tensors(batch: Batch) -> Batch:
    import torch

    return {
        name: column
        if isinstance(column, list | torch.Tensor)
        else torch.as_tensor(column if column.flags.writeable else column.copy())  # small batches arrive read-only
        for name, column in batch.items()
    }
