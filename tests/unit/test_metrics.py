"""Values that actors report, as curves and as a table."""

from types import SimpleNamespace
from typing import Any

from monarch_nb.shape import Extent
from monarch_nb.telemetry import Metrics
from monarch_nb.telemetry.series import FORMER, KEPT, Point, Series


def point(value: float, rank: int = 0, mesh: str = "a1", name: str = "loss") -> Point:
    return Point(mesh, rank, name, value, 1.0, value)


def mesh(*ranks: int) -> Any:
    """A slice of an actor mesh, and the procs that it lives on."""
    actors = SimpleNamespace(uid="a1", name="trainers")
    region = Extent(["gpus"], [4]).region.slice(gpus=slice(ranks[0], ranks[-1] + 1))
    return SimpleNamespace(_state=SimpleNamespace(uid="p1", name="workers", actors={"a1": actors}), _region=region)


def test_long_series_get_thinner_at_their_old_end_and_keep_the_new_one() -> None:
    series = Series()
    series.add(point(float(step)) for step in range(10 * KEPT))
    steps = [sample.step for sample in series.of("a1")["loss"][0]]
    assert len(steps) < KEPT
    assert steps == sorted(steps)
    assert steps[0] == 0.0
    assert steps[-KEPT // 2 :] == [float(step) for step in range(10 * KEPT - KEPT // 2, 10 * KEPT)]


def test_of_many_meshes_the_latest_are_kept() -> None:
    series = Series()
    series.add(point(1.0, mesh=f"a{number}") for number in range(FORMER + 5))
    assert series.of("a4") == {}
    assert series.of("a5") != {}


def test_the_metrics_of_procs_are_those_of_the_actors_on_them_by_rank_of_the_slice() -> None:
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
