"""Private names of torchmonarch that programs use: unit tests of actors, frameworks, launchers.

Elsewhere: that the names import (tests/unit/test_names.py), helpers without processes (tests/unit/test_compat_*.py).
"""

import asyncio
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import pytest

import monarch._src.actor.pickle as native_pickle
from monarch._rust_bindings.monarch_hyperactor.actor import PythonMessage, PythonMessageKind
from monarch._rust_bindings.monarch_hyperactor.handle import _new_handle_pair
from monarch._rust_bindings.monarch_hyperactor.mailbox import PortId, PortRef
from monarch._rust_bindings.monarch_hyperactor.proc import ActorAddr
from monarch._rust_bindings.monarch_hyperactor.pytokio import PythonTask
from monarch._src.actor import actor_mesh
from monarch._src.actor.host_mesh import _spawn_admin
from monarch._src.actor.mock import patch_actor
from monarch._src.actor.shape import MeshTrait
from monarch.actor import (
    Actor,
    ActorError,
    ActorMesh,
    BootstrapCommand,
    Context,
    NDSlice,
    Port,
    ProcMesh,
    Shape,
    concurrent_endpoint,
    context,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Worker(Actor):
    """Routes every call through one endpoint, as a well-known framework does."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def scaled(self, number: int) -> int:
        return self.factor * number

    @endpoint
    def __invoke__(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    @endpoint
    def twice(self, number: int) -> int:
        """Twice."""
        return 2 * number

    @endpoint
    def identity(self) -> dict[str, Any]:
        actor_id = context().actor_instance.actor_id
        names = ("actor_name", "proc_id", "proc_name", "label", "uid", "addr", "pid", "rank")
        return {"id": actor_id, "text": str(actor_id), **{name: getattr(actor_id, name) for name in names}}

    @endpoint
    def context_of_the_message(self) -> bool:
        is_own = actor_mesh._context.get().actor_instance is context().actor_instance
        return is_own and actor_mesh._client_context.try_get() is None


class Waiting(Actor):
    @endpoint
    async def add(self, a: int, b: int) -> int:
        return a + b

    @concurrent_endpoint
    async def delay(self, a: int) -> int:
        await asyncio.sleep(0)
        return a


def test_an_endpoint_may_be_named_like_pythons_own_methods(quad: ProcMesh) -> None:
    workers: Any = quad.spawn("workers", Worker, 3)
    assert workers.__invoke__.call("scaled", 7).get(20).values() == [21] * 4
    assert getattr(workers.slice(gpus=1), "__invoke__").call_one("scaled", 2).get(20) == 6  # noqa: B009
    assert "__invoke__" in dir(workers)
    for name in ("__fspath__", "__deepcopy__", "__not_there__"):  # libraries look these up on any object
        assert not hasattr(workers, name)
    copy: Any = pickle.loads(pickle.dumps(workers))
    assert copy.__invoke__.call("scaled", 1).get(20).values() == [3] * 4


def test_an_endpoint_cannot_replace_a_method_of_the_mesh() -> None:
    class Long(Actor):
        @endpoint
        def __len__(self) -> int:
            return 3

    with pytest.raises(ValueError, match=r"collides with an endpoint name: Long\.__len__"):
        this_proc().spawn("long", Long)


def test_an_actor_is_tested_without_being_spawned() -> None:
    worker, waiting = Worker(5), Waiting()
    assert worker.twice._method(worker, 4) == 8  # type: ignore[attr-defined]
    assert Worker.twice._method(worker, 4) == 8
    assert worker.__invoke__._method(worker, "scaled", 2) == 10  # type: ignore[attr-defined]
    assert asyncio.run(waiting.add._method(waiting, 1, b=2)) == 3  # type: ignore[attr-defined]
    assert asyncio.run(waiting.delay._method(waiting, 1)) == 1  # type: ignore[attr-defined]
    assert worker.twice.__doc__ == "Twice."


def test_a_mesh_knows_the_class_of_its_actors(quad: ProcMesh) -> None:
    workers: Any = quad.spawn("workers", Worker)
    assert isinstance(workers, ActorMesh)
    assert workers._class is Worker
    assert workers.slice(gpus=0)._class is Worker
    assert (workers._shape.labels, workers.slice(gpus=slice(1, 3))._shape.ranks()) == (["gpus"], [1, 2])


def test_the_running_actor_is_known_inside_it_and_nowhere_else(quad: ProcMesh) -> None:
    context()
    assert actor_mesh._context.get() is None
    workers: Any = quad.spawn("workers", Worker)
    assert workers.context_of_the_message.call().get(20).values() == [True] * 4


def test_a_program_may_note_on_a_future_what_it_is_of(quad: ProcMesh) -> None:
    workers: Any = quad.slice(gpus=0).spawn("workers", Worker)
    future = workers.twice.call_one(4)
    future.method_name = "twice"
    assert (future.get(20), future.method_name) == (8, "twice")


def test_an_actor_id_has_parts(quad: ProcMesh) -> None:
    workers: Any = quad.spawn("workers", Worker)
    rows = workers.identity.call().get(20).values()
    assert [row["actor_name"] for row in rows] == [row["label"] for row in rows] == ["workers"] * 4
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert len({row["proc_id"] for row in rows}) == len({row["proc_name"] for row in rows}) == 4
    assert len({row["uid"] for row in rows}) == 4
    assert all(row["uid"].startswith("workers<") for row in rows)
    assert all(row["pid"] == row["uid"] and row["addr"] == row["proc_id"] for row in rows)
    for row in rows:
        assert (row["id"].uid, row["id"].rank, str(row["id"])) == (row["uid"], row["rank"], row["text"])
    client = context().actor_instance.actor_id
    assert (client.actor_name, client.rank, client.proc_id) == ("client", 0, context().actor_instance.proc_id)
    assert isinstance(context(), Context)


@dataclass(frozen=True)
class Reference:
    key: str
    note: str = "made by its constructor"

    def __getstate__(self) -> Any:
        raise TypeError("this one does not travel by itself")


def of_key(key: str) -> Reference:
    return Reference(key, "made by its reducer")


@pytest.mark.parametrize(
    "table", ["_TorchPickler.dispatch_table", "_Pickler._dispatch_table", "_Pickler.dispatch_table"]
)
def test_a_reducer_in_a_dispatch_table_counts_for_messages(quad: ProcMesh, table: str) -> None:
    if table.startswith("_Torch"):
        pytest.importorskip("torch")
    native_pickle._ensure_torch_pickle() if table.startswith("_Torch") else None
    owner, _, name = table.partition(".")
    reducers = getattr(getattr(native_pickle, owner), name)
    workers: Any = quad.slice(gpus=0).spawn("workers", Echo)
    with pytest.raises(TypeError, match="does not travel"):
        workers.echo.call_one(Reference("a"))
    reducers[Reference] = lambda reference: (of_key, (reference.key,))
    try:
        assert workers.echo.call_one([Reference("a")]).get(20) == "made by its reducer"
    finally:
        del reducers[Reference]


class Echo(Actor):
    @endpoint
    def echo(self, references: list[Reference]) -> str:
        return references[0].note


class Inner(Actor):
    @endpoint
    def kind(self) -> str:
        return "real"


class FakeInner(Actor):
    @endpoint
    def kind(self) -> str:
        return "fake"


class Outer(Actor):
    @endpoint
    def kind_of_inner(self) -> str:
        inner: Any = this_proc().spawn("inner", Inner)
        kind: str = inner.kind.call_one().get(20)
        return kind


def test_an_actor_class_can_be_replaced_here_and_in_spawned_processes() -> None:
    with patch_actor(Inner, FakeInner):
        own: Any = this_proc().spawn("inner", Inner)
        root: Any = get_or_spawn_controller("inner_of_test", Inner).get(20)
        procs = this_host().spawn_procs(name="patched")
        outer: Any = procs.spawn("outer", Outer)
        kinds = [outer.kind_of_inner.call_one().get(40), own.kind.call_one().get(20), root.kind.call_one().get(20)]
    assert kinds == ["fake"] * 3
    restored: Any = this_proc().spawn("inner", Inner)
    assert restored.kind.call_one().get(20) == "real"
    procs.stop().get(20)


def test_bootstrap_main_is_the_program_of_a_process() -> None:
    command = BootstrapCommand(sys.executable, None, ["-m", "monarch._src.actor.bootstrap_main"], {"MARK": "1"})
    procs = this_host().spawn_procs(bootstrap_command=command, name="by_module")
    worker: Any = procs.spawn("worker", Worker)
    assert worker.twice.call_one(4).get(40) == 8
    procs.stop().get(20)


def test_a_message_to_a_handwritten_address_returns_to_its_sender() -> None:
    class Sender(Actor):
        def __init__(self) -> None:
            self.returns: list[str] = []

        @endpoint
        def send_nowhere(self) -> None:
            nobody = ActorAddr(addr="local:0", proc_name="bogus", actor_name="bogus")
            message = PythonMessage(PythonMessageKind.Result(None), b"123", [])
            PortRef(PortId(actor_id=nobody, port=7)).send(context().actor_instance._as_rust(), message)

        @endpoint
        def send_through(self, port: Any) -> None:
            port.send(1)

        @endpoint
        def what_came_back(self) -> list[str]:
            return self.returns

        def _handle_undeliverable_message(self, message: Any) -> bool:
            self.returns.append(message.dest())
            return True

    sender: Any = this_proc().spawn("sender", Sender)
    sender.send_nowhere.call_one().get(20)
    assert "bogus" in sender.what_came_back.call_one().get(20)[0]
    nobody = PortId(actor_id=ActorAddr(addr="local:0", proc_name="bogus", actor_name="bogus"), port=7)
    sender.send_through.call_one(Port(PortRef(nobody), context().actor_instance._as_rust(), None)).get(20)
    until(lambda: len(sender.what_came_back.call_one().get(20)) == 2)


def test_tasks_run_beside_the_program_in_the_context_of_their_maker() -> None:
    caller = context()

    async def double(number: int) -> int:
        await PythonTask.sleep(0.001)
        assert context() is caller
        return 2 * number

    assert PythonTask.from_coroutine(double(4)).block_on() == 8
    slow = PythonTask.sleep(60)
    assert PythonTask.select_one([slow, PythonTask.spawn_blocking(context).task()]).block_on() == (caller, 1)
    shared = PythonTask.from_coroutine(double(5)).spawn()
    assert (shared.block_on(), shared.poll()) == (10, 10)
    with pytest.raises(TimeoutError):
        PythonTask.sleep(60).with_timeout(0.01).block_on()
    with pytest.raises(ValueError, match="asked for before"):
        slow.block_on()


def test_a_handle_is_settled_once_and_seen_by_many() -> None:
    handle, completer = _new_handle_pair()
    assert handle.poll() is None
    with pytest.raises(TimeoutError, match="goes on"):
        handle.get(0.01)

    async def see() -> int:
        given_up = handle.as_asyncio()
        given_up.cancel()
        completer.set_result(3)
        return await handle

    assert (asyncio.run(see()), handle.get(), handle.poll()) == (3, 3, 3)
    with pytest.raises(RuntimeError, match="has a result already"):
        completer.set_exception(OSError())
    orphan, nobody = _new_handle_pair()
    del nobody
    with pytest.raises(RuntimeError, match="ended without one"):
        orphan.get()


def test_modules_of_private_paths_travel_and_absent_ones_say_so() -> None:
    assert pickle.loads(pickle.dumps(actor_mesh)) is actor_mesh
    assert actor_mesh._actor_kind(Waiting) == actor_mesh.ActorKind.ASYNC
    assert actor_mesh._client_context.try_get() is actor_mesh._client_context._val is context()
    with pytest.raises(NotImplementedError, match="the inside of torchmonarch"):
        _spawn_admin()


def test_a_program_may_stop_what_its_client_has_spawned(quad: ProcMesh) -> None:
    client = context().actor_instance
    assert repr(client) == str(client) == "<root>"
    assert quad in client._children
    client._children = None
    procs = this_host().spawn_procs()
    assert procs in client._children
    procs.stop().get(20)
    assert procs not in client._children


def test_a_mesh_of_a_programs_own_is_sliced_by_its_shapes() -> None:
    class Places(MeshTrait):
        def __init__(self, shape: Shape) -> None:
            self._shape = shape

        @property
        def _ndslice(self) -> NDSlice:
            return self._shape.ndslice

        @property
        def _labels(self) -> tuple[str, ...]:
            return tuple(self._shape.labels)

        def _new_with_shape(self, shape: Shape) -> "Places":
            return Places(shape)

    places = Places(Shape(["hosts", "gpus"], NDSlice(offset=0, sizes=[2, 3], strides=[3, 1])))
    assert (len(places), places.sizes) == (6, {"hosts": 2, "gpus": 3})
    assert list(places.slice(hosts=1).flatten("gpu")._shape.ndslice) == [3, 4, 5]
    with pytest.raises(NotImplementedError, match="has neither _region nor _labels"):
        type("Empty", (MeshTrait,), {})().flatten("gpu")


def test_a_mesh_is_sliced_by_a_shape(quad: ProcMesh) -> None:
    half = quad.slice(gpus=slice(1, 3))
    assert quad._new_with_shape(half._shape) == half


def test_meshes_are_found_behind_each_other(quad: ProcMesh) -> None:
    half = quad.slice(gpus=slice(1, 3))
    inner = half._proc_mesh
    assert inner.block_on() == inner.poll() == inner.task().with_timeout(20).block_on() == half
    assert inner.block_on().region.labels == ["gpus"]
    assert inner.block_on().region.slice() == half._ndslice
    actors = half.spawn("behind", Worker)
    assert actors._proc_mesh == half
    assert actors.slice(gpus=1)._proc_mesh == quad.slice(gpus=2)
    assert this_host()._hy_host_mesh.block_on() == this_host()


def test_meshes_that_failed_to_start_raise_when_looked_up() -> None:
    async def fails() -> None:
        raise OSError("no room")

    procs = this_host().spawn_procs(bootstrap=fails)
    with pytest.raises(ActorError, match="no room"):
        procs._proc_mesh.block_on()
