"""Keeps the meshes of a process: those it owns and those it holds references to; the hands of its supervision."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_nb.mesh.editions import Editions
from monarch_nb.mesh.healing import Heals
from monarch_nb.mesh.news import News
from monarch_nb.mesh.operations import Operations
from monarch_nb.mesh.stops import Stops
from monarch_nb.mesh.verbs import ACTOR_FAILED
from monarch_nb.mesh.watching import Watching
from monarch_nb.runtime import ActorState, Future, Instance, MeshState, ProcState, Runtime
from monarch_nb.shape import NDSlice, Region, runs
from monarch_nb.supervision import Action, Driver, Machine, MeshSpec, Refusal
from monarch_nb.transport import held_back
from monarch_nb.wire import Asker, Layout

if TYPE_CHECKING:
    from monarch_nb.logs import MeshLogs
    from monarch_nb.mesh.proc import ProcMesh

logger = logging.getLogger(__name__)


class Keeper:
    """One per process. What it does at length is done by its parts: `watching`, `news`, `stops` and `heals`."""

    def __init__(self, engine: Runtime, driver: Driver, logs: "MeshLogs", operations: Operations) -> None:
        self.engine = engine
        self.driver = driver
        self.logs = logs
        self.operations = operations
        self.agent_environment: dict[str, dict[str, str]] = {}
        self.python: str | None = None  # the interpreter this process was asked to run with; its own follow
        self.workspaces: dict[str, list[str]] = {}  # by host: folders of code that come first on the path there
        # Called on engine threads: they must not block.
        self.on_event: list[Callable[[str, Any], None]] = [logs.happened]
        self.on_call: list[Callable[[ActorState], None]] = []  # told of each call that begins here, on its thread
        self.revive: Callable[[Iterable[str]], None] = lambda hosts: None  # starts dead agents of this machine again
        self.controllers: Any = None  # the way to actors of which a program has one each
        self._owned: dict[str, list[str]] = {}  # stream of the owner -> uids
        self._mesh: ProcMesh | None = None
        engine.keeper = self
        self.watching = Watching(self)
        self.news = News(self)
        self.editions = Editions(self)
        self.stops = Stops(self)
        self.heals = Heals(self)
        engine.verbs.handle(ACTOR_FAILED, self._actor_failed)

    @property
    def pids(self) -> dict[str, int]:
        """The processes that agents told of, by address."""
        return self.watching.pids

    @property
    def unresponsive(self) -> dict[str, float]:
        """Addresses of processes that live and do not answer, and since when (wall clock)."""
        return self.watching.unresponsive

    def event(self, kind: str, about: Any) -> None:
        """Tells displays."""
        for listener in tuple(self.on_event):
            try:
                listener(kind, about)
            except Exception:
                logger.exception("a display failed on %s", kind)

    # -- what this process owns and knows ---------------------------------------------------------------------------

    @staticmethod
    def ranks(region: Region) -> "Sequence[int]":
        """The base ranks of a region, in its order; a range where they are one."""
        pieces = runs(region)
        if len(pieces) == 1 and pieces[0].stride == 1:
            return range(pieces[0].rank, pieces[0].rank + pieces[0].count)
        return region.ranks()

    def _spec(self, state: MeshState) -> MeshSpec:
        extent = state.region.extent
        shape = (tuple(extent.labels), tuple(extent.sizes))
        ranks = self.ranks(state.region)
        if isinstance(state, ProcState):
            return MeshSpec(
                uid=state.uid, name=state.name, kind="procs", ranks=ranks, extent=shape, layout=state.layout
            )
        assert isinstance(state, ActorState)
        return MeshSpec(uid=state.uid, name=state.name, kind="actors", ranks=ranks, extent=shape, on=state.procs.uid)

    def own(self, instance: Instance, state: MeshState) -> None:
        """An actor of this process has spawned a mesh: from now on it is known, and has an owner."""
        held_back(self._own, instance, state)

    def _own(self, instance: Instance, state: MeshState) -> None:
        self.engine.meshes[state.uid] = state
        if isinstance(state, ActorState):
            state.procs.actors[state.uid] = state
        self._owned.setdefault(instance.stream, []).append(state.uid)
        incarnation = (instance.base_rank, instance.incarnation) if instance.mesh else None

        def register(machine: Machine) -> list[Action]:
            machine.join(instance.stream, str(instance), instance.mesh or None, incarnation)
            return machine.own(instance.stream, self._spec(state))

        self.driver.feed(register)
        self.event("spawned", state)

    def disown(self, state: MeshState, uids: "Sequence[str]") -> None:
        """A mesh of this process was stopped long ago, and the actors on it: nothing is known of them any more."""
        self.driver.feed(lambda machine: machine.disown(state.uid))
        for uid in uids:
            self.news.forget(uid)
            for owned in tuple(self._owned.values()):
                if uid in owned:
                    owned.remove(uid)
        if isinstance(state, ProcState):
            self.watching.forget(f"{state.uid}.")

    def subscribe(self, state: MeshState) -> None:
        """A reference to a mesh owned elsewhere has come here: learn of its failures, heals and end."""

        def register(machine: Machine) -> list[Action]:
            machine.know(state.home, self._spec(state))
            return []

        self.driver.feed(register)
        if self.engine.closed or state.home == self.engine.address:
            return
        self.news.subscribe(state)
        procs = state if isinstance(state, ProcState) else None
        self.watching.watch(state.home, *(map(procs.address, range(procs.layout.size)) if procs is not None else ()))

    def belongs(self, mesh: "ProcMesh") -> None:
        """This process is one of that mesh."""
        self._mesh = mesh

    def proc_mesh(self) -> "ProcMesh":
        """The mesh this process belongs to."""
        return self._mesh if self._mesh is not None else self.this_proc()

    def this_proc(self) -> "ProcMesh":
        """This process, as a ProcMesh of one."""
        from monarch_nb.mesh.proc import ProcMesh

        uid, rank, _ = self.engine.address.partition("/")[2].split(".")
        region = Region((), NDSlice(int(rank), (), ()))
        if self._mesh is not None:
            return ProcMesh(self._mesh._state, region)
        state = self.engine.meshes.get(uid)
        if not isinstance(state, ProcState):
            layout = Layout(uid, (self.engine.host,), 1)
            state = ProcState(uid, "this_proc", region, self.engine.address, layout=layout)
            self.own(self.engine.root, state)
        return ProcMesh(state, state.region)

    # -- effects of supervision -----------------------------------------------------------------------------------

    def stop_mesh(self, what: "str | MeshState", reason: str, region: Region | None = None) -> Future[None]:
        """Stops a mesh or slice; the future resolves when it is gone."""
        state = self.engine.meshes.get(what) if isinstance(what, str) else what
        return Future._resolved(None) if state is None else self.stops.stop(state, reason, region)

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped."""
        self.stops.await_all(self._owned.pop(instance.stream, ()), instance)

    def heal(self, state: MeshState, region: Region, *, kill: bool = False) -> Future[None]:
        """Brings failed ranks of a slice back, or with `kill` all of them."""
        return self.heals.heal(state, region, kill=kill)

    def host_lost(self, host: str, reason: str, incarnation: int) -> None:
        """A host agent is gone, and all processes of its host with it; `incarnation` is the agent's, if it is known."""
        self.watching.host_lost(host, reason, incarnation)

    # -- reading thread ---------------------------------------------------------------------------------------------

    def _actor_failed(self, refusal: Refusal, asker: Asker[None]) -> None:
        self.engine.node.settled(self.driver.refused, refusal)  # what it answered before comes before
