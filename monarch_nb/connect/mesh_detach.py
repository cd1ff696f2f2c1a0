"""Detaching meshes, by `detach` or when this process ends; host agents hold them from then on.

Another controller restores a mesh from its record, which is made and read here.
"""

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

from monarch_nb._package import __version__
from monarch_nb.connect.hosts import JoinedHost
from monarch_nb.connect.routes import ExternalHost, HostRoutes
from monarch_nb.host import mesh_files, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.folders import run_folder_for
from monarch_nb.host.mesh_files import KEEPERS, HostRoute, MeshFile, clock
from monarch_nb.lifecycle.actor_spawn import ActorSpawnSpec
from monarch_nb.lifecycle.proc_spawn import ProcSpawnSpec, host_mesh_of, python_version
from monarch_nb.mesh.handle import operations
from monarch_nb.mesh.host import host_labels
from monarch_nb.mesh.host_record import HostRecord, RecordedSource, record_with
from monarch_nb.mesh.mesh_events import (
    Event,
    HostLost,
    MeshEvents,
    MeshHealed,
    MeshResized,
    MeshStarting,
    MeshStopped,
    RanksStarting,
)
from monarch_nb.mesh.registry import ActorForm, ProcForm, actor_form, proc_form
from monarch_nb.mesh.requests import RequestError, UnansweredError, inform_ranks, request
from monarch_nb.runtime import ActorState, EncodedObject, Future, MeshState, ProcState, Runtime, proc_state_of
from monarch_nb.runtime.stored_answers import UnreadCalls
from monarch_nb.runtime.verbs import UNREAD, UnreadState
from monarch_nb.settings import format_duration, settings
from monarch_nb.supervision import Cause, Driver
from monarch_nb.supervision.actions import Action, ShowFailure
from monarch_nb.supervision.machine import SupervisionMachine
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Asker, agent_of, decode, encode, error_line, host_name, msgpack_decoder

logger = logging.getLogger(__name__)
PROCS = "procs"  # the part of the processes; those of actors have the uids of their meshes
NOTES = "notes"  # of the notebook
_AGREE_S = 10.0  # for an agent's confirmation
_RECLAIM_S = 3.0
_SOON_S = 0.05  # meshes are often spawned one right after the other


class DetachError(RuntimeError):
    """A mesh cannot be detached; the text gives the reason, and the mesh is unchanged."""


