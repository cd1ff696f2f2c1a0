"""One mesh, typed, as text and static HTML render it."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from monarch_nb.shape import Region
from monarch_nb.store.meshes import MeshEntry, Meshes
from monarch_nb.store.records import Document, RankFields, RankState
from monarch_nb.supervision import notice_text
from monarch_nb.wire import host_name


class RankView(Struct, frozen=True):
    """One rank: its coordinates in the described mesh, and its state. `pid` is 0 while unknown."""

    rank: int  # in the mesh as it was spawned
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
    on: str  # uid of the procs that actors are on, "" for procs
    actors: tuple[str, ...]  # names of the actor meshes that live on procs
    stopped: str  # the reason, "" while it runs
    notices: tuple[str, ...] = ()  # of its hosts that are about to be taken away

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts its ranks are on."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def counts(self) -> dict[RankState, int]:
        """Number of ranks by state, the commonest first."""
        return dict(Counter(rank.state for rank in self.ranks).most_common())

    def having(self, state: RankState) -> tuple[RankView, ...]:
        """The ranks in one state."""
        return tuple(rank for rank in self.ranks if rank.state == state)


def mesh_view(meshes: Meshes, document: Document, uid: str, region: Region, now: float) -> MeshView | None:
    """A mesh, or its slice `region`; None if the state does not contain it."""
    mesh = meshes.get(uid)
    if mesh is None:
        return None
    event = mesh.event
    procs = meshes.get(event.on) or mesh
    why = str(document["meshes"][uid].get("stopped") or "")
    above = (meshes.get(other) for other in mesh.on_it)
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
        stopped=why if mesh.default == "stopped" else "",
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
