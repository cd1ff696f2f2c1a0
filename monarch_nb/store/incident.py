"""Failures of several ranks that are one event, told as one: which belong together, and what is said of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from monarch_nb.store.failures import Record, text, title
from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.ranks import where

FOLD_S = 2.0  # so long after the last of them another one still belongs to it
MEMORY_FOLD_S = 15.0  # the same where memory ran out: the kernel kills one process at a time, and each gives some back
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
    """A mesh as an incident needs it: the places of base ranks in it, and how many of the others work."""

    uid: str
    name: str
    procs: bool
    extent: tuple[tuple[str, ...], tuple[int, ...]]
    place: Callable[[int], int]
    left: Callable[[set[int]], int]


class Incident(Struct):
    """What is told as one failure, under the id of the first of them."""

    id: str
    uid: str  # the mesh it is told of
    members: dict[str, Member] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)  # how many are how
    bases: set[int] = field(default_factory=set)
    latest: float = 0.0
    of_memory: bool = False

    def add(self, key: str, member: Member) -> None:
        """One more belongs to it."""
        self.members[key] = member
        self.states[member.state] = self.states.get(member.state, 0) + 1
        self.bases.update(member.bases)
        self.of_memory = self.of_memory or bool(member.record.get("oom"))
        self.latest = max(self.latest, member.record.get("detected", 0.0))

    def takes(self, bases: Sequence[int], detected: float) -> bool:
        """Whether something alike that happened now belongs to it."""
        within_s = MEMORY_FOLD_S if self.of_memory else FOLD_S
        fresh = self.bases.isdisjoint(bases) and detected - self.latest <= within_s
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

    def story(self, mesh: Shape) -> dict[str, Any]:
        """The fields of its record that follow from all of its failures; None is what is not known."""
        members = sorted(self.members.values(), key=lambda member: [mesh.place(base) for base in member.bases])
        first = members[0]
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
        if len(members) == 1:  # all is said already, but others may have failed since
            before, advice = first.record["next"], failure.next_step
            return {"next": advice, "report": first.record["report"].removesuffix(before) + advice}
        lines = _kinds(members, lambda member: tuple(member.record.get("last_lines") or ()))
        texts = _kinds(members, lambda member: member.record.get("text") or "")
        several = len(texts) > 1 and failure.cause.kind not in OF_PROCESSES
        at: Callable[[list[int]], str] = lambda bases: where(mesh.extent, map(mesh.place, bases))  # noqa: E731
        story = {
            **first.record,
            "ranks": places,
            "name": mesh.name,
            "kind": "procs" if mesh.procs else "actors",
            "where": failure.where,
            "title": title(failure) + (" (the texts differ)" if several else ""),
            "pid": None,
            "processes": _processes(members) or None,
            "at": min(member.record["at"] for member in members),
            "detected": min(member.record["detected"] for member in members),
            "dump": next((member.record["dump"] for member in members if member.record.get("dump")), None),
            "last_lines": list(next(iter(lines))) or None,
            "lines": [[at(bases), list(last)] for last, bases in lines.items() if last] if len(lines) > 1 else None,
            "texts": [[at(bases), raised] for raised, bases in texts.items()] if several else None,
            "also": list(_also(members, mesh.name)) or None,
            "next": failure.next_step,
        }
        story["report"] = f"{story['title']}\n\n{text(story)}"
        return story


def _kinds(members: Sequence[Member], of: Callable[[Member], Any]) -> dict[Any, list[int]]:
    """What there is of something, and on which base ranks; the first kinds of it."""
    kinds: dict[Any, list[int]] = {}
    for member in members:
        kinds.setdefault(of(member), []).extend(member.bases)
    return dict(list(kinds.items())[:KINDS])


def _processes(members: Sequence[Member]) -> list[list[Any]]:
    pids_of: dict[str, list[int]] = {}
    for member in members:
        host, pid = member.record.get("host"), member.record.get("pid")
        if host:
            pids_of.setdefault(host, []).extend([pid] if pid else [])
    return [[host, pids] for host, pids in pids_of.items()]


def _also(members: Sequence[Member], name: str) -> dict[str, None]:
    names: dict[str, None] = {}
    for member in members:
        record: Mapping[str, Any] = member.record
        names.update(dict.fromkeys((*(record.get("also") or ()), record["name"])))
    names.pop(name, None)
    return names
