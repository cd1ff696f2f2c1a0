"""Failures are reported to owners, and upwards until one handles them."""

import asyncio
import gc
import pickle
import weakref
from typing import Any

import pytest

from monarch_nb.actor import (
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    endpoint,
    heal_mesh,
    this_proc,
)
from monarch_nb.lifecycle.mesh_healer import MeshHealer
from monarch_nb.runtime import current_runtime
from monarch_nb.runtime.actors.executors import AsyncExecutor, SyncExecutor
from monarch_nb.testing import Cluster
from tests.cluster.actor_tools import Faults
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Child(Actor):
    def __init__(self, fail_in_init: bool = False) -> None:
        if fail_in_init:
            raise ValueError("not like this")

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def boom(self) -> None:
        raise ValueError("boom")

    @endpoint
    def hold(self, port: Port[Port[None]]) -> None:
        key, receiver = Channel[None].open()
        port.send(key)
        receiver.recv().get(20)


class Owner(Actor):
    """Owns children; handles, ignores or stumbles over their failures."""

    def __init__(self, how: str, port: Port[Any]) -> None:
        self.how = how
        self.port = port

    @endpoint
    def make(self, procs: Any) -> Any:
        self.children = procs.spawn("children", Child)
        return self.children

    @endpoint
    def ping(self) -> str:
        return "pong"

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send((self.how, failure.mesh_name, failure.crashed_ranks, failure.report()))
        if self.how == "raises":
            raise KeyError("in the hook")
        return self.how == "handles"


class AsyncOwner(Actor):
    def __init__(self, how: str, port: Port[Any]) -> None:
        self.how = how
        self.port = port

    @endpoint
    async def make(self, procs: Any) -> Any:
        self.children = procs.spawn("children", Child)
        return self.children

    @endpoint
    async def ping(self) -> str:
        return "pong"

    async def __supervise__(self, failure: MeshFailure) -> bool:  # type: ignore[override]
        self.port.send((self.how, failure.mesh_name, failure.crashed_ranks, failure.report()))
        if self.how == "raises":
            raise KeyError("in the hook")
        return self.how == "handles"


def test_a_broadcast_that_raises_is_told_to_the_owner_exactly_once(quad: ProcMesh, faults: Faults) -> None:
    children: Any = quad.spawn("children", Child)
    children.slice(gpus=2).boom.broadcast()
    failure = faults.next()
    assert failure.mesh_name == "children"
    assert failure.crashed_ranks == [2]
    assert "ValueError: boom" in failure.report()
    with pytest.raises(SupervisionError, match="boom") as caught:
        children.ping.call().get(20)
    assert caught.value.failure is not None
    assert caught.value.failure.crashed_ranks == [2]
    assert children.slice(gpus=3).ping.call_one().get(20) == "pong"
    assert faults.left() == []


