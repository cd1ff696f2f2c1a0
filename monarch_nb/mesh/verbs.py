"""Engine messages between the processes that own meshes and those that hold references to them."""

from typing import ClassVar

import msgspec

from monarch_nb.runtime.actors.endpoint import Kind
from monarch_nb.shape import RegionForm
from monarch_nb.supervision import ActorEnd, RankIncarnation
from monarch_nb.wire import Done, Lane, Verb
from monarch_nb.wire.texts import Harmless


class Subscribe(msgspec.Struct, array_like=True, frozen=True):
    """Somebody holds a reference to a mesh of the receiving process."""

    uid: str


class Update(msgspec.Struct, array_like=True, frozen=True):
    """What a heal has changed, or another extent. `since`: after which loss of its host each rank came, if after one.

    `region`, and the `hosts` of procs, are set for meshes that are not as they were spawned.
    """

    uid: str
    incarnations: dict[int, int]
    version: int
    back: tuple[RankIncarnation, ...]
    since: dict[int, int] = {}
    region: RegionForm | None = None
    hosts: tuple[str, ...] = ()


class StopUpdate(msgspec.Struct, array_like=True, frozen=True):
    """A mesh, or some of its ranks, stop, or have stopped once it is `over`."""

    uid: str
    ranks: tuple[int, ...] | None
    reason: str
    over: bool


class StopMeshRequest(msgspec.Struct, array_like=True, frozen=True):
    """Somebody who holds a reference wants a mesh of the receiving process stopped."""

    uid: str
    ranks: tuple[int, ...] | None
    reason: str


class StopActor(msgspec.Struct, array_like=True, frozen=True):
    """One rank of a mesh that lives in the receiving process is to end."""

    mesh: str
    rank: int
    incarnation: int
    reason: str


class ActorGone(msgspec.Struct, frozen=True):
    """It has ended, or was given up in the middle of something."""

    left_in: str = ""


class HealMesh(msgspec.Struct, array_like=True, frozen=True):
    """Somebody who holds a reference wants ranks of a mesh of the receiving process healed."""

    uid: str
    ranks: tuple[int, ...]
    kill: bool


class NewClass(msgspec.Struct, array_like=True, frozen=True):
    """The class that a mesh has from now on, encoded."""

    uid: str
    edition: int
    kind: Kind
    frames: tuple[bytes, ...]


class ControllersReply(msgspec.Struct, frozen=True):
    """An encoded reference to the registry of controllers, or the process to ask instead."""

    frames: tuple[bytes, ...] = ()
    ask: str = ""


class StoredResult(Harmless, frozen=True, kw_only=True):
    """An answer that arrived when no controller was attached, without its body."""

    PROSE: ClassVar = ("error",)

    number: int  # in its process
    mesh: str
    rank: int
    endpoint: str
    call: str
    index: int
    extent: tuple[tuple[str, ...], tuple[int, ...]] | None
    at: float
    size: int
    stored: bool  # else it was too large, or has made room for others
    error: str = ""  # in a line, where it raised


class WantedResults(msgspec.Struct, array_like=True, frozen=True):
    """The answers of some meshes; those of these numbers are not needed any more."""

    meshes: tuple[str, ...]
    forget: tuple[int, ...] = ()


class StoredResults(msgspec.Struct, frozen=True):
    """Those of one process."""

    results: tuple[StoredResult, ...] = ()


class WantedResult(msgspec.Struct, array_like=True, frozen=True):
    """The body of one of them."""

    number: int


class ResultBody(msgspec.Struct, frozen=True):
    """The encoded value, or what was raised; none where it is not kept any more."""

    frames: tuple[bytes, ...] | None = None


SUBSCRIBE = Verb("mesh.subscribe", Subscribe, doc="the sender holds a reference, and subscribes to heals and the end")
UPDATE = Verb("mesh.update", Update, Done, doc="ranks of a mesh were healed, or it has grown, or shrunk")
STOPPED = Verb("mesh.stopped", StopUpdate, doc="a mesh, or ranks of it, stop or have stopped")
STOP_MESH = Verb("mesh.stop", StopMeshRequest, Done, doc="stops a mesh that the receiver owns")
HEAL_MESH = Verb("mesh.heal", HealMesh, Done, doc="heals a mesh that the receiver owns")
NEW_CLASS = Verb("mesh.class", NewClass, Done, doc="a mesh has a newer class")
STOP_ACTOR = Verb("actor.stop", StopActor, ActorGone, doc="ends one rank of an actor mesh")
ACTOR_FAILED = Verb("actor.failed", ActorEnd, doc="an actor has failed: notifies its owner")
RESULTS = Verb("proc.results", WantedResults, StoredResults, doc="stored results that no controller has received")
RESULT = Verb("proc.result", WantedResult, ResultBody, doc="the body of such an answer", lane=Lane.DATA)
FIND_CONTROLLERS = Verb("controllers.find", Done, ControllersReply, doc="where the registry of controllers is")
