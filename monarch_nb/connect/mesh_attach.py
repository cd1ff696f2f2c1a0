"""Attaching a detached mesh, left by this process or another, on this machine or elsewhere."""

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from monarch_nb._package import __version__, more
from monarch_nb.connect.downtime import DowntimeReport, RankEnd, downtime_report, listing
from monarch_nb.connect.hosts import AttachError, JoinedHost, attach_states, inspect_endpoints, readmit, refusals
from monarch_nb.connect.local_host import connect_local_host
from monarch_nb.connect.mesh_detach import NOTES, Detacher, RecordError, actors_from, procs_from
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.connect.remote_host import Gateway, GatewayHost, RemoteHost
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.connect.workers import attach as attach_gateway
from monarch_nb.connect.workers import run_in_thread
from monarch_nb.host import mesh_files, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.mesh_files import KEEPERS, HostRoute, MeshFile, clock
from monarch_nb.host.run_findings import of_all_hosts
from monarch_nb.lifecycle.mesh_healer import MeshHealer
from monarch_nb.lifecycle.proc_spawn import python_version
from monarch_nb.lifecycle.updates import ReferenceUpdates
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.logs import MeshLogs
from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.mesh_events import MeshEvents, MeshStarting
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import UnansweredError, request
from monarch_nb.runtime import ActorState, Future, MeshState, ProcState, Runtime, current_runtime, when_done
from monarch_nb.settings import settings
from monarch_nb.supervision import Action, Cause, Driver
from monarch_nb.supervision.actions import RootFault
from monarch_nb.supervision.machine import SupervisionMachine
from monarch_nb.transport import Keys, TransportError, UnreachableError
from monarch_nb.wire import agent_of, counted, host_name, host_of, msgpack_decoder, parse_address, text_of

_ANSWER_S = 10.0
_CALLS_S = 20.0  # for a host that dials in every few seconds

Failures = dict[str, str]  # reasons why hosts cannot be reached, by their ids


def connect_hosts(runtime: Runtime, mesh: MeshFile) -> Failures:
    """Connects this process with the hosts of a mesh, in parallel; blocks.

    Returns the hosts that cannot be reached, with the reason of each.
    """
    routes = runtime.part(HostRoutes)
    gateways = {way.gateway.host: way.gateway for way in mesh.ways if way.gateway is not None}
    shut = _try_each(
        tuple(gateways.values()),
        lambda way: attach_gateway(endpoint_of(routes, way), private_key=way.key.encode() or None),
    )
    failures, ways = {}, []
    for way in mesh.ways:
        if way.gateway is not None and way.gateway.host in shut:
            failures[way.host] = f"the gateway to it, {host_name(way.gateway.host)}: {shut[way.gateway.host]}"
        elif not _is_connected(routes, way.host):
            ways.append(way)
    local = [way for way in ways if way.endpoint.startswith("ipc://")]
    inbound = [way for way in ways if way.calls]
    dialled = [way for way in ways if way not in local and way not in inbound]
    if local and mesh.machine == platform.node():
        runtime.part(LocalAgents).ensure()  # routes are announced to agents, and an agent knows this process
    jobs = [partial(_try_each, [way], partial(_connect_local, runtime, mesh)) for way in local]
    jobs += [partial(_await_inbound, runtime, mesh, part) for part in _group(inbound)]
    jobs += [partial(_connect_dialled, runtime, mesh, part) for part in _group(dialled)]
    attempts: list[Future[Failures]] = [run_in_thread(job) for job in jobs]
    for attempt in attempts:
        failures |= attempt.get()
    return failures


def _is_connected(routes: HostRoutes, host: str) -> bool:
    return host in routes.local or (host in routes.attached and not routes.attached[host].lost)


def _group(ways: Sequence[HostRoute]) -> list[list[HostRoute]]:
    """Groups routes by key and by the endpoint that their hosts dial: a group is connected in one call."""
    groups: dict[tuple[str, str], list[HostRoute]] = {}
    for way in ways:
        groups.setdefault((way.key, way.calls), []).append(way)
    return list(groups.values())