def test_each_rank_that_fails_is_told(quad: ProcMesh, faults: Faults) -> None:
    children: Any = quad.spawn("children", Child)
    children.boom.broadcast()
    assert sorted(rank for _ in range(4) for rank in faults.next().crashed_ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize(("executor", "cls"), [(SyncExecutor, Owner), (AsyncExecutor, AsyncOwner)])
def test_an_actor_without_a_thread_has_failed(
    simulated: Cluster, quad: ProcMesh, faults: Faults, executor: type, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "start", start)
        actors = quad.spawn("actors", cls, "", Channel[int].open()[0])
        with pytest.raises(SupervisionError, match="no thread could be started for it: can't start new thread"):
            actors.initialized.get(20)
        assert sorted(rank for _ in range(4) for rank in faults.next().crashed_ranks) == [0, 1, 2, 3]
    with pytest.raises(SupervisionError, match="no thread could be started"):
        actors.ping.call().get(20)
    actors.stop().get(20)


LIVING: "weakref.WeakSet[Actor]" = weakref.WeakSet()


class Model(Actor):
    """Owns a mesh, so that the record of that mesh refers to it."""

    def __init__(self) -> None:
        LIVING.add(self)
        self.child = this_proc().spawn("child", Child)

    @endpoint
    def boom(self) -> None:
        raise ValueError("boom")


class AsyncModel(Model):
    @endpoint
    async def boom(self) -> None:  # type: ignore[override]
        raise ValueError("boom")


def remain(count: int) -> bool:
    gc.collect()
    return len(LIVING) == count


@pytest.mark.parametrize("end", ["stop", "heal", "heal of its group"])
@pytest.mark.parametrize("cls", [Model, AsyncModel])
def test_a_failure_holds_no_state_of_an_ended_actor(quad: ProcMesh, faults: Faults, cls: Any, end: str) -> None:
    LIVING.clear()
    models: Any = quad.slice(gpus=slice(0, 2)).spawn("models", cls)
    with pytest.raises(ActorError):
        models.boom.call().get(20)
    assert len(LIVING) == 2
    if end == "stop":
        models.stop().get(20)
        until(lambda: remain(0), "the state of the stopped actor is released")
        return
    if end == "heal of its group":  # which constructs survivors anew
        current_runtime().part(MeshHealer)._reinitialized.add(models._state.uid)
    models.slice(gpus=0).boom.broadcast()
    faults.next()
    heal_mesh(models)
    until(lambda: remain(2), "the state of the failed actor is released")
    models.stop().get(20)


def test_a_raising_init_is_reported_on_use_and_to_the_owner(quad: ProcMesh, faults: Faults) -> None:
    children: Any = quad.slice(gpus=slice(0, 2)).spawn("children", Child, True)
    with pytest.raises(SupervisionError, match="not like this"):
        children.ping.call().get(20)
    reports = [faults.next() for _ in range(2)]
    assert sorted(rank for failure in reports for rank in failure.crashed_ranks) == [0, 1]
    for failure in reports:
        assert "children" in failure.report()
        assert "its __init__ raised" in failure.report()
        assert "not like this" in str(failure)
    with pytest.raises(SupervisionError, match="not like this"):
        children.initialized.get(20)


@pytest.mark.parametrize("owner_class", [Owner, AsyncOwner])
@pytest.mark.parametrize("how", ["ignores", "raises"])
def test_an_owner_that_does_not_handle_it_fails_with_it(
    quad: ProcMesh, faults: Faults, owner_class: Any, how: str
) -> None:
    port, receiver = Channel[Any].open()
    owner: Any = quad.slice(gpus=0).spawn("owner", owner_class, how, port)
    children = owner.make.call_one(quad).get(20)
    children.slice(gpus=1).boom.broadcast()
    assert receiver.recv().get(20)[0] == how
    failure = faults.next()
    report = failure.report()
    assert "boom" in report
    if how == "raises":
        assert "in the hook" in report
        assert "This error occurred while handling another failure:" in report
        return
    assert failure.mesh_name == "owner"
    assert "did not handle a supervision event from its child" in report
    with pytest.raises(SupervisionError, match="did not handle"):
        owner.ping.call_one().get(20)
    with pytest.raises(RuntimeError):
        children.slice(gpus=0).ping.call_one().get(20)


def test_the_owner_is_told_and_not_the_caller(quad: ProcMesh, faults: Faults) -> None:
    port, receiver = Channel[Any].open()
    owner: Any = quad.slice(gpus=0).spawn("owner", Owner, "handles", port)
    children = owner.make.call_one(quad.slice(gpus=slice(1, 3))).get(20)
    children.slice(gpus=1).boom.broadcast()  # sent by this client, which does not own it
    assert receiver.recv().get(20)[2] == [1]
    assert faults.left() == []


def test_a_failure_is_told_in_words_and_does_not_travel(quad: ProcMesh, faults: Faults) -> None:
    children: Any = quad.slice(gpus=0).spawn("children", Child)
    children.boom.broadcast()
    failure = faults.next()
    assert str(failure).startswith("MeshFailure(mesh_name=children, crashed_ranks=[0], event=Supervision event: actor ")
    assert failure.mesh is None
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(failure)


class ConcurrentPort(Actor):
    def __init__(self, port: Port[str]) -> None:
        self.port = port

    @concurrent_endpoint(explicit_response_port=True)
    async def fails(self, answer: Port[int]) -> None:
        raise ValueError("in a task")

    async def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send(f"cleaned up after {exc!r}")


def test_a_failing_task_ends_its_idle_actor_with_a_clean_up(quad: ProcMesh, faults: Faults) -> None:
    port, receiver = Channel[str].open()
    actor: Any = quad.slice(gpus=0).spawn("actor", ConcurrentPort, port)
    with pytest.raises(SupervisionError, match="in a task"):
        actor.fails.call_one().get(20)
    assert receiver.recv().get(20) == "cleaned up after ValueError('in a task')"
    assert faults.next().mesh_name == "actor"


class Sender(Actor):
    def __init__(self, how: str, port: Port[Any]) -> None:
        self.how = how
        self.port = port

    @endpoint
    def tell(self, mesh: Any) -> None:
        for _ in range(3):
            mesh.boom.broadcast()

    @endpoint
    def fill(self, port: Port[int]) -> None:
        port.send(1)

    @endpoint
    def ping(self) -> str:
        return "pong"

    def _handle_undeliverable_message(self, message: Any) -> bool:
        self.port.send(message.reason)
        if self.how == "raises":
            raise KeyError("while judging")
        return self.how == "handles"


class Stubborn(Actor):
    """Sends to the closed port again while it handles a lost message."""

    def __init__(self, lost: Port[int], port: Port[str]) -> None:
        self.lost = lost
        self.port = port

    @endpoint
    def fill(self) -> None:
        self.lost.send(1)

    @endpoint
    def say(self, text: str) -> None:
        self.port.send(text)

    def _handle_undeliverable_message(self, message: Any) -> bool:
        self.lost.send(2)
        self.port.send(message.reason)
        return True


class AsyncStubborn(Stubborn):
    @endpoint
    async def fill(self) -> None:
        self.lost.send(1)

    @endpoint
    async def say(self, text: str) -> None:
        self.port.send(text)

    async def _handle_undeliverable_message(self, message: Any) -> bool:
        await asyncio.sleep(0)
        return Stubborn._handle_undeliverable_message(self, message)


def closed_port() -> Port[int]:
    port, _ = Channel[int].open()
    return port


def test_a_sender_that_minds_no_lost_message_lives(quad: ProcMesh, faults: Faults) -> None:
    port, receiver = Channel[Any].open()
    sender: Any = quad.slice(gpus=0).spawn("sender", Sender, "handles", port)
    sender.fill.call_one(closed_port()).get(20)
    assert "nothing receives" in receiver.recv().get(20)
    assert sender.ping.call_one().get(20) == "pong"


@pytest.mark.parametrize("kind", [Stubborn, AsyncStubborn])
def test_messages_lost_while_a_loss_is_judged_are_not_judged(quad: ProcMesh, kind: type[Stubborn]) -> None:
    port, receiver = Channel[str].open()
    sender: Any = quad.slice(gpus=0).spawn("stubborn", kind, closed_port(), port)
    for _ in range(3):
        sender.fill.call_one().get(20)
        assert "nothing receives" in receiver.recv().get(20)
    sender.say.call_one("the last").get(20)
    assert receiver.recv().get(20) == "the last"


@pytest.mark.parametrize(("how", "text"), [("ignores", "nothing receives"), ("raises", "while judging")])
def test_a_sender_that_says_it_minds_fails(quad: ProcMesh, faults: Faults, how: str, text: str) -> None:
    port, receiver = Channel[Any].open()
    sender: Any = quad.slice(gpus=0).spawn("sender", Sender, how, port)
    sender.fill.call_one(closed_port()).get(20)
    receiver.recv().get(20)
    assert text in faults.next().report()
    with pytest.raises(SupervisionError, match=text):
        sender.ping.call_one().get(20)


def test_broadcasts_to_a_failed_actor_return_to_their_sender(quad: ProcMesh, faults: Faults) -> None:
    port, receiver = Channel[Any].open()
    sender: Any = quad.slice(gpus=0).spawn("sender", Sender, "handles", port)
    child: Any = quad.slice(gpus=1).spawn("child", Child)
    gate, keys = Channel[Port[None]].open()
    child.hold.broadcast(gate)  # so that all broadcasts are sent before the first one fails the actor
    key = keys.recv().get(20)
    sender.tell.call_one(child).get(20)
    key.send(None)
    assert "boom" in faults.next().report()
    for _ in range(2):
        assert "boom" in receiver.recv().get(20)
