"""Hosts that are about to be taken away: owners hear of it before anything fails."""

from collections.abc import Sequence

from .actions import Action, Supervise
from .cause import Cause
from .machine import Machine
from .records import Mesh
from .tree import Entry


def warned(machine: Machine, hosts: Sequence[str], cause: Cause) -> list[Action]:
    """Each owner with ranks on these hosts is handed that, once for each family of meshes; nothing fails of it.

    It comes to `__supervise__` in its turn, behind failures that are told before. What that returns, or raises, changes
    nothing. The root is told otherwise.
    """
    actions: list[Action] = []
    for procs in [mesh for mesh in machine._records.meshes.values() if mesh.is_procs]:
        by_owner: dict[str, list[tuple[Mesh, list[int]]]] = {}
        for mesh in machine._records.family(procs):
            there = [
                rank
                for host in hosts
                for rank in procs.ranks_on(host)
                if rank in mesh and mesh.at(rank).state == "alive"
            ]
            if there and mesh.owner is not None and mesh.owner != machine.root:
                by_owner.setdefault(mesh.owner, []).append((mesh, there))
        for owner, hit in by_owner.items():
            first, ranks = next(((mesh, there) for mesh, there in hit if not mesh.is_procs), hit[0])
            also = tuple(mesh.name for mesh, _ in hit if mesh is not first)
            failure = first.failure(ranks, cause, next(machine._ids), also)
            now = machine._tree.push(owner, Entry(failure, awaited=False))
            actions += [] if now is None else [Supervise(owner, now.failure)]
    return actions
