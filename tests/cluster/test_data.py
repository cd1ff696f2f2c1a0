"""Feeds: ranks get their parts, none gets ahead, and a rank that died goes on where it was."""

import asyncio
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from monarch_nb.actor import Actor, ActorError, ProcMesh, endpoint, heal_mesh, this_host
from monarch_nb.data import Feed
from monarch_nb.data.feed import Rows, ServedFeed
from monarch_nb.runtime import unretrieved
from monarch_nb.wire import decode
from tests.cluster.actor_tools import Faults
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Reader(Actor):
    """Iterates."""

    @endpoint
    def rows(self, feed: Feed, limit: int = 10**9) -> list[list[int]]:
        rows: list[list[int]] = []
        for batch in feed:
            rows.append(batch["x"].tolist())
            if len(rows) == limit:
                break
        return rows

    @endpoint
    def sums(self, feed: Feed) -> tuple[int, float]:
        rows, total = 0, 0.0
        for batch in feed:
            rows += len(batch["x"])
            total += float(batch["x"].sum(dtype=np.float64))
        return rows, total

    @endpoint
    def memory_files(self, feed: Feed) -> list[tuple[int, int]]:
        """Device and inode of the file that each batch lies in."""
        files = []
        for batch in feed:
            address = batch["x"].__array_interface__["data"][0]
            for line in Path("/proc/self/maps").read_text().splitlines():
                span, _, _, device, inode, *_ = line.split()
                start, end = (int(part, 16) for part in span.split("-"))
                if start <= address < end:
                    files.append((int(device.replace(":", ""), 16), int(inode)))
        return files

    @endpoint
    def die_after(self, feed: Feed, count: int) -> None:
        for number, _ in enumerate(feed, 1):
            if number == count:
                os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def unread_errors(self, feed: Feed) -> list[BaseException]:
        """The errors of batches asked ahead that are reported, after the feed has failed."""
        errors: list[BaseException] = []
        report, unretrieved.report = unretrieved.report, lambda error, count: errors.append(error)
        with pytest.raises(ActorError):
            list(feed)
        unretrieved.close()
        unretrieved.report = report
        return errors

    @endpoint
    def own_feed(self, mesh: Any) -> Feed:
        """A loader: the source is in this process."""
        return feed_of(batches(40, 10), mesh, batch_size=5)


class AsyncReader(Actor):
    """Iterates in an async endpoint."""

    @endpoint
    async def rows(self, feed: Feed) -> list[list[int]]:
        return [batch["x"].tolist() async for batch in feed]


def batches(rows: int, size: int) -> Iterator[dict[str, Any]]:
    for start in range(0, rows, size):
        yield {"x": np.arange(start, min(start + size, rows))}


def feed_of(source: Any, mesh: Any, **options: Any) -> Feed:
    """A feed of NumPy arrays: most tests need no torch, which takes seconds to import."""
    return Feed(source, mesh, **{"arrays": "numpy", **options})


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs(per_host={"dp": 2, "tp": 2}, name="fed")
    yield mesh
    mesh.stop().get()


@pytest.fixture(scope="module")
def readers(procs: ProcMesh) -> Any:
    return procs.spawn("readers", Reader)


def test_each_part_goes_to_one_rank_and_all_rows_arrive_once(readers: Any) -> None:
    feed = feed_of(batches(103, 7), readers, batch_size=5)
    parts = list(readers.rows.call(feed).get(60).values())
    assert sorted(row for steps in parts for rows in steps for row in rows) == list(range(103))
    assert [steps[0] for steps in parts] == [list(range(5 * rank, 5 * rank + 5)) for rank in range(4)]
    assert repr(feed) == "<Feed, step 6 of 6; 103 rows done, 0.0 MB read, 0 steps held>"
    feed.stop()


def test_ranks_that_differ_in_other_dimensions_get_the_same(procs: ProcMesh, readers: Any) -> None:
    feed = feed_of(batches(40, 40), readers, batch_size=10, split="dp")
    mesh = procs.spawn("async_readers", AsyncReader)
    results = mesh.rows.call(feed).get(60)
    assert results.item(dp=0, tp=0) == results.item(dp=0, tp=1) == [list(range(10)), list(range(20, 30))]
    assert results.item(dp=1, tp=1) == [list(range(10, 20)), list(range(30, 40))]
    mesh.stop().get()


