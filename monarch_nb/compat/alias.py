"""Modules under another name, which take their attributes from other modules, their homes."""

import importlib
from types import ModuleType
from typing import Any

from monarch_nb._package import refuse
from monarch_nb.compat.names import ALIASES, no_counterpart

_HYPERACTOR = "monarch._rust_bindings.monarch_hyperactor."

# Private names without a meaning here that programs import beside useful ones: the import succeeds, so that the rest
# of such a program works, and their use raises NotImplementedError.
NAMES: dict[str, str] = {
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


class _Refused(type):
    def __call__(cls, *args: object, **kwargs: object) -> object:
        refuse(f"{cls.__module__}.{cls.__name__}", "the inside of torchmonarch")


_made: dict[str, type] = {}


def refused(name: str) -> type | None:
    """Returns the stand-in for a private name, given in full; None for other names."""
    module, _, last = name.rpartition(".")
    if last not in NAMES.get(module, "").split():
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
