"""Processes that are started ahead for a mesh of tensors: one takes the position of a rank that has died."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import monarch_nb
from monarch_nb.distributed import Mesh
from monarch_nb.exceptions import DeviceMeshError
from tests.cluster.actor_tools import spawned
from tests.cluster.fault_tools import agent, status
from tests.polling import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(not Path("/proc").exists(), reason="spares are forks")]


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    for procs in spawned(2, "spared"):
        mesh = Mesh.of(procs, spares=1)
        ready(previous=[])
        yield mesh
    until(lambda: not spares(), "the spare ends with its mesh")


def ready(previous: list[int]) -> int:
    """Waits for a spare; its pid."""
    until(lambda: spares() not in ([], previous), "a spare is ready")
    status()  # its agent has seen it
    return spares()[0]


def spares() -> list[int]:
    """Pids of the spares of this host, which wait for a rank."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").split()
        except OSError:  # it has ended
            continue
        if fields[1] == "(mnb-spare)" and int(fields[3]) == agent().pid and fields[2] != "Z":
            processes.append(int(folder.name))
    return processes


def pids(mesh: Mesh) -> list[int]:
    return list(mesh.execute(os.getpid).values())


def lose(mesh: Mesh, rank: int) -> None:
    os.kill(pids(mesh)[rank], signal.SIGKILL)

    def use() -> None:
        for _ in range(1000):  # a process that was killed may answer once more
            mesh.ones(4, sharding_spec=["gpus"]).sum().item()

    with pytest.raises(DeviceMeshError):
        use()


def surroundings() -> tuple[str | None, str, str | None]:
    return os.environ.get("SET_LATER"), os.getcwd(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_spare_becomes_the_lost_rank_and_is_replaced(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, [spare] = mesh.arange(4), spares()
    assert mesh.size() == len(pids(mesh)) == 2  # it is no rank
    devices = mesh.execute(surroundings).get(1)[2]
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.chdir(tmp_path)
    lose(mesh, 1)
    monarch_nb.heal_mesh(mesh)
    assert values.tolist() == [0, 1, 2, 3]
    assert pids(mesh)[1] == spare
    assert mesh.execute(surroundings).get(1) == ("yes", str(tmp_path), devices)
    spare = ready(previous=[spare])
    lose(mesh, 0)
    monarch_nb.heal_mesh(mesh)
    assert pids(mesh)[0] == spare


@pytest.mark.slow
def test_a_spare_that_dies_fails_nothing(mesh: Mesh) -> None:
    [spare] = spares()
    os.kill(spare, signal.SIGKILL)
    lose(mesh, 0)
    monarch_nb.heal_mesh(mesh)
    assert mesh.ones(4).tolist() == [1.0] * 4
    ready(previous=[spare])


def test_a_spare_killed_while_it_takes_over_is_replaced(mesh: Mesh) -> None:
    [spare] = spares()
    os.kill(spare, signal.SIGSTOP)
    lose(mesh, 1)
    healing = threading.Thread(target=monarch_nb.heal_mesh, args=(mesh,))
    healing.start()
    until(lambda: any((proc.pid, proc.how, proc.state) == (spare, "spare", "starting") for proc in status().procs))
    os.kill(spare, signal.SIGKILL)
    healing.join()
    assert spare not in pids(mesh)
    assert mesh.ones(4, sharding_spec=["gpus"]).sum().item() == 4
