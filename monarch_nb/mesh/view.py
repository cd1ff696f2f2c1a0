"""How a mesh is right now, as plain data: what every display of meshes shows."""

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from monarch_nb.runtime import ActorState, MeshState, ProcState, runtime
from monarch_nb.shape import Region
from monarch_nb.supervision import Cause
from monarch_nb.supervision.report import facts

if TYPE_CHECKING:
    from monarch_nb.mesh.actor import ActorMesh
    from monarch_nb.mesh.proc import ProcMesh

Condition = Literal["alive", "starting", "healing", "paused", "unresponsive", "failed", "stopped"]


class RankView(Struct, frozen=True):
    """One rank: its place in the mesh that was described, and how it is. `pid` is 0 while it is not known."""

    rank: int  # in the mesh as it was spawned
    point: tuple[int, ...]
    state: Condition
    host: str
    pid: int
    detail: str  # a few words, "" when there is nothing to say


class MeshView(Struct, frozen=True):
    """One mesh, or a slice of one."""

    name: str
    kind: Literal["procs", "actors"]
    uid: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[RankView, ...]
    actor_class: str  # "" for procs
    on: str  # uid of the procs that actors are on, "" for procs
    actors: tuple[str, ...]  # names of the actor meshes that live on procs
    stopped: str  # why it was stopped, "" if it was not

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts its ranks are on."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def counts(self) -> dict[Condition, int]:
        """How many ranks are in each state, the commonest first."""
        return dict(Counter(rank.state for rank in self.ranks).most_common())


def describe(mesh: "ProcMesh | ActorMesh[Any] | MeshState") -> MeshView:
    """How a mesh is. Never blocks and sends nothing."""
    state: Any = mesh if isinstance(mesh, MeshState) else mesh._state
    region: Region = state.region if isinstance(mesh, MeshState) else mesh._region
    procs: ProcState = state.procs if isinstance(state, ActorState) else state
    actors = tuple(a.name for a in procs.actors.values() if a.stopped is None) if state is procs else ()
    return MeshView(
        name=state.name,
        kind="procs" if state is procs else "actors",
        uid=state.uid,
        labels=tuple(region.labels),
        sizes=tuple(region.extent.sizes),
        ranks=tuple(_ranks(state, procs, region)),
        actor_class=state.cls.__name__ if isinstance(state, ActorState) else "",
        on=procs.uid if state is not procs else "",
        actors=actors,
        stopped=state.stopped or "",
    )


def conditions(state: MeshState) -> dict[int, Condition]:
    """How each rank of a whole mesh is."""
    return {rank.rank: rank.state for rank in describe(state).ranks}


def _ranks(state: MeshState, procs: ProcState, region: Region) -> list[RankView]:
    keeper = runtime().keeper
    status = _status(keeper, state.uid)
    found = []
    for index, rank in enumerate(region.ndslice):
        address = procs.address(rank)
        point = region.extent.point(index)
        pid = keeper.pids.get(address, 0)
        known = status.get(rank)
        what: Condition = known.state if known is not None else "alive"
        detail = ""
        if state.stopped is not None:
            what = "stopped"
        elif what == "failed" and known is not None and known.cause is not None:
            detail = _ended(known.cause)
        elif what == "alive" and procs.home == runtime().address and not pid and procs.born is not None:
            what = "starting"
        elif what == "alive" and (held := runtime().held_at(state.uid, rank)):
            what, detail = "paused", held
        elif what == "alive" and address in keeper.unresponsive:
            what = "unresponsive"
            detail = f"for {time.time() - keeper.unresponsive[address]:.0f} s"
        found.append(RankView(rank, tuple(point.values()), what, procs.layout.host_of(rank), pid, detail))
    return found


def _status(keeper: Any, uid: str) -> dict[int, Any]:
    driver = keeper.driver
    with driver._lock:
        try:
            return dict(driver.machine.status(uid))
        except KeyError:  # this very process, as a mesh of one
            return {}


def _ended(cause: Cause) -> str:
    origin = cause.origin
    told = dict(facts(origin)).get("ended", "")
    if told:
        return f"it ended {told}" + (", out of memory" if origin.oom else "")
    lines = (origin.text or cause.text or cause.kind).strip().splitlines()
    return lines[0] if lines else cause.kind