class Detacher:
    """Detaches the meshes of this controller, and keeps their records with the host agents up to date until then."""

    def __init__(self, runtime: Runtime, diagnoser: str) -> None:
        """`diagnoser` names the function with which agents diagnose detached meshes: a name can be sent to agents."""
        self._runtime, self._diagnoser = runtime, diagnoser
        self._secrets: dict[str, str] = {}  # by uid of the procs
        self._notes: dict[str, bytes] = {}
        self._grants: dict[str, tuple[int, int]] = {}  # grant and turn of each attached mesh
        self._unread: dict[str, UnreadCalls] = {}  # by mesh with stored answers
        # Add notes of the notebook to the record of a mesh, given the uids of the mesh and of its actors.
        self.note_sources: list[Callable[[tuple[str, ...]], bytes]] = []
        # By mesh, the hosts whose agents were asked to hold it, with the last message; None for a full record.
        self._held: dict[str, dict[str, p.Hold | None]] = {}
        # Incarnations of ranks that were lost with their host, by host and mesh.
        self._lost: dict[tuple[str, str], dict[int, int]] = {}
        self._ways: dict[str, HostRoute] = {}  # to hosts of attached meshes that this process has not reached
        self._due: dict[str, set[str]] = {}  # meshes whose hosts need an update, and hosts that get a full record
        self._unwritten: dict[str, str] = {}  # reasons, by the names of meshes
        self._lock = threading.Lock()
        self._recording = threading.Lock()
        self._description = f"the program {Path(sys.argv[0]).name or 'python'}"  # for other controllers
        self.hosts: set[str] = set()  # whose agents are to outlive this process
        runtime.verbs.handle(verbs.STOLEN, self._on_stolen)
        runtime.part(MeshEvents).listeners.append(self._on_mesh_event)
        runtime.part(HostRoutes).reclaims.append(self._reclaim)

    @property
    def holder(self) -> p.MeshHolder:
        """This process, as other controllers see the holder of a mesh."""
        return p.MeshHolder(
            address=self._runtime.address, pid=os.getpid(), machine=platform.node(), what=self._description,
            since=time.time(), system=mesh_files.own_system(), started=mesh_files.start_of(os.getpid()),
        )  # fmt: skip

    def set_description(self, description: str) -> None:
        """Sets how other controllers see this process as the holder of a mesh."""
        self._description = description

    def flush_holds(self) -> None:
        """Sends host agents all changes up to now, so that a controller that attaches after a crash finds them.

        Blocks until the records are written; does nothing if nothing has changed.
        """
        self._hold_due()  # records under way too: their notes may be older than the end of the cell
        for state in self._own_meshes() if self._held else ():
            if state.uid in self._held and self._notes_of(state) != self._notes.get(state.uid):
                with self._lock:
                    self._due.setdefault(state.uid, set())
        self._hold_due()

    def _notes_of(self, state: ProcState) -> bytes | None:
        """Returns the notes to be stored with a mesh."""
        notes = self._notes.get(state.uid)
        for notes_for in self.note_sources:
            notes = notes_for((state.uid, *state.actors))
        return notes

    def adopt(self, mesh: MeshFile, notes: bytes, grant: tuple[int, int]) -> None:
        """Registers an attached mesh with its notes, grant and turn."""
        uid = mesh.uid
        self._secrets[uid], self._grants[uid] = mesh.secret, grant
        self._ways.update({way.host: way for way in mesh.ways})
        if notes:
            self._notes[uid] = notes
        self._held[uid] = {}
        self._schedule_holds(uid)
        self._introduce(uid)

    def _introduce(self, uid: str) -> None:
        """Informs attached meshes, whose actors may refer to each other, of their common owner.

        The agents of a mesh only inform processes on its own hosts.
        """
        attached = {state.uid: state for state in self._own_meshes() if state.uid in self._grants}
        newest = attached.pop(uid)
        for peer in attached.values():
            inform_ranks(self._runtime, peer, verbs.NEW_OWNER, self._news_of(newest))
            inform_ranks(self._runtime, newest, verbs.NEW_OWNER, self._news_of(peer))

    def _news_of(self, state: ProcState) -> p.NewOwner:
        meshes = (state.uid, *state.actors)
        return p.NewOwner(meshes=meshes, owner=self._runtime.address, turn=self._grants[state.uid][1])

    # -- detaching --------------------------------------------------------------------------------------------------

    def detach(self, state: ProcState, seconds: float, reason: str = "it was detached") -> None:
        """Detaches a mesh of processes with all actors on it; blocks until its hosts hold it. Raises DetachError."""
        runtime = self._runtime
        if state.stopped is not None:
            raise DetachError(f"{state.name} cannot be detached: {state.end_text}")
        if state.owner_process != runtime.address or not isinstance(state.spawn_spec, ProcSpawnSpec):
            raise DetachError(f"{state.name} cannot be detached here: it was spawned by {state.owner_process}")
        if seconds <= 0:
            raise DetachError(f"{state.name}: a lease must be longer than 0 s, such as 30m or 2h")
        hosts = [host for host in dict.fromkeys(state.hosts) if self._is_attached(host)]
        if not hosts:
            raise DetachError(f"{state.name} cannot be detached: none of its hosts can be reached")
        with self._recording:  # a record under way would replace the lease
            self._leave(state, hosts, seconds, reason)

    def _leave(self, state: ProcState, hosts: Sequence[str], seconds: float, reason: str) -> None:
        runtime = self._runtime
        if state.uid in self._held:
            self._held[state.uid] = {}  # if one host refuses, the others have a record that is not valid
        try:
            holds = self._holds(state, seconds, keep=True)
        except DetachError as error:
            raise DetachError(f"{state.name} is not detached: {error}") from error
        self._ask(state, hosts, holds, verbs.HOLD)
        waiting = () if state.unread is None else state.unread.state(waiting_only=True)
        self._ask(state, hosts, {host: p.Detach(state.uid, reason, waiting) for host in hosts}, verbs.DETACH)
        file = mesh_files.path_of(state.uid, state.name)  # agents elsewhere cannot write this file
        written = mesh_files.read(file)
        if written is not None and written.holder is not None and written.holder.address == runtime.address:
            mesh_files.leave(file, seconds, reason)
        self._mark_left(state, Cause(kind="left", text=f"detached for {format_duration(round(seconds * 1e9))}"))

    def detach_on(self, hosts: Sequence[str], host_mesh: str, seconds: float) -> None:
        """Detaches the meshes that were spawned here on a host mesh."""
        for state in self._own_meshes():
            if state.spawn_spec is not None and host_mesh_of(state) == host_mesh and set(state.hosts) <= set(hosts):
                self.detach(state, seconds)

    def detach_all(self, reason: str) -> list[str]:
        """Detaches the meshes that are to outlive this process; returns their names."""
        names = []
        for state in self._own_meshes():
            try:
                self.detach(state, settings.mesh_keep, reason)
                names.append(state.name)
            except (DetachError, RuntimeError, TimeoutError) as error:
                logger.warning("%s ends with this process: %s", state.name, error)
        return names

    def _own_meshes(self) -> list[ProcState]:
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
        requests: dict[str, Future[Any]] = {
            host: request(self._runtime, agent_of(host), verb, bodies[host]) for host in hosts
        }
        for host, answer in requests.items():
            try:
                answer.get(_AGREE_S)
            except (TimeoutError, RuntimeError) as error:
                raise DetachError(
                    f"{state.name} is not detached: host {host_name(host)} has not agreed: {error}"
                ) from error

    def _mark_left(self, state: ProcState, cause: Cause) -> None:
        """Marks a mesh as no longer owned by this process."""
        runtime = self._runtime
        for mesh in (state, *state.actors.values()):
            mesh.detached, mesh.stopped = mesh.stopped is None, mesh.stopped or cause.text
        self._forget_calls(state)
        runtime.part(Driver).feed(lambda machine: machine.detached(state.uid, cause))
        self._held.pop(state.uid, None)
        self.hosts.update(host for host in state.hosts if host in runtime.part(HostRoutes).local)
        runtime.part(MeshEvents).publish(MeshStopped(state))

    # -- the record of a mesh before it is detached -------------------------------------------------------------------

    def _holds(self, state: ProcState, seconds: float, *, keep: bool) -> dict[str, p.Hold]:
        """Returns the message for each of its hosts; the first hosts store the full record."""
        parts = parts_of(self._runtime, state)
        notes = self._notes_of(state)
        if notes is not None:
            parts[NOTES] = self._notes[state.uid] = notes
        try:
            file = mesh_files.path_of(state.uid, state.name)
        except OSError as error:
            raise DetachError(f"its record cannot be written: {error}") from error
        secret = self._secrets.setdefault(state.uid, secrets.token_hex(32))
        # Hosts that store the full record have to be reachable.
        hosts = sorted(dict.fromkeys(state.hosts), key=lambda host: not self._is_attached(host))
        actors = [actors for actors in state.actors.values() if actors.stopped is None]
        grant, turn = self._grants.get(state.uid, (0, 0))
        shape = ", ".join(f"{label}={size}" for label, size in state.region.extent.items())
        written = MeshFile(
            uid=state.uid, name=state.name, secret=secret, ways=tuple(self._way(host) for host in hosts),
            version=__version__, python=python_version(), machine=platform.node(), ranks=len(state.region),
            shape=shape, actors=tuple(mesh.name for mesh in actors), holder=self.holder, keep=seconds if keep else 0.0,
        )  # fmt: skip
        try:
            mesh_files.write(file, written)
        except OSError as error:
            raise DetachError(
                f"its record {file} cannot be written: {error.strerror or error}. Make room there, or set "
                "XDG_STATE_HOME to a folder that has some"
            ) from error
        first = p.Hold(
            uid=state.uid, name=state.name, secret=secret, seconds=seconds, keep=keep, holder=self.holder,
            meshes=(state.uid, *(mesh.uid for mesh in actors)), parts=parts, file=str(file),
            grant=grant, turn=turn,
            unwatched=p.Unwatched(diagnoser=self._diagnoser, extent=dict(state.region.extent), actors=written.actors),
        )  # fmt: skip
        second, bare = msgspec.structs.replace(first, file=""), msgspec.structs.replace(first, parts={}, file="")
        assert first.unwatched is not None
        elsewhere = [state.address(rank) for rank in state.ranks if state.layout.host_of(rank) != hosts[0]]
        first = msgspec.structs.replace(
            first, unwatched=msgspec.structs.replace(first.unwatched, elsewhere=tuple(elsewhere))
        )
        return {host: second if index < KEEPERS else bare for index, host in enumerate(hosts)} | {hosts[0]: first}

    def _is_attached(self, host: str) -> bool:
        routes = self._runtime.part(HostRoutes)
        return host in routes.local or (host in routes.attached and not routes.attached[host].lost)

    def _way(self, host: str) -> HostRoute:
        routes = self._runtime.part(HostRoutes)
        never_met = host not in routes.local and host not in routes.attached
        return self._ways[host] if never_met and host in self._ways else _way_to(self._runtime, host)

    def refresh(self) -> dict[str, str]:
        """Sends agents the new value of the setting `mesh_keep`; blocks until the records are written.

        Returns why meshes are not kept, by name.
        """
        with self._lock:
            for state in self._own_meshes():
                self._due.setdefault(state.uid, set())
                self._store_answers(state)
        return self._hold_due()

    def keys_changed(self) -> None:
        """Writes the records again that name a key of hosts; blocks."""
        with self._lock:
            for uid in self._held:
                self._due.setdefault(uid, set())
        self._hold_due()

    def _schedule_holds(self, uid: str, hosts: Iterable[str] = ()) -> None:
        """Schedules an update of a mesh's hosts; `hosts` get a full record again."""
        state = self._runtime.meshes.get(uid)
        with self._lock:
            first = not self._due
            self._due.setdefault(uid, set()).update(hosts)
            if isinstance(state, ProcState):
                self._store_answers(state)
        if first:
            self._runtime.later(_SOON_S, lambda: _in_background(self._hold_due))

    def _hold_due(self) -> dict[str, str]:
        with self._recording:
            with self._lock:
                due, self._due = self._due, {}
            return self._hold(due)

    def _hold(self, due: Mapping[str, set[str]]) -> dict[str, str]:
        """Writes and sends records; returns the reasons for unwritten ones, by the names of the meshes."""
        failed: dict[str, str] = {}
        for uid, hosts in due.items():
            state = self._runtime.meshes.get(uid)
            if not isinstance(state, ProcState) or state.stopped is not None or self._runtime.closed:
                continue
            try:
                keep = settings.mesh_keep
                self._send_holds(uid, self._holds(state, keep, keep=keep > 0), hosts)
            except Exception as error:
                failed[state.name] = str(error)
        for name, reason in failed.items():
            if self._unwritten.get(name) != reason:
                logger.warning("%s would end with this process: %s", name, reason)
        self._unwritten = failed
        return failed

    def _send_holds(self, uid: str, holds: Mapping[str, p.Hold], hosts: set[str]) -> None:
        """Sends holds to the hosts that store the full record, and to others only if their holds have changed."""
        before = dict(self._held.get(uid, {}))  # a host may be lost meanwhile
        last = self._held[uid] = {host: hold for host, hold in before.items() if host in holds and host not in hosts}
        for host, hold in holds.items():
            if not self._is_attached(host):
                last.pop(host, None)
                continue
            plain = msgspec.structs.replace(hold, holder=msgspec.structs.replace(hold.holder, since=0.0))
            if last.get(host) == plain:
                continue
            last.pop(host, None)
            try:
                self._runtime.post(agent_of(host), verbs.HOLD, hold)
            except UnreachableError:  # it has just ended: the others hold their parts
                continue
            last[host] = None if hold.parts else plain

    def _store_answers(self, state: ProcState) -> None:
        """Has the ranks of a mesh store answers until they are read, if it is to outlive this process."""
        runtime, uid = self._runtime, state.uid
        if settings.mesh_keep <= 0 or state.stopped is not None:
            state.unread = None
            return
        if uid not in self._unread:
            self._unread[uid] = UnreadCalls(
                runtime.clock, lambda unread: inform_ranks(runtime, state, UNREAD, UnreadState(unread))
            )
        state.unread = self._unread[uid]

    def _forget_calls(self, state: ProcState) -> None:
        state.unread = None
        if calls := self._unread.pop(state.uid, None):
            calls.close()

    def _on_mesh_event(self, event: Event) -> None:
        match event:
            case RanksStarting(state, hosts):  # the agent of a new host, or a new agent, holds the mesh before that
                unheld = hosts - self._held.get(state.uid, {}).keys()
                if unheld and self._is_kept(state):
                    with self._lock:
                        self._due.setdefault(state.uid, set()).update(unheld)
                    self._hold_due()
            case MeshHealed(ProcState() as state, back):  # a host may have a new agent, which knows nothing
                self._on_change(state, {state.layout.host_of(rank) for rank, _ in back})
            case MeshStarting(state) | MeshHealed(state) | MeshResized(state):
                self._on_change(state)
            case MeshStopped(ActorState() as state):
                self._on_change(state)
            case HostLost(host):
                for holds in tuple(self._held.values()):
                    holds.pop(host, None)
                for state in self._own_meshes():
                    if ranks := state.layout.ranks_on(host):
                        self._lost[host, state.uid] = {rank: state.incarnation(rank) for rank in ranks}
            case MeshStopped(ProcState() as state) if state.uid in self._held and state.stopped is not None:
                self._forget_calls(state)
                self._held.pop(state.uid, None)
                with contextlib.suppress(OSError):
                    mesh_files.remove(mesh_files.path_of(state.uid, state.name))
            case _:
                return

    def _on_change(self, state: MeshState, hosts: Iterable[str] = ()) -> None:
        procs = proc_state_of(state)
        if self._is_kept(procs):
            self._schedule_holds(procs.uid, hosts)

    def _is_kept(self, procs: MeshState) -> bool:
        """Returns whether a mesh is to outlive this process, or was attached."""
        owned = procs.spawn_spec is not None and procs.stopped is None
        return owned and (settings.mesh_keep > 0 or procs.uid in self._held)

    # -- hosts that were lost -----------------------------------------------------------------------------------------

    def _reclaim(self, host: str) -> None:
        """Stops processes of this process's meshes that still run on a host that has returned after its loss. Blocks.

        Its agent may hold such a mesh for any controller, or for another one that took it over from this process.
        """
        for state in self._own_meshes():
            incarnations = self._lost.get((host, state.uid))
            if incarnations is None:
                continue
            drop = p.DropMesh(uid=state.uid, secret=self._secrets.get(state.uid, ""), incarnations=incarnations)
            try:
                request(self._runtime, agent_of(host), verbs.DROP, drop).get(_RECLAIM_S)
            except UnansweredError:
                raise
            except RequestError as error:  # another controller owns the processes there
                logger.warning("%s on host %s: %s", state.name, host_name(host), error)
            self._lost.pop((host, state.uid), None)

    # -- taken over -------------------------------------------------------------------------------------------------

    def _on_stolen(self, message: p.Stolen, asker: Asker[None]) -> None:
        """Handles that another controller has taken over a mesh (reading thread)."""
        state = self._runtime.meshes.get(message.uid)
        if not isinstance(state, ProcState) or state.stopped is not None:
            return
        holder = message.by
        reason = f"taken over by {holder.what} (process {holder.pid} on {holder.machine}) at {clock(time.time())}"
        cause = Cause(kind="taken", text=reason, at=time.time())

        def report(machine: SupervisionMachine) -> list[Action]:
            failure = machine.describe(state.uid, list(state.ranks), cause)
            return [] if failure is None else [ShowFailure(failure)]

        self._runtime.part(Driver).feed(report)
        self._held.pop(state.uid, None)
        self._mark_left(state, cause)