def key_of(mesh: MeshFile, way: HostRoute) -> Keys | None:
    """Returns the key of a host as recorded."""
    return Keys.from_text(way.key.encode(), f"the file of {mesh.name}") if way.key else None


def endpoint_of(routes: HostRoutes, way: HostRoute) -> str:
    """Returns the endpoint at which a host is dialled, opening its tunnel if it has one.

    Raises RuntimeError with the job's reason.
    """
    if not way.tunnel:
        return way.endpoint
    return routes.open_tunnel(way.tunnel)


def _try_each(ways: Sequence[HostRoute], follow_one: Callable[[HostRoute], object]) -> Failures:
    failures = {}
    for way in ways:
        try:
            follow_one(way)
        except Exception as error:  # of the transport, a job or the host
            failures[way.host] = text_of(error)
    return failures


def _connect_local(runtime: Runtime, mesh: MeshFile, way: HostRoute) -> None:
    if mesh.machine != platform.node():
        raise UnreachableError(f"it is on the machine {mesh.machine}, where no TCP port leads to it; this is "
                               f"{platform.node()}")  # fmt: skip
    folder = way.endpoint.removeprefix("ipc://")
    local = connect_local_host(runtime, f"{folder}/agent", time.monotonic() + 1.0, lambda: runtime.closed)
    runtime.part(HostRoutes).attached[local.host] = local
    local.join().get(_ANSWER_S)


def _await_inbound(runtime: Runtime, mesh: MeshFile, ways: Sequence[HostRoute]) -> Failures:
    """Awaits hosts that dial one endpoint with one key."""
    hosts = [way.host for way in ways]
    errors = readmit(runtime, hosts, ways[0].calls, key_of(mesh, ways[0]), _CALLS_S)
    return {host: text_of(error) for host, error in errors.items()}


def _connect_dialled(runtime: Runtime, mesh: MeshFile, ways: Sequence[HostRoute]) -> Failures:
    """Dials hosts that share one key."""
    routes = runtime.part(HostRoutes)
    endpoints: dict[str, str] = {}  # by host
    failures = _try_each(ways, lambda way: endpoints.update({way.host: endpoint_of(routes, way)}))
    key = key_of(mesh, ways[0])
    try:
        by_endpoint, errors = inspect_endpoints(list(dict.fromkeys(endpoints.values())), key, key is None, _ANSWER_S)
    except TransportError as error:  # the key does not allow any of them
        return failures | dict.fromkeys(endpoints, text_of(error))
    matches = []
    for host, endpoint in endpoints.items():
        state = by_endpoint.get(endpoint)
        if state is None:
            failures[host] = text_of(errors[endpoint])
        elif state.host == host:
            matches.append(state)
        else:
            failures[host] = (
                f"host {host_name(state.host)} answers at {endpoint}, not {host_name(host)}: that one's agent has "
                "ended, or the name leads elsewhere"
            )

    def take(states: Sequence[p.HostState]) -> None:
        attach_states(runtime, {endpoints[state.host]: state for state in states}, key, key is None, None, _ANSWER_S)

    return failures | {state.host: text_of(error) for state, error in refusals(matches, take)}


_causes = msgpack_decoder(Cause)
_TURN = 1 << 32  # versions and editions of a mesh that one owner may assign


