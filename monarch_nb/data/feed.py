"""`Feed`: batches of a source for the ranks of a mesh. They are regrouped, without copies if a batch lies in one
piece, and served by an actor in the process that has the source.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

from monarch_nb.mesh import this_proc
from monarch_nb.mesh.declare import Actor, concurrent_endpoint
from monarch_nb.mesh.handle import state_of
from monarch_nb.runtime import Future, Runtime, current_runtime, reported_elsewhere
from monarch_nb.shape import Extent, Point
from monarch_nb.wire import Encoded, encode

Column = Any  # an array, a tensor or a list
Batch = dict[str, Column]  # columns by name, of one length
Progress = tuple[list[int], int | None, int, int, int]
"""Steps done by each rank, total of steps (if known), steps held, rows done, bytes read."""

_PATIENCE_S = 600.0  # for which a step waits for a slow rank


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


class Step(NamedTuple):
    """Encoded rows of a step by part; None for a part without rows."""

    parts: list[Encoded | None]
    rows: int
    nbytes: int


class Ledger:
    """Holds steps until every rank has finished them, and limits the steps read ahead."""

    def __init__(self, ranks: int, ahead: int) -> None:
        self.done = [0] * ranks  # steps that each rank has finished
        self.ended: int | None = None  # the number of steps, once known
        self.rows = 0  # of the steps that all ranks have finished
        self._ahead = ahead
        self._steps: deque[Step] = deque()
        self._first = 0  # the number of the first step held

    @property
    def held(self) -> int:
        """Number of steps held."""
        return len(self._steps)

    @property
    def next(self) -> int:
        """Number of the next step to read."""
        return self._first + len(self._steps)

    @property
    def slowest(self) -> int:
        """Number of steps that all ranks have finished."""
        return min(self.done)

    def behind(self) -> list[int]:
        """Returns the slowest ranks."""
        return [rank for rank, done in enumerate(self.done) if done == self.slowest]

    def may_read(self) -> bool:
        """Returns whether another step may be read."""
        return self.ended is None and self.next < self.slowest + self._ahead

    def add(self, step: Step | None) -> None:
        """Adds the next step; None marks the end."""
        if step is None:
            self.ended = self.next
        else:
            self._steps.append(step)

    def finish(self, rank: int, steps: int) -> bool:
        """Records that a rank has finished its first `steps`; returns whether that makes room."""
        self.done[rank] = max(self.done[rank], steps)
        first = self._first
        while self._steps and self._first < self.slowest:
            self.rows += self._steps.popleft().rows
            self._first += 1
        return self._first > first

    def step(self, number: int) -> Step | None:
        """Returns a held step, or None before it is read. Raises LookupError after all ranks have finished it."""
        index = number - self._first
        if index < 0:
            raise LookupError(f"batch {number} is gone: all ranks were done with it")
        return self._steps[index] if index < len(self._steps) else None


class ServedFeed:
    """Serves one feed, which is read at most `ahead` steps before the slowest rank.

    A thread reads when there is room, and encodes each part into memory that messages send from. All requests for a
    part get the same memory, which is reused after all ranks have finished with it.
    """

    numbers = itertools.count()

    def __init__(
        self, rows: Rows, *, ranks: int, parts: int, batch_size: int, ahead: int, drop_last: bool, patience: float
    ) -> None:
        self._rows = rows
        self._parts, self._batch_size, self._drop_last = parts, batch_size, drop_last
        self._patience = patience
        self.ledger = Ledger(ranks, ahead)
        self._reading: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        self._changed = asyncio.Condition()
        self._bytes = 0

    async def pull(self, part: int, step: int) -> Encoded | None:
        """Waits for a part of a step; None after the last step."""
        while True:
            ready = self.ledger.step(step)
            if ready is not None:
                return ready.parts[part]  # None: the last step has no rows for this part
            if self.ledger.ended is not None and step >= self.ledger.ended:
                return None
            self._read_on()
            await self._wait(step)

    async def finish(self, rank: int, steps: int) -> None:
        """Records that a rank has finished its first `steps`."""
        if self.ledger.finish(rank, steps):
            if self._failed is None:
                self._read_on()
            async with self._changed:
                self._changed.notify_all()

    async def end(self, rank: int) -> None:
        """Records that a rank needs nothing more of the steps read so far."""
        await self.finish(rank, self.ledger.next)

    async def stop(self) -> None:
        """Fails waiting ranks; the source is released after the read in progress."""
        self._failed = LookupError("this feed was stopped")
        async with self._changed:
            self._changed.notify_all()

    def progress(self) -> Progress:
        """Returns the progress of the feed."""
        ledger = self.ledger
        return list(ledger.done), ledger.ended, ledger.held, ledger.rows, self._bytes

    def _read_on(self) -> None:
        """Starts to read the next step unless a read is in progress. Raises the error of the source."""
        if self._failed is not None:
            raise self._failed
        if self._reading is None and self.ledger.may_read():
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        runtime = current_runtime()
        try:
            while self.ledger.may_read() and self._failed is None:
                step = await asyncio.to_thread(self._next, runtime)
                self.ledger.add(step)
                if step is None:
                    self._rows = Rows(())  # releases the source
                else:
                    self._bytes += step.nbytes
                async with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            self._failed = error
        finally:
            self._reading = None
            async with self._changed:
                self._changed.notify_all()

    def _next(self, runtime: Runtime) -> Step | None:
        """Reads a step; None after the last. Runs on a thread of its own.

        Raises RuntimeError for an error of the source that asyncio would take for a request to the task that waits.
        """
        try:
            return self._encoded_step(runtime)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, CancelledError):
                raise
            raise RuntimeError(f"the source of the feed raised {type(error).__name__}: {error}") from error

    def _encoded_step(self, runtime: Runtime) -> Step | None:
        parts: list[Encoded | None] = []
        count = nbytes = 0
        for _ in range(self._parts):
            rows = self._rows.take(self._batch_size)
            if rows is None:
                parts.append(None)
                continue
            parts.append(Encoded(runtime.node.snapshot(encode(rows, runtime)).bodies))
            count += rows_of(rows)
            nbytes += sum(getattr(column, "nbytes", 0) for column in rows.values())
        if not count or (self._drop_last and count < self._parts * self._batch_size):
            return None
        return Step(parts, count, nbytes)

    async def _wait(self, step: int) -> None:
        async with self._changed:
            ledger = self.ledger
            if self._failed is not None or ledger.ended is not None or ledger.step(step) is not None:
                return
            try:
                await asyncio.wait_for(self._changed.wait(), self._patience)
            except TimeoutError:
                if self._reading is not None:
                    raise TimeoutError(
                        f"batch {step} has waited {self._patience:g} s for the source, which has not given it yet"
                    ) from None
                ranks = ", ".join(map(str, ledger.behind()))
                raise TimeoutError(
                    f"batch {step} has waited {self._patience:g} s for rank {ranks}, still at batch {ledger.slowest}: "
                    "it is slow, stopped or dead. Heal its mesh, and it goes on from there"
                ) from None


class FeedServer(Actor):
    """Serves all feeds of this process. Feeds add themselves to `open`, since a source cannot be sent."""

    open: ClassVar[dict[int, ServedFeed]] = {}  # of the process

    @concurrent_endpoint
    async def begin(self, feed: int, rank: int) -> int:
        """Returns the step at which a rank continues."""
        return self._of(feed).ledger.done[rank]

    @concurrent_endpoint
    async def pull(self, feed: int, rank: int, part: int, step: int, done: int) -> Encoded | None:
        """Waits for a rank's batch of a step; None after the last. `done` steps are no longer needed."""
        serving = self._of(feed)
        await serving.finish(rank, done)
        return await serving.pull(part, step)

    @concurrent_endpoint
    async def finish(self, feed: int, rank: int) -> None:
        """Records that a rank has received its last batch."""
        await self._of(feed).end(rank)

    @concurrent_endpoint
    async def progress(self, feed: int) -> Progress:
        """Returns the progress of a feed."""
        return self._of(feed).progress()

    @concurrent_endpoint
    async def close(self, feed: int) -> None:
        """Stops a feed."""
        serving = self.open.pop(feed, None)
        if serving is not None:
            await serving.stop()

    def _of(self, feed: int) -> ServedFeed:
        serving = self.open.get(feed)
        if serving is None:
            raise LookupError("this feed was stopped")
        return serving


_servers: "WeakKeyDictionary[Runtime, Any]" = WeakKeyDictionary()


def server() -> FeedServer:
    """Returns the server of this process."""
    runtime = current_runtime()
    handle = _servers.get(runtime)
    if handle is None or state_of(handle).stopped:  # the user may have stopped the actor
        handle = _servers[runtime] = this_proc().spawn("feeds", FeedServer)
    actor: FeedServer = handle
    return actor


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
        self._before = int((state or {}).get("rows", 0))
        if self._before < 0:
            raise ValueError(f"the state has {self._before} rows: it is none of a feed")
        self._extent: Extent = mesh.extent
        labels = self._extent.labels
        self._split = tuple(labels) if split is None else (split,) if isinstance(split, str) else tuple(split)
        unknown = [name for name in self._split if name not in labels]
        if unknown:
            raise ValueError(f"the mesh has no dimension {unknown[0]}; it has {', '.join(labels) or 'none'}")
        self._prefetch, self._arrays = prefetch, arrays
        rows = Rows(batches_of(source))
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
        reported_elsewhere(future)  # of batches asked ahead, whoever iterates needs no error
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
