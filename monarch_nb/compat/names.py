"""Names of torchmonarch that have another home here, or none yet: its private import paths, which are aliases of
modules, and its other parts.
"""

import importlib
from types import ModuleType
from typing import Any

from monarch_nb._package import PAGE, NotYetError, refuse, sentence

_ACTOR = ("monarch_nb.actor",)
_INTERNALS = ("monarch_nb.compat.internals",)
_TASKS = ("monarch_nb.compat.tasks",)
_REFS = ("monarch_nb.compat.refs",)
_SHAPE = ("monarch_nb.shape", "monarch_nb.compat.internals")
_JOB = ("monarch_nb.job", *(f"monarch_nb.job.{module}" for module in ("ssh", "tools.stores", "trait", "process")))
_RANKS = ("monarch_nb.distributed", "monarch_nb.tensor.ranks.engine")
_TIMER = ("monarch_nb.tensor.ranks.timing",)
_RANDOM = ("monarch_nb.tensor.ranks.generators",)
_PROCS = (*_ACTOR, *_INTERNALS, "monarch_nb.mesh.proc")
_TENSORS = "the tensor engine"
_SUPERVISOR = "monarch_supervisor, torchmonarch's older controller"
_DISTRIBUTED = ("monarch_nb.distributed",)
_COMMANDS = "the command line"
_LAUNCHERS = "launchers of one's own"
_SQL = "telemetry by SQL"
_DASHBOARD = "the dashboard"
_HYPERACTOR = "monarch._rust_bindings.monarch_hyperactor."

# Alternatives to missing parts.
INSTEAD = {
    _SUPERVISOR: "Start processes with spawn_procs; procs.activate() and Mesh.of(procs) make meshes of them",
    _TENSORS: "Hold tensors in actors and let torch.distributed move them: monarch.spmd sets it up",
    _COMMANDS: "monarch-nb --help lists the commands there are",
    _LAUNCHERS: "spawn_procs(bootstrap_command=...) starts processes by a command of your own",
    _SQL: "monarch.actor.span and get_meter report to OpenTelemetry, where the program sets that up",
    _DASHBOARD: "In a notebook, %meshes and the side panel show the meshes",
}

