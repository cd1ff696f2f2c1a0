"""Stopping is no failure: meshes, actors that stop themselves, and the errors of later calls."""

import threading
import time
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, SupervisionError, context, endpoint, this_host
from monarch_nb.lifecycle import stopping
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.runtime import current_runtime
from tests.cluster.actor_tools import Faults

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Stoppable(Actor):
    def __init__(self, port: Port[Any] | None = None) -> None:
        self.port = port

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def nap(self, port: Port[str]) -> str:
        """Sleeps until the actor is told to stop, and a little longer."""
        cell: Any = context().actor_instance.cell
        port.send("begun")
        while cell.cause is None:  # no event reports it to an endpoint
            time.sleep(0.01)
        time.sleep(0.05)
        return "slept"

    @endpoint
    def stop_self(self, reason: str | None = None) -> str:
        context().actor_instance.stop(reason)
        return "answered"

    @endpoint
    def kill_self(self, how: str, reason: str | None = None) -> str:
        getattr(context().actor_instance, how)(reason)
        return "never"

    @endpoint
    def stop_mesh(self, mesh: Any) -> None:
        mesh.stop().get(20)

    @endpoint
    def ask(self, mesh: Any) -> str:
        try:
            return str(mesh.ping.call().get(20).values())
        except SupervisionError as error:
            return str(error)

    def __cleanup__(self, exc: Exception | None) -> None:
        if self.port is not None:
            self.port.send((threading.current_thread().name, exc))


class BadCleanup(Actor):
    @endpoint
    def ping(self) -> str:
        return "pong"

    def __cleanup__(self, exc: Exception | None) -> None:
        raise ValueError("could not tidy up")


def test_a_stopped_actor_mesh_refuses_calls_and_says_why(quad: ProcMesh) -> None:
    port, receiver = Channel[Any].open()
    mesh: Any = quad.spawn("mesh", Stoppable, port)
    assert mesh.ping.call().get(20).values() == ["pong"] * 4
    first = mesh.stop("not needed")
    first.get(20)
    assert mesh.stop() is first
    for call in (mesh.ping.call(), mesh.slice(gpus=0).ping.call_one(), mesh.ping.choose()):
        with pytest.raises(
            SupervisionError, match=r"mesh.ping\(\) failed, .* stopped: not needed(.|\n)* spawn a new one"
        ):
            call.get(20)
    with pytest.raises(SupervisionError):
        mesh.ping.broadcast()
    for future in mesh.ping.stream():
        with pytest.raises(SupervisionError):
            future.get(20)
    assert [receiver.recv().get(20) for _ in range(4)] == [("monarch-actor-driver", None)] * 4
    assert "stopped: not needed" in repr(mesh)


def test_a_process_mesh_stops_with_its_actors_after_their_clean_up(faults: Faults) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 8}, name="stopping")
    port, receiver = Channel[Any].open()
    mesh: Any = procs.spawn("mesh", Stoppable, port)
    assert mesh.ping.call().get(20).values() == ["pong"] * 8
    first = procs.stop("all done")
    first.get(20)
    assert procs.stop() is first
    assert [receiver.recv().get(20) for _ in range(8)] == [("monarch-actor-driver", None)] * 8
    with pytest.raises(SupervisionError, match="actor mesh is stopped due to proc mesh shutdown"):
        mesh.ping.call().get(20)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        procs.spawn("again", Stoppable)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        procs.initialized.get(20)
    assert faults.left() == []


def test_processes_live_on_when_their_actors_stop(quad: ProcMesh) -> None:
    mesh: Any = quad.spawn("mesh", Stoppable)
    mesh.stop().get(20)
    assert quad.spawn("mesh", Stoppable).ping.call().get(20).values() == ["pong"] * 4  # type: ignore[attr-defined]


def test_a_running_message_is_finished_and_waiting_ones_are_refused(quad: ProcMesh) -> None:
    port, receiver = Channel[str].open()
    actor: Any = quad.slice(gpus=0).spawn("one", Stoppable)
    nap = actor.nap.call_one(port)
    ping = actor.ping.call_one()
    assert receiver.recv().get(20) == "begun"
    actor.stop().get(20)
    assert nap.get(20) == "slept"
    with pytest.raises(SupervisionError, match="stopped"):
        ping.get(20)


def test_a_slice_can_be_stopped_alone(quad: ProcMesh) -> None:
    mesh: Any = quad.spawn("mesh", Stoppable)
    mesh.slice(gpus=slice(1, 3)).stop("half of it").get(20)
    with pytest.raises(SupervisionError, match="half of it"):
        mesh.ping.call().get(20)
    with pytest.raises(SupervisionError, match="half of it"):
        mesh.slice(gpus=2).ping.call_one().get(20)
    assert mesh.slice(gpus=0).ping.call_one().get(20) == "pong"
    assert mesh.slice(gpus=3).ping.call_one().get(20) == "pong"
    mesh.stop().get(20)


