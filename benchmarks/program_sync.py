"""Uses of the data plane: weights that many pull, rows that are fed, state dicts and bulk as arguments."""

import io
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars
import psutil
import torch
from measure import Plan, figure, leave, plan_of, repeat

from monarch.actor import Actor, endpoint, this_host
from monarch.data import Feed
from monarch.rdma import ParameterSource, ParameterStore

GENERATORS = 4
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


class Learner(Actor):
    """Publishes its parameters once, and takes steps."""

    @endpoint
    def publish(self, size: int) -> ParameterSource:
        self.store = ParameterStore({"w": torch.ones(size // 4)})
        self.store.publish()
        return self.store.source

    @endpoint
    def steps(self, count: int) -> float:
        """Seconds of the quickest third of so many steps, each."""
        matrix = torch.randn(256, 256)
        seconds = repeat(count, lambda: torch.mm(matrix, matrix), warm=5)
        return sum(sorted(seconds)[: count // 3]) / (count // 3)


class Generator(Actor):
    """Pulls them."""

    @endpoint
    def pull(self, source: ParameterSource, size: int, count: int) -> tuple[float, float]:
        """Seconds of a copy of as much memory in this process, and of a pull: the best of each."""
        local, target = torch.ones(size // 4), torch.zeros(size // 4)
        copies = repeat(count, lambda: target.copy_(local), warm=1)
        return min(copies), min(repeat(count, lambda: source.pull({"w": target}).get(), warm=1))


class Sink(Actor):
    """Takes bulk arguments."""

    @endpoint
    def take(self, value: Any) -> int:
        return len(value)

    @endpoint
    def rows(self, feed: Feed) -> int:
        return sum(read(batch) for batch in feed)


def read(batch: Mapping[str, Any]) -> int:
    """Uses all of a batch; how many rows it has."""
    columns = [torch.as_tensor(column) for column in batch.values()]
    return len(columns[0]) if all(column.sum() >= 0 for column in columns) else 0


def query(folder: str, rows: int) -> polars.LazyFrame:
    """A query on a file of 16 columns of numbers."""
    path = f"{folder}/{rows}.parquet"
    random = np.random.default_rng(0)
    polars.DataFrame({f"x{column}": random.random(rows, dtype=np.float32) for column in range(16)}).write_parquet(path)
    return polars.scan_parquet(path).filter(polars.col("x0") >= 0)


def weights(plan: Plan, procs: Any) -> None:
    size = plan.big * 25_600_000  # a quarter of a gigabyte
    learner = procs.slice(gpus=0).spawn("learner", Learner)
    generators = procs.slice(gpus=slice(1, 1 + GENERATORS)).spawn("generators", Generator)
    source = learner.publish.call_one(size).get()
    pulls = list(generators.pull.call(source, size, 3).get().values())
    copies, seconds = (sum(column) / GENERATORS for column in zip(*pulls, strict=True))
    figure("sync: weights", value=size / 1e9 / seconds, part=copies / seconds)
    baseline = learner.steps.call_one(300).get()
    under_way = generators.slice(gpus=0).pull.call_one(source, size, 30)
    busy = learner.steps.call_one(300).get()
    under_way.get()
    figure("sync: learner's step", above=100 * (busy / baseline - 1))


def feeding(plan: Plan, procs: Any) -> None:
    folder = tempfile.mkdtemp()
    sinks = procs.slice(gpus=slice(1, 1 + GENERATORS)).spawn("sinks", Sink)
    sinks.rows.call(Feed(query(folder, 16), sinks, batch_size=1)).get()
    rows = plan.big * 400_000
    source = query(folder, rows)
    began = time.perf_counter()
    total = sum(
        read({name: frame[name].to_numpy() for name in frame.columns}) for frame in source.collect_batches(lazy=True)
    )
    alone = time.perf_counter() - began
    process = psutil.Process()
    before, most, over = process.memory_info().rss, 0, threading.Event()

    def poll() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, process.memory_info().rss)

    poller = threading.Thread(target=poll)
    poller.start()
    began = time.perf_counter()
    fed = sinks.rows.call(Feed(source, sinks, batch_size=32_768)).get()
    seconds = time.perf_counter() - began
    over.set()
    poller.join()
    shutil.rmtree(folder)
    assert sum(fed.values()) == total == rows
    figure("sync: feed", value=rows * 64 / 1e9 / seconds, part=alone / seconds)
    figure("sync: feed, controller", grown=max(0, most - before) / 1e6)


def arguments(plan: Plan, procs: Any) -> None:
    sink = procs.slice(gpus=0).spawn("sink", Sink)
    state = {str(number): torch.randn(4096) for number in range(200)}

    def saved() -> None:
        into = io.BytesIO()
        torch.save(state, into)
        into.seek(0)
        torch.load(into)

    theirs = min(repeat(20, saved, warm=2))
    ours = min(repeat(20, lambda: sink.take.call_one(state).get(), warm=2))
    figure("sync: state dict", part=theirs / ours)
    bulk = np.ones(64_000_000, np.uint8)
    process = psutil.Process()
    for _ in range(5):
        sink.take.call_one(bulk).get()
    before, files = process.memory_info().rss, process.num_fds()
    for _ in range(10 * plan.big):
        sink.take.call_one(bulk).get()
    figure("sync: bulk", grown=(process.memory_info().rss - before) / 1e6, files=process.num_fds() - files)


def sync(plan: Plan) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    procs = this_host().spawn_procs(per_host={"gpus": 1 + GENERATORS})
    weights(plan, procs)
    feeding(plan, procs)
    arguments(plan, procs)


if __name__ == "__main__":
    try:
        sync(plan_of(sys.argv))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()