class RankReconciler:
    """Brings the state of one mesh of processes, and of its actors, up to date with the reports of its processes.

    The recorded state may be outdated: a controller that was killed may have healed ranks, or may have been about to,
    without recording it. The processes report their running actors and the reasons for missing ones. `apply` may be
    called from any thread.
    """

    def __init__(self, runtime: Runtime, procs: ProcState, actors: Sequence[ActorState]) -> None:
        self._runtime, self._procs, self._actors = runtime, procs, actors
        self.ended: list[RankEnd] = []

    def supersede(self, turn: int) -> None:
        """Moves versions and editions past all that earlier owners have published."""
        for state in (self._procs, *self._actors):
            state.renew(state.incarnations, max(state.version + 1, turn * _TURN))
        for actors in self._actors:
            actors.edition = max(actors.edition, turn * _TURN)

    def apply(self, address: str, welcome: p.Welcome) -> None:
        """Applies a process's report of the actors in it."""
        rank = parse_address(address).rank
        if address != self._procs.address(rank) or self._procs.stopped is not None:
            return  # it has been replaced meanwhile
        if welcome.bare:
            reason = "the controller that started it ended before it was set up"
            self._runtime.part(MeshHealer).kill(self._procs, (rank,), reason)
            return
        reports = {actor.mesh: actor for actor in welcome.actors if actor.rank == rank}
        for state in self._actors:
            if rank in state.ranks and state.stopped is None:
                self._reconcile_rank(state, rank, reports.get(state.uid))

    def _reconcile_rank(self, state: ActorState, rank: int, report: p.ActorThere | None) -> None:
        current = state.incarnation(rank)
        if report is None or report.incarnation < current:
            text = "the controller that was to create it ended before it did"
            self._rank_failed(state, rank, current, Cause(kind="spawn", text=text, at=time.time()))
            return
        if report.incarnation > current:
            _set_incarnation(state, rank, report.incarnation)
            uid, incarnation = state.uid, report.incarnation
            self._runtime.part(Driver).feed(lambda machine: machine.found(uid, rank, incarnation))
        if report.end:
            cause = _causes.decode(report.end)
            if cause.kind == "stopped":
                self._runtime.part(Driver).mark_stopped(state, (rank,), cause.text, over=False)
            else:
                self._rank_failed(state, rank, report.incarnation, cause)

    def _rank_failed(self, state: ActorState, rank: int, incarnation: int, cause: Cause) -> None:
        """Records a failure from the time without a controller; it does not end a script, which reports it itself."""
        self.ended.append(RankEnd(state.uid, rank, cause))

        def failed(machine: SupervisionMachine) -> list[Action]:
            actions = machine.actor_failed(state.uid, rank, incarnation, cause)
            if machine.root_policy == "notebook":
                return actions
            return [action for action in actions if not isinstance(action, RootFault)]

        self._runtime.part(Driver).feed(failed)

    def announce(self) -> None:
        """Publishes the state to all holders of references."""
        for state in (self._procs, *self._actors):
            self._runtime.part(ReferenceUpdates).announce(state)


def _set_incarnation(state: MeshState, rank: int, incarnation: int) -> None:
    with state.lock:
        state.incarnations = {**state.incarnations, rank: incarnation}
        state.version += 1


class AttachedMesh(Struct, frozen=True):
    """A mesh that this process has attached."""

    procs: ProcMesh
    actors: tuple[ActorMesh[object], ...]
    report: DowntimeReport
    notes: bytes = b""  # of the notebook that detached it


def detached_meshes() -> list[MeshFile]:
    """Returns this user's detached meshes, and those that may become detached, the newest last.

    Reads and tidies files; sends nothing.
    """
    return [mesh for _, mesh in mesh_files.tidied() if not mesh.ended]


def attach_mesh(name: str, *, steal: bool = False) -> AttachedMesh:
    """Attaches the mesh of that name, or with actors of that name; blocks until all of it has answered.

    Raises AttachError with the current holder, or with the fate of the mesh.
    """
    runtime = current_runtime()
    path, mesh = _find(name)
    own, recorded = (__version__, python_version()), (mesh.version, mesh.python)
    if own != recorded:
        raise AttachError.of(
            f"{mesh.name} runs monarch-nb {recorded[0]} on Python {recorded[1]}, this process {own[0]} on {own[1]}: "
            f"attach it with those, or end it with `monarch-nb mesh stop {mesh.name}`"
        )
    failures = _reach(runtime, path, mesh)
    answers = _claim(runtime, mesh, failures, steal=steal)
    try:
        return _take_over(runtime, mesh, answers, failures)
    except RecordError as error:
        _give_back(runtime, mesh, failures, str(error))
        raise AttachError.of(str(error)) from error


