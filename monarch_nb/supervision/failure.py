"""MeshFailure: the event passed to an owner's `__supervise__`."""

import time
from collections.abc import Iterable
from math import prod
from typing import NoReturn, Self

import msgspec

from monarch_nb.runtime import Cause
from monarch_nb.wire import Harmless, host_name, msgpack_decoder
from monarch_nb.wire.plain import decode_plain

from .ranks import Extent, points_text
from .report import dump_text, error_text, event_text, facts, last_lines_text, notice_text, unhandled

_WIDTH = 120  # of the text that names ranks
_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # a MeshName is text on the wire


class MeshName(str):
    """The name a mesh was spawned with. Equal to that text, but not to the name of another mesh called the same."""

    uid: str

    def __new__(cls, text: str, uid: str) -> Self:
        """Creates the name `text` of the mesh `uid`."""
        name = super().__new__(cls, text)
        name.uid = uid
        return name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MeshName):
            return self.uid == other.uid
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> "tuple[type[MeshName], tuple[str, str]]":
        return MeshName, (str(self), self.uid)


class MeshFailure(Harmless, frozen=True, kw_only=True, omit_defaults=True):
    """Some ranks of a mesh have failed, or, if `preempted`, their host is about to be taken away.

    `crashed_ranks` count row-major in that mesh; `also` names other affected meshes, and `left` counts the ranks of
    that mesh that have not failed (-1: all but the ranks of this event).
    """

    mesh_name: str
    cause: Cause
    failure_id: int = 0  # 0: no owner in this process is notified
    mesh_uid: str = ""
    procs: bool = False  # a proc mesh, else an actor mesh
    extent: Extent = ((), ())
    places: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    healing: bool = False
    left: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh_uid:  # a program compares it with the name of its mesh, which other meshes may share
            msgspec.structs.force_setattr(self, "mesh_name", MeshName(self.mesh_name, self.mesh_uid))

    @property
    def mesh(self) -> None:
        """Always None, as upstream: the mesh is named, not passed."""
        return

    @property
    def crashed_ranks(self) -> list[int]:
        """The ranks that failed; none, while their host is only about to be taken away."""
        return [] if self.preempted else list(self.places)

    @property
    def preempted(self) -> bool:
        """True if no rank has failed yet, but the host of these ranks is about to be taken away."""
        return self.cause.kind == "preemption"

    @property
    def seconds_left(self) -> float | None:
        """The seconds until that host is taken away; None if not known, and for a failure."""
        cause = self.cause
        return None if cause.seconds is None else max(0.0, cause.at + cause.seconds - time.time())

    @property
    def host(self) -> str:
        """The host of the failure; "" if unknown."""
        return self.cause.host or self.cause.origin.host

    @property
    def at(self) -> float:
        """The time in seconds since the epoch; 0 if unknown."""
        return self.cause.at or self.cause.origin.at

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the failed process wrote."""
        return self.cause.last_lines or self.cause.origin.last_lines

    @property
    def chain(self) -> tuple[Cause, ...]:
        """Its causes: the nearest first, the root cause last."""
        return self.cause.links

    @property
    def size(self) -> int:
        """The number of ranks of the mesh."""
        return prod(self.extent[1])

    @property
    def where(self) -> str:
        """The ranks as text, such as "gpus=0-3"."""
        if not self.places:
            return "all ranks"
        if 1 < len(self.places) == self.size:
            return f"all {self.size} ranks"
        text = points_text(self.extent, self.places)
        if not text:
            return f"rank {self.places[0]}"
        return text if len(text) <= _WIDTH else f"{text[:_WIDTH].rpartition(',')[0]},… ({len(self.places)} ranks)"

    @property
    def next_step(self) -> str:
        """Advice on what to do next."""
        name, kind = self.mesh_name, self.cause.kind
        if kind in ("left", "taken"):
            return f"monarch.attach({name!r}{', steal=True' * (kind == 'taken')}) comes back to it"
        if kind == "shrunk":
            return f"call {name}, or take a slice of it anew: what it has by now works"
        if kind == "preemption":
            return f"save what is there; once it is lost, heal_mesh({name}, replace=True) goes on with another host"
        if kind in ("stopped", "owner"):
            return f"{name} cannot be used again: spawn a new one"
        if self.healing:
            return f"{name} is being healed: wait for heal_mesh({name})"
        if kind == "undeliverable":
            return f"correct the cause and call {name} again; a message that was lost is not sent again by itself"
        several = ", " in self.host
        host = f"host {host_name(self.host) or 'it was on'}"
        giver = self.cause.origin.giver
        condition = "once these hosts are back, " if several else f"once {host} is back, "
        first = {"host": "" if giver else condition, "init": "once its cause is corrected, "}
        plural = len(self.places) > 1 or not self.places
        if kind in ("init", "exception", "aborted"):
            verb = f"re-creates {'them with their' if plural else 'it with its'} original arguments"
        else:
            verb = f"brings {'them' if plural else 'it'} back"
        steps = [f"{first.get(kind, '')}heal_mesh({name}) {verb}"]
        if kind == "host" and giver:
            stay_away = "these hosts do" if several else f"{host} does"
            steps.append(f"if {stay_away} not come back, {giver} is asked for {'others' if several else 'another'}")
        if self.cause.origin.oom:
            steps.insert(0, "let it hold less, or give its host more memory")
        if self.places and self.left != 0 and len(self.places) < self.size:
            steps.append(f"{name}.slice(...) without {self.where} still works")
        return "; ".join(steps)

    def report(self) -> str:
        """Returns the whole report: mesh, cause, ranks, hosts, last lines of output, and the next step."""
        state = {"stopped": "stopped", "owner": "failed", "left": "left", "taken": "taken", "shrunk": "shrunk"}.get(
            self.cause.kind
        )
        if state is not None:
            mesh_kind = "proc mesh" if self.procs else "actor mesh"
            lines = [f"The {mesh_kind} {self.mesh_name} has status: {state}: {self.cause.text}"]
            if self.places:
                lines.append(f"  mesh      {self.mesh_name}, {self.where}")
            lines += [f"  {kind:<9} {value}" for kind, value in facts(self.cause.origin) if kind == "host"]
            return "\n".join([*lines, f"  next      {self.next_step}"])
        if self.preempted:
            rows = [("mesh", f"{self.mesh_name}, {self.where}"), ("affects", ", ".join(self.also))]
            lines = [notice_text(self.host.split(", "), self.cause.text, self.seconds_left)]
            lines += [f"  {label:<9} {value}" for label, value in (*rows, ("next", self.next_step)) if value]
            return "\n".join(lines)
        cause, owners = unhandled(self.cause)
        heading = f"The {'proc' if self.procs else 'actor'} {cause.actor} and all its descendants have failed:"
        if cause.kind == "undeliverable":
            heading = f"A message to {cause.actor or self.mesh_name} was lost on its way:"
        error = error_text(cause)
        if self.procs:
            error = error.replace("the process this actor was running on", "its process", 1)
        lines = [heading, *(f"  {line}" for line in (*error.splitlines(), *owners)), ""]
        rows = [("mesh", f"{self.mesh_name}, {self.where}"), *facts(self.cause.origin)]
        if self.also:
            rows.append(("affects", ", ".join(self.also)))
        lines += [f"  {label:<9} {value}" for label, value in rows]
        lines += filter(None, [last_lines_text(self.last_lines), dump_text(self.cause.origin.dump)])
        return "\n".join([*lines, f"  {'next':<9} {self.next_step}"])

    def encode(self) -> bytes:
        """Returns the failure as bytes, for messages between our own processes."""
        return _encoder.encode(self)

    def __str__(self) -> str:
        return (
            f"MeshFailure(mesh_name={self.mesh_name}, crashed_ranks={self.crashed_ranks}, "
            f"event={event_text(self.cause)})"
        )

    __repr__ = __str__

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MeshFailure cannot be pickled: send its report() instead")


_decoder = msgpack_decoder(MeshFailure)


def decode_failure(data: bytes | memoryview) -> MeshFailure:
    """Decodes a failure. Raises msgspec.DecodeError on garbage."""
    return decode_plain(data, _decoder)


def gathered(failures: Iterable[MeshFailure]) -> list[MeshFailure]:
    """Merges failures of a mesh with the same cause, in the order of the first of each."""
    groups: dict[tuple[str, str], list[MeshFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.mesh_uid or failure.mesh_name, failure.cause.likeness), []).append(failure)
    return [_merge(group) for group in groups.values()]


def _merge(group: list[MeshFailure]) -> MeshFailure:
    first = min(group, key=lambda failure: failure.places)
    if len(group) == 1:
        return first
    indices = tuple(sorted({index for failure in group for index in failure.places}))
    also = tuple(dict.fromkeys(name for failure in group for name in failure.also))
    remaining = min(failure.left for failure in group)
    cause = msgspec.structs.replace(first.cause, actor=first.mesh_name) if first.cause.actor else first.cause
    return msgspec.structs.replace(first, places=indices, also=also, left=remaining, cause=cause)
