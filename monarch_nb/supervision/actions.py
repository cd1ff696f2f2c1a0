"""Actions of the machine, which its driver carries out in order, and the interface that the driver needs for them."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from monarch_nb.runtime import ActorEnd, Cause, Future, Instance
from monarch_nb.supervision.failure import MeshFailure
from monarch_nb.supervision.ranks import RankIncarnation


class Supervise(msgspec.Struct, frozen=True):
    """Run `__supervise__` of an owner, then report with `owner_result`. One at a time per owner."""

    owner: str
    failure: MeshFailure


class FailActor(msgspec.Struct, frozen=True):
    """Fail an owner: the driver notifies the process of its own owner by `actor_failed` with this cause."""

    actor: str
    cause: Cause


class StopOwnedMesh(msgspec.Struct, frozen=True):
    """Stop a mesh, then report with `stopped`."""

    mesh_uid: str


class FailCalls(msgspec.Struct, frozen=True):
    """Raise `failure` in this process's pending calls that wait for these incarnations; None is every rank."""

    mesh_uid: str
    incarnations: tuple[RankIncarnation, ...] | None
    failure: MeshFailure


class RootFault(msgspec.Struct, frozen=True):
    """An unhandled failure, once.

    'fatal': a script's fault hook runs. 'show': show it now. 'call': a call that is awaited raises it;
    `mark_reported` follows when it has, or `report_unclaimed` if the call is no longer awaited.
    """

    failure: MeshFailure
    route: Literal["fatal", "show", "call"]


class ShowFailure(msgspec.Struct, frozen=True):
    """Show a failure that a call was to raise, since the call is no longer awaited."""

    failure: MeshFailure


class Respawn(msgspec.Struct, frozen=True):
    """Start these ranks of a proc mesh, set-up cells and bootstrap included; report `respawned` or `heal_failed`."""

    mesh_uid: str
    incarnations: tuple[RankIncarnation, ...]


class Recreate(msgspec.Struct, frozen=True):
    """Create these ranks of an actor mesh with its original arguments; report `recreated` or `heal_failed`."""

    mesh_uid: str
    incarnations: tuple[RankIncarnation, ...]


class Healed(msgspec.Struct, frozen=True):
    """A heal is over: answer `requests`, then run the hooks for `incarnations` of each mesh.

    `again` has the failures of ranks that were not restored. Without incarnations and these nothing was to be healed.
    """

    requests: tuple[int, ...]
    incarnations: tuple[tuple[str, tuple[RankIncarnation, ...]], ...] = ()
    again: tuple[MeshFailure, ...] = ()


class HealRefused(msgspec.Struct, frozen=True):
    """Answer `request` with an error. `retry_after` is in seconds, None if waiting does not help."""

    request: int
    mesh_uid: str
    text: str
    retry_after: float | None = None


class OwnerSaid(msgspec.Struct, frozen=True):
    """No action, but an event for displays: `__supervise__` of an owner has ended."""

    failure_id: int
    owner: str
    handled: bool


Action = (
    Supervise
    | FailActor
    | StopOwnedMesh
    | FailCalls
    | RootFault
    | ShowFailure
    | Respawn
    | Recreate
    | Healed
    | HealRefused
)


class SupervisorEffects(Protocol):
    """Carries out actions on meshes, hosts and messages."""

    def stop_mesh(self, uid: str, reason: str) -> Future[None]:
        """Stops a mesh owned here."""

    def respawn(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Starts processes again; may block; raises on failure."""

    def recreate(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Creates actors again; may block; raises on failure."""

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]], await_hooks: bool) -> None:
        """Notifies all processes that hold a reference, then runs the hooks of survivors; may block."""

    def report_to_owner(self, process: str, end: ActorEnd) -> None:
        """Sends the end of an actor to its owner, which is in another process."""

    def watch_owner(self, process: str) -> None:
        """Watches the process of an owner of an actor here, which ends when that process does."""

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped."""
