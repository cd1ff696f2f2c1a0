"""Spawning processes: from a request to messages for host agents, at first and again in a heal."""

import logging
import os
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from monarch_nb.collectives.environment import OURS, RendezvousEnvironment, free_port
from monarch_nb.host import verbs as host_verbs
from monarch_nb.host.gpus import CONTROL, MPS, MPS_EQUAL, SLOT, VISIBLE, devices, slot_of, too_few, without_mps
from monarch_nb.host.procs.template import QUICK, worth_importing
from monarch_nb.host.protocol import Launch, SpawnProcs
from monarch_nb.lifecycle.actor_spawn import with_stand_ins
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.mesh.console import console_state
from monarch_nb.mesh.handle import ProcsWanted, operations
from monarch_nb.mesh.host_record import HostRecord
from monarch_nb.mesh.mesh_events import MeshEvents, MeshStarting
from monarch_nb.mesh.proc import ProcMesh, announce
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import RequestError, request
from monarch_nb.mesh.sending import encode_arguments, send_each, send_region
from monarch_nb.runtime import (
    COLLECTIVES,
    EncodedObject,
    Future,
    Instance,
    PendingCall,
    ProcState,
    Runtime,
    current_runtime,
    ranks_of,
    resolved_future,
    when_done,
)
from monarch_nb.settings import TRAVELS_IN, settings
from monarch_nb.shape import Extent, NDSlice, Region, RegionForm
from monarch_nb.supervision import RankIncarnation
from monarch_nb.wire import Layout, agent_of, host_name, name_text

logger = logging.getLogger(__name__)

DIMENSION = "gpus"
Environment = dict[str, str | None]
_logged: set[str] = set()


def environments(per_host: Mapping[str, int], common: Mapping[str, str | None]) -> tuple[Environment, ...]:
    """Returns the environment of each process of a host, row-major: its local rank, and the slot of its GPU.

    The host assigns a GPU to the slot, if it has any (`host.gpus.with_gpu`); no slot if `common` chooses devices.
    """
    extent = Extent(tuple(per_host), tuple(per_host.values()))
    needs_gpus = DIMENSION in per_host and VISIBLE not in common
    if needs_gpus and not devices() and "none" not in _logged:
        _logged.add("none")
        logger.info("this host has no GPUs: %s is a dimension like any other", DIMENSION)
    by_process = []
    for local in range(extent.nelements):
        own: Environment = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(extent.nelements)}
        if needs_gpus:
            own[SLOT] = slot_of(extent.point(local)[DIMENSION], per_host[DIMENSION], settings.share_gpus)
        by_process.append({**own, **common})
    return tuple(by_process)


def check_own_host(host: str, per_host: Mapping[str, int], common: Mapping[str, str | None]) -> None:
    """Raises ValueError if this machine, named `host`, has GPUs, but fewer than are requested, or no MPS."""
    requested, available = per_host.get(DIMENSION, 0), len(devices())
    if not available or not requested or VISIBLE in common:
        return
    if available < requested and not settings.share_gpus:
        raise ValueError(too_few(host, available, requested))
    if settings.share_gpus in (MPS, MPS_EQUAL) and shutil.which(CONTROL) is None:
        raise ValueError(without_mps(host))


def _gpu_of(env: Mapping[str, str | None]) -> str | None:
    """Returns the name of a process's GPU: its own choice, or the number of its slot."""
    slot = env.get(SLOT)
    return slot.partition("/")[0] if slot is not None else env.get(VISIBLE)


def warn_of_shared(name: str, hosts: Sequence[str], envs: Sequence[Environment], meshes: Sequence[ProcState]) -> None:
    """Warns, with names, if processes of living meshes have the same GPUs as those of the mesh `name`.

    `meshes` are records of proc meshes. Does nothing if GPUs are shared, or this host has none.
    """
    if settings.share_gpus or not devices():
        return
    gpus = {gpu for env in envs if (gpu := _gpu_of(env)) is not None}
    for mesh in meshes:
        spawned = mesh.spawn_spec.env if isinstance(mesh.spawn_spec, ProcSpawnSpec) else ()
        shared = sorted(gpus & {gpu for env in spawned if (gpu := _gpu_of(env)) is not None})
        if shared and set(hosts) & set(mesh.hosts):
            warnings.warn(
                f"{name} and {mesh.name} both use GPU {', '.join(shared)}: stop one of them, choose devices with "
                "CUDA_VISIBLE_DEVICES, or say that they share them with monarch.config.configure(share_gpus=True)",
                stacklevel=5,
            )


PYTHON = "MONARCH_NB_PYTHON"  # the Python version of a process's owner


