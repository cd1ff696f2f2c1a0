"""The actor that serves the batches of feeds, in the process that has their sources."""

import asyncio
import itertools
from collections import deque
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from monarch_nb.data.rows import Rows, rows_of
from monarch_nb.mesh import this_proc
from monarch_nb.mesh.declare import Actor, concurrent_endpoint
from monarch_nb.mesh.handle import state_of
from monarch_nb.runtime import Runtime, current_runtime
from monarch_nb.wire import Encoded, encode

Progress = tuple[list[int], int | None, int, int, int]
"""Steps done by each rank, total of steps (if known), steps held, rows done, bytes read."""


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
            self._steps.popleft()
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
        self._rows_of_steps: list[int] = []
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
        return list(ledger.done), ledger.ended, ledger.held, sum(self._rows_of_steps[: ledger.slowest]), self._bytes

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
                    self._rows_of_steps.append(step.rows)
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
        """Reads a step; None after the last. Runs on a thread of its own."""
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
