"""Failures of several ranks that are one event, told as one: which belong together, and what is said of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from monarch_nb.store.failures import Record, text, title
from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.ranks import where

FOLD_S = 2.0  # so long after the last of them another one still belongs to it
_STATES = ("open", "healing", "healed", "stopped")  # the worst first
KINDS = 8  # of texts and of last lines that are kept of one event
OF_PROCESSES = frozenset({"exit", "signal", "host", "spawn"})


class Member(Struct):
    """One failure: what supervision told, and how it is now."""

    failure: MeshFailure | None
    bases: tuple[int, ...]
    record: Record
    state: str = "open"


class Shape(Struct, frozen=True):
    """A mesh as a group needs it: the places of base ranks in it, and how many of the others work."""

    uid: str
    name: str
    procs: bool
    extent: tuple[tuple[str, ...], tuple[int, ...]]
    place: Callable[[int], int]
    left: Callable[[set[int]], int]


class Group(Struct):
    """What is told as one failure, under the id of the first of them."""

    id: str
    uid: str  # the mesh it is told of
    members: dict[str, Member] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)  # how many are how
    bases: set[int] = field(default_factory=set)
    latest: float = 0.0

    def add(self, key: str, member: Member) -> None:
        """One more belongs to it."""
        self.members[key] = member
        self.states[member.state] = self.states.get(member.state, 0) + 1
        self.bases.update(member.bases)
        self.latest = max(self.latest, member.record.get("detected", 0.0))

    def takes(self, bases: Sequence[int], detected: float) -> bool:
        """Whether something alike that happened now belongs to it."""
        fresh = self.bases.isdisjoint(bases) and detected - self.latest <= FOLD_S
        return fresh and self.state == "open"

    @property
    def state(self) -> str:
        """As bad as the worst of them."""
        return next(state for state in _STATES if self.states.get(state) or state == _STATES[-1])

    def settle(self, key: str, state: str) -> None:
        """How one of them is from now on."""
        member = self.members[key]
        self.states[member.state] -= 1
        self.states[state] = self.states.get(state, 0) + 1
        member.state = state

    def told(self, mesh: Shape) -> dict[str, Any]:
        """What is said of it now; None is what is not known."""
        each = sorted(self.members.values(), key=lambda member: [mesh.place(base) for base in member.bases])
        first = each[0]
        if first.failure is None:
            return {}
        places = sorted({place for place in map(mesh.place, self.bases) if place >= 0})
        failure = msgspec.structs.replace(
            first.failure,
            mesh_name=mesh.name,
            mesh_uid=mesh.uid,
            procs=mesh.procs,
            extent=mesh.extent,
            places=tuple(places),
            left=mesh.left(set(places)),
        )
        if len(each) == 1:  # all is said already, but others may have failed since
            before, advice = first.record["next"], failure.next_step
            return {"next": advice, "report": first.record["report"].removesuffix(before) + advice}
        lines = _kinds(each, lambda member: tuple(member.record.get("last_lines") or ()))
        texts = _kinds(each, lambda member: member.record.get("text") or "")
        several = len(texts) > 1 and failure.cause.kind not in OF_PROCESSES
        at: Callable[[list[int]], str] = lambda bases: where(mesh.extent, map(mesh.place, bases))  # noqa: E731
        found = {
            **first.record,
            "ranks": places,
            "name": mesh.name,
            "kind": "procs" if mesh.procs else "actors",
            "where": failure.where,
            "title": title(failure) + (" (the texts differ)" if several else ""),
            "pid": None,
            "processes": _processes(each) or None,
            "at": min(member.record["at"] for member in each),
            "detected": min(member.record["detected"] for member in each),
            "dump": next((member.record["dump"] for member in each if member.record.get("dump")), None),
            "last_lines": list(next(iter(lines))) or None,
            "lines": [[at(bases), list(last)] for last, bases in lines.items() if last] if len(lines) > 1 else None,
            "texts": [[at(bases), told] for told, bases in texts.items()] if several else None,
            "also": list(_also(each, mesh.name)) or None,
            "next": failure.next_step,
        }
        found["report"] = f"{found['title']}\n\n{text(found)}"
        return found


def _kinds(each: Sequence[Member], of: Callable[[Member], Any]) -> dict[Any, list[int]]:
    """What there is of something, and on which base ranks; the first kinds of it."""
    found: dict[Any, list[int]] = {}
    for member in each:
        found.setdefault(of(member), []).extend(member.bases)
    return dict(list(found.items())[:KINDS])


def _processes(each: Sequence[Member]) -> list[list[Any]]:
    found: dict[str, list[int]] = {}
    for member in each:
        host, pid = member.record.get("host"), member.record.get("pid")
        if host:
            found.setdefault(host, []).extend([pid] if pid else [])
    return [[host, pids] for host, pids in found.items()]


def _also(each: Sequence[Member], name: str) -> dict[str, None]:
    told: dict[str, None] = {}
    for member in each:
        record: Mapping[str, Any] = member.record
        told.update(dict.fromkeys((*(record.get("also") or ()), record["name"])))
    told.pop(name, None)
    return told