def python_version() -> str:
    """Returns the part of the version that must agree: code is sent as byte code of one minor version."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


class ProcSpawnSpec(Struct, eq=False):
    """The definition of a proc mesh, enough to start any of its ranks again."""

    instance: Instance
    setup: EncodedObject
    env: tuple[dict[str, str | None], ...]
    proc_bind: tuple[dict[str, str], ...]
    launch: tuple[Launch, ...]  # by rank, if not the default command
    python: str | None
    host_mesh: str  # the identity of the host mesh it was spawned on
    host_record: HostRecord | None = None  # of that host mesh, if it can replace and add hosts
    master: tuple[str, int] = ("", 0)  # address of the next process groups of torch.distributed
    initialized: Future[object] = field(default_factory=lambda: resolved_future(True))

    def release(self) -> None:
        """Drops data that only a restart needs, once the mesh has stopped."""
        self.setup, self.env, self.proc_bind, self.launch = EncodedObject(()), (), (), ()
        self.host_record = None
        self.initialized = resolved_future(True)

    def inherits(self, rank: int) -> bool:
        """Returns whether a rank gets this process's environment."""
        return not self.launch or self.launch[rank].inherit_env


def host_mesh_of(state: ProcState) -> str:
    """Returns the identity of the host mesh on which this process has spawned it; "" for meshes of others."""
    return state.spawn_spec.host_mesh if isinstance(state.spawn_spec, ProcSpawnSpec) else ""


def has_heavy_modules() -> bool:
    """Returns whether this process has loaded any slow module that templates import."""
    return any(name in sys.modules for name in worth_importing() if name not in QUICK)


def _environment(runtime: Runtime, host: str) -> dict[str, str | None]:
    """Returns the changes in this process's environment since its host agent was started."""
    before = runtime.part(MeshRegistry).agent_environment.get(host)
    if before is None:
        return {}
    now = dict(os.environ)
    changed: dict[str, str | None] = {name: value for name, value in now.items() if before.get(name) != value}
    changed.update({name: None for name in before if name not in now})
    return changed


def world_of(state: ProcState) -> RendezvousEnvironment | None:
    """Returns torchrun's variables for the ranks of a mesh, or None if none are to be set."""
    spawn_spec = state.spawn_spec
    assert isinstance(spawn_spec, ProcSpawnSpec)
    if not settings.torchrun_environment:
        return None
    return RendezvousEnvironment(
        state.uid, RegionForm.of(state.pending_region or state.region), state.layout.per_host, spawn_spec.master
    )


def renew_world(runtime: Runtime, state: ProcState, lost: Sequence[int]) -> Future[set[str]]:
    """Gives up process groups of torch.distributed that include `lost` ranks, on all ranks of a mesh.

    New groups have the mesh's current size and the address set by `choose_master`. The future has the uids of actor
    meshes whose `__init__` had created such a group. Does not block.
    """
    ranks = ranks_of(state.pending_region or state.region)
    return runtime.feature(COLLECTIVES).renew_after_loss(state, ranks, world_of(state), tuple(lost))


def choose_master(state: ProcState) -> None:
    """Chooses the address of the next process groups: the first rank's host, and a port that seems free."""
    spawn_spec = state.spawn_spec
    assert isinstance(spawn_spec, ProcSpawnSpec)
    ranks = ranks_of(state.pending_region or state.region)
    hosts = tuple(dict.fromkeys(state.layout.host_of(rank) for rank in ranks))
    spawn_spec.master = (operations().meeting_point(hosts), free_port((spawn_spec.master[1],)))


def start(runtime: Runtime, state: ProcState, incarnations: Sequence[RankIncarnation]) -> Future[object]:
    """Asks agents for these ranks and runs their set-up; resolves when that is done, fails when a rank is lost."""
    spawn_spec = state.spawn_spec
    assert isinstance(spawn_spec, ProcSpawnSpec)  # it was spawned here
    layout = state.layout
    by_host: dict[str, list[RankIncarnation]] = {}
    for rank, incarnation in incarnations:
        by_host.setdefault(layout.host_of(rank), []).append((rank, incarnation))
    runtime.part(MeshRegistry).revive(by_host)
    call = PendingCall(
        runtime,
        f"{state.name}.set-up",
        state.uid,
        lambda: [rank for rank, _ in incarnations],
        len(incarnations),
        lambda replies: True,
    )
    try:
        for host, entries in by_host.items():
            handed_on = {PYTHON: python_version(), TRAVELS_IN: settings.to_send() or None}
            shared = {**_environment(runtime, host), **handed_on}
            request_body = SpawnProcs(
                mesh=state.uid,
                ranks=tuple(rank for rank, _ in entries),
                incarnations=tuple(incarnation for _, incarnation in entries),
                env=tuple(
                    {
                        **(shared if spawn_spec.inherits(rank) else handed_on),
                        **_own_environment(state, spawn_spec, rank),
                    }
                    for rank, _ in entries
                ),
                proc_bind=tuple(spawn_spec.proc_bind[rank % layout.per_host] for rank, _ in entries)
                if spawn_spec.proc_bind
                else (),
                python=spawn_spec.python,
                launch=tuple(spawn_spec.launch[rank] for rank, _ in entries) if spawn_spec.launch else (),
                bootstrap_env_cold=bool(spawn_spec.proc_bind) or spawn_spec.python is not None,
                heavy=has_heavy_modules(),
                cwd=os.getcwd(),
                sys_path=(
                    *runtime.part(MeshRegistry).workspaces.get(host, ()),
                    *(path or os.getcwd() for path in sys.path),
                ),
                owner=runtime.address,
                name=state.name,
                setup=1,
                runner=runtime.part(MeshRegistry).runner,
            )
            reply = request(runtime, agent_of(host), host_verbs.SPAWN, request_body)
            when_done(reply, _fail_if_refused(call))
            runtime.later(settings.mesh_proc_spawn_max_idle, _fail_if_silent(runtime, host, reply, call))
        console = console_state(state)
        context = runtime.root_context if spawn_spec.instance is runtime.root else runtime.context()
        is_whole = [rank for rank, _ in incarnations] == list(state.ranks)
        arguments = (*spawn_spec.setup.load(runtime)[0], ProcMesh(state, state.pending_region or state.region))
        body = encode_arguments(f"{state.name}.set-up", arguments, {})
        if is_whole:
            send_region(runtime, context, console, state.region, "setup", body, pending=call)
        else:
            send_each(runtime, context, console, [rank for rank, _ in incarnations], "setup", body, call)
    except BaseException:
        call.close()
        raise
    return call.future


