"""The record through which another controller can use a mesh: its owner writes it, the attaching one reads it."""

from typing import Any

import msgspec

from monarch_nb.lifecycle.actor_spawn import ActorSpawnSpec
from monarch_nb.lifecycle.proc_spawn import ProcSpawnSpec, host_mesh_of
from monarch_nb.mesh.host import host_labels
from monarch_nb.mesh.host_record import HostRecord, RecordedSource, record_with
from monarch_nb.mesh.operations import operations
from monarch_nb.mesh.reference import ActorForm, ProcForm, actor_form, proc_form
from monarch_nb.runtime import ActorState, EncodedObject, MeshState, ProcState, Runtime
from monarch_nb.wire import decode, encode, error_line, msgpack_decoder

PROCS = "procs"  # the part of the processes; those of actors have the uids of their meshes
NOTES = "notes"  # of the notebook


class RecordError(RuntimeError):
    """A mesh cannot be used by this process; the text names the part of it and the reason."""


def parts_of(runtime: Runtime, procs: ProcState) -> dict[str, bytes]:
    """Serializes a mesh of processes and all actors on it. Raises the errors of pickle."""
    spec = procs.spawn_spec
    assert isinstance(spec, ProcSpawnSpec)  # it was spawned here
    spec_args = (spec.setup, spec.env, spec.proc_bind, spec.launch, spec.python, spec.host_mesh)
    parts = {PROCS: _pack(runtime, (proc_form(procs), spec_args, _origin_of(procs)))}
    for actors in tuple(procs.actors.values()):
        if actors.stopped is None and isinstance(actors.spawn_spec, ActorSpawnSpec):
            spawned = (actors.spawn_spec.cls, actors.spawn_spec.arguments, actors.spawn_spec.spec)
            parts[actors.uid] = _pack(runtime, (actor_form(actors), spawned))
        else:
            parts[actors.uid] = b""
    return parts


def _origin_of(procs: ProcState) -> tuple[str, tuple[str, ...], str, str] | None:
    """Returns the origin of its hosts: name and hosts of the host mesh, the job's description, and its loader."""
    record = record_with(host_mesh_of(procs), procs.hosts)
    if record is None or record.source is None or not (written := record.source.written()):
        return None
    return record.name, record.hosts, str(record.source), written


def _pack(runtime: Runtime, value: Any) -> bytes:
    return msgspec.msgpack.encode([bytes(frame) for frame in encode(value, runtime)])


def _unpack(runtime: Runtime, name: str, part: bytes) -> Any:
    frames = msgpack_decoder(list[bytes]).decode(part)
    try:
        return decode([frames[0], *map(bytearray, frames[1:])], runtime)
    except Exception as error:
        raise RecordError(
            f"{name} cannot be used in this process: {error_line(error)}. Its classes must be importable here as they "
            "were where it was spawned: the same folder, the same packages"
        ) from error


def procs_from(runtime: Runtime, name: str, parts: dict[str, bytes]) -> ProcState:
    """Restores the mesh of processes, which this process owns from then on. Raises RecordError."""
    form, spec_args, origin = _unpack(runtime, name, parts[PROCS])
    fields: ProcForm = form
    common, layout = fields
    spawn_spec = ProcSpawnSpec(runtime.root, *spec_args)
    if origin is not None:
        mesh_name, hosts, job, written = origin
        source = RecordedSource(job, written, operations().source_of)
        spawn_spec.host_record = HostRecord(mesh_name, hosts, host_labels(hosts), None, spawn_spec.host_mesh, source)
    existing = runtime.meshes.get(common[0])
    state = existing if isinstance(existing, ProcState) else _new_state(runtime, ProcState, common, layout=layout)
    _take_over(runtime, state, common, spawn_spec)
    state.layout = layout
    return state


def actors_from(runtime: Runtime, procs: ProcState, parts: dict[str, bytes]) -> list[ActorState]:
    """Restores the meshes of actors on it, in the order they were spawned. Raises RecordError."""
    states = []
    for uid, part in parts.items():
        if uid in (PROCS, NOTES) or not part:
            continue
        form, (cls, arguments, spec) = _unpack(runtime, f"an actor mesh on {procs.name}", part)
        fields: ActorForm = form
        common, _, newest, kind = fields
        arguments = arguments if isinstance(arguments, EncodedObject) else EncodedObject(())
        spec = msgspec.structs.replace(spec, owner=runtime.root.stream, owner_process=runtime.address)
        spawn_spec = ActorSpawnSpec(cls, arguments, spec, runtime.root)
        existing = runtime.meshes.get(uid)
        state = (
            existing
            if isinstance(existing, ActorState)
            else _new_state(runtime, ActorState, common, procs=procs, cls=newest, kind=kind)
        )
        _take_over(runtime, state, common, spawn_spec)
        states.append(state)
    return states


def _new_state(runtime: Runtime, record: Any, common: Any, **fields: Any) -> Any:
    uid, name, region, _, incarnations, version, _ = common
    return record(uid, name, region, runtime.address, incarnations, version, None, **fields)


def _take_over(runtime: Runtime, state: MeshState, common: Any, spawn_spec: Any) -> None:
    """Takes over ownership; if the mesh was known here before, all its handles work again."""
    with state.lock:
        state.owner_process, state.stopped, state.spawn_spec = runtime.address, None, spawn_spec
        state.detached = False
    state.renew(common[4], common[5])
