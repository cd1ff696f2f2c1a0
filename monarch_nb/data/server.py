"""The actor that reads a source and hands out its batches, in the process that has the source."""

import asyncio
import itertools

from monarch_nb.data.ledger import Ledger
from monarch_nb.data.rows import Batch, Rows, rows_of
from monarch_nb.mesh.declare import Actor, concurrent_endpoint

__all__ = ["FeedServer", "lend"]

_lent: dict[int, Rows] = {}  # sources cannot travel; the server runs in the process that has them
_numbers = itertools.count()


def lend(rows: Rows) -> int:
    """Lays rows by for a server of this process."""
    number = next(_numbers)
    _lent[number] = rows
    return number


class FeedServer(Actor):
    """Reads no more than `ahead` steps before the slowest rank."""

    def __init__(
        self, source: int, ranks: int, parts: int, batch_size: int, ahead: int, drop_last: bool, patience: float
    ) -> None:
        self._rows = _lent.pop(source)
        self._parts, self._batch_size, self._drop_last = parts, batch_size, drop_last
        self._patience = patience
        self._ledger = Ledger(ranks, ahead)
        self._reading = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._rows_of_steps: list[int] = []
        self._bytes = 0

    @concurrent_endpoint
    async def begin(self, rank: int) -> int:
        """The step that a rank goes on with."""
        return self._ledger.done[rank]

    @concurrent_endpoint
    async def pull(self, rank: int, part: int, step: int, done: int) -> Batch | None:
        """A rank's batch of a step, once it is there; None after the last. `done` is what it needs no more."""
        await self._finish(rank, done)
        while True:
            batch = self._ledger.part(step, part)
            if batch is not None:
                return batch if rows_of(batch) else None
            if self._ledger.ended is not None and step >= self._ledger.ended:
                return None
            if self._ledger.may_read():
                await self._read()
            else:
                await self._wait(step)

    @concurrent_endpoint
    async def finish(self, rank: int, done: int) -> None:
        """A rank needs its first `done` batches no more."""
        await self._finish(rank, done)

    @concurrent_endpoint
    async def progress(self) -> tuple[list[int], int | None, int, int, int]:
        """How far the ranks are, how many steps there are (if known), how many are held, rows done, bytes read."""
        ledger = self._ledger
        return list(ledger.done), ledger.ended, ledger.held, sum(self._rows_of_steps[: ledger.slowest]), self._bytes

    async def _finish(self, rank: int, done: int) -> None:
        if self._ledger.finish(rank, done):
            async with self._changed:
                self._changed.notify_all()

    async def _read(self) -> None:
        async with self._reading:
            if not self._ledger.may_read():
                return
            rows = await asyncio.to_thread(self._rows.take, self._parts * self._batch_size)
            count = rows_of(rows) if rows is not None else 0
            if rows is None or (self._drop_last and count < self._parts * self._batch_size):
                self._ledger.add(None)
            else:
                step = [_slice(rows, part * self._batch_size, self._batch_size) for part in range(self._parts)]
                self._ledger.add(step)
                self._rows_of_steps.append(count)
                self._bytes += sum(getattr(column, "nbytes", 0) for column in rows.values())
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, step: int) -> None:
        async with self._changed:
            ledger = self._ledger
            if ledger.may_read() or ledger.ended is not None or ledger.part(step, 0) is not None:
                return
            try:
                await asyncio.wait_for(self._changed.wait(), self._patience)
            except TimeoutError:
                ranks = ", ".join(map(str, ledger.behind()))
                raise TimeoutError(
                    f"batch {step} has waited {self._patience:g} s for rank {ranks}, still at batch {ledger.slowest}: "
                    "it is slow, stopped or dead. Heal its mesh, and it goes on from there"
                ) from None


def _slice(rows: Batch, start: int, size: int) -> Batch:
    return {name: column[start : start + size] for name, column in rows.items()}
