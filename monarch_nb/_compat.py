"""Names of torchmonarch that are found elsewhere here, or not yet: its private import paths, and its other parts.

Programs, tests and pages written for it import from `monarch._src` and `monarch._rust_bindings`, since not all that
they need has a public home there. Here it has: these paths are aliases, made from the table below when they are used.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from monarch_nb._about import page

PAGE = page("compatibility.md")


class NotYetError(ImportError):
    """A part of torchmonarch that this version does not have; the text says which, and where to read on."""


def _not_yet(what: str, part: str) -> NotYetError:
    return NotYetError(f"{what} is not there yet: it belongs to {part}, see {PAGE}", name=what)


_ACTOR = ("monarch_nb.actor",)
_SHAPE = ("monarch_nb.shape",)
_TENSORS = "the tensor engine"
_SIMULATOR = "the simulator"

# Private modules of torchmonarch, and where what programs import from them is found here, in this order.
ALIASES: dict[str, tuple[str, ...]] = {
    "monarch._src": (),
    "monarch._src.actor": _ACTOR,
    "monarch._src.actor.actor_mesh": _ACTOR,
    "monarch._src.actor.bootstrap": _ACTOR,
    "monarch._src.actor.concurrent": _ACTOR,
    "monarch._src.actor.debugger": (),
    "monarch._src.actor.debugger.debug_controller": ("monarch_nb.debug.actor", *_ACTOR),
    "monarch._src.actor.debugger.debug_session": ("monarch_nb.debug.actor",),
    "monarch._src.actor.endpoint": _ACTOR,
    "monarch._src.actor.future": _ACTOR,
    "monarch._src.actor.host_mesh": _ACTOR,
    "monarch._src.actor.proc_mesh": (*_ACTOR, "monarch_nb.mesh.registry"),
    "monarch._src.actor.returns_future": _ACTOR,
    "monarch._src.actor.shape": _SHAPE,
    "monarch._src.actor.supervision": _ACTOR,
    "monarch._src.actor.telemetry": ("monarch_nb.telemetry",),
    "monarch._src.actor.v1": _ACTOR,
    "monarch._src.actor.v1.host_mesh": _ACTOR,
    "monarch._src.actor.v1.proc_mesh": (*_ACTOR, "monarch_nb.mesh.registry"),
    "monarch._src.job": ("monarch_nb.job",),
    "monarch._src.job.job": ("monarch_nb.job",),
    "monarch._src.job.job_state": ("monarch_nb.job",),
    "monarch._src.job.port_forward": ("monarch_nb.job",),
    "monarch._src.job.process": ("monarch_nb.job",),
    "monarch._src.job.service_identity": ("monarch_nb.job",),
    "monarch._src.job.shell": ("monarch_nb.job",),
    "monarch._src.rdma": ("monarch_nb.rdma",),
    "monarch._src.rdma.rdma": ("monarch_nb.rdma",),
    "monarch._src.spmd": ("monarch_nb.spmd",),
    "monarch._src.spmd.actor": ("monarch_nb.spmd",),
    "monarch._rust_bindings": (),
    "monarch._rust_bindings.monarch_hyperactor": (),
    "monarch._rust_bindings.monarch_hyperactor.actor": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.actor_mesh": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.bootstrap": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.channel": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.config": ("monarch_nb.config",),
    "monarch._rust_bindings.monarch_hyperactor.context": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.endpoint": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.handle": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.host_mesh": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.mailbox": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.proc": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.proc_mesh": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.shape": (*_SHAPE, *_ACTOR),
    "monarch._rust_bindings.monarch_hyperactor.supervision": _ACTOR,
    "monarch._rust_bindings.monarch_hyperactor.value_mesh": _ACTOR,
    "monarch.actor.concurrent": _ACTOR,
    "monarch.actor_mesh": _ACTOR,
    "monarch.proc_mesh": (*_ACTOR, "monarch_nb.mesh.registry"),
}

# Parts that are not there yet: modules, with all that is in them.
MODULES: dict[str, str] = {
    "monarch._src.actor.mock": _SIMULATOR,
    "monarch._src.actor.proc_launcher": "launchers of one's own",
    "monarch.builtins": _TENSORS,
    "monarch.common": _TENSORS,
    "monarch.controller": _TENSORS,
    "monarch.distributed_telemetry": "telemetry by SQL",
    "monarch.experimental": "what torchmonarch calls experimental",
    "monarch.fetch": _TENSORS,
    "monarch.gather_mount": "mounts",
    "monarch.gradient": _TENSORS,
    "monarch.gradient_generator": _TENSORS,
    "monarch.job.kubernetes": "Kubernetes jobs",
    "monarch.job.meta": "the schedulers of one company",
    "monarch.job.spmd": "jobs",
    "monarch.mesh_controller": _TENSORS,
    "monarch.monarch_dashboard": "the dashboard",
    "monarch.notebook": "the schedulers of one company; in a notebook use %load_ext monarch",
    "monarch.parallel": _TENSORS,
    "monarch.profiler": _TENSORS,
    "monarch.random": _TENSORS,
    "monarch.rdma": "the data plane",
    "monarch.remotemount": "mounts",
    "monarch.simulator": _SIMULATOR,
    "monarch.tensor_engine": _TENSORS,
    "monarch.tensorboard": _TENSORS,
    "monarch.timer": _TENSORS,
    "monarch.tools": "the command line",
    "monarch.worker": _TENSORS,
    "monarch.world_mesh": _TENSORS,
}

# Names of the package `monarch` itself.
NAMES: dict[str, str] = {
    **dict.fromkeys(
        (
            "Future",
            "OpaqueRef",
            "RemoteProcessGroup",
            "Selection",
            "Stream",
            "Tensor",
            "builtins",
            "call_on_shard_and_fetch",
            "coalescing",
            "fetch_shard",
            "function_resolvers",
            "get_active_mesh",
            "get_active_stream",
            "grad_function",
            "grad_generator",
            "inspect",
            "no_mesh",
            "reduce",
            "reduce_",
            "remote",
            "show",
            "slice_mesh",
            "timer",
            "to_mesh",
            "world_mesh",
        ),
        _TENSORS,
    ),
    "ActorFuture": "torchmonarch, where it cannot be imported either (use monarch.actor.Future)",
    "Simulator": _SIMULATOR,
    "mast_reserve": "the scheduler of one company",
    "set_meta": _SIMULATOR,
}

# Names of public modules that their module does not have yet.
OTHERS: dict[str, dict[str, str]] = {}


def missing(module: str, name: str) -> Exception:
    """What to raise for a name that a public module of ours does not have."""
    shown = module.replace("monarch_nb", "monarch", 1)
    part = OTHERS.get(module, {}).get(name)
    if part is None and module == "monarch_nb":
        part = NAMES.get(name) or MODULES.get(f"monarch.{name}")
    if part is not None:
        return _not_yet(f"{shown}.{name}", part)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def part_of(module: str) -> str | None:
    """What a missing module, or one of its parents, belongs to."""
    while "." in module:
        if module in MODULES:
            return MODULES[module]
        module = module.rpartition(".")[0]
    return None


def check_module(module: str) -> None:
    """Raises NotYetError for a module of torchmonarch that is not there yet."""
    part = part_of(module)
    if part is not None:
        raise _not_yet(module, part)


class Alias(ModuleType):
    """A module under a private name of torchmonarch: what is looked up in it comes from its homes."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Stands for {name} of torchmonarch; see monarch.actor for the public names.")
        self.__path__: list[str] = []
        self._homes = ALIASES[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for home in self._homes:
            if home not in sys.modules and importlib.util.find_spec(home) is None:
                raise _not_yet(f"{self.__name__}.{name}", part_of(home.replace("monarch_nb", "monarch", 1)) or home)
            module = importlib.import_module(home)
            if name in vars(module):
                return vars(module)[name]
        raise NotYetError(
            f"{self.__name__}.{name} is private to torchmonarch and has no counterpart here; the public names are in "
            f"monarch.actor, see {PAGE}",
            name=self.__name__,
        )
