"""What a process reports of its actors: only what has changed, and no flicker of calls shorter than the sampling."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from monarch_nb.runtime import EXEC
from monarch_nb.store.activity import ActorSample, _stack_text


class Cell:
    """An actor, as the reporter looks at it."""

    mesh, rank, incarnation, state, errors = "a1", 2, 0, "idle", 0

    def __init__(self) -> None:
        self.calls = 0
        self.running: Any = None

    def queued(self) -> list[None]:
        return []

    def run(self, endpoint: str, since: float) -> None:
        self.running = ("call", endpoint, since)
        self.calls += 1


def test_an_actor_is_reported_at_each_begin_and_end_only() -> None:
    cell, sample = Cell(), ActorSample(0, now=10.0)
    first = sample.take(cell, 10.1)
    assert first is not None
    assert (first.uid, first.rank, first.doing, first.endpoint) == ("a1", 2, "idle", "")
    assert sample.take(cell, 10.2) is None
    cell.run("step", 10.25)
    busy = sample.take(cell, 10.3)
    assert busy is not None
    assert (busy.doing, busy.endpoint, busy.calls) == ("busy", "step", 1)
    assert sample.take(cell, 10.4) is None
    cell.running = None
    idle = sample.take(cell, 10.5)
    assert idle is not None
    assert (idle.doing, idle.endpoint) == ("idle", "")


def test_a_constantly_answering_actor_is_busy_between_calls() -> None:
    cell, sample = Cell(), ActorSample(0, now=10.0)
    cell.run("step", 10.05)
    busy = sample.take(cell, 10.1)
    assert busy is not None
    assert busy.doing == "busy"
    for tenth in range(2, 9):  # at each look none runs, and one has run since the last
        cell.running = None
        cell.calls += 1
        assert sample.take(cell, 10 + tenth / 10) is None
    idle = sample.take(cell, 10.95)
    assert idle is not None
    assert idle.doing == "idle"


def test_counts_alone_are_worth_a_report_once_a_second() -> None:
    cell, sample = Cell(), ActorSample(0, now=10.0)
    assert sample.take(cell, 10.1) is not None
    cell.calls = 50  # all between two looks
    assert sample.take(cell, 10.5) is None
    report = sample.take(cell, 11.0)
    assert report is not None
    assert (report.doing, report.calls, report.rate) == ("idle", 50, 50.0)


def test_a_cell_and_a_reload_go_under_names_that_people_know() -> None:
    cell, sample = Cell(), ActorSample(0, now=10.0)
    cell.state = "starting"
    report = sample.take(cell, 10.1)
    assert report is not None
    assert report.doing == "starting"
    cell.state = "idle"
    cell.run(EXEC, 10.2)
    running = sample.take(cell, 10.3)
    assert running is not None
    assert running.endpoint == "cell"


def test_the_stacks_of_all_concurrent_endpoints_are_shown() -> None:
    async def napping() -> None:
        await asyncio.sleep(20)

    async def text_of_naps() -> str:
        naps = [asyncio.create_task(napping()) for _ in range(2)]
        await asyncio.sleep(0)
        runs = {str(number): (nap, (str(number), "nap", float(number))) for number, nap in enumerate(naps)}
        thread = SimpleNamespace(thread=threading.current_thread())
        spec = SimpleNamespace(name="naps", class_name="m.Napping")
        cell: Any = SimpleNamespace(spec=spec, executor=thread, running=None, constructing=None, async_runs=runs)
        try:
            return _stack_text(cell)
        finally:
            for nap in naps:
                nap.cancel()

    text = asyncio.run(text_of_naps())
    assert (text.count("naps (Napping): nap, for "), text.count("await asyncio.sleep(20)")) == (2, 2)