def _in_background(function: Callable[[], object]) -> None:
    threading.Thread(target=function, name="monarch-hold", daemon=True).start()


def _way_to(runtime: Runtime, host: str) -> HostRoute:
    """Returns how another controller reaches a host that this one has, or has had."""
    routes = runtime.part(HostRoutes)
    remote = routes.attached.get(host)
    if remote is None:
        return HostRoute(host, f"ipc://{run_folder_for(host)}")
    if remote.is_local:
        return HostRoute(host, remote.endpoint)
    way = _way(routes, remote, remote.endpoint)
    if isinstance(remote, JoinedHost):
        return HostRoute(host, "", way.key, calls=remote.calls)
    if remote.via_gateway and routes.gateway is not None:
        gateway = routes.gateway
        return HostRoute(host, remote.endpoint, way.key, gateway=_way(routes, gateway.remote, gateway.address))
    return way


def _way(routes: HostRoutes, remote: ExternalHost, endpoint: str) -> HostRoute:
    key = "" if remote.keys is None else remote.keys.to_text().decode()
    tunnel = routes.tunnels.get(endpoint)
    return HostRoute(remote.host, endpoint, key, tunnel="" if tunnel is None else tunnel.written)


class RecordError(RuntimeError):
    """A mesh cannot be used by this process; the text names the part of it and the reason."""


