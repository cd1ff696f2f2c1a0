"""What supervision asks of the layer above it."""

from collections.abc import Sequence
from typing import Any, Protocol

from monarch_nb.runtime import ActorLife, Future, Instance
from monarch_nb.supervision.causes import Refusal
from monarch_nb.supervision.ranks import Life, Selection


class Hands(Protocol):
    """Carries out what needs meshes and hosts: the layer above."""

    def stop_mesh(self, uid: str, reason: str) -> Future[None]:
        """Stops a mesh owned here."""

    def respawn(self, uid: str, lives: Sequence[Life]) -> None:
        """Starts processes again; may block; raises what went wrong."""

    def recreate(self, uid: str, lives: Sequence[Life]) -> None:
        """Creates actors again; may block; raises what went wrong."""

    def healed(self, lives: Sequence[tuple[str, Sequence[Life]]], await_hooks: bool) -> None:
        """Tells everybody who holds a reference, then runs the hooks of survivors; may block."""

    def selection(self, state: Any, region: Any) -> Selection:
        """The ranks of a slice."""

    def actor_failed(self, cell: ActorLife, refusal: Refusal) -> None:
        """Lets the process of the actor's owner know."""

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped."""
