"""A lost rank concerns only the slices that hold it."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import SupervisionError, heal_mesh
from monarch_nb.testing import Cluster, cluster
from tests.memory_network.faults.actors import SOON, Worker, outcome

pytestmark = pytest.mark.timeout(60)
SIZES = {"hosts": 2, "rows": 2, "gpus": 2}
SLICES = [
    {name: index for name, index in zip(SIZES, part, strict=True) if index is not None}
    for part in itertools.product((None, 0, 1), repeat=3)
]


@pytest.fixture(scope="module")
def cube() -> Iterator[tuple[Cluster, Any, Any]]:
    with cluster(hosts=2) as sim:
        procs = sim.hosts().spawn_procs(per_host={"rows": 2, "gpus": 2}, name="cube")
        mesh: Any = procs.spawn("cubes", Worker)
        sim.result(mesh.initialized)
        yield sim, procs, mesh


def position(rank: int) -> dict[str, int]:
    return {"hosts": rank // 4, "rows": rank // 2 % 2, "gpus": rank % 2}


def holds(part: dict[str, int], rank: int) -> bool:
    return all(position(rank)[name] == index for name, index in part.items())


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("how", ["call", "stream", "broadcast"])
def test_only_slices_that_hold_a_killed_rank_fail(cube: Any, rank: int, how: str) -> None:
    sim, procs, mesh = cube
    sim.advance(60)  # a rank may be healed three times in a minute
    sim.kill(procs.slice(**position(rank)))
    failed, well = [], []
    for part in SLICES:
        endpoint = mesh.slice(**part).do
        if how == "call":
            errors = [outcome(sim, endpoint.call("x"))]
        elif how == "stream":
            errors = [future.exception(SOON) for future in endpoint.stream("x")]
        else:
            try:
                errors = [endpoint.broadcast("x")]
            except SupervisionError as error:
                errors = [error]
        errors = [error for error in errors if error is not None]
        assert all(isinstance(error, SupervisionError) for error in errors)
        (failed if errors else well).append(part)
    assert failed == [part for part in SLICES if holds(part, rank)]
    assert well == [part for part in SLICES if not holds(part, rank)]
    assert heal_mesh(mesh, timeout=SOON) is mesh
    assert len(sim.result(mesh.do.call("y")).values()) == 8


@pytest.mark.parametrize("rank", range(8))
def test_a_failed_actor_is_named_by_its_full_mesh_coordinates(cube: Any, rank: int) -> None:
    sim, _, mesh = cube
    sim.advance(60)
    sim.failures.clear()
    actor = mesh.slice(**position(rank))
    actor.fail.broadcast(f"of {rank}")
    sim.settle()
    [failure] = sim.failures
    assert (failure.mesh_name, failure.crashed_ranks) == ("cubes", [rank])
    location = " ".join(f"{name}={index}" for name, index in position(rank).items())
    with pytest.raises(SupervisionError) as caught:
        actor.do.call_one("x").get(SOON)
    assert location in str(caught.value)
    assert f"of {rank}" in str(caught.value)
    heal_mesh(actor, timeout=SOON)
    assert sim.result(actor.do.call_one("y")) == (0, "y")


@pytest.mark.parametrize("part", SLICES[1:], ids=lambda part: "-".join(f"{k}{v}" for k, v in part.items()))
def test_a_value_mesh_of_a_slice_has_its_dimensions_and_points(cube: Any, part: dict[str, int]) -> None:
    sim, _, mesh = cube
    sim.advance(60)
    values = sim.result(mesh.slice(**part).do.call("z"))
    names = [name for name in SIZES if name not in part]
    assert dict(values.extent) == dict.fromkeys(names, 2)
    for indices, (rank, item) in zip(itertools.product(range(2), repeat=len(names)), values.values(), strict=True):
        point = dict(zip(names, indices, strict=True))
        assert values.item(**point) == (rank, "z") == (rank, item)
        assert rank == int("".join(map(str, indices)) or "0", 2)
    full = sim.result(mesh.echo.call(7))
    assert full.slice(**part).values() == [7] * len(values)
