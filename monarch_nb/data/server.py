"""The actor that hands out the batches of feeds, in the process that has their sources."""

import asyncio
import itertools
from typing import Any, cast
from weakref import WeakKeyDictionary

from monarch_nb.data.ledger import Ledger
from monarch_nb.data.rows import Batch, Rows, rows_of
from monarch_nb.mesh import this_proc
from monarch_nb.mesh.declare import Actor, concurrent_endpoint
from monarch_nb.mesh.handle import state_of
from monarch_nb.runtime import Runtime, runtime

__all__ = ["FeedServer", "Progress", "Serving", "server"]

Progress = tuple[list[int], int | None, int, int, int]
"""How far the ranks are, how many steps there are (if known), how many are held, rows done, bytes read."""


class Serving:
    """One feed: reads no more than `ahead` steps before the slowest rank."""

    numbers = itertools.count()

    def __init__(
        self, rows: Rows, *, ranks: int, parts: int, batch_size: int, ahead: int, drop_last: bool, patience: float
    ) -> None:
        self._rows = rows
        self._parts, self._batch_size, self._drop_last = parts, batch_size, drop_last
        self._patience = patience
        self.ledger = Ledger(ranks, ahead)
        self._reading = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._rows_of_steps: list[int] = []
        self._bytes = 0

    async def pull(self, rank: int, part: int, step: int) -> Batch | None:
        """A rank's part of a step, once it is there; None after the last."""
        while True:
            batch: Batch | None = self.ledger.part(step, part)
            if batch is not None:
                if rows_of(batch):
                    return batch
                await self.finish(rank, step + 1)  # the last step has nothing for this part
                return None
            if self.ledger.ended is not None and step >= self.ledger.ended:
                return None
            if self.ledger.may_read():
                await self._read()
            else:
                await self._wait(step)

    async def finish(self, rank: int, steps: int) -> None:
        """A rank needs its first batches no more."""
        if self.ledger.finish(rank, steps):
            async with self._changed:
                self._changed.notify_all()

    def progress(self) -> Progress:
        """How far it is."""
        ledger = self.ledger
        return list(ledger.done), ledger.ended, ledger.held, sum(self._rows_of_steps[: ledger.slowest]), self._bytes

    async def _read(self) -> None:
        async with self._reading:
            if not self.ledger.may_read():
                return
            rows = await asyncio.to_thread(self._rows.take, self._parts * self._batch_size)
            count = rows_of(rows) if rows is not None else 0
            if rows is None or (self._drop_last and count < self._parts * self._batch_size):
                self.ledger.add(None)
                self._rows = Rows(())  # the source is let go
            else:
                step = [_slice(rows, part * self._batch_size, self._batch_size) for part in range(self._parts)]
                self.ledger.add(step)
                self._rows_of_steps.append(count)
                self._bytes += sum(getattr(column, "nbytes", 0) for column in rows.values())
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, step: int) -> None:
        async with self._changed:
            ledger = self.ledger
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


class FeedServer(Actor):
    """All feeds whose sources are in this process. Feeds are put into `open` there, for a source cannot travel."""

    open: "dict[int, Serving]" = {}  # noqa: RUF012  # of the process

    @concurrent_endpoint
    async def begin(self, feed: int, rank: int) -> int:
        """The step that a rank goes on with."""
        return self._of(feed).ledger.done[rank]

    @concurrent_endpoint
    async def pull(self, feed: int, rank: int, part: int, step: int, done: int) -> Batch | None:
        """A rank's batch of a step, once it is there; None after the last. `done` is what it needs no more."""
        serving = self._of(feed)
        await serving.finish(rank, done)
        return await serving.pull(rank, part, step)

    @concurrent_endpoint
    async def finish(self, feed: int, rank: int, done: int) -> None:
        """A rank needs its first `done` batches no more."""
        await self._of(feed).finish(rank, done)

    @concurrent_endpoint
    async def progress(self, feed: int) -> Progress:
        """How far a feed is."""
        return self._of(feed).progress()

    @concurrent_endpoint
    async def close(self, feed: int) -> None:
        """Lets go of a feed."""
        self.open.pop(feed, None)

    def _of(self, feed: int) -> Serving:
        serving = self.open.get(feed)
        if serving is None:
            raise LookupError("this feed was stopped")
        return serving


_servers: "WeakKeyDictionary[Runtime, Any]" = WeakKeyDictionary()


def server() -> Any:
    """The server of this process."""
    engine = runtime()
    found = _servers.get(engine)
    if found is None or state_of(found).stopped:  # by hand, as all of a notebook is
        found = _servers[engine] = this_proc().spawn("feeds", cast("Any", FeedServer))
    return found


def _slice(rows: Batch, start: int, size: int) -> Batch:
    return {name: column[start : start + size] for name, column in rows.items()}
