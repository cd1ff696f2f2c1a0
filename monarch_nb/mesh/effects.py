"""What supervision decides, carried out on meshes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from monarch_nb.mesh.verbs import ACTOR_FAILED
from monarch_nb.runtime import Future, Instance
from monarch_nb.supervision import RankIncarnation, Refusal

if TYPE_CHECKING:
    from monarch_nb.mesh.keeper import Keeper


class MeshEffects:
    """Hands each effect to the part of this process that carries it out."""

    def __init__(self, keeper: "Callable[[], Keeper]") -> None:
        self._keeper = keeper

    def stop_mesh(self, uid: str, reason: str) -> Future[None]:
        """Stops a mesh owned here."""
        return self._keeper().stop_mesh(uid, reason)

    def respawn(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Starts processes again; blocks until they are ready."""
        self._keeper().heals.respawn(uid, incarnations)

    def recreate(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Creates actors again; blocks until they are there."""
        self._keeper().heals.recreate(uid, incarnations)

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]], await_hooks: bool) -> None:
        """Tells everybody who holds a reference, then runs the hooks of survivors."""
        self._keeper().heals.healed(incarnations, await_hooks)

    def tell_owner(self, process: str, refusal: Refusal) -> None:
        """Lets the process of a failed actor's owner know."""
        self._keeper().engine.tell(process, ACTOR_FAILED, refusal)

    def watch_owner(self, process: str) -> None:
        """An actor of an owner in that process lives here: it ends when that process does."""
        self._keeper().watching.watch_owner(process)

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped."""
        self._keeper().await_stops(instance)