def end_mesh(name: str, *, steal: bool = False) -> str:
    """Stops a detached mesh, run by any version, and returns a line about it; blocks. Raises AttachError."""
    runtime = current_runtime()
    path, mesh = _find(name)
    failures = _reach(runtime, path, mesh)
    answers = _claim(runtime, mesh, failures, steal=steal)
    requests = []
    by_host: dict[str, list[str]] = {}
    for proc in (proc for answer in answers for proc in answer.procs):
        by_host.setdefault(host_of(proc.address), []).append(proc.address)
    for host, addresses in by_host.items():
        stop = p.Stop(tuple(addresses), reason="stopped by monarch-nb mesh stop")
        requests.append(request(runtime, agent_of(host), verbs.STOP, stop))
    ends = [answer.get(settings.mesh_terminate_timeout + _ANSWER_S) for answer in requests]
    mesh_files.remove(path)
    count = sum(len(end.exits) for end in ends)
    summary = f"stopped {mesh.name}: {counted(count, 'proc')}"
    for host, reason in failures.items():
        summary += f"\nhost {host_name(host)} cannot be reached: what runs there ends with its lease ({reason})"
    return summary


def _find(name: str) -> tuple[Path, MeshFile]:
    """Returns the file of the mesh with that name. Raises AttachError."""
    entries = mesh_files.tidied()
    matches = [entry for entry in entries if name in (entry[1].name, entry[1].uid)]
    matches = matches or [entry for entry in entries if name in entry[1].actors]
    living = [(path, mesh) for path, mesh in matches if not mesh.ended]
    if len(living) > 1:
        uids = ", ".join(f"{mesh.uid} ({mesh.shape}, {_state(mesh)})" for _, mesh in living)
        raise AttachError.of(f"there are several meshes called {name}: attach one of them by its id: {uids}")
    if living:
        return living[0]
    ended = [(path, mesh) for path, mesh in matches if mesh.ended]
    if ended:
        path, mesh = ended[-1]
        mesh_files.remove(path)
        raise AttachError.of(f"{name} is gone: {mesh.ended}; spawn it anew")
    names = ", ".join(sorted({mesh.name for _, mesh in entries if not mesh.ended})) or "none"
    raise AttachError.of(
        f"there is no mesh {name!r} to attach; there are: {names}. A mesh ends with its kernel or program, unless "
        "that has left it before (%detach NAME, mesh.detach()) or keeps it (%detach --keep 1h, "
        f'configure(mesh_keep="1h")){more("manual/detach.md#attaching")}'
    )


def _reach(runtime: Runtime, path: Path, mesh: MeshFile) -> Failures:
    try:
        return _reach_hosts(runtime, mesh)
    except AttachError:
        if mesh_files.agent_gone(mesh):
            mesh_files.remove(path)
        raise


def _state(mesh: MeshFile) -> str:
    if mesh.holder is not None:
        return f"held by {mesh.holder.what}, process {mesh.holder.pid}"
    return f"left at {clock(mesh.left_at)}"


