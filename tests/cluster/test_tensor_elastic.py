"""Tensor meshes when their processes grow and shrink: they work, or errors name the remedy; never a wrong value."""

from collections.abc import Iterator

import pytest

import monarch_nb
from monarch_nb.actor import ProcMesh
from monarch_nb.distributed import ContentsLostError, Mesh
from monarch_nb.exceptions import DeviceMeshError
from monarch_nb.job import ProcessJob
from tests.cluster.fault_tools import SOON

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow, pytest.mark.usefixtures("host")]


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    """On a host of a job that gives more."""
    job = ProcessJob({"trainers": 1}, env={"MONARCH_NB_PRELOAD": "torch"})
    try:
        yield job.state(cached_path=None).trainers.spawn_procs(name="trainers")
    finally:
        job.kill()


def test_tensors_survive_growth_and_a_new_mesh_has_all_processes(procs: ProcMesh, shown: list[object]) -> None:
    before = Mesh.of(procs, ("dp",))
    t = before.arange(6, sharding_spec=["dp"])
    procs.grow(hosts=2)
    assert (t * 2).sum().item() == 30
    after = Mesh.of(procs, ("dp",))
    assert (before.shape, after.shape) == ((1,), (3,))
    assert after.arange(6, sharding_spec=["dp"]).sum().item() == 15
    assert list(after.execute(len, after.arange(6, sharding_spec=["dp"])).values()) == [2, 2, 2]
    assert (t + 1).sum().item() == 21, "earlier tensors keep their contents"
    assert list(before.execute(len, t).values()) == [6]
    assert after.bring(t).sum().item() == 15
    part = after.slice(dp=2)
    assert part.ones(4).sum().item() == 4

    procs.shrink(hosts=[0])
    for mesh in (before, after, part):
        with pytest.raises(
            ContentsLostError, match=r"trainers has shrunk\. Make a mesh for tensors on what it has now"
        ):
            (mesh.ones(3) + 1).sum().item()
    with pytest.raises(DeviceMeshError, match="trainers has shrunk"):
        t.sum().item()
    rest = Mesh.of(procs, ("dp",))
    assert rest.shape == (2,)
    assert rest.arange(6, sharding_spec=["dp"]).sum().item() == 15

    procs.grow(hosts=1)  # in place of the removed one
    again = Mesh.of(procs, ("dp",))
    assert again.arange(6, sharding_spec=["dp"]).sum().item() == 15
    assert rest.ones(2, sharding_spec=["dp"]).sum().item() == 2


def test_survivors_of_a_shrink_go_on_and_healing_the_lost_explains(procs: ProcMesh, shown: list[object]) -> None:
    procs.grow(hosts=1)
    mesh = Mesh.of(procs, ("dp",))
    t = mesh.ones(4, sharding_spec=["dp"])
    assert t.sum().item() == 4
    assert procs.shrink(hosts=-1).sizes["hosts"] == 1
    alone = Mesh.of(procs, ("dp",))
    assert alone.ones(4, sharding_spec=["dp"]).sum().item() == 4
    monarch_nb.heal_mesh(mesh, timeout=SOON)
    with pytest.raises(DeviceMeshError, match=r"trainers has (shrunk|other hosts)"):
        mesh.ones(4).sum().item()
    assert alone.ones(4, sharding_spec=["dp"]).sum().item() == 4


def test_streams_go_on_as_their_mesh_grows_and_shrinks(procs: ProcMesh, shown: list[object]) -> None:
    side, late = monarch_nb.Stream("other"), monarch_nb.Stream("later")

    def check(count: int) -> None:
        """Each stream has all ranks, which exchange values and lend memory."""
        with procs.activate() as mesh:
            for stream in (side, late, monarch_nb.Stream("new"), monarch_nb.get_active_stream()):
                with stream.activate():
                    total = mesh.rank_tensor("hosts").reduce("hosts")
                    assert [int(monarch_nb.inspect(total, hosts=index)) for index in range(count)] == [
                        sum(range(count))
                    ] * count
            value = mesh.rank_tensor("hosts") + 1
            lent, borrow = side.borrow(value, mutable=True)
            with borrow, side.activate():
                lent.reduce_("hosts", "max")
            assert [int(monarch_nb.inspect(value, hosts=index)) for index in range(count)] == [count] * count

    x = procs.rank_tensor("hosts") + 1.0
    y = x.mesh.rank_tensor("hosts") + 5.0
    lent, borrow = side.borrow(x, mutable=True)
    with side.activate():
        lent.add_(1)
    procs.grow(hosts=1)
    with late.borrow(y)[1]:  # a stream that begins before there is a mesh of all processes
        pass
    check(2)
    with borrow, side.activate():
        lent.mul_(10)
    assert monarch_nb.inspect(x).tolist() == 20
    moved = x.slice_mesh(hosts=0).to_mesh(procs, stream=side)
    with side.activate():
        assert [monarch_nb.inspect(moved, hosts=index).tolist() for index in range(2)] == [20, 20]
    procs.grow(hosts=1)
    check(3)
    ranks = procs.rank_tensor("hosts")
    _, borrow = late.borrow(ranks)
    procs.shrink(hosts=[0])
    with pytest.raises(DeviceMeshError, match="trainers has shrunk"):
        monarch_nb.inspect(ranks + 1)
    borrow.drop()
    check(2)
