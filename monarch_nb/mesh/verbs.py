"""Engine messages between the processes that own meshes and those that hold references to them."""

from typing import ClassVar

import msgspec

from monarch_nb.runtime.actors.actor import Kind
from monarch_nb.shape import RegionForm
from monarch_nb.supervision import ActorEnd, RankIncarnation
from monarch_nb.wire import Done, Lane, Verb
from monarch_nb.wire.texts import Harmless


class Subscribe(msgspec.Struct, array_like=True, frozen=True):
    """Registers a reference to a mesh of the receiving process."""

    uid: str


class Update(msgspec.Struct, array_like=True, frozen=True):
    """Healed ranks, or another extent, of a mesh. `since`: the loss of its host after which each rank came, if any.

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
    """Asks to stop a mesh of the receiving process; sent by a holder of a reference."""

    uid: str
    ranks: tuple[int, ...] | None
    reason: str


class StopActor(msgspec.Struct, array_like=True, frozen=True):
    """Ends one rank of a mesh that lives in the receiving process."""

    mesh: str
    rank: int
    incarnation: int
    reason: str


class ActorGone(msgspec.Struct, frozen=True):
    """An actor has ended, or was given up; `left_in` is its work at that time."""

    left_in: str = ""


class HealMesh(msgspec.Struct, array_like=True, frozen=True):
    """Asks to heal ranks of a mesh of the receiving process; sent by a holder of a reference."""

    uid: str
    ranks: tuple[int, ...]
    kill: bool


class NewClass(msgspec.Struct, array_like=True, frozen=True):
    """The new class of a mesh, encoded."""

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
    stored: bool  # else it was too large, or was removed for others
    error: str = ""  # in a line, where it raised


class WantedResults(msgspec.Struct, array_like=True, frozen=True):
    """Asks for the answers of some meshes; the answers of numbers in `forget` are not needed any more."""

    meshes: tuple[str, ...]
    forget: tuple[int, ...] = ()


class StoredResults(msgspec.Struct, frozen=True):
    """The stored answers of one process."""

    results: tuple[StoredResult, ...] = ()


class WantedResult(msgspec.Struct, array_like=True, frozen=True):
    """Asks for the body of a stored answer."""

    number: int


class ResultBody(msgspec.Struct, frozen=True):
    """The encoded value, or the encoded error; empty where it is not kept any more."""

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
