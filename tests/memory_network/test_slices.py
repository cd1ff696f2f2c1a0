"""Slicing meshes by name, and the slice that a message was sent to."""

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, context, current_rank, current_size, endpoint, this_host
from monarch_nb.mesh.host import HostMesh, host_labels

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Member(Actor):
    @endpoint
    def message(self) -> tuple[str, dict[str, int], int]:
        return str(current_rank()), current_size(), context().actor_instance.rank.rank


@pytest.fixture(scope="module")
def grid() -> Iterator[ProcMesh]:
    procs = this_host().spawn_procs(per_host={"rows": 2, "gpus": 2}, name="grid")
    yield procs
    procs.stop().get(20)


@pytest.fixture(scope="module")
def members(grid: ProcMesh) -> Any:
    return grid.spawn("members", Member)


def test_dimensions_are_those_of_the_host_then_those_requested(grid: ProcMesh, members: Any) -> None:
    for mesh in (grid, members):
        assert mesh.sizes == {"rows": 2, "gpus": 2}
        assert mesh.size() == len(mesh) == 4
        assert mesh.size("gpus") == 2
        assert mesh.size(["rows", "gpus"]) == 4
        assert list(mesh.extent.labels) == ["rows", "gpus"]
        with pytest.raises(KeyError):
            mesh.size("cores")
    assert this_host().sizes == {}


def test_a_slice_knows_its_own_points(members: Any) -> None:
    row = members.slice(rows=1)
    assert row.message.call().get(20).values() == [("{'gpus': 0/2}", {"gpus": 2}, 2), ("{'gpus': 1/2}", {"gpus": 2}, 3)]
    column = members.slice(gpus=slice(1, 2))
    assert column.message.call().get(20).values() == [
        ("{'rows': 0/2, 'gpus': 0/1}", {"rows": 2, "gpus": 1}, 1),
        ("{'rows': 1/2, 'gpus': 0/1}", {"rows": 2, "gpus": 1}, 3),
    ]
    assert members.slice(rows=1, gpus=0).message.call_one().get(20) == ("{}", {}, 2)


def test_names_and_shapes_can_be_changed(members: Any) -> None:
    flat = members.flatten("workers")
    assert [value[1] for value in flat.message.call().get(20).values()] == [{"workers": 4}] * 4
    assert [v[2] for v in flat.slice(workers=slice(1, 3)).message.call().get(20).values()] == [1, 2]
    renamed = members.rename(rows="hosts")
    assert (
        renamed.slice(hosts=1).message.call().get(20).values() == members.slice(rows=1).message.call().get(20).values()
    )
    split = flat.split(workers=("dp", "tp"), tp=2)
    assert split.sizes == {"dp": 2, "tp": 2}
    assert [v[2] for v in split.slice(tp=1).message.call().get(20).values()] == [1, 3]


def test_steps_may_be_wider_than_one(members: Any) -> None:
    every_other = members.flatten("workers").slice(workers=slice(0, 4, 2))
    assert [v[2] for v in every_other.message.call().get(20).values()] == [0, 2]
    assert every_other.slice(workers=1).message.call_one().get(20)[2] == 2


def test_impossible_slices_say_what_is_wrong(grid: ProcMesh, members: Any) -> None:
    for mesh in (grid, members):
        with pytest.raises(IndexError, match="index out of range"):
            mesh.slice(gpus=2)
        with pytest.raises(TypeError, match=r"cores.*gpus"):  # the existing names
            mesh.slice(cores=0)
        with pytest.raises(ValueError, match=r"gpus.*3"):
            mesh.split(gpus=("a", "b"), b=3)
        with pytest.raises(ValueError, match="sparse"):
            mesh.slice(gpus=slice(0, 1)).flatten("all")


def test_actors_on_a_slice_of_procs_have_the_slices_points(grid: ProcMesh) -> None:
    part = grid.slice(gpus=1).spawn("some", Member)
    assert part.message.call().get(20).values() == [
        ("{'rows': 0/2}", {"rows": 2}, 0),
        ("{'rows': 1/2}", {"rows": 2}, 1),
    ]


def test_a_mesh_without_dimensions_has_one_member() -> None:
    procs = this_host().spawn_procs()
    assert procs.sizes == {}
    assert len(procs) == 1
    assert procs.spawn("one", Member).message.call_one().get(20) == ("{}", {}, 0)
    assert procs.host_mesh == this_host()
    procs.stop().get(20)


def test_impossible_meshes_are_refused() -> None:
    for size in (0, -1, 1.5, True, "two"):
        with pytest.raises(ValueError, match=r"gpus=.* must be a whole number"):
            this_host().spawn_procs(per_host={"gpus": size})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"100000000 processes are more than a host can run"):
        this_host().spawn_procs(per_host={"gpus": 100_000_000})
    with pytest.raises(ValueError, match="proc_bind"):
        this_host().spawn_procs(per_host={"gpus": 2}, proc_bind=[{"cpus": "0"}])


def test_a_dimension_of_the_hosts_is_not_given_twice() -> None:
    several = HostMesh("several", [this_host().host_ids[0]] * 2, host_labels(["a", "b"]))
    with pytest.raises(ValueError, match=r"hosts is a dimension of the hosts already.*rename"):
        several.spawn_procs(per_host={"hosts": 2})
