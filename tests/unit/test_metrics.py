"""Values that actors report, as curves and as a table."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_nb.mesh.mesh_events import OwnerChanged
from monarch_nb.shape import Extent
from monarch_nb.telemetry import Metrics
from monarch_nb.telemetry.points import FORMER, MOST_VALUES, Points, Series, log
from monarch_nb.telemetry.verbs import MetricPoint, MetricPoints


def point(value: float, rank: int = 0, mesh: str = "a1", name: str = "loss") -> MetricPoint:
    return MetricPoint(mesh, rank, name, value, 1.0, value)


def mesh(*ranks: int) -> Any:
    """A slice of an actor mesh, and the procs that it lives on."""
    actors = SimpleNamespace(uid="a1", name="trainers")
    region = Extent(["gpus"], [4]).region.slice(gpus=slice(ranks[0], ranks[-1] + 1))
    return SimpleNamespace(_state=SimpleNamespace(uid="p1", name="workers", actors={"a1": actors}), _region=region)


def test_long_series_are_thinned_at_their_old_end() -> None:
    series = Series()
    series.add(point(float(step)) for step in range(10 * MOST_VALUES))
    steps = [sample.step for sample in series.of("a1")["loss"][0]]
    assert len(steps) < MOST_VALUES
    assert steps == sorted(steps)
    assert steps[0] == 0.0
    assert steps[-MOST_VALUES // 2 :] == [
        float(step) for step in range(10 * MOST_VALUES - MOST_VALUES // 2, 10 * MOST_VALUES)
    ]


def test_of_many_meshes_the_latest_are_kept() -> None:
    series = Series()
    series.add(point(1.0, mesh=f"a{number}") for number in range(FORMER + 5))
    assert series.of("a4") == {}
    assert series.of("a5") != {}


def test_metrics_of_procs_are_those_of_their_actors_by_slice_rank() -> None:
    series = Series()
    series.add(point(float(10 * rank + step), rank) for rank in range(4) for step in range(3))
    metrics = Metrics(mesh(2, 3), series.of)
    assert list(metrics) == ["loss"]
    assert metrics["loss"] == {
        0: [(20.0, 20.0), (21.0, 21.0), (22.0, 22.0)],
        1: [(30.0, 30.0), (31.0, 31.0), (32.0, 32.0)],
    }
    assert metrics.latest() == {"loss": {0: 22.0, 1: 32.0}}
    assert repr(metrics).splitlines()[1].split() == ["loss", "2", "3", "27", "20", "32"]
    assert "no metrics yet" in repr(Metrics(mesh(0), Series().of))


class Process:
    """A process that takes reports of actors: the first one, or one started by another."""

    def __init__(self, started_by: str = "") -> None:
        self.sent: list[tuple[str, list[MetricPoint]]] = []
        self.later: list[Callable[[], None]] = []
        self.take: Any = None
        self.parts = SimpleNamespace(started_by=started_by, is_left=False, listeners=[])
        runtime: Any = SimpleNamespace(
            address="h/here",
            verbs=SimpleNamespace(handle=self._handle),
            part=lambda _: self.parts,
            later=lambda _, function: self.later.append(function),
            post=lambda dst, _, message: self.sent.append((dst, message.points)),
        )
        self.points = Points(runtime)

    def _handle(self, _: Any, function: Any) -> None:
        self.take = function


def test_while_nobody_owns_the_mesh_values_wait_for_the_next_owner() -> None:
    process = Process("h/first")
    process.parts.is_left = True
    process.points.note(report(1.0, 2.0))
    for call in process.later:
        call()
    assert process.sent == []
    process.parts.started_by, process.parts.is_left = "h/second", False
    process.later.clear()
    process.parts.listeners[0](OwnerChanged("h/second"))
    for call in process.later:
        call()
    assert [(dst, [point.value for point in points]) for dst, points in process.sent] == [("h/second", [1.0, 2.0])]


def report(*values: float, step: float | None = None) -> list[MetricPoint]:
    return [MetricPoint("a1", 0, "loss", step, 1.0, value) for value in values]


def test_reports_within_a_short_time_travel_together_and_count_steps() -> None:
    process = Process("h/home")
    process.points.note(report(5.0))
    process.points.note(report(4.0, 3.0))
    assert process.sent == []
    [send] = process.later
    send()
    [(home, points)] = process.sent
    assert (home, [(point.step, point.value) for point in points]) == ("h/home", [(0.0, 5.0), (1.0, 4.0), (2.0, 3.0)])
    process.points.note(report(2.0, step=100.0))
    assert len(process.later) == 2, "what comes later goes later"


def test_a_flood_of_one_value_is_thinned_and_others_stay_whole() -> None:
    process = Process("h/home")
    for step in range(2 * MOST_VALUES):
        process.points.note([point(float(step), name="flood")])
        if step % 4 == 0:
            process.points.note([point(float(step))])
    process.later[0]()
    [(_, points)] = process.sent
    losses = [sent.value for sent in points if sent.name == "loss"]
    assert losses == [float(step) for step in range(0, 2 * MOST_VALUES, 4)]
    flood = [sent.value for sent in points if sent.name == "flood"]
    assert len(flood) < MOST_VALUES
    assert (flood[0], flood[-1]) == (0.0, 2.0 * MOST_VALUES - 1)


def test_a_process_that_ends_sends_what_it_has_gathered() -> None:
    process, home = Process("h/home"), Process()
    process.points.note(report(1.0))
    process.points.close()
    assert [(dst, [point.value for point in points]) for dst, points in process.sent] == [("h/home", [1.0])]
    process.later[0]()
    home.points.close()
    assert len(process.sent) == 1
    assert home.sent == []


def test_metrics_are_stored_at_home_and_forwarded_in_between() -> None:
    home, between = Process(), Process("h/home")
    heard: list[MetricPoint] = []
    stop = home.points.listen(heard.extend)
    home.take(MetricPoints(report(1.0, step=1.0)), None)
    stop()
    home.take(MetricPoints(report(2.0, step=2.0)), None)
    assert [point.value for point in heard] == [1.0]
    assert [sample.value for sample in home.points.of("a1")["loss"][0]] == [1.0, 2.0]
    between.take(MetricPoints(report(3.0, step=1.0)), None)
    assert [(dst, points[0].value) for dst, points in between.sent] == [("h/home", 3.0)]
    assert between.points.of("a1") == {}


@pytest.mark.parametrize("step", [math.nan, -math.inf, 1e30])
def test_a_step_that_no_export_could_write_is_refused(step: float) -> None:
    with pytest.raises(ValueError, match=r"log: step=\S+ is not the number of a step"):
        log(step=step, loss=math.nan)
