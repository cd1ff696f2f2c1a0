"""Hooks that change modules once the program has imported them; the hooks import nothing themselves."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]


class _Finder:
    """A finder that delegates to the other finders, and applies a change after a module's code was executed."""

    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module that is to be changed."""
        change = self.changes.get(name)
        if change is None:
            return None
        finders = (finder for finder in tuple(sys.meta_path) if finder is not self)
        finds = (getattr(finder, "find_spec", None) for finder in finders)
        specs = (find(name, path, target) for find in finds if find is not None)
        spec = next(filter(None, specs), None)
        loader: Any = spec and spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module
        return spec


_finder = _Finder()


def when_imported(name: str, change: Change) -> None:
    """Calls `change` with a module: now if it is imported already, and after each later execution of the module."""
    _finder.changes[name] = change
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        change(module)
