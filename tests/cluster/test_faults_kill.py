"""SIGKILL of a process at every stage of its life."""

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Channel, MeshFailure, ProcMesh, SupervisionError, heal_mesh
from tests.cluster.fault_tools import SOON, Worker, begun, kill, spawned, status, still_works
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


def told(error: BaseException, pid: int, rank: int, mesh: str = "workers") -> None:
    """The whole story: which mesh, which rank, which host, how it ended, what to do."""
    text = str(error)
    where = (f"mesh      {mesh}, gpus={rank}", "host      ", f"pid {pid}")
    for part in (*where, "signal 9 (SIGKILL)", f"heal_mesh({mesh})"):
        assert part in text, text


def test_killing_an_idle_rank_is_shown_once_and_it_heals(workers: Any, shown: list[MeshFailure], host: Any) -> None:
    pids = workers.pid.call().get(SOON).values()
    kill(pids[1])
    until(lambda: shown, "the failure is shown")
    assert shown[0].crashed_ranks == [1]
    assert len(shown) == 1
    with pytest.raises(SupervisionError) as caught:
        workers.pid.call().get(SOON)
    told(caught.value, pids[1], 1)
    assert workers.slice(gpus=0).pid.call_one().get(SOON) == pids[0]
    assert heal_mesh(workers, timeout=SOON) is workers
    assert workers.pid.call().get(SOON).values()[0] == pids[0]
    still_works(host)


def test_killing_a_rank_fails_the_call_that_it_runs(workers: Any, shown: list[MeshFailure]) -> None:
    port, receiver = Channel.open()
    call = workers.slice(gpus=1).hang.call_one(port)
    [pid] = begun(receiver, 1)
    kill(pid)
    with pytest.raises(SupervisionError) as caught:
        call.get(SOON)
    told(caught.value, pid, 1)
    assert "workers.hang() failed" in str(caught.value)
    heal_mesh(workers, timeout=SOON)
    assert workers.rank.call().get(SOON).values() == [0, 1]


def test_killing_ranks_fails_their_futures_of_a_stream(workers: Any) -> None:
    port, receiver = Channel.open()
    futures = list(workers.nap.stream(0.0, port))
    begun(receiver, 2)
    assert [future.get(SOON) for future in futures] == ["slept"] * 2
    stream = workers.slice(gpus=slice(0, 2)).hang.stream(port)
    pids = begun(receiver, 2)
    first = next(stream)
    kill(pids[0])
    with pytest.raises(SupervisionError, match="heal_mesh"):
        first.get(SOON)
    kill(pids[1])


def test_of_a_rank_between_many_broadcasts(workers: Any, shown: list[MeshFailure]) -> None:
    pid = workers.slice(gpus=1).pid.call_one().get(SOON)
    kill(pid)
    with pytest.raises(SupervisionError, match="gpus=1"):
        deque(map(workers.note.broadcast, range(100_000)), maxlen=0)
    until(lambda: shown)
    noted = workers.slice(gpus=0).noted.call_one().get(SOON)
    assert noted == list(range(len(noted)))  # in order, none twice


class Waits(Worker):
    """Is not spawned before a file is there."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        while not os.path.exists(gate):
            time.sleep(0.01)


def test_while_it_is_being_spawned(host: Any, shown: list[MeshFailure], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with spawned(host, name="early") as procs:
        early = procs.spawn("early", Waits, str(gate))
        until(lambda: [one for one in status().procs if one.pid and one.address == procs._state.address(1)])
        [pid] = [one.pid for one in status().procs if one.address == procs._state.address(1)]
        kill(pid)
        with pytest.raises(SupervisionError) as caught:
            early.initialized.get(SOON)
        assert "early" in str(caught.value)
        assert "heal_mesh" in str(caught.value)
        gate.touch()
        heal_mesh(early, timeout=SOON)
        assert early.rank.call().get(SOON).values() == [0, 1]


def test_during_its_set_up(host: Any) -> None:
    dies = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    with spawned(host, name="sets", setup=dies) as procs:
        with pytest.raises(SupervisionError) as caught:
            procs.initialized.get(SOON)
        assert "sets, gpus=1" in str(caught.value)
        assert "SIGKILL" in str(caught.value)
        actors = procs.spawn("acts", Worker)
        with pytest.raises(SupervisionError, match="heal_mesh"):
            actors.rank.call().get(SOON)
        assert actors.slice(gpus=0).rank.call_one().get(SOON) == 0


class DiesInInit(Worker):
    def __init__(self, path: str) -> None:
        import os

        from monarch_nb.actor import context

        super().__init__()
        if context().actor_instance.rank.rank == 1 and not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), 9)


def test_killing_a_rank_during_init_is_reported_and_heals(duo: ProcMesh, tmp_path: Any) -> None:
    actors = duo.spawn("inits", DiesInInit, str(tmp_path / "died"))
    with pytest.raises(SupervisionError) as caught:
        actors.rank.call().get(SOON)
    assert "mesh      inits, gpus=1" in str(caught.value)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        actors.initialized.get(SOON)
    heal_mesh(actors, timeout=SOON)
    assert actors.rank.call().get(SOON).values() == [0, 1]


def test_killing_a_rank_during_its_heal_fails_the_heal(host: Any, tmp_path: Any) -> None:
    again = f"import os, signal\nif os.path.exists({str(tmp_path / 'again')!r}): os.kill(os.getpid(), signal.SIGKILL)"
    with spawned(host, name="heals", setup=again) as procs:
        actors = procs.spawn("healed", Worker)
        pids = actors.pid.call().get(SOON).values()
        (tmp_path / "again").touch()
        kill(pids[0])
        with pytest.raises(RuntimeError, match="gpus=0") as caught:
            lose(actors)
        assert "SIGKILL" in str(caught.value)
        (tmp_path / "again").unlink()
        heal_mesh(actors, timeout=SOON)
        assert actors.rank.call().get(SOON).values() == [0, 1]


def lose(mesh: Any) -> None:
    with pytest.raises(SupervisionError):
        mesh.pid.call().get(SOON)
    heal_mesh(mesh, timeout=SOON)


@pytest.mark.slow
def test_killing_ranks_during_a_stop_does_not_hang_it(host: Any) -> None:
    with spawned(host, name="stops") as procs:
        actors = procs.spawn("stops", Worker)
        port, receiver = Channel.open()
        call = actors.hang.call(port)
        pids = begun(receiver, 2)
        stopped = procs.stop()
        for pid in pids:
            kill(pid)
        stopped.get(SOON)
        with pytest.raises(SupervisionError, match="stops"):
            call.get(SOON)
    still_works(host)
