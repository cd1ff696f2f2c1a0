"""The rank and mesh that a line comes from, and their written form."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch_nb.runtime import MeshState, ProcState
from monarch_nb.shape import places
from monarch_nb.wire import parse_address


class Source(NamedTuple):
    """The rank and mesh of a process."""

    uid: str
    name: str
    labels: tuple[str, ...]
    point: tuple[int, ...]
    sizes: tuple[int, ...] = ()


class Sources:
    """Maps processes to ranks by the known meshes: `meshes` by uid."""

    def __init__(self, meshes: Mapping[str, MeshState]) -> None:
        self._meshes = meshes

    def of(self, address: str) -> Source:
        """Returns the rank of a process."""
        uid, rank = mesh_of(address), rank_of(address)
        state = self._meshes.get(uid)
        if state is None:
            return Source(uid, uid, ("rank",), (rank,))
        point = state.region.point_of_base_rank(rank)
        return Source(uid, state.name, tuple(point.labels), tuple(point.values()), tuple(point.extent.sizes))

    def spawned_here(self, uid: str) -> bool:
        """Returns whether this process spawned a mesh: other processes show the output of theirs."""
        state = self._meshes.get(uid)
        return isinstance(state, ProcState) and state.spawn_spec is not None

    @property
    def several(self) -> bool:
        """True with several meshes of processes, so that lines need the names of their meshes."""
        states = tuple(self._meshes.values())
        return len([state for state in states if self.spawned_here(state.uid) and state.stopped is None]) > 1


def mesh_of(address: str) -> str:
    """Returns the uid of the mesh that a process belongs to."""
    return parse_address(address).mesh


def rank_of(address: str) -> int:
    """Returns the base rank of a process in its mesh."""
    return parse_address(address).rank


def prefix(sources: Sequence[Source], *, named: bool) -> str:
    """Returns `[workers gpus=0-3] `, or a prefix without the mesh's name."""
    first = sources[0]
    ranks = places(first.labels, (source.point for source in sources), first.sizes)
    both = " ".join(filter(None, (first.name if named else "", ranks)))
    return f"[{both}] " if both else ""
