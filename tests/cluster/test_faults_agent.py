"""The host agent dies, at every stage: its meshes fail with an error, and the host is usable again at once."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import Channel, MeshFailure, SupervisionError, heal_mesh, this_host
from monarch_nb.connect import own_hosts
from monarch_nb.exceptions import DeviceMeshError
from monarch_nb.lifecycle import proc_spawn
from monarch_nb.lifecycle.mesh_healer import MeshHealer
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import host_name
from tests.cluster.fault_tools import SOON, Worker, agent, begun, controlling, kill, spawned, still_works
from tests.cluster.leftovers import marked
from tests.polling import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.fixture
def host(nothing_left_behind: None) -> Iterator[Any]:
    """A controller for each test: its agent dies."""
    with controlling() as local_host:
        yield local_host


def check_error(error: BaseException, mesh: str, pid: int) -> None:
    """The error names the mesh, the host, the reason and the remedy."""
    text = str(error)
    host = host_name(current_runtime().host)
    for part in (f"the host {host} was lost", f"host agent (process {pid}) ended with signal 9", f"mesh      {mesh}",
                 f"heal_mesh({mesh})"):  # fmt: skip
        assert part in text, text


def lose_agent() -> int:
    """SIGKILL to the agent, seen by the operating system only."""
    pid = agent().pid
    kill(pid)
    return pid


@pytest.mark.slow
def test_killing_an_idle_agent_fails_its_mesh_which_heals(workers: Any, host: Any, shown: list[MeshFailure]) -> None:
    pids = workers.pid.call().get(SOON).values()
    pid = lose_agent()
    until(lambda: shown, "the failure is shown")
    assert [sorted(failure.crashed_ranks) for failure in shown] == [[0, 1]]
    with pytest.raises(SupervisionError) as caught:
        workers.pid.call().get(SOON)
    check_error(caught.value, "workers", pid)
    with pytest.raises(SupervisionError):
        workers.slice(gpus=0).pid.broadcast()
    until(lambda: not set(pids) & set(marked()), "its processes are gone")
    still_works(this_host())
    assert heal_mesh(workers, timeout=SOON) is workers
    assert workers.rank.call().get(SOON).values() == [0, 1]


def test_during_a_call_a_stream_and_a_broadcast(workers: Any, host: Any) -> None:
    port, receiver = Channel.open()
    call = workers.hang.call(port)
    begun(receiver, 2)
    stream = workers.echo.stream(1)
    first = next(stream)
    pid = lose_agent()
    with pytest.raises(SupervisionError) as caught:
        call.get(SOON)
    check_error(caught.value, "workers", pid)
    with pytest.raises(SupervisionError):
        first.get(SOON)
    with pytest.raises(SupervisionError):
        workers.note.broadcast(1)
    still_works(host)  # an older reference works as well


@pytest.mark.slow
def test_while_processes_are_being_spawned(host: Any) -> None:
    pid = lose_agent()
    procs = host.spawn_procs(per_host={"gpus": 2}, name="early")  # very likely before the death is known
    actors = procs.spawn("early", Worker)
    error = actors.rank.call().exception(SOON)
    if error is not None:
        assert isinstance(error, SupervisionError)
        assert f"process {pid}" in str(error) or "host" in str(error)
        heal_mesh(actors, timeout=SOON)
    assert actors.rank.call().get(SOON).values() == [0, 1]
    procs.stop().get(SOON)


@pytest.mark.slow
def test_during_set_up_and_init(host: Any) -> None:
    port, receiver = Channel.open()
    port.send(0)
    assert receiver.recv().get(SOON) == 0

    def slow() -> None:
        import threading

        port.send(1)
        threading.Event().wait(600)

    procs = host.spawn_procs(per_host={"gpus": 2}, name="slow", bootstrap=slow)
    actors = procs.spawn("slow", Worker)
    begun(receiver, 2)
    pid = lose_agent()
    with pytest.raises(SupervisionError) as caught:
        procs.initialized.get(SOON)
    check_error(caught.value, "slow", pid)
    with pytest.raises(SupervisionError):
        actors.initialized.get(SOON)
    procs.stop().get(SOON)
    still_works(this_host())


@pytest.mark.slow
def test_killing_the_agent_during_a_heal_ends_it_with_an_error(host: Any, tmp_path: Any) -> None:
    setup = f"import os, time\nwhile os.path.exists({str(tmp_path / 'wait')!r}): time.sleep(0.01)"
    with spawned(host, name="heals", setup=setup) as procs:
        actors = procs.spawn("heals", Worker)
        pids = actors.pid.call().get(SOON).values()
        (tmp_path / "wait").touch()
        kill(pids[1])
        with pytest.raises(SupervisionError):
            actors.pid.call().get(SOON)
        before = set(marked())
        heal = current_runtime().part(MeshHealer).heal(actors._state, actors._region)
        until(lambda: [line for pid, line in marked().items() if pid not in before and line.startswith("mnb:")])
        lose_agent()
        with pytest.raises(RuntimeError, match="heals") as caught:
            heal.get(SOON)
        assert "host" in str(caught.value)
        (tmp_path / "wait").unlink()
        heal_mesh(actors, timeout=SOON)
        assert actors.rank.call().get(SOON).values() == [0, 1]


@pytest.mark.slow
def test_killing_the_agent_during_a_stop_does_not_hang_it(host: Any) -> None:
    port, receiver = Channel.open()
    procs = host.spawn_procs(per_host={"gpus": 2}, name="stops")
    actors = procs.spawn("stops", Worker)
    actors.hang.call(port)
    begun(receiver, 2)
    stop = procs.stop()
    lose_agent()
    stop.get(SOON)
    with pytest.raises(SupervisionError, match="stops"):
        actors.pid.call().get(SOON)
    still_works(this_host())


@pytest.mark.slow
@pytest.mark.parametrize("visible", [False, True], ids=["not seen yet", "seen"])
@pytest.mark.parametrize("operation", ["spawn", "heal"])
def test_between_being_there_and_being_asked(
    host: Any, monkeypatch: pytest.MonkeyPatch, operation: str, *, visible: bool
) -> None:
    ask = proc_spawn.request

    def lose(runtime: Any, dst: str, verb: str, body: Any) -> Any:
        monkeypatch.setattr(proc_spawn, "request", ask)
        victim = agent()
        lose_agent()
        if visible:
            running = runtime.part(own_hosts.LocalAgents).running
            until(lambda: running.get(runtime.host) is not victim, "the death is seen")
        return ask(runtime, dst, verb, body)

    with spawned(host) as procs:
        workers = procs.spawn("workers", Worker)
        if operation == "heal":
            kill(workers.pid.call().get(SOON).values()[1])
            with pytest.raises(SupervisionError):
                workers.pid.call().get(SOON)
        monkeypatch.setattr(proc_spawn, "request", lose)
        begin = time.monotonic()

        def bring() -> None:
            if operation == "heal":
                heal_mesh(workers)
            else:
                host.spawn_procs(per_host={"gpus": 2}, name="late").initialized.get(SOON)

        with pytest.raises(DeviceMeshError, match="was lost"):
            bring()
        heal_mesh(workers, timeout=SOON)
        assert workers.rank.call().get(SOON).values() == [0, 1]
        assert time.monotonic() - begin < 20  # nothing has waited for a time-out
