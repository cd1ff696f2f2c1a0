"""Modules under another name: what is looked up in them comes from their homes."""

import importlib
from types import ModuleType
from typing import Any

from monarch_nb.compat.names import ALIASES, no_counterpart
from monarch_nb.compat.refused import refused


class Alias(ModuleType):
    """A module under a name of torchmonarch. It has what its homes have, and the aliases below it as submodules."""

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
        if (found := refused(below)) is not None:
            return found
        raise AttributeError(no_counterpart(below))

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)

    def _public(self) -> list[str]:
        homes = [importlib.import_module(home) for home in self._homes]
        return sorted({name for home in homes for name in getattr(home, "__all__", ())})

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._public()})
