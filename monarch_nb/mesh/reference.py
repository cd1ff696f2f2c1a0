"""Meshes in messages: references, bound to the receiving process's own record of the mesh.

A handle pickles as its region and the form of its record by `proc_form` or `actor_form`; the receiver's `proc_record`
or `actor_record` returns the record there. A process follows a mesh from its first reference on.
"""

import threading
from typing import Any, TypeVar

from monarch_nb.mesh.operations import operations
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime, current_runtime
from monarch_nb.runtime.actors.endpoint import Kind
from monarch_nb.shape import Region
from monarch_nb.wire import Layout, host_of

S = TypeVar("S", bound=MeshState)
Common = tuple[str, str, Region, str, dict[int, int], int, str | None]  # the region is that of the version
ProcForm = tuple[Common, Layout]
ActorForm = tuple[Common, ProcForm, type, Kind]

_lock = threading.Lock()


def _common(state: MeshState) -> Common:
    with state.lock:
        return (
            state.uid,
            state.name,
            state.region,
            state.owner_process,
            dict(state.incarnations),
            state.version,
            state.stopped,
        )


def proc_form(state: ProcState) -> ProcForm:
    """Returns the form of a mesh of processes in messages."""
    return _common(state), state.layout


def actor_form(state: ActorState) -> ActorForm:
    """Returns the form of a mesh of actors in messages."""
    return _common(state), proc_form(state.procs), state.cls, state.kind


def proc_record(form: ProcForm) -> ProcState:
    """Returns this process's record of a mesh of processes. Raises UnreachableError for hosts that are out of reach."""
    common, layout = form
    uid, name, _, owner, *_ = common
    runtime = current_runtime()
    if uid not in runtime.meshes:
        operations().reach((host_of(owner), *layout.hosts), name)
    return _record(runtime, common, ProcState, layout=layout)


def actor_record(form: ActorForm) -> ActorState:
    """Returns this process's record of a mesh of actors. Raises UnreachableError for hosts that are out of reach."""
    common, procs, cls, kind = form
    return _record(current_runtime(), common, ActorState, procs=proc_record(procs), cls=cls, kind=kind)


def _record(runtime: Runtime, common: Common, record: type[S], **fields: Any) -> S:
    uid, name, region, owner, incarnations, version, stopped = common
    with _lock:
        state = runtime.meshes.get(uid)
        if state is None:
            state = runtime.meshes[uid] = record(uid, name, region, owner, incarnations, version, stopped, **fields)
            try:
                operations().refer(state)
            except BaseException:  # its end would never be reported: the next reference tries again
                del runtime.meshes[uid]
                raise
        else:
            new_region = region if region != state.region else None
            runtime.part(MeshRegistry).renew(state, incarnations, version, new_region, fields.get("layout"))
    assert isinstance(state, record)
    return state