def _take_over(runtime: Runtime, mesh: MeshFile, answers: Sequence[p.AttachReply], failures: Failures) -> AttachedMesh:
    first = answers[0]
    registry, driver = runtime.part(MeshRegistry), runtime.part(Driver)
    living = {proc.address: proc for answer in answers for proc in answer.procs if proc.exit is None}
    procs = procs_from(runtime, mesh.name, first.parts)
    heals = _adopt_incarnations(procs, [proc.address for answer in answers for proc in answer.procs])
    driver.feed(lambda machine: machine.disown(mesh.uid))  # this process may have owned it before
    registry.own(runtime.root, procs)
    actors = actors_from(runtime, procs, first.parts)
    _count_heals(actors, {rank: count for rank, count in heals.items() if procs.address(rank) not in living})
    reconciler = RankReconciler(runtime, procs, actors)
    reconciler.supersede(first.turn)
    for actor_mesh in actors:
        registry.own(runtime.root, actor_mesh)
    watcher, events = runtime.part(ProcessWatcher), runtime.part(MeshEvents)
    logs = {address: file for answer in answers for address, file in answer.logs.items()}
    runtime.part(MeshLogs).receiver.catch_up(living)
    for address, proc in living.items():
        watcher.found(p.StartedProc(address=address, pid=proc.pid, how=proc.how, log=logs.get(address, "")))
    ranks = set(procs.ranks)  # without those released when the mesh shrank
    exits = tuple(end for answer in answers for end in answer.exits if parse_address(end.address).rank in ranks)
    exits = (*exits, *_missing(procs, answers, failures))
    for end in exits:
        watcher.ended_while_detached(end)
    _report_lost(runtime, mesh, failures)
    welcomes = _greet(runtime, procs, actors, first.turn, list(living), reconciler)
    reconciler.announce()
    watcher.watch(*(procs.address(rank) for rank in procs.ranks))  # ends since then are reported again
    for state in (procs, *actors):
        events.publish(MeshStarting(state))
    notes = first.parts.get(NOTES, b"")
    runtime.part(Detacher).adopt(mesh, notes, (first.grant, first.turn))
    notices = {answer.host: answer.notices for answer in answers if answer.notices}
    report = downtime_report(runtime, procs, actors, first, exits, welcomes, tuple(reconciler.ended), failures, notices,
                             of_all_hosts(finding for answer in answers for finding in answer.findings))  # fmt: skip
    meshes: tuple[ActorMesh[object], ...] = tuple(ActorMesh(state, state.region) for state in actors)
    return AttachedMesh(ProcMesh(procs, procs.region), meshes, report, notes)


def _missing(procs: ProcState, answers: Sequence[p.AttachReply], unreached: Container[str]) -> list[p.Exited]:
    """Returns the ends of dead processes that no host has reported.

    They ended before the mesh was detached, in the middle of a heal, or with an agent that was restarted.
    """
    processes = {proc.address: proc for answer in answers for proc in answer.procs}
    reported = {end.address for answer in answers for end in answer.exits}
    missing = []
    for rank in procs.ranks:
        address = procs.address(rank)
        proc = processes.get(address)
        if address in reported or (proc is not None and proc.exit is None) or host_of(address) in unreached:
            continue
        if proc is not None and proc.exit is not None:
            missing.append(msgspec.structs.replace(proc.exit, expected=False))
            continue
        reason = "the process this actor was running on failed: its host's agent was started anew meanwhile"
        missing.append(p.Exited(address=address, host=host_of(address), at=time.time(), reason=reason, expected=False))
    return missing


def _adopt_incarnations(procs: ProcState, addresses: Sequence[str]) -> dict[int, int]:
    """Takes over the incarnations known to the hosts; returns by how much they are newer than the recorded ones."""
    latest = dict(procs.incarnations)
    for address in addresses:
        _, rank, incarnation = parse_address(address).place
        if incarnation > latest.get(rank, 0):
            latest[rank] = incarnation
    heals = {rank: latest[rank] - procs.incarnation(rank) for rank in latest if latest[rank] > procs.incarnation(rank)}
    procs.renew(latest, procs.version + bool(heals))
    return heals


def _count_heals(actors: Sequence[ActorState], heals: Mapping[int, int]) -> None:
    """Counts unrecorded heals of processes that have ended since: each has given its actors an incarnation, too."""
    for state in actors:
        for rank in heals.keys() & set(state.ranks):
            _set_incarnation(state, rank, state.incarnation(rank) + heals[rank])


