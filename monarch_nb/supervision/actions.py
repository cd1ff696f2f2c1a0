"""What the machine asks of its driver. Actions are to be carried out in the order they come."""

from dataclasses import dataclass
from typing import Literal

from .cause import Cause
from .failure import MeshFailure
from .ranks import Life


@dataclass(frozen=True, slots=True)
class Supervise:
    """Run `__supervise__` of an owner, then report with `owner_result`. One at a time per owner."""

    owner: str
    failure: MeshFailure


@dataclass(frozen=True, slots=True)
class FailActor:
    """Fail an owner: the driver lets the process of its own owner know by `actor_failed` with this cause."""

    actor: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class StopMesh:
    """Stop a mesh, then report with `stopped`."""

    mesh_uid: str


@dataclass(frozen=True, slots=True)
class FailCalls:
    """Raise `failure` in this process's pending calls that wait for these lives; None is every rank."""

    mesh_uid: str
    lives: tuple[Life, ...] | None
    failure: MeshFailure


@dataclass(frozen=True, slots=True)
class RootFault:
    """A failure that nobody handled, once.

    'fatal': a script's fault hook runs. 'show': show it now. 'call': a call somebody waits for raises it;
    report `told` when it did, or `unheard` when nobody waits any longer.
    """

    failure: MeshFailure
    telling: Literal["fatal", "show", "call"]


@dataclass(frozen=True, slots=True)
class Tell:
    """Show a failure that was to be told by a call, but nobody waits for the call any more."""

    failure: MeshFailure


@dataclass(frozen=True, slots=True)
class Respawn:
    """Start these lives of a proc mesh, set-up cells and bootstrap included; report `respawned` or `heal_failed`."""

    mesh_uid: str
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Recreate:
    """Create these lives of an actor mesh with its original arguments; report `recreated` or `heal_failed`."""

    mesh_uid: str
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Healed:
    """A heal is over: answer `requests`, then run the hooks for `lives` of each mesh.

    `again` is what did not come back. No lives and nothing again: there was nothing to heal.
    """

    requests: tuple[int, ...]
    lives: tuple[tuple[str, tuple[Life, ...]], ...] = ()
    again: tuple[MeshFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class HealRefused:
    """Answer `request` with an error. `retry_after` is in seconds, None if waiting does not help."""

    request: int
    mesh_uid: str
    text: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class OwnerSaid:
    """No action, but news of one for displays: `__supervise__` of an owner has ended."""

    failure_id: int
    owner: str
    handled: bool


Action = Supervise | FailActor | StopMesh | FailCalls | RootFault | Tell | Respawn | Recreate | Healed | HealRefused