def test_the_source_is_read_no_faster_than_the_slowest_rank_goes(readers: Any) -> None:
    sizes: list[int] = []

    def counted() -> Iterator[dict[str, Any]]:
        for batch in batches(10_000, 4):
            sizes.append(len(batch["x"]))
            yield batch

    feed = feed_of(counted(), readers, batch_size=1, prefetch=3)
    assert [steps[:1] for steps in readers.rows.call(feed, 2).get(60).values()] == [[[0]], [[1]], [[2]], [[3]]]
    assert len(sizes) <= 2 + 3, "two steps were used, and three may be ahead"
    feed.stop()


@pytest.mark.slow
def test_the_controllers_memory_stays_bounded_however_long_the_stream(readers: Any) -> None:
    alive = most = 0

    def free(size: int) -> None:
        nonlocal alive
        alive -= size

    def stream() -> Iterator[dict[str, Any]]:
        nonlocal alive, most
        for number in range(300):
            column = np.full(250_000, number, np.float32)
            alive += column.nbytes
            weakref.finalize(column, free, column.nbytes)
            most = max(most, alive)
            yield {"x": column}

    process = psutil.Process()
    before, highest = process.memory_info().rss, 0
    feed = feed_of(stream(), readers, batch_size=100_000, split="dp", prefetch=3)
    results = readers.sums.call(feed)
    while not results.wait(0.02):
        highest = max(highest, process.memory_info().rss)
    rows, total = (sum(column) for column in zip(*results.get().values(), strict=True))
    assert (rows, total) == (2 * 300 * 250_000, 2 * 250_000 * sum(range(300))), "two ranks get each part"
    assert most <= 3_000_000, "batches of the source that are kept: the one that is read, and what is left of it"
    assert highest - before < 64e6, "the stream has 300 MB, and a step of it 0.8"
    feed.stop()


def test_ranks_that_share_a_part_are_sent_the_same_memory(procs: ProcMesh, readers: Any) -> None:
    feed = feed_of(batches(400_000, 100_000), readers, batch_size=200_000, split=[])
    files = readers.memory_files.call(feed).get(60).values()
    assert len({file for rank in files for file in rank}) == 2, "two steps, four ranks"
    feed.stop()


def test_ranks_waiting_for_a_feed_are_released_when_it_is_stopped(procs: ProcMesh) -> None:
    mesh = procs.spawn("async_readers", AsyncReader)
    feed = feed_of(batches(100, 10), mesh, batch_size=1)
    call = mesh.slice(dp=slice(0, 1), tp=slice(0, 1)).rows.call_one(feed)
    until(lambda: "2 steps held" in repr(feed))
    feed.stop()
    with pytest.raises(ActorError, match="this feed was stopped"):
        call.get(20)
    mesh.stop().get()


@pytest.mark.slow
def test_a_rank_that_dies_gets_its_part_again_after_the_heal(faults: Faults) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="mortal_procs")
    readers = procs.spawn("mortal_readers", Reader)
    feed = feed_of(batches(60, 9), readers, batch_size=5)
    steady = readers.slice(gpus=1).rows.call_one(feed)
    with pytest.raises(Exception, match="mortal"):
        readers.slice(gpus=0).die_after.call_one(feed, 3).get(60)
    assert not steady.done(), "the other rank waits for the one that is gone"
    assert faults.next().mesh_name == "mortal_readers"
    heal_mesh(readers)
    repeated = readers.slice(gpus=0).rows.call_one(feed).get(60)
    assert repeated[0] == list(range(20, 25)), "the batch during which it died comes again"
    assert len(repeated) == 4
    assert [row for rows in steady.get(60) for row in rows] == [
        row for start in range(5, 60, 10) for row in range(start, start + 5)
    ]
    feed.stop()
    procs.stop().get()


