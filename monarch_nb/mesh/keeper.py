"""Keeps the meshes of a process: those it owns, those it holds references to, and the agents' word on them."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.host import protocol as p
from monarch_nb.mesh.actor import Born, spawn_frames
from monarch_nb.mesh.requests import fail_requests, gather, request, route_answers
from monarch_nb.mesh.sending import send_region
from monarch_nb.mesh.spawning import start
from monarch_nb.mesh.state import ActorState, MeshState, ProcState
from monarch_nb.runtime import HOOK, SPAWN, ActorCell, Future, Instance, PendingCall, Runtime, SpawnActor
from monarch_nb.settings import settings
from monarch_nb.shape import NDSlice, Region, runs
from monarch_nb.supervision import (
    Action,
    Cause,
    Driver,
    Life,
    Machine,
    MeshSpec,
    Refusal,
    RootPolicy,
    Selection,
)
from monarch_nb.wire import Header, Kind, Status

if TYPE_CHECKING:
    from monarch_nb.mesh.proc import ProcMesh
    from monarch_nb.transport import Parcel

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0


class _Update(msgspec.Struct, array_like=True, frozen=True):
    """What a heal has changed, for those who hold a reference."""

    uid: str
    incarnations: dict[int, int]
    version: int
    lives: tuple[Life, ...]


class _StopActor(msgspec.Struct, array_like=True, frozen=True):
    """actor.stop: these ranks of a mesh that live in the receiving process."""

    mesh: str
    rank: int
    incarnation: int
    reason: str


class Keeper:
    """One per process; the hands of its supervision driver."""

    def __init__(self, engine: Runtime, *, root: str | None, policy: RootPolicy = "script") -> None:
        self.engine = engine
        self.driver = Driver(engine, self, root=root, policy=policy)
        self.agent_environment: dict[str, dict[str, str]] = {}
        self.unresponsive: dict[str, float] = {}  # address -> since when (wall clock)
        self.pids: dict[str, int] = {}
        self.on_event: list[Callable[[str, Any], None]] = []  # displays; called on engine threads, must not block
        self.revive: Callable[[Iterable[str]], None] = lambda hosts: None  # starts dead agents of this machine again
        self._subscribers: dict[str, set[str]] = {}
        self._stops: dict[str, Future[None]] = {}
        self._owned: dict[str, list[str]] = {}  # stream of the owner -> uids
        self._owners_here: dict[str, set[str]] = {}  # process of an owner -> streams whose actors live here
        self._mesh: ProcMesh | None = None
        self.python: str | None = None  # the interpreter that processes spawned on this host from here run
        engine.keeper = self
        engine.supervisor = self.driver
        route_answers(engine)
        engine.controls.update(
            {
                "proc.started": self._started,
                "proc.exited": self._exited,
                "proc.unresponsive": self._unresponsive,
                "proc.responsive": self._responsive,
                "proc.ping": self._ping,
                "host.lost": self._hosts_lost,
                "actor.failed": self._actor_failed,
                "actor.stop": self._stop_actor,
                "actor.interrupt": self._interrupt,
                "mesh.subscribe": self._subscribe,
                "mesh.update": self._update,
                "mesh.heal": self._heal_asked,
            }
        )

    # -- what this process owns and knows ---------------------------------------------------------------------------

    @staticmethod
    def _ranks(region: Region) -> "Sequence[int]":
        pieces = runs(region)
        if len(pieces) == 1 and pieces[0].stride == 1:
            return range(pieces[0].rank, pieces[0].rank + pieces[0].count)
        return region.ranks()

    def _spec(self, state: MeshState) -> MeshSpec:
        extent = state.region.extent
        shape = (tuple(extent.labels), tuple(extent.sizes))
        ranks = self._ranks(state.region)
        if isinstance(state, ProcState):
            return MeshSpec(
                uid=state.uid, name=state.name, kind="procs", ranks=ranks, extent=shape, layout=state.layout
            )
        assert isinstance(state, ActorState)
        return MeshSpec(uid=state.uid, name=state.name, kind="actors", ranks=ranks, extent=shape, on=state.procs.uid)

    def own(self, instance: Instance, state: MeshState) -> None:
        """An actor of this process has spawned a mesh."""
        self._owned.setdefault(instance.stream, []).append(state.uid)
        life = (instance.base_rank, instance.incarnation) if instance.mesh else None

        def register(machine: Machine) -> list[Action]:
            machine.join(instance.stream, str(instance), instance.mesh or None, life)
            return machine.own(instance.stream, self._spec(state))

        self.driver.feed(register)
        self.event("spawned", state)

    def subscribe(self, state: MeshState) -> None:
        """A reference to a mesh owned elsewhere has come here: learn of its failures and heals."""

        def register(machine: Machine) -> list[Action]:
            machine.know(state.home, self._spec(state))
            return []

        self.driver.feed(register)
        procs = state if isinstance(state, ProcState) else None
        if self.engine.closed or state.home == self.engine.address:
            return
        self.engine.control(state.home, "mesh.subscribe", state.uid)
        self._watch(state.home)
        if procs is not None:
            self._watch(*map(procs.address, range(procs.layout.size)))

    def _watch(self, *addresses: str) -> None:
        by_host: dict[str, list[str]] = {}
        for address in addresses:
            host, _, name = address.partition("/")
            # A controller is nobody's child: agents end with it, or when its lease does.
            if address != self.engine.address and name.startswith("p"):
                by_host.setdefault(host, []).append(address)
        for host, mine in by_host.items():
            self.engine.control(f"{host}/agent", "agent.watch", p.Addresses(tuple(mine)))

    def hosts(self, spec: SpawnActor) -> None:
        """An actor of an owner elsewhere lives here from now on: it ends when its owner's process does."""
        if spec.owner_process != self.engine.address and spec.owner_process not in self._owners_here:
            self._owners_here[spec.owner_process] = set()
            self._watch(spec.owner_process)

    def belongs(self, mesh: "ProcMesh") -> None:
        """This process is one of that mesh."""
        self._mesh = mesh

    def proc_mesh(self) -> "ProcMesh":
        """The mesh this process belongs to."""
        return self._mesh if self._mesh is not None else self.this_proc()

    def this_proc(self) -> "ProcMesh":
        """This process, as a ProcMesh of one."""
        from monarch_nb.mesh.proc import ProcMesh
        from monarch_nb.wire import Layout

        uid, rank, _ = self.engine.address.partition("/")[2].split(".")
        if self._mesh is not None:
            return ProcMesh(self._mesh._state, Region((), NDSlice(int(rank), (), ())))
        state = self.engine.meshes.get(uid)
        if state is None:
            region = Region((), NDSlice(int(rank), (), ()))
            layout = Layout(uid, (self.engine.host,), 1)
            state = ProcState(uid, "this_proc", region, self.engine.address, layout=layout)
            self.engine.meshes[uid] = state
            self.own(self.engine.root, state)
        return ProcMesh(state, state.region)

    def event(self, kind: str, about: Any) -> None:
        """Tells displays."""
        for listener in tuple(self.on_event):
            try:
                listener(kind, about)
            except Exception:
                logger.exception("a display failed on %s", kind)

    # -- agents' word (reading thread) ------------------------------------------------------------------------------

    def _started(self, header: Header, parcel: "Parcel") -> None:
        started = p.decode(parcel.frames[0], p.Started)
        self.pids[started.address] = started.pid
        if started.why:
            logger.info("%s was started cold: %s", started.address, started.why)
        self.event("started", started)

    def _exited(self, header: Header, parcel: "Parcel") -> None:
        gone = p.decode(parcel.frames[0], p.Exited)
        self.unresponsive.pop(gone.address, None)
        uid, rank, incarnation = self._name_of(gone.address)
        if not gone.expected:
            lines = settings.get("tail_log_lines")
            cause = Cause(
                kind="signal" if gone.signal else ("exit" if gone.pid else "spawn"),
                text=gone.reason,
                host=gone.host,
                pid=gone.pid,
                exitcode=gone.exitcode,
                signal=gone.signal,
                oom=gone.oom,
                last_lines=gone.last_lines[-lines:] if lines else (),
                at=gone.at,
            )
            self.driver.proc_exited(uid, rank, incarnation, cause)
        self._owner_gone(gone.address, gone.reason)
        fail_requests(self.engine, (gone.address,), gone.reason)
        self.engine.node.forget(gone.address, gone.reason)  # last: what waited for it has been told better
        self.event("exited", gone)

    def host_lost(self, host: str, reason: str) -> None:
        """A host agent is gone, and all processes of its host with it."""
        cause = Cause(kind="host", text=reason, host=host, at=time.time())
        ranks = {
            rank
            for state in tuple(self.engine.meshes.values())
            if isinstance(state, ProcState)
            for rank in range(state.layout.size)
            if state.layout.host_of(rank) == host
        }
        pending = set().union(*(self.driver._pending(rank) for rank in ranks))
        self.driver.feed(lambda machine: machine.host_lost([host], cause, pending))
        gone = {f"{host}/agent", *(address for address in self.pids if address.startswith(f"{host}/"))}
        fail_requests(self.engine, gone, reason)
        for address in gone:
            self.engine.node.forget(address, reason)
        self.event("host lost", host)

    def _hosts_lost(self, header: Header, parcel: "Parcel") -> None:
        for host, reason in p.decode(parcel.frames[0], p.Lost).hosts.items():
            self.host_lost(host, reason)

    @staticmethod
    def _name_of(address: str) -> tuple[str, int, int]:
        name = address.partition("/")[2]
        uid, _, rest = name.partition(".")
        rank, _, incarnation = rest.partition(".")
        return uid, int(rank or 0), int(incarnation or 0)

    def _owner_gone(self, process: str, reason: str) -> None:
        self.driver.feed(lambda machine: machine.owner_gone(process, reason))
        if self._owners_here.pop(process, None) is None:
            return
        for cell in tuple(self.engine.cells.values()):
            if cell.spec.owner_process == process and cell.spec.where != 1:
                cause = Cause(kind="owner", text=f"its owner {process} is gone: {reason}", actor=str(cell.instance))
                cell.stop("its owner is gone", cause=cause)

    def _unresponsive(self, header: Header, parcel: "Parcel") -> None:
        told = p.decode(parcel.frames[0], p.Pressed)
        self.unresponsive[told.address] = told.since
        self.event("unresponsive", told)

    def _responsive(self, header: Header, parcel: "Parcel") -> None:
        told = p.decode(parcel.frames[0], p.Pressed)
        self.unresponsive.pop(told.address, None)
        self.event("responsive", told)

    def _ping(self, header: Header, parcel: "Parcel") -> None:
        self.engine.control(header.src, "proc.pong", p.Done(), port=header.port)

    # -- actors -----------------------------------------------------------------------------------------------------

    def actor_failed(self, cell: ActorCell, refusal: Refusal) -> None:
        """Lets the process of the actor's owner know; in this process itself the event goes straight in."""
        home = cell.spec.owner_process
        if home == self.engine.address:
            self.driver.refused(refusal)
        else:
            self.engine.control(home, "actor.failed", refusal)

    def _actor_failed(self, header: Header, parcel: "Parcel") -> None:
        self.driver.refused(msgspec.msgpack.decode(parcel.frames[0], type=Refusal))

    def selection(self, state: Any, region: Any) -> Selection:
        """The ranks of a slice as runs."""
        return runs(region)

    def _stop_actor(self, header: Header, parcel: "Parcel") -> None:
        asked = msgspec.msgpack.decode(parcel.frames[0], type=_StopActor)
        cell = self.engine.cells.get((asked.mesh, asked.rank))
        if cell is None or cell.incarnation != asked.incarnation:
            self._answer(header)
            return
        cell.on_end(lambda: self._answer(header))
        cell.stop(asked.reason)
        self.engine.later(settings.get("stop_actor_timeout"), lambda: None if cell.ended else cell.interrupt())

    def _answer(self, header: Header) -> None:
        if header.port:
            self.engine.control(header.src, "reply", p.Done(), port=header.port)

    def _interrupt(self, header: Header, parcel: "Parcel") -> None:
        mesh, rank = msgspec.msgpack.decode(parcel.frames[0], type=tuple[str, int])
        cell = self.engine.cells.get((mesh, rank))
        if cell is not None:
            cell.interrupt()

    # -- stopping ---------------------------------------------------------------------------------------------------

    def stop_mesh(self, what: "str | MeshState", reason: str) -> Future[None]:
        """Stops a mesh; the future resolves when it is gone. A second stop gives the first one's future."""
        state = self.engine.meshes.get(what) if isinstance(what, str) else what
        if state is None:
            return Future._resolved(None)
        first = self._stops.get(state.uid)
        if first is not None:
            return first
        future: Future[None] = Future._make(story=lambda: f"{state.name} has not stopped yet")
        self._stops[state.uid] = future
        self.driver.feed(lambda machine: machine.stopping(state.uid, None, reason))
        with state.lock:  # a heal either sees it, or has named the lives that end with it
            state.stopped = reason
        if isinstance(state, ProcState):
            for actors in state.actors.values():
                actors.stopped = "its processes were stopped"
        under_way = self._stop_procs(state, reason) if isinstance(state, ProcState) else self._stop_actors(state, reason)
        self.event("stopping", state)

        def done(_: Future[Any]) -> None:
            self.event("stopped", state)
            future._set(None)

        self._tell_ended(state, under_way, reason)
        under_way._on_done(done)
        return future

    def _tell_ended(self, state: MeshState, gone: Future[Any], reason: str) -> None:
        """Calls that still wait for a stopped mesh end once it is gone."""
        gone._on_done(lambda _: self.driver.feed(lambda machine: machine.stopped(state.uid, None, reason)))

    def _stop_procs(self, state: ProcState, reason: str) -> Future[Any]:
        by_host: dict[str, list[str]] = {}
        for rank in self._ranks(state.region):
            by_host.setdefault(state.layout.host_of(rank), []).append(state.address(rank))
        asked = [
            request(
                self.engine,
                f"{host}/agent",
                "agent.stop",
                p.Stop(tuple(addresses), timeout_s=settings.get("mesh_terminate_timeout"), reason=reason),
                p.Ended,
            )
            for host, addresses in by_host.items()
        ]
        for ended in asked:
            ended._on_done(self._forget)
        return gather(asked, lambda: f"{state.name} has not stopped yet")

    def _forget(self, future: Future[Any]) -> None:
        if future.exception(0) is None:
            for gone in future.get(0).exits:
                self.engine.node.forget(gone.address, gone.reason)

    def _stop_actors(self, state: MeshState, reason: str) -> Future[Any]:
        assert isinstance(state, ActorState)
        asked = []
        with self.driver._lock:
            status = dict(self.driver.machine.status(state.uid))
        for rank in self._ranks(state.region):
            if rank in status and status[rank].state == "failed":
                continue
            message = _StopActor(state.uid, rank, state.incarnation(rank), reason)
            asked.append(request(self.engine, state.procs.address(rank), "actor.stop", message))
        return gather(asked, lambda: f"{state.name} has not stopped yet")

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped; not for ever."""
        limit = max(settings.get("stop_actor_timeout"), settings.get("mesh_terminate_timeout"))
        deadline = time.monotonic() + limit + 5
        for uid in self._owned.pop(instance.stream, []):
            future = self._stops.get(uid)
            if future is not None:
                try:
                    future.get(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    logger.warning("%s did not stop in time", uid)

    # -- heal -------------------------------------------------------------------------------------------------------

    def heal(self, state: MeshState, region: Region) -> Future[None]:
        """Brings failed ranks of a slice back."""
        if state.home != self.engine.address:
            return request(self.engine, state.home, "mesh.heal", (state.uid, region.ranks()))
        return self.driver.heal(state.uid, runs(region))

    def _heal_asked(self, header: Header, parcel: "Parcel") -> None:
        uid, ranks = msgspec.msgpack.decode(parcel.frames[0], type=tuple[str, list[int]])

        def answer(future: Future[None]) -> None:
            error = future.exception(0)
            body = p.Done() if error is None else p.Refused(str(error))
            one = Header(Kind.CONTROL, header.src, self.engine.address, method="reply", port=header.port)
            one.status = Status.VALUE if error is None else Status.EXCEPTION
            self.engine.send(one, self.engine.node.snapshot([msgspec.msgpack.encode(body)]), 1)

        self.driver.heal(uid, frozenset(ranks))._on_done(answer)

    def respawn(self, uid: str, lives: Sequence[Life]) -> None:
        """Starts processes again, their set-up included; blocks until they are ready."""
        state = self.engine.meshes[uid]
        assert isinstance(state, ProcState)
        self._renew(state, lives)
        ready = start(self.engine, state, lives)
        if state.stopped is not None:  # meanwhile: what was just asked for may have come after the stop
            self._tell_ended(state, self._stop_procs(state, state.stopped), state.stopped)
        ready.get()

    @staticmethod
    def _renew(state: MeshState, lives: Sequence[Life]) -> None:
        with state.lock:
            if state.stopped is not None:
                raise RuntimeError(f"{state.name} was stopped while it was being healed")
            state.incarnations = {**state.incarnations, **dict(lives)}
            state.version += 1

    def recreate(self, uid: str, lives: Sequence[Life]) -> None:
        """Creates actors again, of the newest class, with their original arguments; blocks until they are there."""
        state = self.engine.meshes[uid]
        assert isinstance(state, ActorState)
        born: Born = state.born
        state.cls = born.newest()
        self._renew(state, lives)
        frames = spawn_frames(state.cls, born.arguments, born.spec)
        call = PendingCall(
            self.engine,
            f"{state.name}.__init__",
            uid,
            lambda: [rank for rank, _ in lives],
            len(lives),
            lambda replies: None,
        )
        call.call = call.future.wait_id = self.engine.new_call()
        self.engine.calls[call.call] = call
        try:
            for place, (rank, _) in enumerate(lives):
                send_region(
                    self.engine,
                    self.engine.root_context,
                    state,
                    Region((), NDSlice(rank, (), ())),
                    SPAWN,
                    frames,
                    port=call.number,
                    call=call.call,
                    ordered=False,
                    index=place,
                )
        except BaseException:
            call.close()
            raise
        if state.stopped is not None:
            self._tell_ended(state, self._stop_actors(state, state.stopped), state.stopped)
        call.future.get()

    def healed(self, lives: Sequence[tuple[str, Sequence[Life]]]) -> None:
        """Tells everybody who holds a reference, then runs the hooks of survivors; blocks for their answers."""
        asked = []
        for uid, back in lives:
            state = self.engine.meshes.get(uid)
            if state is None:
                continue
            update = _Update(uid, state.incarnations, state.version, tuple(back))
            for process in tuple(self._subscribers.get(uid, ())):
                asked.append((process, uid, request(self.engine, process, "mesh.update", update)))
        for process, uid, future in asked:
            try:
                future.get(5.0)
            except Exception:
                self._subscribers[uid].discard(process)
        for uid, back in lives:
            state = self.engine.meshes.get(uid)
            if isinstance(state, ActorState):
                self._tell_survivors(state, back)
            if state is not None:
                self.event("healed", (state, back))

    def _tell_survivors(self, state: ActorState, back: Sequence[Life]) -> None:
        from monarch_nb.mesh.endpoint import encode_arguments

        if getattr(getattr(state.cls, HOOK), "_monarch_default", False):
            return
        fresh = {rank for rank, _ in back}
        survivors = [rank for rank in self._ranks(state.region) if rank not in fresh]
        points = [state.region.point_of_base_rank(rank) for rank in sorted(fresh)]
        frames = encode_arguments(f"{state.name}.{HOOK}", (points,), {})
        call = PendingCall(
            self.engine, f"{state.name}.{HOOK}", state.uid, lambda: survivors, len(survivors), lambda replies: None
        )
        call.call = call.future.wait_id = self.engine.new_call()
        if not survivors:
            call.close()
            return
        self.engine.calls[call.call] = call
        for place, rank in enumerate(survivors):
            send_region(
                self.engine,
                self.engine.root_context,
                state,
                Region((), NDSlice(rank, (), ())),
                HOOK,
                frames,
                port=call.number,
                call=call.call,
                index=place,
            )
        call.future.get()

    def _subscribe(self, header: Header, parcel: "Parcel") -> None:
        uid = msgspec.msgpack.decode(parcel.frames[0], type=str)
        self._subscribers.setdefault(uid, set()).add(header.src)
        state = self.engine.meshes.get(uid)
        if state is not None and state.version:
            self.engine.control(header.src, "mesh.update", _Update(uid, state.incarnations, state.version, ()))

    def _update(self, header: Header, parcel: "Parcel") -> None:
        update = msgspec.msgpack.decode(parcel.frames[0], type=_Update)
        state = self.engine.meshes.get(update.uid)
        if state is not None:
            state.renew(update.incarnations, update.version)
            lives = update.lives or tuple(update.incarnations.items())
            known = "respawned" if isinstance(state, ProcState) else "recreated"
            self.driver.feed(lambda machine: getattr(machine, known)(update.uid, lives))
            if isinstance(state, ProcState):
                for rank, _ in lives:
                    self.engine.node.learn(state.layout.host_of(rank))  # it is there again, if it was lost
                    self._watch(state.address(rank))
        self._answer(header)
