"""Coming back to a mesh that was left: by this process or another, on this machine or elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from monarch_nb._about import __version__, more
from monarch_nb.connect.following import Failures, follow, key_of
from monarch_nb.connect.gateway import Gateway, GatewayHost
from monarch_nb.connect.hosts import AttachError
from monarch_nb.connect.joining import JoinedHost
from monarch_nb.connect.leaving import Leaving
from monarch_nb.connect.lives import Lives
from monarch_nb.connect.record import NOTES, RecordError, actors_from, procs_from
from monarch_nb.connect.remote_host import RemoteHost
from monarch_nb.connect.routes import Routes
from monarch_nb.connect.story import Story, listing, story_of
from monarch_nb.host import mesh_files, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.holdings import clock
from monarch_nb.host.mesh_files import KEEPERS, MeshFile, Way
from monarch_nb.lifecycle.proc_spawn import python_version
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.logs import MeshLogs
from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.mesh_events import MeshEvents, MeshStarting
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import UnansweredError, request
from monarch_nb.runtime import ActorState, Future, ProcState, Runtime, current_runtime, when_done
from monarch_nb.settings import settings
from monarch_nb.supervision import Driver
from monarch_nb.wire import agent_of, counted, host_name, host_of, parse_address, text_of

_ANSWER_S = 10.0


class Return(Struct, frozen=True):
    """A mesh that this process has come back to."""

    procs: ProcMesh
    actors: tuple[ActorMesh[object], ...]
    story: Story
    notes: bytes = b""  # what the notebook that left it had to say


def left_meshes() -> list[MeshFile]:
    """The meshes of this user that were left, or may be, the newest last. Asks nobody; reads files, and tidies them."""
    return [mesh for _, mesh in mesh_files.tidied() if not mesh.ended]


def come_back(name: str, *, steal: bool = False) -> Return:
    """Attaches the mesh of that name, or with actors of that name; blocks until all of it answers.

    Raises AttachError, which says who has it, or what has become of it.
    """
    runtime = current_runtime()
    path, mesh = _find(name)
    here, there = (__version__, python_version()), (mesh.version, mesh.python)
    if here != there:
        raise AttachError.of(
            f"{mesh.name} runs monarch-nb {there[0]} on Python {there[1]}, this process {here[0]} on {here[1]}: attach "
            f"it with those, or end it with `monarch-nb mesh stop {mesh.name}`"
        )
    failures = _reach(runtime, path, mesh)
    answers = _claim(runtime, mesh, failures, steal=steal)
    try:
        return _take(runtime, mesh, answers, failures)
    except RecordError as error:
        _give_back(runtime, mesh, failures, str(error))
        raise AttachError.of(str(error)) from error


def end_mesh(name: str, *, steal: bool = False) -> str:
    """Stops a mesh that was left, whatever version runs it, and gives a line about it; blocks. Raises AttachError."""
    runtime = current_runtime()
    path, mesh = _find(name)
    failures = _reach(runtime, path, mesh)
    answers = _claim(runtime, mesh, failures, steal=steal)
    asked = []
    by_host: dict[str, list[str]] = {}
    for proc in (proc for answer in answers for proc in answer.procs):
        by_host.setdefault(host_of(proc.address), []).append(proc.address)
    for host, addresses in by_host.items():
        stop = p.Stop(tuple(addresses), reason="stopped by monarch-nb mesh stop")
        asked.append(request(runtime, agent_of(host), verbs.STOP, stop))
    ends = [answer.get(settings.mesh_terminate_timeout + _ANSWER_S) for answer in asked]
    mesh_files.remove(path)
    count = sum(len(end.exits) for end in ends)
    stopped = f"stopped {mesh.name}: {counted(count, 'proc')}"
    for host, why in failures.items():
        stopped += f"\nhost {host_name(host)} cannot be reached: what runs there ends with its lease ({why})"
    return stopped


def _find(name: str) -> tuple[Path, MeshFile]:
    """The file of the mesh that is meant. Raises AttachError."""
    every = mesh_files.tidied()
    called = [found for found in every if name in (found[1].name, found[1].uid)]
    called = called or [found for found in every if name in found[1].actors]
    living = [(path, mesh) for path, mesh in called if not mesh.ended]
    if len(living) > 1:
        uids = ", ".join(f"{mesh.uid} ({mesh.shape}, {_state(mesh)})" for _, mesh in living)
        raise AttachError.of(f"there are several meshes called {name}: attach one of them by its id: {uids}")
    if living:
        return living[0]
    ended = [(path, mesh) for path, mesh in called if mesh.ended]
    if ended:
        path, mesh = ended[-1]
        mesh_files.remove(path)
        raise AttachError.of(f"{name} is gone: {mesh.ended}; spawn it anew")
    others = ", ".join(sorted({mesh.name for _, mesh in every if not mesh.ended})) or "none"
    raise AttachError.of(
        f"there is no mesh {name!r} to attach; there are: {others}{more('manual/detach.md#attaching')}"
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


def _take(runtime: Runtime, mesh: MeshFile, answers: Sequence[p.Attached], failures: Failures) -> Return:
    first = answers[0]
    registry, driver = runtime.part(MeshRegistry), runtime.part(Driver)
    living = {proc.address: proc for answer in answers for proc in answer.procs if proc.exit is None}
    procs = procs_from(runtime, mesh.name, first.parts)
    _follow_lives(procs, [proc.address for answer in answers for proc in answer.procs])
    driver.feed(lambda machine: machine.disown(mesh.uid))  # it may have been known here before
    registry.own(runtime.root, procs)
    actors = actors_from(runtime, procs, first.parts)
    lives = Lives(runtime, procs, actors)
    lives.outdo(first.turn)
    for each in actors:
        registry.own(runtime.root, each)
    watcher, events = runtime.part(ProcessWatcher), runtime.part(MeshEvents)
    logs = {address: file for answer in answers for address, file in answer.logs.items()}
    runtime.part(MeshLogs).receiver.catch_up(living)
    for address, proc in living.items():
        watcher.found(p.Started(address=address, pid=proc.pid, how=proc.how, log=logs.get(address, "")))
    ranks = set(procs.ranks)  # not those that were let go as it shrank
    exits = tuple(gone for answer in answers for gone in answer.exits if parse_address(gone.address).rank in ranks)
    exits = (*exits, *_missing(procs, answers, failures))
    for gone in exits:
        watcher.gone_meanwhile(gone)
    _lose(runtime, mesh, failures)
    welcomes = _greet(runtime, procs, actors, first.turn, list(living), lives)
    lives.announce()
    watcher.watch(*(procs.address(rank) for rank in procs.ranks))  # who has ended since is told again
    for state in (procs, *actors):
        events.publish(MeshStarting(state))
    notes = first.parts.get(NOTES, b"")
    runtime.part(Leaving).came_back(mesh, notes, (first.grant, first.turn))
    notices = {answer.host: answer.notices for answer in answers if answer.notices}
    story = story_of(runtime, procs, actors, first, exits, welcomes, tuple(lives.ended), failures, notices)
    whole: tuple[ActorMesh[object], ...] = tuple(ActorMesh(state, state.region) for state in actors)
    return Return(ProcMesh(procs, procs.region), whole, story, notes)


def _missing(procs: ProcState, answers: Sequence[p.Attached], unreached: Container[str]) -> list[p.Exited]:
    """The ends of processes that do not live, and of whose ends nobody was to be told.

    They had ended before the mesh was left, or in the middle of a heal, or with an agent that was started anew.
    """
    known = {proc.address: proc for answer in answers for proc in answer.procs}
    told = {gone.address for answer in answers for gone in answer.exits}
    missing = []
    for rank in procs.ranks:
        address = procs.address(rank)
        proc = known.get(address)
        if address in told or (proc is not None and proc.exit is None) or host_of(address) in unreached:
            continue
        if proc is not None and proc.exit is not None:
            missing.append(msgspec.structs.replace(proc.exit, expected=False))
            continue
        reason = "the process this actor was running on failed: its host's agent was started anew meanwhile"
        missing.append(p.Exited(address=address, host=host_of(address), at=time.time(), reason=reason, expected=False))
    return missing


def _follow_lives(procs: ProcState, addresses: Sequence[str]) -> None:
    """The incarnations that its hosts know, which may be later than what was written down."""
    latest = dict(procs.incarnations)
    for address in addresses:
        _, rank, incarnation = parse_address(address).place
        if incarnation > latest.get(rank, 0):
            latest[rank] = incarnation
    procs.renew(latest, procs.version + (latest != procs.incarnations))


def _greet(runtime: Runtime, procs: ProcState, actors: Sequence[ActorState], turn: int, living: Sequence[str],
           lives: Lives) -> dict[str, p.Welcome]:  # fmt: skip
    """Tells the processes who owns them, and takes what they have to tell; the silent are not waited for."""
    meshes = (procs.uid, *(each.uid for each in actors))
    news = p.NewOwner(meshes=meshes, owner=runtime.address, turn=turn)
    asked = {address: request(runtime, address, verbs.NEW_OWNER, news) for address in living}
    until = time.monotonic() + _ANSWER_S
    answers = {}
    for address, answer in asked.items():
        try:
            answers[address] = answer.get(max(0.0, until - time.monotonic()))
        except TimeoutError:  # it is stopped: it hears when it goes on, and tells then
            when_done(answer, _later(lives, address))
        except RuntimeError:  # it has ended
            continue
        else:
            lives.learn(address, answers[address])
    return answers


def _later(lives: Lives, address: str) -> Callable[[Future[p.Welcome]], None]:
    def learn(answer: Future[p.Welcome]) -> None:
        if answer.exception(0) is None:
            lives.learn(address, answer.get(0))
            lives.announce()

    return learn


def attach(name: str | None = None, *, steal: bool = False) -> ProcMesh | ActorMesh[object] | str:
    """Comes back to a mesh that was left with `detach`, or by a program that has ended; blocks until it answers.

    Gives the mesh of processes of that name, or that of actors, and writes what has happened meanwhile. All actors on
    the same processes come along: attach them by name too. Without a name it gives the list of what can be attached.
    With `steal` a mesh is taken over from a controller that holds it, which is told. Ranks on hosts that cannot be
    reached within some 10 s (20 s for those that dial) count as lost, until `heal_mesh`; `monarch.results` has what
    calls have answered meanwhile.
    Raises AttachError, which says who has the mesh since when, what has become of it, or that none of the hosts that
    keep it can be reached.
    """
    if name is None:
        return listing(left_meshes())
    known = _mine(current_runtime(), name)
    if known is not None:
        return known
    back = come_back(name, steal=steal)
    sys.stdout.write(f"{back.story.text()}\n")
    found = _mine(current_runtime(), name)
    return found if found is not None else back.procs


def _mine(runtime: Runtime, name: str) -> ProcMesh | ActorMesh[object] | None:
    """A mesh of that name that this process has already."""
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
    """Its hosts know of this process, and it of them: why not, of those that cannot be reached, by host.

    Raises AttachError where none of those can be that keep what it takes to come back.
    """
    failures = follow(runtime, mesh)
    keepers = [way.host for way in mesh.ways[:KEEPERS]]
    if all(host in failures for host in keepers):
        raise AttachError({host: RuntimeError(_unreachable(mesh, host, failures[host])) for host in keepers}, 1)
    with contextlib.suppress(TimeoutError, RuntimeError):  # who is silent now is when it is asked for the mesh, too
        runtime.part(Routes).settle([way.host for way in mesh.ways if way.host not in failures], _ANSWER_S)
    return failures


def _unreachable(mesh: MeshFile, host: str, why: str) -> str:
    return f"{mesh.name} cannot be attached, its host {host_name(host)} cannot be reached: {why}"


def _claim(runtime: Runtime, mesh: MeshFile, failures: Failures, *, steal: bool) -> list[p.Attached]:
    """Gets the mesh from the first of its hosts that knows of it, which decides, then from the others.

    What the deciding one says comes first. An agent that was started anew knows nothing, and has no procs of it. A host
    that is silent goes to the `failures`.
    """
    holder = runtime.part(Leaving).holder
    wanted = p.Attach(uid=mesh.uid, secret=mesh.secret, holder=holder, steal=steal, ended=mesh.former)
    keepers = [way.host for way in mesh.ways[:KEEPERS]]
    answers: dict[str, p.Attached] = {}
    first = p.Attached(known=False)
    for host in keepers:
        if host not in failures and not first.known:
            first = answers[host] = _attached(runtime, mesh, host, wanted, failures)
    if not first.known:
        silent = [_unreachable(mesh, host, failures[host]) for host in keepers if host in failures]
        raise AttachError.of(
            silent[0] if silent else f"{mesh.name} is not there any more: it was stopped, or its lease has ended"
        )
    wanted = msgspec.structs.replace(wanted, grant=first.grant, turn=first.turn)
    others = [way.host for way in mesh.ways if way.host not in failures and way.host not in answers]
    asked = {host: request(runtime, agent_of(host), verbs.ATTACH, wanted) for host in others}
    try:
        answers |= {host: _answer(mesh, host, answer, failures) for host, answer in asked.items()}
    except AttachError as error:
        _give_back(runtime, mesh, failures, str(error))
        raise
    return [first, *(answer for answer in answers.values() if answer is not first)]


def _attached(runtime: Runtime, mesh: MeshFile, host: str, wanted: p.Attach, failures: Failures) -> p.Attached:
    return _answer(mesh, host, request(runtime, agent_of(host), verbs.ATTACH, wanted), failures)


def _answer(mesh: MeshFile, host: str, asked: Future[p.Attached], failures: Failures) -> p.Attached:
    """What a host says; of a silent one it is noted why. Raises AttachError where it refuses."""
    try:
        return msgspec.structs.replace(asked.get(_ANSWER_S), host=host)
    except (TimeoutError, UnansweredError) as error:
        failures[host] = text_of(error)
        return p.Attached(known=False)
    except RuntimeError as error:
        raise AttachError.of(f"{mesh.name} cannot be attached: {error}") from error


def _give_back(runtime: Runtime, mesh: MeshFile, failures: Container[str], why: str) -> None:
    """It cannot be used here: whoever wants it may have it."""
    left = p.Detach(mesh.uid, f"{runtime.part(Leaving).holder.what} could not use it: {why}")
    asked = [request(runtime, agent_of(way.host), verbs.DETACH, left) for way in mesh.ways if way.host not in failures]
    for answer in asked:
        with contextlib.suppress(TimeoutError, RuntimeError):
            answer.get(_ANSWER_S)


def _lose(runtime: Runtime, mesh: MeshFile, failures: Mapping[str, str]) -> None:
    """What runs on these hosts counts as lost, here and on all others; why is given by host.

    Once a host can be reached its ranks can be healed: what lived on there is stopped then.
    """
    routes, ways = runtime.part(Routes), {way.host: way for way in mesh.ways}
    for host, why in failures.items():
        reason = f"it could not be reached when {mesh.name} was attached: {why}"
        loss = runtime.part(ProcessWatcher).host_lost(host, reason, 0, told=True)
        routes.tell_lost(host, reason, 0, loss)
        remote = None if host not in ways else _remote(runtime, mesh, ways[host])
        if remote is not None:
            remote.lost = reason
            routes.attached[host] = remote
            remote.cut()  # it is looked for


def _remote(runtime: Runtime, mesh: MeshFile, way: Way) -> RemoteHost | None:
    """None for one that cannot come back: an agent on this machine that has ended, or what a lost gateway led to."""
    gateway, key = runtime.part(Routes).gateway, key_of(mesh, way)
    unknown = p.HostState(host=way.host, pid=0, procs=())
    if way.calls:
        return JoinedHost(runtime, unknown, way.calls, key, None)
    if way.gateway is not None:
        return GatewayHost(runtime, way.endpoint, unknown, gateway, None) if isinstance(gateway, Gateway) else None
    if way.endpoint.startswith("tcp://"):
        return RemoteHost(runtime, way.endpoint, unknown, key, key is None, None)
    return None
