"""Stopping at awkward moments, and twice."""

from typing import Any

import pytest

from monarch_nb.actor import Channel, MeshFailure, SupervisionError, heal_mesh
from tests.cluster.fault_tools import SOON, Worker, begun, kill, spawned, still_works

pytestmark = pytest.mark.timeout(120)


def test_stop_of_processes_during_a_call_that_never_ends(host: Any, impatient: None) -> None:
    port, receiver = Channel.open()
    with spawned(host, name="deaf") as procs:
        actors = procs.spawn("deaf", Worker)
        call = actors.hang.call(port)
        begun(receiver, 2)
        procs.stop().get(SOON)
        with pytest.raises(SupervisionError, match="deaf has status: stopped"):
            call.get(SOON)
    still_works(host)


def test_stop_right_after_spawn(host: Any, shown: list[MeshFailure]) -> None:
    for _ in range(3):
        procs = host.spawn_procs(per_host={"gpus": 2}, name="brief")
        actors = procs.spawn("brief", Worker)
        procs.stop().get(SOON)
        with pytest.raises(SupervisionError, match="brief has status: stopped"):
            actors.rank.call().get(SOON)
        with pytest.raises(RuntimeError, match="brief"):
            procs.initialized.get(SOON)
    assert not shown


@pytest.mark.slow
def test_stop_of_a_mesh_with_a_dead_rank(host: Any) -> None:
    with spawned(host, name="partly") as procs:
        actors = procs.spawn("partly", Worker)
        pids = actors.pid.call().get(SOON).values()
        kill(pids[1])
        with pytest.raises(SupervisionError):
            actors.pid.call().get(SOON)
        actors.stop().get(SOON)
        with pytest.raises(SupervisionError):
            actors.pid.call().get(SOON)
        procs.stop().get(SOON)
    still_works(host)


def test_stop_of_actors_whose_process_dies_meanwhile(host: Any) -> None:
    port, receiver = Channel.open()
    with spawned(host, name="dying") as procs:
        actors = procs.spawn("dying", Worker)
        actors.hang.call(port)
        pids = begun(receiver, 2)
        stop = actors.stop()
        for pid in pids:
            kill(pid)
        stop.get(SOON)


def test_stop_during_a_heal(host: Any, impatient: None, tmp_path: Any) -> None:
    setup = f"import os, time\nwhile os.path.exists({str(tmp_path / 'wait')!r}): time.sleep(0.01)"
    with spawned(host, name="healing", setup=setup) as procs:
        actors = procs.spawn("healing", Worker)
        pids = actors.pid.call().get(SOON).values()
        (tmp_path / "wait").touch()
        kill(pids[1])
        with pytest.raises(SupervisionError):
            actors.pid.call().get(SOON)
        heal = host_healer().heal(actors._state, actors._region)
        stop = procs.stop()
        with pytest.raises(RuntimeError, match="was stopped while it was being healed"):
            heal.get(SOON)
        stop.get(SOON)
        with pytest.raises(RuntimeError, match="was stopped"):
            heal_mesh(actors, timeout=SOON)
    still_works(host)


class StopsWhenRead(tuple[dict[str, str | None], ...]):
    """The environments of a mesh, which stop it when they are read for a heal."""

    procs: Any

    def __getitem__(self, index: Any) -> Any:
        self.procs.stop().get(SOON)
        return super().__getitem__(index)


def test_stop_just_before_a_heal_asks_for_processes_leaves_none(host: Any, impatient: None) -> None:
    """The fixture that checks each test finds leftovers."""
    with spawned(host, name="between") as procs:
        actors = procs.spawn("between", Worker)
        pids = actors.pid.call().get(SOON).values()
        kill(pids[1])
        with pytest.raises(SupervisionError):
            actors.pid.call().get(SOON)
        procs._state.spawn_spec.env = env = StopsWhenRead(procs._state.spawn_spec.env)
        env.procs = procs
        with pytest.raises(RuntimeError, match="was stopped while it was being healed"):
            host_healer().heal(actors._state, actors._region).get(SOON)
    still_works(host)


def host_healer() -> Any:
    from monarch_nb.lifecycle.mesh_healer import MeshHealer
    from monarch_nb.runtime import current_runtime

    return current_runtime().part(MeshHealer)
