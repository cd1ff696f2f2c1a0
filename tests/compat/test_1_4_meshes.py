"""Section 1.4: meshes.

Elsewhere: slicing, splitting and the words of errors (tests/unit/test_shape_*.py, memory_network/test_slices.py),
value meshes (tests/unit/test_value_mesh.py), stopping (memory_network/test_stop.py), commands (test_spawn_options.py).
"""

import asyncio
import gc
import os
import pickle
import sys
from typing import Any, cast

import pytest

from monarch._src.actor.proc_mesh import get_active_proc_meshes
from monarch.actor import (
    Actor,
    ActorMesh,
    BootstrapCommand,
    HostMesh,
    ProcMesh,
    current_rank,
    default_bootstrap_cmd,
    endpoint,
    this_host,
)
from monarch_nb.wire import host_name
from tests.cluster.actor_tools import spawned

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Place(Actor):
    def __init__(self) -> None:
        self.first_rank = str(current_rank())

    @endpoint
    async def place(self) -> tuple[str, str, int]:
        return self.first_rank, str(current_rank()), os.getpid()


def test_this_host_has_no_dimensions_unless_one_called_hosts_is_requested() -> None:
    assert dict(this_host().extent) == {}
    assert len(this_host()) == 1
    single = this_host().spawn_procs()
    assert dict(single.extent) == {}
    pair = this_host().spawn_procs(per_host={"hosts": 1, "gpus": 2})
    assert pair.sizes == {"hosts": 1, "gpus": 2}
    results = pair.spawn("place", Place).place.call().get(30)
    assert [value[0] for value in results.values()] == ["{'hosts': 0/1, 'gpus': 0/2}", "{'hosts': 0/1, 'gpus': 1/2}"]
    assert single.spawn("place", Place).place.call_one().get(30)[0] == "{}"
    pair.stop().get(20)
    single.stop().get(20)


def test_host_meshes_are_equal_by_what_they_are() -> None:
    assert this_host() == this_host()
    assert this_host() != "this host"
    assert pickle.loads(pickle.dumps(this_host())) == this_host()
    assert isinstance(this_host(), HostMesh)
    assert len(this_host().region.slice()) == 1
    assert (this_host().is_fake_in_process, this_host().stream_logs) == (False, False)
    assert this_host().initialized.get(20) is True


def test_processes_of_a_process_mesh_know_their_host(quad: ProcMesh) -> None:
    assert quad.slice(gpus=0).host_mesh == this_host()
    with pytest.raises(NotImplementedError):
        _ = quad.host_mesh


def test_operations_that_a_proc_mesh_lacks_say_where_to_go(quad: ProcMesh) -> None:
    with pytest.raises(NotImplementedError, match=r"HostMesh\.sync_workspace"):
        asyncio.run(quad.sync_workspace(None))
    with pytest.raises(ValueError, match="Actor"):
        quad.spawn("no", int)  # type: ignore[type-var]


def test_a_table_shows_where_each_process_is(quad: ProcMesh) -> None:
    host = host_name(this_host().host_ids[0])
    assert quad.slice(gpus=2).to_table() == f"{host}[2]"
    assert [line.split() for line in quad.split(gpus=("dp", "pp"), pp=2).to_table().splitlines()] == [
        ["dp", "pp=0", "pp=1"],
        ["0", f"{host}[0]", f"{host}[1]"],
        ["1", f"{host}[2]", f"{host}[3]"],
    ]
    assert quad.slice(gpus=slice(1, 4, 2)).to_table().splitlines()[1].split() == [f"{host}[1]", f"{host}[3]"]


def test_spawn_takes_its_class_by_name_too(quad: ProcMesh) -> None:
    assert len(quad.spawn(name="place", Class=Place).place.call().get(20)) == 4


def test_dropping_a_mesh_keeps_its_processes() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="kept")
    actors = procs.spawn("place", Place)
    pid = actors.place.call_one().get(30)[2] if len(actors) == 1 else 0  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(actors))
    assert procs in list(get_active_proc_meshes())
    del procs, actors
    gc.collect()
    assert copy.place.call_one().get(20)[2] == pid
    survivor = next(mesh for mesh in get_active_proc_meshes() if mesh.name == "kept")
    survivor.stop().get(20)


def test_an_actor_mesh_is_cast_to_use_what_meshes_have(quad: ProcMesh) -> None:
    actors = quad.spawn("place", Place)
    mesh = cast(ActorMesh[Place], actors)
    assert mesh.initialized.get(20) is None
    assert len(mesh) == 4
    assert isinstance(mesh._name.get(20), str)
    assert mesh.stop("done").get(20) is None


def test_the_name_of_a_mesh_is_that_in_its_failures(quad: ProcMesh, faults: Any) -> None:
    class Fails(Actor):
        @endpoint
        def fail(self) -> None:
            raise ValueError("told")

    mesh: Any = quad.slice(gpus=0).spawn("fails", Fails)
    mesh.fail.broadcast()
    assert faults.next().mesh_name == mesh._name.get(20)


def test_a_command_with_another_environment() -> None:
    command = BootstrapCommand(program=sys.executable, arg0=None, args=["-c", "pass"], env={"A": "1", "B": None})
    changed = command.with_env({"A": None, "C": "3"})
    assert (changed.env.get("A"), changed.env["C"], changed.inherit_env) == (None, "3", True)
    assert command.env["A"] == "1"
    assert isinstance(default_bootstrap_cmd(), BootstrapCommand)


def test_bootstraps_may_be_sync_or_async_and_their_actors_stay() -> None:
    def plain() -> None:
        os.environ["SET_UP"] = "plain"

    async def coroutine() -> None:
        os.environ["SET_UP"] = "coroutine"

    class Tells(Actor):
        def __init__(self) -> None:
            self.set_up = os.environ.get("SET_UP")

        @endpoint
        def tell(self) -> str | None:
            return self.set_up

    for bootstrap, value in ((plain, "plain"), (coroutine, "coroutine")):
        for procs in spawned(1, "set_up", bootstrap=bootstrap):
            assert procs.spawn("tells", Tells).tell.call_one().get(20) == value
