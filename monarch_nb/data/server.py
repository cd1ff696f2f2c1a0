"""The actor that hands out the batches of feeds, in the process that has their sources."""

import asyncio
import itertools
from collections import deque
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from monarch_nb.data.rows import Rows, rows_of
from monarch_nb.mesh import this_proc
from monarch_nb.mesh.declare import Actor, concurrent_endpoint
from monarch_nb.mesh.handle import state_of
from monarch_nb.runtime import Runtime, runtime
from monarch_nb.wire import Encoded, encode

__all__ = ["FeedServer", "Progress", "Serving", "server"]

Progress = tuple[list[int], int | None, int, int, int]
"""How far the ranks are, how many steps there are (if known), how many are held, rows done, bytes read."""


class Step(NamedTuple):
    """What there is for each part: its rows as they travel, None for none."""

    parts: list[Encoded | None]
    rows: int
    nbytes: int


class Ledger:
    """A step is held until every rank is done with it, and few are held ahead."""

    def __init__(self, ranks: int, ahead: int) -> None:
        self.done = [0] * ranks  # by rank: steps that it is done with
        self.ended: int | None = None  # how many steps there are, once that is known
        self._ahead = ahead
        self._held: deque[Any] = deque()
        self._first = 0  # the number of the first that is held

    @property
    def held(self) -> int:
        """How many steps are."""
        return len(self._held)

    @property
    def next(self) -> int:
        """The number of the step that is read next."""
        return self._first + len(self._held)

    @property
    def slowest(self) -> int:
        """How many steps all ranks are done with."""
        return min(self.done)

    def behind(self) -> list[int]:
        """The ranks that hold up the others."""
        return [rank for rank, done in enumerate(self.done) if done == self.slowest]

    def may_read(self) -> bool:
        """Whether there is room for another step."""
        return self.ended is None and self.next < self.slowest + self._ahead

    def add(self, step: Any | None) -> None:
        """The next step was read; None: there is none."""
        if step is None:
            self.ended = self.next
        else:
            self._held.append(step)

    def finish(self, rank: int, steps: int) -> bool:
        """A rank is done with its first `steps`; whether that makes room."""
        self.done[rank] = max(self.done[rank], steps)
        first = self._first
        while self._held and self._first < self.slowest:
            self._held.popleft()
            self._first += 1
        return self._first > first

    def step(self, number: int) -> Any:
        """A step that is held; None if it is still to be read. Raises LookupError for one that is gone."""
        place = number - self._first
        if place < 0:
            raise LookupError(f"batch {number} is gone: all ranks were done with it")
        return self._held[place] if place < len(self._held) else None


class Serving:
    """One feed: reads no more than `ahead` steps before the slowest rank.

    A thread reads as soon as there is room, and puts each part where messages take it from: what all ranks are done
    with is filled again, and whoever gets the same part, or asks again, gets the same memory.
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
        """A part of a step, once it is there; None after the last."""
        while True:
            held: Step | None = self.ledger.step(step)
            if held is not None:
                return held.parts[part]  # None: the last step has nothing for this part
            if self.ledger.ended is not None and step >= self.ledger.ended:
                return None
            self._read_on()
            await self._wait(step)

    async def finish(self, rank: int, steps: int) -> None:
        """A rank needs its first batches no more."""
        if self.ledger.finish(rank, steps):
            if self._failed is None:
                self._read_on()
            async with self._changed:
                self._changed.notify_all()

    async def end(self, rank: int) -> None:
        """There is nothing more for a rank in what was read."""
        await self.finish(rank, self.ledger.next)

    async def stop(self) -> None:
        """Whoever waits is told; the source is let go once what is being read has come."""
        self._failed = LookupError("this feed was stopped")
        async with self._changed:
            self._changed.notify_all()

    def progress(self) -> Progress:
        """How far it is."""
        ledger = self.ledger
        return list(ledger.done), ledger.ended, ledger.held, sum(self._rows_of_steps[: ledger.slowest]), self._bytes

    def _read_on(self) -> None:
        """Has the next step read, unless that is under way. Raises what the source has raised."""
        if self._failed is not None:
            raise self._failed
        if self._reading is None and self.ledger.may_read():
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        engine = runtime()
        try:
            while self.ledger.may_read() and self._failed is None:
                step = await asyncio.to_thread(self._next, engine)
                self.ledger.add(step)
                if step is None:
                    self._rows = Rows(())  # the source is let go
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

    def _next(self, engine: Runtime) -> Step | None:
        """Reads a step; None after the last. On a thread of its own."""
        parts: list[Encoded | None] = []
        count = nbytes = 0
        for _ in range(self._parts):
            rows = self._rows.take(self._batch_size)
            if rows is None:
                parts.append(None)
                continue
            parts.append(Encoded(engine.node.snapshot(encode(rows, engine)).bodies))
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
    """All feeds whose sources are in this process. Feeds are put into `open` there, for a source cannot travel."""

    open: "dict[int, Serving]" = {}  # noqa: RUF012  # of the process

    @concurrent_endpoint
    async def begin(self, feed: int, rank: int) -> int:
        """The step that a rank goes on with."""
        return self._of(feed).ledger.done[rank]

    @concurrent_endpoint
    async def pull(self, feed: int, rank: int, part: int, step: int, done: int) -> Encoded | None:
        """A rank's batch of a step, once it is there; None after the last. `done` is what it needs no more."""
        serving = self._of(feed)
        await serving.finish(rank, done)
        return await serving.pull(part, step)

    @concurrent_endpoint
    async def finish(self, feed: int, rank: int) -> None:
        """A rank has had its last batch, and needs none any more."""
        await self._of(feed).end(rank)

    @concurrent_endpoint
    async def progress(self, feed: int) -> Progress:
        """How far a feed is."""
        return self._of(feed).progress()

    @concurrent_endpoint
    async def close(self, feed: int) -> None:
        """Lets go of a feed."""
        serving = self.open.pop(feed, None)
        if serving is not None:
            await serving.stop()

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