def _greet(runtime: Runtime, procs: ProcState, actors: Sequence[ActorState], turn: int, living: Sequence[str],
           reconciler: RankReconciler) -> dict[str, p.Welcome]:  # fmt: skip
    """Announces the new owner to the processes and applies their replies, without waiting for silent processes."""
    meshes = (procs.uid, *(state.uid for state in actors))
    news = p.NewOwner(meshes=meshes, owner=runtime.address, turn=turn)
    requests = {address: request(runtime, address, verbs.NEW_OWNER, news) for address in living}
    deadline = time.monotonic() + _ANSWER_S
    answers = {}
    for address, answer in requests.items():
        try:
            answers[address] = answer.get(max(0.0, deadline - time.monotonic()))
        except TimeoutError:  # a stopped process: it replies when it continues
            when_done(answer, _reconcile_late(reconciler, address))
        except RuntimeError:  # ended
            continue
        else:
            reconciler.apply(address, answers[address])
    return answers


def _reconcile_late(reconciler: RankReconciler, address: str) -> Callable[[Future[p.Welcome]], None]:
    def apply(answer: Future[p.Welcome]) -> None:
        if answer.exception(0) is None:
            reconciler.apply(address, answer.get(0))
            reconciler.announce()

    return apply


def attach(name: str | None = None, *, steal: bool = False) -> ProcMesh | ActorMesh[object] | str:
    """Attaches a mesh that was left by `detach`, or by a program that has ended; blocks until it has answered.

    Returns the mesh of processes, or of actors, of that name, and prints the events in the meantime. All actors on the
    same processes are attached with it: get them by name too. Without a name it returns the list of meshes that can be
    attached. With `steal` the mesh is taken over from a controller that holds it, which is notified. Ranks on hosts
    that cannot be reached within some 10 s (20 s for those that dial) count as lost, until `heal_mesh`;
    `monarch.results` has the results of calls in the meantime. Raises AttachError, which names the holder of the mesh
    and the time of its claim, or the fate of the mesh, or says that none of its storing hosts can be reached.
    """
    if name is None:
        return listing(detached_meshes())
    owned = _owned_here(current_runtime(), name)
    if owned is not None:
        return owned
    attached = attach_mesh(name, steal=steal)
    sys.stdout.write(f"{attached.report.text()}\n")
    mesh = _owned_here(current_runtime(), name)
    return mesh if mesh is not None else attached.procs


def _owned_here(runtime: Runtime, name: str) -> ProcMesh | ActorMesh[object] | None:
    """Returns the mesh of that name if this process owns it already."""
    for state in reversed(tuple(runtime.meshes.values())):
        if (
            state.name == name
            and state.stopped is None
            and state.owner_process == runtime.address
            and state.spawn_spec is not None
        ):
            if isinstance(state, ProcState):
                return ProcMesh(state, state.region)
            if isinstance(state, ActorState):
                return ActorMesh(state, state.region)
    return None


def _reach_hosts(runtime: Runtime, mesh: MeshFile) -> Failures:
    """Connects the hosts of a mesh; returns the reasons for those that cannot be reached, by host.

    Raises AttachError if none of the hosts that store the mesh's record can be reached.
    """
    failures = connect_hosts(runtime, mesh)
    keepers = [way.host for way in mesh.ways[:KEEPERS]]
    if all(host in failures for host in keepers):
        raise AttachError({host: RuntimeError(_unreachable(mesh, host, failures[host])) for host in keepers}, 1)
    with contextlib.suppress(TimeoutError, RuntimeError):  # a silent host is reported when the mesh is claimed
        runtime.part(HostRoutes).settle([way.host for way in mesh.ways if way.host not in failures], _ANSWER_S)
    return failures


def _unreachable(mesh: MeshFile, host: str, reason: str) -> str:
    return f"{mesh.name} cannot be attached, its host {host_name(host)} cannot be reached: {reason}"