def test_a_feed_state_resumes_on_a_mesh_of_another_shape(readers: Any) -> None:
    feed = feed_of(batches(100, 13), readers, batch_size=5)
    readers.rows.call(feed, 2).get(60)
    state = feed.state_dict()
    assert state == {"rows": 20}, "the second batch was not done with"
    feed.stop()
    feed = feed_of(batches(100, 13), readers, batch_size=10, split="dp", state=state)
    results = readers.rows.call(feed).get(60)
    steps = zip(results.item(dp=0, tp=0), results.item(dp=1, tp=0), strict=True)
    assert [row for parts in steps for part in parts for row in part] == list(range(20, 100))
    assert feed.state_dict() == {"rows": 100}
    with pytest.raises(ValueError, match="it is another source"):
        feed_of(batches(5, 5), readers, batch_size=1, state=state)
    with pytest.raises(ValueError, match="-1 rows"):
        feed_of(batches(5, 5), readers, batch_size=1, state={"rows": -1})


@pytest.mark.parametrize("error", [OSError, CancelledError, asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_a_source_that_fails_fails_whoever_waits_with_its_words(readers: Any, error: type[BaseException]) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield {"x": np.arange(4)}
        raise error("the disk is gone")

    feed = feed_of(broken(), readers, batch_size=1)
    with pytest.raises(ActorError, match="the disk is gone"):
        readers.rows.call(feed).get(60)
    assert readers.unread_errors.call(feed).get(60).values() == [[]] * 4
    feed.stop()


def test_waiting_for_a_rank_that_never_comes_ends_and_names_it(procs: ProcMesh) -> None:
    mesh = procs.spawn("async_readers", AsyncReader)
    feed = feed_of(batches(100, 10), mesh, batch_size=1, patience=0.3)
    with pytest.raises(ActorError, match=r"has waited 0.3 s for rank 1, 2, 3, still at batch 0"):
        mesh.slice(dp=slice(0, 1), tp=slice(0, 1)).rows.call_one(feed).get(60)
    mesh.stop().get()


def test_a_rank_without_the_last_step_gets_all_steps_before_it() -> None:
    """The request for the last step may be answered before that for the step before."""

    async def serve() -> tuple[Any, Any, int]:
        rows = Rows(iter(batches(5, 5)))
        serving = ServedFeed(rows, ranks=2, parts=2, batch_size=2, ahead=2, drop_last=False, patience=20)
        await serving.finish(0, 2)  # part 0 is done
        both = [await serving.pull(part, step) for part, step in ((1, 1), (1, 0))]
        await serving.end(1)
        return both[0], both[1], serving.ledger.done[1]

    last, before, done = asyncio.run(serve())
    assert (last, done) == (None, 2)
    assert decode([bytes(frame) for frame in before.frames])["x"].tolist() == [2, 3]


def test_a_loader_actor_feeds_others(readers: Any) -> None:
    feed = readers.slice(dp=0, tp=0).own_feed.call_one(readers).get(60)
    results = readers.rows.call(feed).get(60)
    assert sorted(row for steps in results.values() for rows in steps for row in rows) == list(range(40))


def test_a_feed_is_for_its_mesh(readers: Any) -> None:
    with pytest.raises(ValueError, match="no dimension gpus; it has dp, tp"):
        feed_of(batches(5, 5), readers, batch_size=1, split="gpus")
    feed = feed_of(batches(5, 5), this_host().spawn_procs(name="one"), batch_size=5)
    with pytest.raises(ActorError, match="make the feed for the mesh that iterates"):
        readers.rows.call(feed).get(60)
    with pytest.raises(ValueError, match="make the feed for"):
        asyncio.run(anext(aiter(feed_of(batches(5, 5), readers, batch_size=5))))


def test_a_stopped_feed_says_so_and_no_feed_leaves_a_thread(readers: Any) -> None:
    feed = feed_of(batches(40, 10), readers, batch_size=5)
    feed.stop()
    with pytest.raises(ActorError, match="this feed was stopped"):
        readers.rows.call(feed).get(60)
    assert "was stopped" in repr(feed)
    threads = threading.active_count()
    for _ in range(20):
        readers.rows.call(feed_of(batches(8, 8), readers, batch_size=2)).get(60)
    assert threading.active_count() <= threads + 8, "they share the threads that read"
