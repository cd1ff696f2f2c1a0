"""One notebook kernel as the single controller of a cluster.

Users write `import monarch` and `from monarch.actor import Actor, endpoint`; `monarch.X` and `monarch_nb.X` are the
same modules. Each name is imported when it is first used, so `import monarch_nb` costs next to nothing.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from monarch_nb import _package
from monarch_nb._package import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from IPython.core.interactiveshell import InteractiveShell

    from monarch_nb.actor import Future
    from monarch_nb.config import clear_runtime_config, configure, configured, get_global_config, get_runtime_config
    from monarch_nb.connect.downtime import results
    from monarch_nb.connect.mesh_attach import attach
    from monarch_nb.diagnosis import diagnose, watch
    from monarch_nb.distributed import (
        OpaqueRef,
        RemoteProcessGroup,
        Simulator,
        Stream,
        Tensor,
        call_on_shard_and_fetch,
        checkpoint,
        coalescing,
        compile,  # noqa: A004 - as torch.compile
        distribute,
        fetch_shard,
        from_local,
        function_resolvers,
        get_active_mesh,
        get_active_stream,
        grad_function,
        grad_generator,
        inspect,
        module_to_mesh,
        no_mesh,
        reduce,
        reduce_,
        remote,
        set_meta,
        show,
        slice_mesh,
        to_mesh,
    )
    from monarch_nb.lifecycle import heal_mesh
    from monarch_nb.profiling import profile, timeline
    from monarch_nb.shape import Extent, NDSlice, Shape

__all__ = [
    "Extent",
    "Future",
    "NDSlice",
    "OpaqueRef",
    "RemoteProcessGroup",
    "Shape",
    "Simulator",
    "Stream",
    "Tensor",
    "__version__",
    "attach",
    "call_on_shard_and_fetch",
    "checkpoint",
    "clear_runtime_config",
    "coalescing",
    "compile",
    "configure",
    "configured",
    "diagnose",
    "distribute",
    "fetch_shard",
    "from_local",
    "function_resolvers",
    "get_active_mesh",
    "get_active_stream",
    "get_global_config",
    "get_runtime_config",
    "grad_function",
    "grad_generator",
    "heal_mesh",
    "inspect",
    "module_to_mesh",
    "no_mesh",
    "profile",
    "reduce",
    "reduce_",
    "remote",
    "results",
    "set_meta",
    "show",
    "slice_mesh",
    "timeline",
    "to_mesh",
    "watch",
]

# Public names and the modules that define them.
_HOMES = {
    "Extent": "monarch_nb.shape",
    "Future": "monarch_nb.actor",
    "NDSlice": "monarch_nb.shape",
    "Shape": "monarch_nb.shape",
    "clear_runtime_config": "monarch_nb.config",
    "configure": "monarch_nb.config",
    "configured": "monarch_nb.config",
    "get_global_config": "monarch_nb.config",
    "get_runtime_config": "monarch_nb.config",
    "attach": "monarch_nb.connect.mesh_attach",
    "checkpoint": "monarch_nb.distributed",
    "coalescing": "monarch_nb.distributed",
    "compile": "monarch_nb.distributed",
    "diagnose": "monarch_nb.diagnosis",
    "distribute": "monarch_nb.distributed",
    "fetch_shard": "monarch_nb.distributed",
    "function_resolvers": "monarch_nb.distributed",
    "get_active_mesh": "monarch_nb.distributed",
    "inspect": "monarch_nb.distributed",
    "Simulator": "monarch_nb.distributed",
    "Stream": "monarch_nb.distributed",
    "get_active_stream": "monarch_nb.distributed",
    "grad_function": "monarch_nb.distributed",
    "grad_generator": "monarch_nb.distributed",
    "no_mesh": "monarch_nb.distributed",
    "reduce": "monarch_nb.distributed",
    "reduce_": "monarch_nb.distributed",
    "remote": "monarch_nb.distributed",
    "OpaqueRef": "monarch_nb.distributed",
    "RemoteProcessGroup": "monarch_nb.distributed",
    "call_on_shard_and_fetch": "monarch_nb.distributed",
    "set_meta": "monarch_nb.distributed",
    "show": "monarch_nb.distributed",
    "slice_mesh": "monarch_nb.distributed",
    "to_mesh": "monarch_nb.distributed",
    "Tensor": "monarch_nb.distributed",
    "from_local": "monarch_nb.distributed",
    "heal_mesh": "monarch_nb.lifecycle",
    "module_to_mesh": "monarch_nb.distributed",
    "profile": "monarch_nb.profiling",
    "timeline": "monarch_nb.profiling",
    "results": "monarch_nb.connect.downtime",
    "watch": "monarch_nb.diagnosis",
}

# Public modules, which are also attributes without an import of their own.
_MODULES = frozenset(
    {
        "actor",
        "builtins",
        "config",
        "data",
        "debug",
        "distributed",
        "exceptions",
        "job",
        "lightning",
        "rdma",
        "spmd",
        "state_dict",
        "testing",
        "timer",
    }
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        path = f"{__name__}.{name}"
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:  # the module exists, but one of its imports is missing
                raise
    if name.startswith("_"):  # a name that tools look up
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = importlib.import_module(f"{__name__}.compat").missing_part(f"monarch.{name}")
    raise AttributeError(reason or f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Missing:
    """The last finder of the import system: raises NotYetError for parts of `monarch` that this version lacks.

    For an attribute (`hasattr`, `getattr`) such a name is an AttributeError, as programs expect; `from monarch import
    name` then looks for a module of that name, and raises the ImportError with the text from this finder.
    """

    @staticmethod
    def find_spec(name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None) -> None:
        root, dot, rest = name.partition(".")
        if dot and root in ("monarch", __name__) and sys.modules.get(root) is sys.modules.get(__name__):
            importlib.import_module(f"{__name__}.compat").check(f"monarch.{rest}")


if not any(getattr(one, "__name__", "") == "_Missing" for one in sys.meta_path):  # this module may be reloaded
    sys.meta_path.append(_Missing)


def _become_controller() -> None:
    controller = importlib.import_module("monarch_nb.engine.controller").become_controller()
    importlib.import_module("monarch_nb.runtime").install(controller)


_package.set_becoming(_become_controller)


def load_ipython_extension(ip: "InteractiveShell") -> None:
    """Loads the notebook side: `%load_ext monarch`, or `%load_ext monarch_nb` anywhere."""
    if f"{__name__}.mesh" not in sys.modules:  # the host agent starts while the rest is imported
        importlib.import_module(f"{__name__}.host.launch").start_ahead()
    _kernel_side().load_ipython_extension(ip)


def unload_ipython_extension(ip: "InteractiveShell") -> None:
    """Removes the notebook side from this kernel."""
    _kernel_side().unload_ipython_extension(ip)


def _kernel_side() -> Any:
    # The only place where the library imports the kernel's side, and only when the kernel requests it.
    return importlib.import_module("monarch_kernel")
