"""A rank that is lost concerns the slices that hold it, and no others."""

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
    {name: index for name, index in zip(SIZES, chosen, strict=True) if index is not None}
    for chosen in itertools.product((None, 0, 1), repeat=3)
]


@pytest.fixture(scope="module")
def cube() -> Iterator[tuple[Cluster, Any, Any]]:
    with cluster(hosts=2) as made:
        procs = made.hosts().spawn_procs(per_host={"rows": 2, "gpus": 2}, name="cube")
        mesh: Any = procs.spawn("cubes", Worker)
        made.result(mesh.initialized)
        yield made, procs, mesh


def place(rank: int) -> dict[str, int]:
    return {"hosts": rank // 4, "rows": rank // 2 % 2, "gpus": rank % 2}


def holds(chosen: dict[str, int], rank: int) -> bool:
    return all(place(rank)[name] == index for name, index in chosen.items())


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("how", ["call", "stream", "broadcast"])
def test_only_slices_that_hold_a_killed_rank_fail(cube: Any, rank: int, how: str) -> None:
    made, procs, mesh = cube
    made.advance(60)  # a rank may be healed three times in a minute
    made.kill(procs.slice(**place(rank)))
    failed, well = [], []
    for chosen in SLICES:
        endpoint = mesh.slice(**chosen).do
        if how == "call":
            errors = [outcome(made, endpoint.call("x"))]
        elif how == "stream":
            errors = [future.exception(SOON) for future in endpoint.stream("x")]
        else:
            try:
                errors = [endpoint.broadcast("x")]
            except SupervisionError as error:
                errors = [error]
        told = [error for error in errors if error is not None]
        assert all(isinstance(error, SupervisionError) for error in told)
        (failed if told else well).append(chosen)
    assert failed == [chosen for chosen in SLICES if holds(chosen, rank)]
    assert well == [chosen for chosen in SLICES if not holds(chosen, rank)]
    assert heal_mesh(mesh, timeout=SOON) is mesh
    assert len(made.result(mesh.do.call("y")).values()) == 8


@pytest.mark.parametrize("rank", range(8))
def test_a_failed_actor_is_named_by_its_full_mesh_coordinates(cube: Any, rank: int) -> None:
    made, _, mesh = cube
    made.advance(60)
    made.failures.clear()
    one = mesh.slice(**place(rank))
    one.fail.broadcast(f"of {rank}")
    made.settle()
    [failure] = made.failures
    assert (failure.mesh_name, failure.crashed_ranks) == ("cubes", [rank])
    where = " ".join(f"{name}={index}" for name, index in place(rank).items())
    with pytest.raises(SupervisionError) as caught:
        one.do.call_one("x").get(SOON)
    assert where in str(caught.value)
    assert f"of {rank}" in str(caught.value)
    heal_mesh(one, timeout=SOON)
    assert made.result(one.do.call_one("y")) == (0, "y")


@pytest.mark.parametrize("chosen", SLICES[1:], ids=lambda chosen: "-".join(f"{k}{v}" for k, v in chosen.items()))
def test_a_value_mesh_of_a_slice_has_its_dimensions_and_points(cube: Any, chosen: dict[str, int]) -> None:
    made, _, mesh = cube
    made.advance(60)
    values = made.result(mesh.slice(**chosen).do.call("z"))
    left = [name for name in SIZES if name not in chosen]
    assert dict(values.extent) == dict.fromkeys(left, 2)
    for place_of, (rank, item) in zip(itertools.product(range(2), repeat=len(left)), values.values(), strict=True):
        at = dict(zip(left, place_of, strict=True))
        assert values.item(**at) == (rank, "z") == (rank, item)
        assert rank == int("".join(map(str, place_of)) or "0", 2)
    whole = made.result(mesh.back.call(7))
    assert whole.slice(**chosen).values() == [7] * len(values)
