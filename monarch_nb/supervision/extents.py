"""Meshes that grow and shrink while they are in use: events of a machine beside failures, heals and stops."""

from collections.abc import Collection

import msgspec

from .actions import Action
from .cause import Cause
from .machine import Machine
from .records import MeshSpec

_COMING = Cause(kind="spawn", text="it has not been started yet")


def grow(machine: Machine, spec: MeshSpec, fresh: Collection[int]) -> list[Action]:
    """A mesh owned here is about to have ranks more: they count as failed until a heal of them has brought them.

    Nobody is told of them, and no call goes there before they are part of the mesh.
    """
    mesh = machine._records.meshes[spec.uid]
    mesh.reshape(spec)
    for rank in fresh:
        known = mesh.odd.get(rank)
        mesh.put(rank, "failed", -1 if known is None else known.incarnation, _COMING)
    machine.intensity.forget(spec.uid, fresh)
    return []


def grown(machine: Machine, uid: str, fresh: Collection[int]) -> list[Action]:
    """They are there. Those that nothing ever happened to take no room, and were not healed."""
    mesh = machine._records.meshes.get(uid)
    if mesh is None:
        return []
    for rank in fresh:
        status = mesh.odd.get(rank)
        if status is not None and status.state == "alive" and not status.incarnation:
            del mesh.odd[rank]
    machine.intensity.forget(uid, fresh)
    return []


def reshape(machine: Machine, spec: MeshSpec, why: str) -> list[Action]:
    """A mesh has other ranks, or other hosts. `why` is told where a slice still has ranks that it has no more."""
    mesh = machine._records.meshes.get(spec.uid)
    if mesh is None:
        return []
    gone = mesh.reshape(spec)
    if not gone:
        return []
    actions = machine.stopping(spec.uid, gone, why)
    for rank in gone:
        cause = Cause(kind="shrunk", text=why, actor=mesh.former[rank])
        mesh.put(rank, "stopped", mesh.odd[rank].incarnation if rank in mesh.odd else 0, cause)
    return actions


def move(machine: Machine, spec: MeshSpec) -> list[Action]:
    """Hosts of a mesh were replaced: what is healed comes to the new ones."""
    mesh = machine._records.meshes.get(spec.uid)
    if mesh is not None:
        mesh.spec = msgspec.structs.replace(mesh.spec, layout=spec.layout)
    return []