# Private modules of torchmonarch, and the modules here that define the names that programs import, in this order.
ALIASES: dict[str, tuple[str, ...]] = {
    "monarch._src": (),
    "monarch._src.actor": _ACTOR,
    "monarch._src.actor.actor_mesh": (
        *_ACTOR,
        *_INTERNALS,
        "monarch_nb.runtime.actors.actor",
        "monarch_nb.runtime.context",
        "monarch_nb.config",
    ),
    "monarch._src.actor.bootstrap": _ACTOR,
    "monarch._src.actor.bootstrap_main": ("monarch_nb.compat.bootstrap_main",),
    "monarch._src.actor.concurrent": _ACTOR,
    "monarch._src.actor.debugger": (),
    "monarch._src.actor.debugger.debug_controller": ("monarch_nb.debug.actor", *_ACTOR),
    "monarch._src.actor.debugger.debug_session": ("monarch_nb.debug.actor",),
    "monarch._src.actor.endpoint": (*_ACTOR, "monarch_nb.runtime.actors.actor", "monarch_nb.mesh.endpoint"),
    "monarch._src.actor.future": _ACTOR,
    "monarch._src.actor.host_mesh": _ACTOR,
    "monarch._src.actor.ipython_check": _INTERNALS,
    "monarch._src.actor.logging": _INTERNALS,
    "monarch._src.actor.mock": ("monarch_nb.compat.mock",),
    "monarch._src.actor.pickle": ("monarch_nb.compat.pickling",),
    "monarch._src.actor.proc_mesh": _PROCS,
    "monarch._src.actor.returns_future": _ACTOR,
    "monarch._src.actor.shape": _SHAPE,
    "monarch._src.actor.supervision": _ACTOR,
    "monarch._src.actor.sync_state": _INTERNALS,
    "monarch._src.actor.telemetry": ("monarch_nb.telemetry", "monarch_nb.compat.internals"),
    "monarch._src.actor.v1": _ACTOR,
    "monarch._src.actor.v1.host_mesh": _ACTOR,
    "monarch._src.actor.v1.proc_mesh": _PROCS,
    "monarch._src.gather_mount": ("monarch_nb.job.mounts",),
    "monarch._src.job": _JOB,
    "monarch._src.job.job": _JOB,
    "monarch._src.job.job_state": _JOB,
    "monarch._src.job.kubernetes": (*_JOB, "monarch_nb.job.kubernetes.template"),
    "monarch._src.job.port_forward": _JOB,
    "monarch._src.job.process": _JOB,
    "monarch._src.job.service_identity": _JOB,
    "monarch._src.job.shell": _JOB,
    "monarch._src.job.slurm": _JOB,
    "monarch._src.job.spmd": ("monarch_nb._torchrun", *_JOB),
    "monarch._src.job.telemetry_config": _JOB,
    "monarch._src.rdma": ("monarch_nb.rdma",),
    "monarch._src.rdma.rdma": ("monarch_nb.rdma",),
    "monarch._src.spmd": ("monarch_nb.spmd", "monarch_nb.job.tools.stores"),
    "monarch._src.spmd.actor": ("monarch_nb.spmd",),
    "monarch._src.spmd.host_mesh": ("monarch_nb.job.tools.stores",),
    "monarch._rust_bindings": _INTERNALS,
    "monarch._rust_bindings.monarch_extension": (),
    "monarch._rust_bindings.monarch_extension.blocking": _INTERNALS,
    "monarch._rust_bindings.monarch_extension.panic": _INTERNALS,
    "monarch._rust_bindings.monarch_hyperactor": (),
    "monarch._rust_bindings.monarch_hyperactor.actor": (*_ACTOR, *_INTERNALS, *_REFS),
    "monarch._rust_bindings.monarch_hyperactor.actor_mesh": (*_ACTOR, *_INTERNALS),
    "monarch._rust_bindings.monarch_hyperactor.bootstrap": ("monarch_nb.compat.worker_loops", *_ACTOR),
    "monarch._rust_bindings.monarch_hyperactor.buffers": ("monarch_nb.compat.pickling",),
    "monarch._rust_bindings.monarch_hyperactor.channel": (*_ACTOR, *_INTERNALS),
    "monarch._rust_bindings.monarch_hyperactor.config": ("monarch_nb.config",),
    "monarch._rust_bindings.monarch_hyperactor.context": (*_ACTOR, "monarch_nb.runtime.context"),
    "monarch._rust_bindings.monarch_hyperactor.endpoint": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.handle": (*_ACTOR, *_TASKS),
    "monarch._rust_bindings.monarch_hyperactor.host_mesh": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.mailbox": (*_ACTOR, *_REFS),
    "monarch._rust_bindings.monarch_hyperactor.pickle": (),
    "monarch._rust_bindings.monarch_hyperactor.proc": (*_ACTOR, *_REFS, "monarch_nb.runtime.context"),
    "monarch._rust_bindings.monarch_hyperactor.proc_mesh": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.pympsc": (),
    "monarch._rust_bindings.monarch_hyperactor.pytokio": _TASKS,
    "monarch._rust_bindings.monarch_hyperactor.runtime": (*_TASKS, *_INTERNALS),
    "monarch._rust_bindings.monarch_hyperactor.shape": (*_SHAPE, *_ACTOR),
    "monarch._rust_bindings.monarch_hyperactor.supervision": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.testing": (),
    "monarch._rust_bindings.monarch_hyperactor.value_mesh": _ACTOR,
    "monarch.actor.concurrent": _ACTOR,
    "monarch.actor_mesh": _ACTOR,
    "monarch.builtins": _RANKS,
    "monarch.builtins.log": _RANKS,
    "monarch.builtins.random": _RANDOM,
    "monarch.cached_remote_function": _RANKS,
    "monarch.common": (),
    "monarch.common._coalescing": _RANKS,
    "monarch.common.client": _RANKS,
    "monarch.common.device_mesh": _RANKS,
    "monarch.common.fake": _RANKS,
    "monarch.common.future": _ACTOR,
    "monarch.common.invocation": _RANKS,
    "monarch.common.opaque_ref": _RANKS,
    "monarch.common.remote": (*_RANKS, "monarch_nb.tensor.ranks.remote"),
    "monarch.common.stream": _RANKS,
    "monarch.common.tensor": _RANKS,
    "monarch.common.tree": _RANKS,
    "monarch.fetch": _RANKS,
    "monarch.gradient": ("monarch_nb.tensor.ranks.gradients",),
    "monarch.gradient_generator": (*_RANKS, "monarch_nb.tensor.ranks.gradients"),
    "monarch.mesh_controller": _RANKS,
    "monarch.opaque_module": _RANKS,
    "monarch.opaque_object": _RANKS,
    "monarch.random": _RANDOM,
    "monarch.tensor_engine": _RANKS,
    "monarch.timer": _TIMER,
    "monarch.timer.execution_timer": _TIMER,
    "monarch.gather_mount": ("monarch_nb.job.mounts",),
    "monarch.remotemount": ("monarch_nb.job.mounts",),
    "monarch.bootstrap_main": ("monarch_nb.compat.bootstrap_main",),
    "monarch.job.kubernetes": _JOB,
    "monarch.job.spmd": ("monarch_nb._torchrun", *_JOB),
    "monarch.proc_mesh": _PROCS,
    "monarch.simulator": _DISTRIBUTED,
    "monarch.simulator.config": _DISTRIBUTED,
    "monarch.simulator.interface": _DISTRIBUTED,
    "monarch.simulator.simulator": _DISTRIBUTED,
    "monarch.tools": (),
    "monarch._src.tools": (),
    "monarch._src.tools.commands": ("monarch_nb._commands",),
    "monarch.tools.commands": ("monarch_nb._commands",),
    "monarch.tools.config": ("monarch_nb.compat.workspaces",),
    "monarch.tools.config.environment": ("monarch_nb.compat.workspaces",),
    "monarch.tools.config.workspace": ("monarch_nb.compat.workspaces",),
    "monarch.tools.network": ("monarch_nb.compat.network",),
    "monarch.tools.utils": ("monarch_nb.compat.workspaces",),
}