def parts_of(runtime: Runtime, procs: ProcState) -> dict[str, bytes]:
    """Serializes a mesh of processes and all actors on it. Raises the errors of pickle."""
    spec = procs.spawn_spec
    assert isinstance(spec, ProcSpawnSpec)  # it was spawned here
    spec_args = (spec.setup, spec.env, spec.proc_bind, spec.launch, spec.python, spec.host_mesh)
    parts = {PROCS: _pack(runtime, (proc_form(procs), spec_args, _origin_of(procs)))}
    for actors in tuple(procs.actors.values()):
        if actors.stopped is None and isinstance(actors.spawn_spec, ActorSpawnSpec):
            spawned = (actors.spawn_spec.cls, actors.spawn_spec.arguments, actors.spawn_spec.spec)
            parts[actors.uid] = _pack(runtime, (actor_form(actors), spawned))
        else:
            parts[actors.uid] = b""
    return parts


def _origin_of(procs: ProcState) -> tuple[str, tuple[str, ...], str, str] | None:
    """Returns the origin of its hosts: name and hosts of the host mesh, the job's description, and its loader."""
    record = record_with(host_mesh_of(procs), procs.hosts)
    if record is None or record.source is None or not (written := record.source.written()):
        return None
    return record.name, record.hosts, str(record.source), written


