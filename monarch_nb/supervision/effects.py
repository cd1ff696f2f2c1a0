"""Effects of supervision, which the rows above carry out."""

from collections.abc import Sequence
from typing import Protocol

from monarch_nb.runtime import ActorEnd, Future, Instance
from monarch_nb.supervision.ranks import RankIncarnation


class SupervisorEffects(Protocol):
    """Carries out what needs meshes, hosts and messages."""

    def stop_mesh(self, uid: str, reason: str) -> Future[None]:
        """Stops a mesh owned here."""

    def respawn(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Starts processes again; may block; raises what went wrong."""

    def recreate(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Creates actors again; may block; raises what went wrong."""

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]], await_hooks: bool) -> None:
        """Notifies all processes that hold a reference, then runs the hooks of survivors; may block."""

    def report_to_owner(self, process: str, end: ActorEnd) -> None:
        """Sends the end of an actor to its owner, which is in another process."""

    def watch_owner(self, process: str) -> None:
        """An actor lives here whose owner is in that process: it ends when that process does."""

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped."""