# Missing parts: whole modules.
MODULES: dict[str, str] = {
    "monarch._src.actor.proc_launcher": _LAUNCHERS,
    "monarch.controller": _TENSORS,
    "monarch.distributed_telemetry": _SQL,
    "monarch.experimental": "what torchmonarch calls experimental",
    "monarch.job.meta": "the schedulers of one company",
    "monarch.memory": _TENSORS,
    "monarch.monarch_dashboard": _DASHBOARD,
    "monarch.notebook": "the schedulers of one company; in a notebook use %load_ext monarch",
    "monarch.parallel": _TENSORS,
    "monarch.profiler": _TENSORS,
    "monarch.python_local_mesh": _TENSORS,
    "monarch.remote_class": _TENSORS,
    "monarch.rust_backend_mesh": _TENSORS,
    "monarch.safe_torch": _TENSORS,
    "monarch.tensorboard": _TENSORS,
    "monarch.tools.cli": _COMMANDS,
    "monarch.tools.colors": _COMMANDS,
    "monarch.tools.debug_env": _COMMANDS,
    "monarch.tools.mesh_spec": _COMMANDS,
    "monarch.worker": _TENSORS,
    "monarch.world_mesh": _SUPERVISOR,
}

# Names of the package `monarch` itself.
NAMES: dict[str, str] = {
    "Selection": "torchmonarch's routing of messages, and none of its public functions takes one",
    "world_mesh": _SUPERVISOR,
    "ActorFuture": "torchmonarch, where it cannot be imported either (use monarch.actor.Future)",
    "mast_reserve": "the scheduler of one company",
}

