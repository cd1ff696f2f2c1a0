"""The parts of one process, and their connections."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from monarch_nb.code.reload import ClassVersions
from monarch_nb.connect.mesh_detach import Detacher
from monarch_nb.connect.routes import HostLosses, HostRoutes
from monarch_nb.engine.operations import ProcessOperations, set_log_level
from monarch_nb.lifecycle.controllers import Controllers
from monarch_nb.lifecycle.mesh_healer import MeshHealer
from monarch_nb.lifecycle.resizing import MeshResizer
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.updates import Handover, ReferenceUpdates
from monarch_nb.lifecycle.watching import HostNotices, ProcessWatcher, Show, log_notice
from monarch_nb.logs import MeshLogs
from monarch_nb.logs.forwarding import Forwarding
from monarch_nb.mesh.cells import run_in_actor
from monarch_nb.mesh.handle import Operations
from monarch_nb.mesh.host_record import giver_of
from monarch_nb.mesh.mesh_events import MeshEvents
from monarch_nb.mesh.proc import ThisProc, get_active_proc_meshes
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import Future, Instance, Loader, Parts, ProcessTables, Runtime
from monarch_nb.supervision import ActorEnd, Driver, MeshFailure, RankIncarnation
from monarch_nb.transport import Clock, Transport

RUNNER = "monarch_nb.engine.worker:run_proc"  # main function of a mesh's processes: a name, as other processes get it
DIAGNOSER = "monarch_nb.diagnosis.unwatched:begin"  # diagnoses detached meshes in a host agent
# Features that a process loads at their first use, or when one of their verbs arrives: one line each.
FEATURES: dict[str, Loader] = {
    "debug": lambda runtime: import_module("monarch_nb.debug.service").attach(runtime),
    "activity": lambda runtime: import_module("monarch_nb.store.activity").attach(runtime),
    "collectives": lambda runtime: import_module("monarch_nb.collectives.service").attach(runtime),
    "diagnosis": lambda runtime: import_module("monarch_nb.diagnosis.service").attach(runtime),
    "relays": lambda runtime: import_module("monarch_nb.mesh.relayed").attach(runtime),
    "metrics": lambda runtime: import_module("monarch_nb.telemetry.points").attach(runtime),
    "tensor": lambda runtime: import_module("monarch_nb.tensor.groups.service").attach(runtime),
    "profiling": lambda runtime: import_module("monarch_nb.profiling.service").attach(runtime),
    "rdma": lambda runtime: import_module("monarch_nb.rdma.service").attach(runtime),
}


def register(name: str, load: Loader) -> None:
    """Adds a feature to processes that start from now on. Raises ValueError for a name that is in use."""
    if name in FEATURES:
        raise ValueError(f"there is a feature {name!r} already")
    FEATURES[name] = load


def _open_tunnel(written: str) -> str:
    opened: str = import_module("monarch_nb.job.named").opened(written)
    return opened


@dataclass(frozen=True)
class ProcessRole:
    """Properties in which processes differ."""

    agent: str  # the address of its host agent
    is_worker: bool = False  # started by a host agent, to hold actors
    root_id: str = "<root>"  # name of code outside actors
    fatal: Callable[[MeshFailure], None] | None = None  # takes unhandled failures
    show: Callable[[MeshFailure], None] | None = None  # takes failures that end nothing
    notice: Show = log_notice  # shows users the hosts that are about to be ended
    revive: Callable[[Iterable[str]], None] = lambda hosts: None  # starts dead agents of this machine again
    await_host: Callable[[str, float], None] = lambda host, seconds: None  # blocks until a returning host can be used
    python: str | None = None  # the requested interpreter


class MeshEffects:
    """Hands each effect to the part of this process that carries it out."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def stop_mesh(self, uid: str, reason: str) -> Future[None]:
        """Stops a mesh owned here."""
        return self._parts.get(MeshStopper).stop_by_uid(uid, reason)

    def respawn(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Starts processes again; blocks until they are ready."""
        self._parts.get(MeshHealer).respawn(uid, incarnations)

    def recreate(self, uid: str, incarnations: Sequence[RankIncarnation]) -> None:
        """Creates actors again; blocks until they are there."""
        self._parts.get(MeshHealer).recreate(uid, incarnations)

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]], await_hooks: bool) -> None:
        """Notifies all processes that hold a reference, then runs the hooks of survivors."""
        self._parts.get(MeshHealer).healed(incarnations, await_hooks)

    def report_to_owner(self, process: str, end: ActorEnd) -> None:
        """Lets the process of a failed actor's owner know."""
        self._parts.get(Handover).report_to_owner(process, end)

    def watch_owner(self, process: str) -> None:
        """Watches the process of an owner of actors here: they end when it does."""
        self._parts.get(ProcessWatcher).watch_owner(process)

    def await_stops(self, instance: Instance) -> None:
        """Blocks until the meshes of an ending actor have stopped."""
        self._parts.get(MeshStopper).await_all(self._parts.get(MeshRegistry).owned_by(instance), instance)


def compose(
    local: ProcessTables,
    node: Transport,
    clock: Clock,
    role: ProcessRole,
    *,
    operations: Callable[[Runtime], Operations] = ProcessOperations,
) -> Runtime:
    """Returns the runtime of a process that takes no messages yet."""
    parts = Parts()
    effects = MeshEffects(parts)
    root = None if role.is_worker else local.root
    driver = parts.add(Driver, Driver(local, clock, effects, root=root, fatal=role.fatal, show=role.show))
    runtime = Runtime(
        local,
        node,
        driver,
        clock,
        agent=role.agent,
        parts=parts,
        features=FEATURES,
        this_proc=lambda: this_proc.this_proc(),
        proc_mesh=lambda: this_proc.proc_mesh(),
        proc_meshes=get_active_proc_meshes,
        run_in_actor=run_in_actor,
        root_id=role.root_id,
        is_worker=role.is_worker,
    )
    routes = parts.add(HostRoutes, HostRoutes(runtime, _open_tunnel))
    logs = parts.add(MeshLogs, MeshLogs(runtime, set_log_level))
    logs.present(Forwarding(logs))
    events = parts.add(MeshEvents, MeshEvents(logs.happened))
    notices = parts.add(HostNotices, HostNotices(runtime, driver, events.publish, role.notice))
    watcher = parts.add(ProcessWatcher, ProcessWatcher(runtime, driver, events.publish, notices))

    def report_lost(agents: Mapping[str, int], reason: str) -> None:
        loss = watcher.hosts_lost(agents, reason)
        for host, incarnation in agents.items():
            routes.announce_lost(host, reason, incarnation, loss)

    parts.add(HostLosses, HostLosses(giver_of, report_lost))
    versions = parts.add(ClassVersions, ClassVersions(runtime))
    updates = parts.add(ReferenceUpdates, ReferenceUpdates(runtime, driver, watcher, versions))
    registry = parts.add(
        MeshRegistry,
        MeshRegistry(
            runtime,
            driver,
            watch=watcher.watch,
            subscribe=updates.subscribe,
            forget_processes=watcher.forget,
            forget_holders=updates.forget,
            publish=events.publish,
            revive=role.revive,
            runner=RUNNER,
            python=role.python,
        ),
    )
    stopper = parts.add(
        MeshStopper, MeshStopper(runtime, driver, updates, disown=registry.disown, publish=events.publish)
    )
    parts.add(
        MeshHealer,
        MeshHealer(
            runtime,
            driver,
            updates=updates,
            versions=versions,
            stopper=stopper,
            publish=events.publish,
            await_host=role.await_host,
        ),
    )
    parts.add(
        MeshResizer,
        MeshResizer(runtime, driver, registry=registry, updates=updates, stopper=stopper, publish=events.publish),
    )
    parts.add(Handover, Handover(runtime, driver, registry, watcher, updates, events))
    if not role.is_worker:
        parts.add(Detacher, Detacher(runtime, DIAGNOSER))
    this_proc = ThisProc(runtime, registry)
    parts.add(Operations, operations(runtime))  # type: ignore[type-abstract]
    parts.add(Controllers, Controllers(runtime, registry))
    return runtime