def _pack(runtime: Runtime, value: Any) -> bytes:
    return msgspec.msgpack.encode([bytes(frame) for frame in encode(value, runtime)])


def _unpack(runtime: Runtime, name: str, part: bytes) -> Any:
    frames = msgpack_decoder(list[bytes]).decode(part)
    try:
        return decode([frames[0], *map(bytearray, frames[1:])], runtime)
    except Exception as error:
        raise RecordError(
            f"{name} cannot be used in this process: {error_line(error)}. Its classes must be importable here as they "
            "were where it was spawned: the same folder, the same packages"
        ) from error


def procs_from(runtime: Runtime, name: str, parts: dict[str, bytes]) -> ProcState:
    """Restores the mesh of processes, which this process owns from then on. Raises RecordError."""
    form, spec_args, origin = _unpack(runtime, name, parts[PROCS])
    fields: ProcForm = form
    common, layout = fields
    spawn_spec = ProcSpawnSpec(runtime.root, *spec_args)
    if origin is not None:
        mesh_name, hosts, job, written = origin
        source = RecordedSource(job, written, operations().source_of)
        spawn_spec.host_record = HostRecord(mesh_name, hosts, host_labels(hosts), None, spawn_spec.host_mesh, source)
    existing = runtime.meshes.get(common[0])
    state = existing if isinstance(existing, ProcState) else _new_state(runtime, ProcState, common, layout=layout)
    _take_over(runtime, state, common, spawn_spec)
    state.layout = layout
    return state


