"""Meshes in messages: what travels is a reference, bound to the receiving process's own record of the mesh."""

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from monarch_nb.mesh.reaching import reach
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime, runtime
from monarch_nb.shape import Region
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Layout

if TYPE_CHECKING:
    from monarch_nb.mesh.actor import ActorMesh
    from monarch_nb.mesh.host import HostMesh
    from monarch_nb.mesh.proc import ProcMesh

_lock = threading.Lock()
_Common = tuple[str, str, Region, str, dict[int, int], int, str | None]


def _common(state: MeshState) -> _Common:
    with state.lock:
        return (
            state.uid,
            state.name,
            state.region,
            state.home,
            dict(state.incarnations),
            state.version,
            state.stopped,
        )


def _known(engine: Runtime, uid: str, incarnations: dict[int, int], version: int) -> Any:
    state = engine.meshes.get(uid)
    if state is not None:
        state.renew(incarnations, version)
    return state


def _proc_state(common: _Common, layout: Layout) -> ProcState:
    uid, name, region, home, incarnations, version, stopped = common
    engine = runtime()
    if uid not in engine.meshes:
        reach(engine, (home.partition("/")[0], *layout.hosts), name)
    with _lock:
        state = _known(engine, uid, incarnations, version)
        if state is None:
            state = ProcState(uid, name, region, home, incarnations, version, stopped, layout=layout)
            engine.meshes[uid] = state
            engine.keeper.subscribe(state)
    assert isinstance(state, ProcState)
    return state


def _make_proc_mesh(common: _Common, layout: Layout, region: Region) -> "ProcMesh":
    from monarch_nb.mesh.proc import ProcMesh

    return ProcMesh(_proc_state(common, layout), region)


def _make_actor_mesh(
    common: _Common, procs: _Common, layout: Layout, cls: type, kind: Any, region: Region
) -> "ActorMesh[Any]":
    from monarch_nb.mesh.actor import ActorMesh

    proc_state = _proc_state(procs, layout)
    uid, name, whole, home, incarnations, version, stopped = common
    engine = runtime()
    with _lock:
        state = _known(engine, uid, incarnations, version)
        if state is None:
            state = ActorState(
                uid, name, whole, home, incarnations, version, stopped, procs=proc_state, cls=cls, kind=kind
            )
            engine.meshes[uid] = state
            engine.keeper.subscribe(state)
    assert isinstance(state, ActorState)
    return ActorMesh(state, region)


def reduce_proc_mesh(mesh: "ProcMesh") -> Any:
    """How a ProcMesh pickles."""
    return _make_proc_mesh, (_common(mesh._state), mesh._state.layout, mesh._region)


def reduce_actor_mesh(mesh: "ActorMesh[Any]") -> Any:
    """How an ActorMesh pickles."""
    state = mesh._state
    return _make_actor_mesh, (
        _common(state),
        _common(state.procs),
        state.procs.layout,
        state.cls,
        state.kind,
        mesh._region,
    )


def reduce_host_mesh(mesh: "HostMesh") -> Any:
    """How a HostMesh pickles: a reference, which cannot shut its hosts down."""
    return _make_host_mesh, (mesh._name, mesh._hosts, mesh._region, mesh._python, mesh._identity)


def _make_host_mesh(name: str, hosts: tuple[str, ...], region: Region, python: str | None, identity: str) -> "HostMesh":
    from monarch_nb.mesh.host import HostMesh

    with contextlib.suppress(UnreachableError):  # whoever uses it is told
        reach(runtime(), hosts, name)
    return HostMesh(name, hosts, region, python=python, owned=False, identity=identity)
