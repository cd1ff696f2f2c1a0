"""The base of references to proc and actor meshes: the record of a mesh, and the referenced ranks."""

from typing import Generic, Self, TypeVar

from monarch_nb.runtime import MeshState
from monarch_nb.shape import MeshTrait, Region

S = TypeVar("S", bound=MeshState, covariant=True)


class Handle(MeshTrait, Generic[S]):
    """A reference to a mesh, or to a slice of one. Cheap to copy and to send; all handles of a mesh share its record.

    Engines use it through `state_of` and `region_of`: the endpoints of actors are attributes of handles, so these
    have as few names of their own as possible.
    """

    _state: S

    def __init__(self, state: S, region: Region) -> None:
        """With the record's own region, the handle means the whole mesh, also after it has grown or shrunk."""
        self._state = state
        state.handles[id(self)] = self
        self.__region = None if region is state.region else region

    @property
    def _region(self) -> Region:
        return self._state.region if self.__region is None else self.__region

    @property
    def _fixed(self) -> Region | None:
        """The ranks of a slice; None for the whole mesh, whose ranks may change."""
        return self.__region

    def _new_with_region(self, region: Region) -> Self:
        return type(self)(self._state, region)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._state.uid == other._state.uid and self._region == other._region

    def __hash__(self) -> int:
        return hash(self._state.uid)  # a mesh may grow

    def _shown(self) -> str:
        """Returns the mesh's name and sizes, and why it was stopped if it was."""
        sizes = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        stopped = f", stopped: {self._state.stopped}" if self._state.stopped else ""
        return f"{self._state.name!r} {{{sizes}}}{stopped}"


def state_of(mesh: Handle[S]) -> S:
    """Returns the record of the whole mesh that a handle, or a slice, refers to."""
    return mesh._state


def form_of(mesh: Handle[MeshState]) -> Region | None:
    """Returns the ranks of a handle in messages: None for the whole mesh."""
    return mesh._fixed


def region_of(mesh: Handle[MeshState]) -> Region:
    """Returns the ranks that a handle means, and how they are arranged."""
    return mesh._region


H = TypeVar("H", bound=MeshTrait)


def part_of(mesh: H, region: Region) -> H:
    """Returns a reference to some of the ranks of a mesh."""
    return mesh._new_with_region(region)


def as_it_is(mesh: H) -> H:
    """Returns a reference to the ranks that a mesh has now, and to no others when it grows or shrinks."""
    return mesh._new_with_region(mesh._region.sliced())