def _claim(runtime: Runtime, mesh: MeshFile, failures: Failures, *, steal: bool) -> list[p.AttachReply]:
    """Claims the mesh at the first of its hosts that knows it, which decides, then at the others.

    The deciding answer comes first. A restarted agent has neither records nor processes of the mesh. Silent hosts are
    added to `failures`.
    """
    holder = runtime.part(Detacher).holder
    claim = p.Attach(uid=mesh.uid, secret=mesh.secret, holder=holder, steal=steal, ended=mesh.former)
    keepers = [way.host for way in mesh.ways[:KEEPERS]]
    answers: dict[str, p.AttachReply] = {}
    first = p.AttachReply(known=False)
    for host in keepers:
        if host not in failures and not first.known:
            first = answers[host] = _request_claim(runtime, mesh, host, claim, failures)
    if not first.known:
        silent = [_unreachable(mesh, host, failures[host]) for host in keepers if host in failures]
        raise AttachError.of(
            silent[0] if silent else f"{mesh.name} is not there any more: it was stopped, or its lease has ended"
        )
    claim = msgspec.structs.replace(claim, grant=first.grant, turn=first.turn)
    hosts = [way.host for way in mesh.ways if way.host not in failures and way.host not in answers]
    requests = {host: request(runtime, agent_of(host), verbs.ATTACH, claim) for host in hosts}
    try:
        answers |= {host: _await_answer(mesh, host, answer, failures) for host, answer in requests.items()}
    except AttachError as error:
        _give_back(runtime, mesh, failures, str(error))
        raise
    return [first, *(answer for answer in answers.values() if answer is not first)]


def _request_claim(runtime: Runtime, mesh: MeshFile, host: str, claim: p.Attach, failures: Failures) -> p.AttachReply:
    return _await_answer(mesh, host, request(runtime, agent_of(host), verbs.ATTACH, claim), failures)


def _await_answer(mesh: MeshFile, host: str, future: Future[p.AttachReply], failures: Failures) -> p.AttachReply:
    """Awaits a host's answer and records the failure of a silent host. Raises AttachError if it refuses."""
    try:
        return msgspec.structs.replace(future.get(_ANSWER_S), host=host)
    except (TimeoutError, UnansweredError) as error:
        failures[host] = text_of(error)
        return p.AttachReply(known=False)
    except RuntimeError as error:
        raise AttachError.of(f"{mesh.name} cannot be attached: {error}") from error


def _give_back(runtime: Runtime, mesh: MeshFile, failures: Container[str], reason: str) -> None:
    """Releases a mesh that cannot be used here, for other controllers to attach."""
    detach = p.Detach(mesh.uid, f"{runtime.part(Detacher).holder.what} could not use it: {reason}")
    requests = [
        request(runtime, agent_of(way.host), verbs.DETACH, detach) for way in mesh.ways if way.host not in failures
    ]
    for answer in requests:
        with contextlib.suppress(TimeoutError, RuntimeError):
            answer.get(_ANSWER_S)


def _report_lost(runtime: Runtime, mesh: MeshFile, failures: Mapping[str, str]) -> None:
    """Reports these hosts, and all ranks on them, as lost, here and to all other hosts.

    Once such a host can be reached, its ranks can be healed; processes that still run there are stopped then.
    """
    routes, ways = runtime.part(HostRoutes), {way.host: way for way in mesh.ways}
    for host, error in failures.items():
        reason = f"it could not be reached when {mesh.name} was attached: {error}"
        loss = runtime.part(ProcessWatcher).hosts_lost({host: 0}, reason, reported=True)
        routes.announce_lost(host, reason, 0, loss)
        remote = None if host not in ways else _remote(runtime, mesh, ways[host])
        if remote is not None:
            remote.lost = reason
            routes.attached[host] = remote
            remote.cut()  # starts watching for its return


def _remote(runtime: Runtime, mesh: MeshFile, way: HostRoute) -> RemoteHost | None:
    """Returns None for a host that cannot return: on this machine with a dead agent, or behind a lost gateway."""
    gateway, key = runtime.part(HostRoutes).gateway, key_of(mesh, way)
    unknown = p.HostState(host=way.host, pid=0, procs=())
    if way.calls:
        return JoinedHost(runtime, unknown, way.calls, key, None)
    if way.gateway is not None:
        return GatewayHost(runtime, way.endpoint, unknown, gateway, None) if isinstance(gateway, Gateway) else None
    if way.endpoint.startswith("tcp://"):
        return RemoteHost(runtime, way.endpoint, unknown, key, key is None, None)
    return None
