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


def check_error(error: BaseException, pid: int, rank: int, mesh: str = "workers") -> None:
    """The error names the mesh, the rank, the host, the end and the remedy."""
    text = str(error)
    location = (f"mesh      {mesh}, gpus={rank}", "host      ", f"pid {pid}")
    for part in (*location, "signal 9 (SIGKILL)", f"heal_mesh({mesh})"):
        assert part in text, text


def test_killing_an_idle_rank_is_shown_once_and_it_heals(workers: Any, shown: list[MeshFailure], host: Any) -> None:
    pids = workers.pid.call().get(SOON).values()
    kill(pids[1])
    until(lambda: shown, "the failure is shown")
    assert shown[0].crashed_ranks == [1]
    assert len(shown) == 1
    with pytest.raises(SupervisionError) as caught:
        workers.pid.call().get(SOON)
    check_error(caught.value, pids[1], 1)
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
    check_error(caught.value, pid, 1)
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
    notes = workers.slice(gpus=0).noted.call_one().get(SOON)
    assert notes == list(range(len(notes)))  # in order, none twice


class Waits(Worker):
    """Is not spawned before a file exists."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        while not os.path.exists(gate):
            time.sleep(0.01)


def test_while_it_is_being_spawned(host: Any, shown: list[MeshFailure], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with spawned(host, name="early") as procs:
        actors = procs.spawn("early", Waits, str(gate))
        until(lambda: [proc for proc in status().procs if proc.pid and proc.address == procs._state.address(1)])
        [pid] = [proc.pid for proc in status().procs if proc.address == procs._state.address(1)]
        kill(pid)
        with pytest.raises(SupervisionError) as caught:
            actors.initialized.get(SOON)
        assert "early" in str(caught.value)
        assert "heal_mesh" in str(caught.value)
        gate.touch()
        heal_mesh(actors, timeout=SOON)
        assert actors.rank.call().get(SOON).values() == [0, 1]


def test_during_its_set_up(host: Any) -> None:
    setup = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    with spawned(host, name="sets", setup=setup) as procs:
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
    setup = f"import os, signal\nif os.path.exists({str(tmp_path / 'again')!r}): os.kill(os.getpid(), signal.SIGKILL)"
    with spawned(host, name="heals", setup=setup) as procs:
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
        stop = procs.stop()
        for pid in pids:
            kill(pid)
        stop.get(SOON)
        with pytest.raises(SupervisionError, match="stops"):
            call.get(SOON)
    still_works(host)