def _own_environment(state: ProcState, spawn_spec: ProcSpawnSpec, rank: int) -> dict[str, str | None]:
    """Returns the environment of one rank, in which the spawner's values take precedence."""
    env = spawn_spec.env[rank % state.layout.per_host]
    world = world_of(state)
    base = {} if world is None else world.environment(rank)
    return {**base, **env, OURS: ",".join(name for name in base if env.get(name, base[name]) == base[name])}


def _fail_if_silent(
    runtime: Runtime, host: str, reply: Future[object], call: PendingCall[object]
) -> Callable[[], None]:
    limit = settings.mesh_proc_spawn_max_idle
    reply_ref, call_ref = weakref.ref(reply), weakref.ref(call)  # so that neither is kept alive for that long

    def check() -> None:
        reply, call = reply_ref(), call_ref()
        if reply is not None and call is not None and not reply.done() and not runtime.closed:
            call.fail(RequestError(f"{call.title}: host {host_name(host)} has not answered within {limit:g} s"))

    return check


def _fail_if_refused(call: PendingCall[object]) -> Callable[[Future[object]], None]:
    def check(future: Future[object]) -> None:
        error = future.exception(0)
        if error is not None:
            call.fail(error)

    return check


def spawn_procs(spec: ProcsWanted) -> ProcMesh:
    """Spawns the processes of a mesh. Does not block."""
    runtime = current_runtime()
    instance = runtime.context().actor_instance
    for source, filename in spec.setup:
        compile(source, filename, "exec", dont_inherit=True)  # raises for a typo here
    region = Region(tuple(spec.extent.labels), NDSlice.new_row_major(tuple(spec.extent.sizes)))
    uid = runtime.new_uid("p")
    own_host, _ = operations().own_host()
    if own_host in spec.hosts:
        check_own_host(host_name(own_host), spec.per_host, spec.env)
    name, env = name_text(spec.name), environments(spec.per_host, spec.env)
    spawn_spec = ProcSpawnSpec(
        instance,
        EncodedObject(encode_arguments(f"{name}.set-up", (list(spec.setup), with_stand_ins(spec.bootstrap)), {})),
        env,
        spec.proc_bind,
        spec.launch,
        spec.python,
        spec.record.identity,
        spec.record if spec.record.source is not None else None,
    )
    state = ProcState(
        uid=uid,
        name=name,
        region=region,
        owner_process=runtime.address,
        layout=Layout(uid, spec.hosts, len(env)),
        spawn_spec=spawn_spec,
    )
    proc_meshes = [mesh for mesh in tuple(runtime.meshes.values()) if isinstance(mesh, ProcState)]
    living = [mesh for mesh in proc_meshes if mesh.stopped is None and isinstance(mesh.spawn_spec, ProcSpawnSpec)]
    warn_of_shared(name, spec.hosts, env, living)
    try:
        choose_master(state)
        runtime.part(MeshRegistry).own(instance, state)
        spawn_spec.initialized = start(runtime, state, [(rank, 0) for rank in range(len(region))])
        mesh = ProcMesh(state, region)
        runtime.part(MeshEvents).publish(MeshStarting(state))
        announce(mesh)
    except BaseException:  # Ctrl-C too: no reference will ever exist
        runtime.part(MeshStopper).stop(state, "its spawn was interrupted")
        raise
    return mesh
