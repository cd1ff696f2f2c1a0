"""Which call output belongs to where its process could not tell: that of C code and child processes."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from monarch_nb.logs.sources import mesh_of, rank_of
from monarch_nb.runtime import ActorState, MeshState


class WaitingCall(Protocol):
    """A call whose answers are not all there."""

    call: str
    mesh: str

    def missing_ranks(self) -> Collection[int]:
        """The ranks that have not answered."""


def only_call(address: str, calls: Iterable[WaitingCall], meshes: Mapping[str, MeshState]) -> str:
    """The only call that waits for an answer of a process, "" if there are none or several."""
    uid, rank = mesh_of(address), rank_of(address)
    claimed = ""
    for call in calls:
        state = meshes.get(call.mesh)
        procs = state.procs.uid if isinstance(state, ActorState) else call.mesh
        if procs == uid and rank in call.missing_ranks():
            if claimed:
                return ""
            claimed = call.call
    return claimed