# Private names without a meaning here that programs import beside useful ones: the import succeeds, so that the rest
# of such a program works, and their use raises NotImplementedError.
_REFUSED: dict[str, str] = {
    f"{_HYPERACTOR}actor": "CallbacksPending MethodSpecifier PortProtocol",
    f"{_HYPERACTOR}host_mesh": "PyMeshAdminRef",
    f"{_HYPERACTOR}pickle": (
        "PendingMessage _get_mesh_pop_count _get_pending_reserve_count _reset_mesh_pop_count "
        "_reset_pending_reserve_count pickle"
    ),
    f"{_HYPERACTOR}pympsc": "PyTestSender Receiver channel_for_test",
    f"{_HYPERACTOR}testing": "_make_handle_probe _sync_inbox_for_test",
    "monarch._src.actor.host_mesh": "_spawn_admin",
    "monarch._src.actor.logging": "LoggingManager flush_all_proc_mesh_logs",
    "monarch._src.job.spmd": "_parse_torchrun",
    "monarch._src.actor.proc_mesh": "HyProcMesh",
}


def missing_part(name: str) -> str | None:
    """Returns the text for a module or name of torchmonarch that does not exist yet ("monarch.remote"), or None."""
    root, _, rest = name.partition(".")
    part = NAMES.get(rest) if root == "monarch" else None
    path = name
    while part is None and "." in path and path not in ALIASES:
        part = MODULES.get(path)
        path = path.rpartition(".")[0]
    return None if part is None else sentence(name, part, INSTEAD.get(part, ""))


def no_counterpart(name: str) -> str:
    """Returns the text for a name below an alias that has no counterpart here."""
    if "._" in name:
        return (
            f"{name} is private to torchmonarch and has no counterpart here; the public names are in monarch.actor, "
            f"see {PAGE}"
        )
    return f"{name} has no counterpart here: dir({name.rpartition('.')[0]}) lists what there is, see {PAGE}"


def check(name: str) -> None:
    """Raises NotYetError for a full name without a counterpart here that torchmonarch may have."""
    parent, _, last = name.rpartition(".")
    message = None if name in ALIASES else missing_part(name)
    if message is None and parent in ALIASES and name not in ALIASES and not last.startswith("__"):
        message = no_counterpart(name)
    if message is not None:
        raise NotYetError(message, name=parent)


class _Refused(type):
    def __call__(cls, *args: object, **kwargs: object) -> object:
        refuse(f"{cls.__module__}.{cls.__name__}", "the inside of torchmonarch")


_made: dict[str, type] = {}  # stand-ins by full name


def refused(name: str) -> type | None:
    """Returns the stand-in for a private name, given in full; None for other names."""
    module, _, last = name.rpartition(".")
    if last not in _REFUSED.get(module, "").split():
        return None
    if name not in _made:
        _made[name] = _Refused(last, (), {"__module__": module, "__doc__": "Not there: raises NotImplementedError."})
    return _made[name]


class Alias(ModuleType):
    """A module under a name of torchmonarch. It has the names of its homes, and the aliases below it as submodules."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Stands for {name} of torchmonarch; see monarch.actor for the public names.")
        self.__path__: list[str] = []
        self._homes = ALIASES[name]

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._public()
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        below = f"{self.__name__}.{name}"
        if below in ALIASES:
            return importlib.import_module(below)
        for home in self._homes:
            module = importlib.import_module(home)
            if name in vars(module) or name in getattr(module, "__all__", ()):
                return getattr(module, name)
        if (stand_in := refused(below)) is not None:
            return stand_in
        raise AttributeError(no_counterpart(below))

    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, (self.__name__,)

    def _public(self) -> list[str]:
        homes = [importlib.import_module(home) for home in self._homes]
        return sorted({name for home in homes for name in getattr(home, "__all__", ())})

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._public()})
