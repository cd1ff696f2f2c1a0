"""The typed view of one mesh that text and static HTML render, and the groups of its like ranks."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from monarch_nb.shape import Region, places
from monarch_nb.store.meshes import MeshEntry, Meshes
from monarch_nb.store.records import Document, RankFields, RankState
from monarch_nb.supervision import notice_text
from monarch_nb.wire import host_name, text_table

WORST_FIRST: tuple[RankState, ...] = (
    "failed",
    "unresponsive",
    "paused",
    "healing",
    "starting",
    "busy",
    "idle",
    "stopped",
)
_MOST_KINDS = 12  # listed at most
_NAMED = 3  # hosts
_LONGEST = 60  # characters of coordinates, and of the description of a kind


class RankView(Struct, frozen=True):
    """One rank: its coordinates in the described mesh, and its state. `pid` is 0 while unknown."""

    rank: int  # in the mesh at its spawn
    point: tuple[int, ...]
    state: RankState
    host: str
    pid: int
    detail: str  # a few words, or ""


class MeshView(Struct, frozen=True):
    """A mesh, or a slice of one."""

    name: str
    kind: Literal["procs", "actors"]
    uid: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[RankView, ...]
    actor_class: str  # "" for procs
    on: str  # uid of the procs of actors, "" for procs
    actors: tuple[str, ...]  # names of the actor meshes that live on procs
    stopped: str  # the reason, "" while it runs
    notices: tuple[str, ...] = ()  # of those of its hosts that are about to be taken away

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of its ranks."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def counts(self) -> dict[RankState, int]:
        """The number of ranks by state, the most common first."""
        return dict(Counter(rank.state for rank in self.ranks).most_common())

    def having(self, state: RankState) -> tuple[RankView, ...]:
        """Returns the ranks in one state."""
        return tuple(rank for rank in self.ranks if rank.state == state)


def mesh_view(meshes: Meshes, document: Document, uid: str, region: Region, now: float) -> MeshView | None:
    """Returns a mesh, or its slice `region`; None if the state does not contain it."""
    mesh = meshes.get(uid)
    if mesh is None:
        return None
    event = mesh.event
    procs = meshes.get(event.on) or mesh
    reason = str(document["meshes"][uid].get("stopped") or "")
    above = (meshes.get(actor_uid) for actor_uid in mesh.on_it)
    return MeshView(
        name=event.name,
        kind=event.kind,
        uid=uid,
        labels=tuple(region.labels),
        sizes=tuple(region.extent.sizes),
        ranks=tuple(
            _rank(mesh, procs, document, base, tuple(region.extent.point(index).values()), now)
            for index, base in enumerate(region.ndslice)
        ),
        actor_class=event.actor_class,
        on=event.on,
        actors=tuple(
            actors.event.name for actors in above if actors is not None and not actors.ended and not actors.event.inner
        ),
        stopped=reason if mesh.default == "stopped" else "",
        notices=tuple(_notices(procs, document, region, now)),
    )


def _notices(procs: MeshEntry, document: Document, region: Region, now: float) -> Iterator[str]:
    if not any(host.get("notice") for host in document["hosts"].values()):
        return
    event = procs.event
    indices = (procs.index_of(base) for base in region.ndslice)
    for host in dict.fromkeys(event.hosts[index // event.per_host] for index in indices if index >= 0 and event.hosts):
        record = document["hosts"].get(host, {})
        if record.get("notice"):
            until = record.get("until")
            yield notice_text([host], record["notice"], None if until is None else max(0.0, until - now))


def _rank(
    mesh: MeshEntry, procs: MeshEntry, document: Document, base: int, point: tuple[int, ...], now: float
) -> RankView:
    index, below = mesh.index_of(base), procs.index_of(base)
    record = document["ranks"][mesh.event.uid].get(str(index), {})
    proc = document["ranks"][procs.event.uid].get(str(below), {})
    hosts = procs.event.hosts
    state = mesh.ranks[index].shown
    return RankView(
        rank=base,
        point=point,
        state=state,
        host=host_name(hosts[below // procs.event.per_host]) if hosts else "",
        pid=proc.get("pid", 0),
        detail=_detail(state, record, document, (mesh.event.uid, index), now),
    )


def _detail(state: RankState, record: RankFields, document: Document, key: tuple[str, int], now: float) -> str:
    if state == "failed":
        return str(record.get("detail") or document["meshes"][key[0]].get("stopped") or "")
    if state == "busy":
        return str(record.get("endpoint") or "")
    if state == "unresponsive":
        return f"for {now - record['since']:.0f} s"
    if state == "paused":
        for session in document["sessions"].values():
            if (session["mesh"], session["rank"]) == key:
                return str(session.get("place") or f"{session.get('function')}, line {session.get('line')}")
    return ""


class LikeRanks(Struct, frozen=True):
    """Ranks that are in the same state for the same reason, or run the same endpoint."""

    state: RankState
    about: str  # the endpoint, or the reason; "" without one
    ranks: tuple[RankView, ...]


def kinds(view: MeshView) -> list[LikeRanks]:
    """Returns all kinds, the worst state first, then the largest first."""
    by_kind: dict[tuple[RankState, str], list[RankView]] = {}
    for rank in view.ranks:
        about = "" if rank.state == "unresponsive" else rank.detail  # a duration does not make a kind
        by_kind.setdefault((rank.state, about), []).append(rank)
    listed = [LikeRanks(state, about, tuple(ranks)) for (state, about), ranks in by_kind.items()]
    return sorted(listed, key=lambda kind: (WORST_FIRST.index(kind.state), -len(kind.ranks)))


def kind_rows(view: MeshView) -> list[tuple[str, str, str, str]]:
    """Returns each kind as text: count, state, description and location; a last row sums up further kinds."""
    groups = kinds(view)
    rows: list[tuple[str, str, str, str]] = [
        (f"{len(kind.ranks):,}", kind.state, _short(kind.about), _location(view, kind, alone=len(groups) == 1))
        for kind in groups[:_MOST_KINDS]
    ]
    rest = groups[_MOST_KINDS:]
    if rest:
        rows.append((f"{sum(len(kind.ranks) for kind in rest):,}", "…", f"{len(rest)} more kinds", ""))
    return rows


def _location(view: MeshView, kind: LikeRanks, *, alone: bool = False) -> str:
    """Returns the location of the ranks of a kind: coordinates, if they are short, and hosts."""
    if alone or len(kind.ranks) * 2 > len(view.ranks):
        return ""
    hosts = list(dict.fromkeys(rank.host for rank in kind.ranks))
    on = ", ".join(hosts) if len(hosts) <= _NAMED else f"{len(hosts):,} hosts"
    coordinates = places(view.labels, (rank.point for rank in kind.ranks), view.sizes)
    return f"{coordinates} on {on}" if coordinates and len(coordinates) <= _LONGEST else f"on {on}"


def kinds_text(view: MeshView) -> str:
    """Returns the kinds as lines of text."""
    return text_table([(f"{count:>7}", state, about, location) for count, state, about, location in kind_rows(view)])


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
