"""`monarch.timeline` on real processes: both ends of calls, spans, an error, a death and its heal."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_nb as monarch
from monarch_nb.actor import Actor, ActorError, SupervisionError, current_rank, endpoint, run_on
from monarch_nb.profiling import Timeline
from monarch_nb.runtime import current_runtime
from monarch_nb.telemetry import span
from tests.cluster.actor_tools import SECONDS, Faults, spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)
RANKS, SLOW = 3, 1


class Trainer(Actor):
    @endpoint
    def step(self, seconds: float) -> None:
        with span("load"):
            time.sleep(3 * seconds if current_rank().rank == SLOW else seconds)

    @endpoint
    def bad(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    def ping(self) -> None:
        """Does nothing."""

    @endpoint
    def die(self) -> None:
        if current_rank().rank == SLOW:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def records(self) -> tuple[bool, list[str]]:
        threads = [thread.name for thread in threading.enumerate()]
        return current_runtime().recorder is not None, threads


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    yield from spawned(RANKS, "recorded")


@pytest.fixture(scope="module")
def trainers(procs: Any) -> Any:
    mesh = procs.spawn("trainers", Trainer)
    mesh.step.call(0.0).get(SECONDS)
    return mesh


def names(timeline: Timeline, rank: int, kind: str = "call") -> list[str]:
    return [entry.name for entry in timeline.spans(rank) if entry.kind == kind]


def test_calls_have_both_ends_their_line_and_spans_inside(trainers: Any) -> None:
    with monarch.timeline(trainers) as timeline:
        trainers.step.call(0.2).get(SECONDS)
    (call,) = timeline.calls
    assert (call.title, call.size, os.path.basename(call.file)) == ("trainers.step", RANKS, "test_timeline.py")
    for rank in range(RANKS):
        # The call before may be there too: a rank answers a moment before it has left the endpoint.
        (execution,) = (entry for entry in timeline.spans(rank) if entry.call == call.call)
        assert (execution.kind, execution.name) == ("call", "step")
        assert call.began <= execution.began + 0.01 <= execution.ended <= call.ended + 0.02
        assert names(timeline, rank, "span") == ["load"]
    assert timeline.groups == [(0, 2), (SLOW,)]
    assert timeline.ends([call.call])[call.call].slowest == SLOW
    assert "trainers.step  test_timeline.py:" in repr(timeline)
    assert not timeline.notes


def test_nothing_is_recorded_before_and_after(trainers: Any) -> None:
    assert current_runtime().recorder is None
    timeline = monarch.timeline(trainers).wait()
    assert current_runtime().recorder is not None
    assert all(on for _, (on, _) in trainers.records.call().get(SECONDS).items())
    timeline.stop().stop()
    assert current_runtime().recorder is None
    off = [(on, "monarch-timeline" in threads) for _, (on, threads) in trainers.records.call().get(SECONDS).items()]
    assert {on for on, _ in off} == {False}
    assert "ping" not in names(timeline, 0)


def test_a_timeline_that_nobody_holds_ends_by_itself(trainers: Any) -> None:
    timeline = monarch.timeline(trainers).wait()
    del timeline
    until(lambda: not any(on for _, (on, _) in trainers.records.call().get(SECONDS).items()))


def test_an_error_is_marked_where_it_was_raised(trainers: Any) -> None:
    with monarch.timeline(trainers) as timeline:
        with pytest.raises(ActorError):
            trainers.bad.call().get(SECONDS)
        trainers.ping.call().get(SECONDS)
    spans = [(entry.name, entry.failed) for entry in timeline.spans(0) if entry.name in ("bad", "ping")]
    assert spans[-2:] == [("bad", True), ("ping", False)]


def test_a_slice_has_the_rows_of_its_ranks_alone(trainers: Any) -> None:
    with monarch.timeline(trainers.slice(gpus=slice(1, 3))) as timeline:
        trainers.step.call(0.01).get(SECONDS)
    assert sorted(rank for group in timeline.groups for rank in group) == [1, 2]


def test_it_grows_while_it_is_recorded_and_shows_what_still_runs(trainers: Any) -> None:
    with monarch.timeline(trainers) as timeline:
        future = trainers.step.call(1.0)
        until(lambda: "step" in names(timeline, 0))
        assert "recording" in repr(timeline)
        future.get(SECONDS)


def test_many_short_calls_are_few_spans(trainers: Any) -> None:
    with monarch.timeline(trainers) as timeline:
        for _ in range(600):
            trainers.ping.call().get(SECONDS)
    pings = [entry for entry in timeline.spans(0) if entry.name == "ping"]
    assert sum(entry.count for entry in pings) == 600
    assert len(timeline.calls) == 600


def test_cells_run_on_processes_are_part_of_it(procs: Any) -> None:
    with monarch.timeline(procs) as timeline:
        run_on(procs, "import time; time.sleep(0.05)").get(SECONDS)
    assert "cell" in names(timeline, 0)


def test_the_saved_file_is_a_chrome_trace(trainers: Any, tmp_path: Path) -> None:
    with monarch.timeline(trainers) as timeline:
        trainers.step.call(0.05).get(SECONDS)
    document = json.loads(timeline.save(tmp_path / "step.json").read_text())
    processes = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert processes == ["controller", *(f"trainers gpus={rank}" for rank in range(RANKS))]
    assert timeline.save(tmp_path / "step.json.gz").stat().st_size > 100
    with pytest.raises(ValueError, match=r"perfetto"):
        timeline.save(tmp_path / "step.png")


def test_a_value_that_is_no_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="can be recorded, not a str"):
        monarch.timeline("trainers")  # type: ignore[arg-type]


def test_a_death_is_shown_and_the_healed_process_recorded(own_procs: Any, faults: Faults) -> None:
    mesh = own_procs.spawn("mortals", Trainer)
    with monarch.timeline(mesh) as timeline:
        with pytest.raises(SupervisionError):
            mesh.die.call().get(SECONDS)
        faults.next()
        monarch.heal_mesh(own_procs)
        until(lambda: mesh.slice(gpus=SLOW).records.call_one().get(SECONDS)[0])
        mesh.step.call(0.05).get(SECONDS)
    kinds = [entry.kind for entry in timeline.spans(SLOW)]
    assert "lost" in kinds
    assert "healing" in kinds
    assert names(timeline, SLOW)[-1] == "step"
    assert (SLOW,) in timeline.groups
    assert f"gpus={SLOW} lost: " in repr(timeline)