def test_a_process_mesh_is_a_context_manager() -> None:
    import asyncio

    async def main() -> Any:
        async with this_host().spawn_procs(per_host={"gpus": 1}, name="with") as procs:
            mesh: Any = procs.spawn("mesh", Stoppable)
            assert await mesh.ping.call_one() == "pong" if len(mesh) == 1 else None
            return mesh

    mesh = asyncio.run(main())
    with pytest.raises(SupervisionError, match="stopped"):
        mesh.ping.call().get(20)


def test_an_actor_stops_itself_after_its_message(quad: ProcMesh, faults: Faults) -> None:
    actor: Any = quad.slice(gpus=0).spawn("one", Stoppable)
    assert actor.stop_self.call_one("had enough").get(20) == "answered"
    with pytest.raises(SupervisionError, match="stopped: had enough"):
        actor.ping.call_one().get(20)
    assert faults.left() == []


@pytest.mark.parametrize("how", ["abort", "kill"])
def test_an_actor_fails_itself_and_its_owner_is_told(quad: ProcMesh, faults: Faults, how: str) -> None:
    port, receiver = Channel[Any].open()
    actor: Any = quad.slice(gpus=0).spawn("one", Stoppable, port)
    with pytest.raises(SupervisionError, match="I give up"):
        actor.kill_self.call_one(how, "I give up").get(20)
    assert "I give up" in faults.next().report()
    _, error = receiver.recv().get(20)
    assert "I give up" in str(error)
    second: Any = quad.slice(gpus=1).spawn("other", Stoppable)
    with pytest.raises(SupervisionError, match="no reason provided"):
        second.kill_self.call_one(how).get(20)
    assert "no reason provided" in faults.next().report()


def test_a_reference_elsewhere_stops_the_mesh_for_all(quad: ProcMesh, faults: Faults) -> None:
    mesh: Any = quad.spawn("mesh", Stoppable)
    holder: Any = quad.slice(gpus=0).spawn("other", Stoppable)
    assert holder.ask.call_one(mesh).get(20) == str(["pong"] * 4)
    holder.stop_mesh.call_one(mesh).get(20)
    with pytest.raises(SupervisionError, match="stopped"):
        mesh.ping.call().get(20)
    assert "stopped" in holder.ask.call_one(mesh).get(20)
    assert faults.left() == []


def test_holders_of_a_reference_learn_of_a_stop(quad: ProcMesh) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="stopping")
    mesh: Any = procs.spawn("mesh", Stoppable)
    holder: Any = quad.slice(gpus=0).spawn("other", Stoppable)
    assert holder.ask.call_one(mesh).get(20) == str(["pong"] * 2)
    procs.stop().get(20)
    assert "actor mesh is stopped due to proc mesh shutdown" in holder.ask.call_one(mesh).get(20)


def test_a_clean_up_that_raises_is_a_failure_of_the_actor(quad: ProcMesh, faults: Faults) -> None:
    actor: Any = quad.slice(gpus=0).spawn("one", BadCleanup)
    assert actor.ping.call_one().get(20) == "pong"
    actor.stop().get(20)
    assert faults.left() == []


def test_old_stopped_meshes_are_forgotten_but_their_handles_still_say_so(
    quad: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "MOST_STOPPED", 2)
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="former")
    dependent: Any = procs.spawn("on them", Stoppable)
    alone: Any = quad.spawn("alone", Stoppable)
    for mesh in (dependent, alone):
        mesh.ping.call().get(20)
    alone.stop("not needed").get(20)
    procs.stop("all done").get(20)
    uids = [mesh._state.uid for mesh in (procs, dependent, alone)]
    assert all(uid in current_runtime().meshes for uid in uids)
    for _ in range(2):
        quad.spawn("next", Stoppable).stop().get(20)
    assert not any(uid in current_runtime().meshes for uid in uids)
    assert not any(uid in address for uid in uids for address in current_runtime().part(ProcessWatcher).pids)
    for mesh, reason in ((dependent, "due to proc mesh shutdown"), (alone, "not needed")):
        with pytest.raises(SupervisionError, match=reason):
            mesh.ping.call().get(20)
        mesh.stop().get(20)
    with pytest.raises(RuntimeError, match="all done"):
        procs.spawn("late", Stoppable)
    assert "all done" in repr(procs)


def test_a_mesh_may_be_stopped_before_it_is_there() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="early")
    mesh: Any = procs.spawn("mesh", Stoppable)
    call = mesh.ping.call()
    procs.stop().get(30)
    error = call.exception(20)  # None if both answered before the stop
    assert error is None or "stopped" in str(error)


@pytest.mark.parametrize("processes", [False, True])
def test_an_actor_that_stops_its_mesh_goes_on_to_the_end(own_procs: ProcMesh, processes: bool) -> None:
    actors: Any = own_procs.spawn("actors", Stoppable)
    actors.slice(gpus=0).stop_mesh.call_one(own_procs if processes else actors).get(20)
    with pytest.raises(SupervisionError, match="stopped"):
        actors.ping.call().get(20)
