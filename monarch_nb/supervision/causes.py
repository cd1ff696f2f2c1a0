"""The causes of what happens to the actors of this process, and how callers are told of them."""

import time
from typing import Any, cast

import msgspec

from monarch_nb.runtime import ActorCell, ActorState, Local
from monarch_nb.supervision.cause import Cause, CauseKind, stop_cause
from monarch_nb.wire import Header, error_line, host_of

# An actor that ended so has failed: whoever hears of it first, a caller or its own process, takes note.
FAILED = frozenset({"exception", "init", "aborted", "unhandled", "raised"})


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """Why a call was not run, as a process tells it to the caller; also how an owner is told of a failed actor."""

    mesh: str
    rank: int
    incarnation: int
    cause: Cause


class Causes:
    """Words for what happens here."""

    def __init__(self, local: Local) -> None:
        self.local = local

    def cause_of(self, kind: str, error: BaseException, text: str, actor: ActorCell, method: str) -> Cause:
        """The cause of an actor's failure."""
        if kind == "aborted":
            return Cause(kind="aborted", text=text, actor=str(actor.instance), host=self.local.host, at=time.time())
        known: CauseKind = "exception" if kind == "cleanup" else cast(CauseKind, kind)
        where = f"{actor.spec.name}.{method}: " if kind != "init" and method else ""
        return Cause(
            kind=known,
            text=f"{where}{error_line(error)}",
            traceback=text,
            actor=str(actor.instance),
            host=self.local.host,
            at=time.time(),
        )

    def stopped_cause(self, actor: ActorCell, reason: str) -> Cause:
        """What callers of a stopped actor are told."""
        return msgspec.structs.replace(stop_cause(reason), actor=str(actor.instance), host=self.local.host)

    def lost_cause(self, header: Header, reason: str) -> Cause:
        """What a caller is told of a message that could not be delivered."""
        state = self.local.meshes.get(header.mesh)
        # One that came back is addressed to us by now: where it was meant for is known by its mesh and rank.
        host = state.procs.layout.host_of(header.rank) if isinstance(state, ActorState) else host_of(header.dst)
        return Cause(kind="undeliverable", text=f"undeliverable: {reason}", host=host)

    def refusal(self, actor: ActorCell) -> Refusal:
        """How the end of an actor is told."""
        return Refusal(actor.mesh, actor.rank, actor.incarnation, cast(Cause, actor.cause))

    def encode(self, cause: Any, request: Header) -> bytes:
        """The cause for which a call is refused, as bytes; it names the actor that was called."""
        return msgspec.msgpack.encode(Refusal(request.mesh, request.rank, request.incarnation, cause))

    def reason(self, cause: Any) -> str:
        """A cause in a few words."""
        return f"{cause.actor} has ended: {cause.text or cause.kind}"
