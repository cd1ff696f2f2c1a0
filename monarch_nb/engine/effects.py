"""What supervision decides, carried out on meshes."""

from collections.abc import Sequence

from monarch_nb.lifecycle.handover import Handover
from monarch_nb.lifecycle.healing import MeshHealer
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import Future, Instance, Parts
from monarch_nb.supervision import ActorEnd, RankIncarnation


class MeshEffects:
    """Hands each effect to the part of this process that carries it out."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def stop_mesh(self, uid: str, reason: str) -> Future[None]:
        """Stops a mesh owned here."""
        return self._parts.get(MeshStopper).stop_by_uid(uid, reason)

    def respawn(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Starts processes again; blocks until they are ready."""
        self._parts.get(MeshHealer).respawn(uid, incarnations)

    def recreate(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Creates actors again; blocks until they are there."""
        self._parts.get(MeshHealer).recreate(uid, incarnations)

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]], await_hooks: bool) -> None:
        """Tells everybody who holds a reference, then runs the hooks of survivors."""
        self._parts.get(MeshHealer).healed(incarnations, await_hooks)

    def notify_owner(self, process: str, end: ActorEnd) -> None:
        """Lets the process of a failed actor's owner know."""
        self._parts.get(Handover).notify_owner(process, end)

    def watch_owner(self, process: str) -> None:
        """An actor of an owner in that process incarnations here: it ends when that process does."""
        self._parts.get(ProcessWatcher).watch_owner(process)

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped."""
        self._parts.get(MeshStopper).await_all(self._parts.get(MeshRegistry).owned_by(instance), instance)
