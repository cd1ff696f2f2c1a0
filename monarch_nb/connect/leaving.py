"""Leaving meshes: by wish, or when this process ends, if it is to be so. Host agents look after them then."""

import contextlib
import logging
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._about import __version__
from monarch_nb.connect.joining import JoinedHost
from monarch_nb.connect.record import NOTES, parts_of
from monarch_nb.connect.routes import AttachedHost, Routes
from monarch_nb.host import mesh_files, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.folders import run_folder_for
from monarch_nb.host.holdings import clock
from monarch_nb.host.mesh_files import KEEPERS, MeshFile, Way
from monarch_nb.lifecycle.proc_spawn import ProcSpawnSpec, python_version
from monarch_nb.mesh.mesh_events import Event, HostLost, MeshEvents, MeshHealed, MeshResized, MeshStarting, MeshStopped
from monarch_nb.mesh.requests import RequestError, UnansweredError, request
from monarch_nb.runtime import ActorState, Future, MeshState, ProcState, Runtime
from monarch_nb.settings import format_duration, settings
from monarch_nb.supervision import Cause, Driver
from monarch_nb.supervision.actions import Action, Tell
from monarch_nb.supervision.machine import Machine
from monarch_nb.wire import Asker, agent_of, host_name

logger = logging.getLogger(__name__)
_AGREE_S = 10.0  # for an agent to take note
_RECLAIM_S = 3.0
_SOON_S = 0.05  # meshes are spawned one after the other


class DetachError(RuntimeError):
    """A mesh cannot be left; the text says why, and it is as before."""