def actors_from(runtime: Runtime, procs: ProcState, parts: dict[str, bytes]) -> list[ActorState]:
    """Restores the meshes of actors on it, in the order they were spawned. Raises RecordError."""
    states = []
    for uid, part in parts.items():
        if uid in (PROCS, NOTES) or not part:
            continue
        form, (cls, arguments, spec) = _unpack(runtime, f"an actor mesh on {procs.name}", part)
        fields: ActorForm = form
        common, _, newest, kind = fields
        arguments = arguments if isinstance(arguments, EncodedObject) else EncodedObject(())
        spec = msgspec.structs.replace(spec, owner=runtime.root.stream, owner_process=runtime.address)
        spawn_spec = ActorSpawnSpec(cls, arguments, spec, runtime.root)
        existing = runtime.meshes.get(uid)
        state = (
            existing
            if isinstance(existing, ActorState)
            else _new_state(runtime, ActorState, common, procs=procs, cls=newest, kind=kind)
        )
        _take_over(runtime, state, common, spawn_spec)
        states.append(state)
    return states


def _new_state(runtime: Runtime, record: Any, common: Any, **fields: Any) -> Any:
    uid, name, region, _, incarnations, version, _ = common
    return record(uid, name, region, runtime.address, incarnations, version, None, **fields)


def _take_over(runtime: Runtime, state: MeshState, common: Any, spawn_spec: Any) -> None:
    """Takes over ownership; if the mesh was known here before, all its handles work again."""
    with state.lock:
        state.owner_process, state.stopped, state.spawn_spec = runtime.address, None, spawn_spec
        state.detached = False
    state.renew(common[4], common[5])