class Leaving:
    """One per controller."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._secrets: dict[str, str] = {}  # by uid of the procs
        self._notes: dict[str, bytes] = {}
        self._got: dict[str, tuple[int, int]] = {}  # the grant and the turn with which each has come here
        self.tellers: list[Callable[[tuple[str, ...]], bytes]] = []  # what is to be kept with meshes, for the notebook
        # Meshes that agents know how to keep, and what hosts of each have been told that keep little of it.
        self._held: dict[str, dict[str, p.Hold]] = {}
        # Which incarnations of the ranks of a mesh went with a host that was lost, by host and mesh.
        self._lost: dict[tuple[str, str], dict[int, int]] = {}
        self._ways: dict[str, Way] = {}  # to hosts of meshes that came here, which nobody here has reached
        self._due: dict[str, set[str]] = {}  # the meshes of which hosts are to hear, and those that hear in any case
        self._lock = threading.Lock()
        self._holding = threading.Lock()
        self._what = f"the program {Path(sys.argv[0]).name or 'python'}"  # this process is, as others are told
        self.hosts: set[str] = set()  # with agents of this process that are to outlive it
        runtime.verbs.handle(verbs.STOLEN, self._stolen)
        runtime.part(MeshEvents).listeners.append(self._happened)
        runtime.part(Routes).reclaims.append(self._reclaim)

    @property
    def holder(self) -> p.Holder:
        """This process, as others are told who has a mesh."""
        return p.Holder(
            address=self._runtime.address, pid=os.getpid(), machine=platform.node(), what=self._what, since=time.time(),
            system=mesh_files.own_system(),
        )  # fmt: skip

    def call_itself(self, what: str) -> None:
        """What this process is, for those who want a mesh that it has."""
        self._what = what

    def keep_up(self) -> None:
        """Agents know now what has changed by now: all there is would be found by who comes after an end at once.

        Blocks for as long as it takes to write that down; does nothing where nothing has changed.
        """
        self._hold_due()  # what is under way, too: notes that were taken before the cell's end may be without its names
        for state in self._mine() if self._held else ():
            if state.uid in self._held and self._noted(state) != self._notes.get(state.uid):
                with self._lock:
                    self._due.setdefault(state.uid, set())
        self._hold_due()

    def _noted(self, state: ProcState) -> bytes | None:
        """What whoever comes for a mesh is given besides."""
        known = self._notes.get(state.uid)
        for tell in self.tellers:
            known = tell((state.uid, *state.actors))
        return known

    def came_back(self, mesh: MeshFile, notes: bytes, got: tuple[int, int]) -> None:
        """A mesh has come to this process, with these notes, this grant and turn."""
        uid = mesh.uid
        self._secrets[uid], self._got[uid] = mesh.secret, got
        self._ways.update({way.host: way for way in mesh.ways})
        if notes:
            self._notes[uid] = notes
        self._held[uid] = {}
        self._plan(uid)

    # -- leaving ----------------------------------------------------------------------------------------------------

    def detach(self, state: ProcState, seconds: float, why: str = "it was detached") -> None:
        """Leaves a mesh of processes with all on it; blocks until its hosts look after it. Raises DetachError."""
        runtime = self._runtime
        if state.stopped is not None:
            raise DetachError(f"{state.name} cannot be detached: it has been stopped already ({state.stopped})")
        if state.owner_process != runtime.address or not isinstance(state.spawn_spec, ProcSpawnSpec):
            raise DetachError(f"{state.name} cannot be detached here: it was spawned by {state.owner_process}")
        if seconds <= 0:
            raise DetachError(f"{state.name}: a lease must be longer than 0 s, such as 30m or 2h")
        hosts = [host for host in dict.fromkeys(state.hosts) if self._is_there(host)]
        if not hosts:
            raise DetachError(f"{state.name} cannot be detached: none of its hosts can be reached")
        if state.uid in self._held:
            self._held[state.uid] = {}  # where one does not agree, the others have been told what is not to be
        self._ask(state, hosts, self._holds(state, seconds, keep=True), verbs.HOLD)
        self._ask(state, hosts, {host: p.Detach(state.uid, why) for host in hosts}, verbs.DETACH)
        now, file = time.time(), mesh_files.path_of(state.uid, state.name)  # which an agent elsewhere cannot write into
        written = mesh_files.read(file)
        if written is not None and written.holder is not None and written.holder.address == runtime.address:
            mesh_files.change(file, holder=None, left_at=now, until=now + seconds, why=why)
        self._let_go(state, Cause(kind="left", text=f"detached for {format_duration(round(seconds * 1e9))}"))

    def detach_on(self, hosts: Sequence[str], host_mesh: str, seconds: float) -> None:
        """Leaves what was spawned from here on a host mesh."""
        for state in self._mine():
            if (
                state.spawn_spec is not None
                and state.spawn_spec.host_mesh == host_mesh
                and set(state.hosts) <= set(hosts)
            ):
                self.detach(state, seconds)

    def detach_all(self, why: str) -> list[str]:
        """This process ends: what is to be kept is left. The names of what was."""
        left = []
        for state in self._mine():
            try:
                self.detach(state, settings.mesh_keep, why)
                left.append(state.name)
            except (DetachError, RuntimeError, TimeoutError) as error:
                logger.warning("%s ends with this process: %s", state.name, error)
        return left

    def _mine(self) -> list[ProcState]:
        address = self._runtime.address
        return [
            state
            for state in tuple(self._runtime.meshes.values())
            if isinstance(state, ProcState)
            and state.stopped is None
            and state.owner_process == address
            and isinstance(state.spawn_spec, ProcSpawnSpec)
        ]

    def _ask(self, state: ProcState, hosts: Iterable[str], bodies: dict[str, Any], verb: Any) -> None:
        asked: dict[str, Future[Any]] = {
            host: request(self._runtime, agent_of(host), verb, bodies[host]) for host in hosts
        }
        for host, answer in asked.items():
            try:
                answer.get(_AGREE_S)
            except (TimeoutError, RuntimeError) as error:
                raise DetachError(
                    f"{state.name} is not detached: host {host_name(host)} has not agreed: {error}"
                ) from error

    def _let_go(self, state: ProcState, cause: Cause) -> None:
        """It is not this process's any more; its handles say what has become of it."""
        runtime = self._runtime
        for one in (state, *state.actors.values()):
            one.stopped = one.stopped or cause.text
        runtime.part(Driver).feed(lambda machine: machine.left(state.uid, cause))
        self._held.pop(state.uid, None)
        self.hosts.update(host for host in state.hosts if host in runtime.part(Routes).local)
        runtime.part(MeshEvents).publish(MeshStopped(state))

    # -- what is kept of a mesh before it is left ---------------------------------------------------------------------

    def _holds(self, state: ProcState, seconds: float, *, keep: bool) -> dict[str, p.Hold]:
        """What each of its hosts is told; the first ones keep all there is to know."""
        parts = parts_of(self._runtime, state)
        notes = self._noted(state)
        if notes is not None:
            parts[NOTES] = self._notes[state.uid] = notes
        file = mesh_files.path_of(state.uid, state.name)
        secret = self._secrets.setdefault(state.uid, secrets.token_hex(32))
        # Those that keep all there is to know have to be there.
        hosts = sorted(dict.fromkeys(state.hosts), key=lambda host: not self._is_there(host))
        actors = [actors for actors in state.actors.values() if actors.stopped is None]
        grant, turn = self._got.get(state.uid, (0, 0))
        shape = ", ".join(f"{label}={size}" for label, size in state.region.extent.items())
        written = MeshFile(
            uid=state.uid, name=state.name, secret=secret, ways=tuple(self._way(host) for host in hosts),
            version=__version__, python=python_version(), machine=platform.node(), ranks=len(state.region),
            shape=shape, actors=tuple(one.name for one in actors), holder=self.holder, keep=seconds if keep else 0.0,
        )  # fmt: skip
        mesh_files.write(file, written)
        first = p.Hold(
            uid=state.uid, name=state.name, secret=secret, seconds=seconds, keep=keep, holder=self.holder,
            meshes=(state.uid, *(one.uid for one in actors)), parts=parts, file=str(file),
            grant=grant, turn=turn,
        )  # fmt: skip
        second, other = msgspec.structs.replace(first, file=""), msgspec.structs.replace(first, parts={}, file="")
        return {host: second if place < KEEPERS else other for place, host in enumerate(hosts)} | {hosts[0]: first}

    def _is_there(self, host: str) -> bool:
        routes = self._runtime.part(Routes)
        return host in routes.local or (host in routes.attached and not routes.attached[host].lost)

    def _way(self, host: str) -> Way:
        routes = self._runtime.part(Routes)
        never_met = host not in routes.local and host not in routes.attached
        return self._ways[host] if never_met and host in self._ways else _way_to(self._runtime, host)

    def refresh(self) -> None:
        """The setting `mesh_keep` has changed: agents hear of it, for the meshes that there are."""
        for state in self._mine():
            self._plan(state.uid)

    def _plan(self, uid: str, hosts: Iterable[str] = ()) -> None:
        """Soon the hosts of a mesh hear of what is new to them, and these of all there is."""
        with self._lock:
            first = not self._due
            self._due.setdefault(uid, set()).update(hosts)
        if first:
            self._runtime.later(_SOON_S, lambda: _aside(self._hold_due))

    def _hold_due(self) -> None:
        with self._holding:
            with self._lock:
                due, self._due = self._due, {}
            self._hold(due)

    def _hold(self, due: Mapping[str, set[str]]) -> None:
        for uid, anew in due.items():
            state = self._runtime.meshes.get(uid)
            if not isinstance(state, ProcState) or state.stopped is not None or self._runtime.closed:
                continue
            try:
                keep = settings.mesh_keep
                self._tell_holds(uid, self._holds(state, keep, keep=keep > 0), anew)
            except Exception as error:
                logger.warning("%s would end with this process: %s", state.name, error)

    def _tell_holds(self, uid: str, holds: Mapping[str, p.Hold], anew: set[str]) -> None:
        """A heal, say, is news to those that keep all there is to know, not to every host there is."""
        before = self._held.get(uid, {})
        told = self._held[uid] = {host: hold for host, hold in before.items() if host in holds and host not in anew}
        for host, hold in holds.items():
            if not self._is_there(host):
                told.pop(host, None)
                continue
            plain = msgspec.structs.replace(hold, holder=msgspec.structs.replace(hold.holder, since=0.0))
            if told.get(host) == plain:
                continue
            told.pop(host, None)
            self._runtime.post(agent_of(host), verbs.HOLD, hold)
            if not hold.parts:
                told[host] = plain

    def _happened(self, event: Event) -> None:
        match event:
            case MeshHealed(ProcState() as state, back):  # a host may have another agent now, which knows nothing
                self._changed(state, {state.layout.host_of(rank) for rank, _ in back})
            case MeshStarting(state) | MeshHealed(state) | MeshResized(state):
                self._changed(state)
            case MeshStopped(ActorState() as state):
                self._changed(state)
            case HostLost(host):
                for state in self._mine():
                    if ranks := state.layout.ranks_on(host):
                        self._lost[host, state.uid] = {rank: state.incarnation(rank) for rank in ranks}
            case MeshStopped(ProcState() as state) if state.uid in self._held and state.stopped is not None:
                self._held.pop(state.uid, None)
                with contextlib.suppress(OSError):
                    mesh_files.remove(mesh_files.path_of(state.uid, state.name))
            case _:
                return

    def _changed(self, state: MeshState, hosts: Iterable[str] = ()) -> None:
        procs = state.procs if isinstance(state, ActorState) else state
        if (
            procs.spawn_spec is not None
            and procs.stopped is None
            and (settings.mesh_keep > 0 or procs.uid in self._held)
        ):
            self._plan(procs.uid, hosts)

    # -- hosts that were lost -----------------------------------------------------------------------------------------

    def _reclaim(self, host: str) -> None:
        """A host is back: what lives on there of meshes of this process was given up, and is stopped. Blocks.

        Its agent may have kept it for whoever comes, or may keep it for somebody else from whom this process has it.
        """
        for state in self._mine():
            incarnations = self._lost.get((host, state.uid))
            if incarnations is None:
                continue
            drop = p.Drop(uid=state.uid, secret=self._secrets.get(state.uid, ""), incarnations=incarnations)
            try:
                request(self._runtime, agent_of(host), verbs.DROP, drop).get(_RECLAIM_S)
            except UnansweredError:
                raise
            except RequestError as error:  # somebody else has what is there
                logger.warning("%s on host %s: %s", state.name, host_name(host), error)
            self._lost.pop((host, state.uid), None)

    # -- taken over -------------------------------------------------------------------------------------------------

    def _stolen(self, message: p.Stolen, asker: Asker[None]) -> None:
        """Another controller has a mesh of this one now (reading thread)."""
        state = self._runtime.meshes.get(message.uid)
        if not isinstance(state, ProcState) or state.stopped is not None:
            return
        by = message.by
        reason = f"taken over by {by.what} (process {by.pid} on {by.machine}) at {clock(time.time())}"
        cause = Cause(kind="taken", text=reason, at=time.time())

        def tell(machine: Machine) -> list[Action]:
            failure = machine.describe(state.uid, list(state.ranks), cause)
            return [] if failure is None else [Tell(failure)]

        self._runtime.part(Driver).feed(tell)
        self._held.pop(state.uid, None)
        self._let_go(state, cause)


def _aside(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="monarch-hold", daemon=True).start()


def _way_to(runtime: Runtime, host: str) -> Way:
    """How another controller reaches a host that this one has, or has had."""
    routes = runtime.part(Routes)
    remote = routes.attached.get(host)
    if remote is None:
        return Way(host, f"ipc://{run_folder_for(host)}")
    if remote.near:
        return Way(host, remote.endpoint)
    way = _way(routes, remote, remote.endpoint)
    if isinstance(remote, JoinedHost):
        return Way(host, "", way.key, calls=remote.calls)
    if remote.behind and routes.gateway is not None:
        leads = routes.gateway
        return Way(host, remote.endpoint, way.key, gateway=_way(routes, leads.remote, leads.address))
    return way


def _way(routes: Routes, remote: AttachedHost, endpoint: str) -> Way:
    key = "" if remote.keys is None else remote.keys.to_text().decode()
    tunnel = routes.tunnels.get(endpoint)
    return Way(remote.host, endpoint, key, tunnel="" if tunnel is None else tunnel.written)
