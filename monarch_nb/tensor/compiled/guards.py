"""Guards on Python values that a step reads, since a compiled call does not read them again.

Guards cover values reachable from the function: globals, closure, `self` and their attributes, modules (training mode,
numbers, parameters) and optimizers (learning rates and the like). Other changes are found by checking runs.
"""

import enum
import functools
import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from monarch_nb.wire import library_folders

Namespace = dict[str, Any]  # attributes of an object, or globals
_MISSING = object()
_DEPTH = 4
_MAX_ITEMS = 64  # elements of a container that are guarded
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


class Watched:
    """A snapshot of the values that a function reads. `changed` takes about 50 ns for each."""

    def __init__(self, function: object, arguments: tuple[object, ...]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._names: list[str] = []
        self._namespaces: list[Namespace] = []
        self._keys: list[str] = []
        self._values: list[object] = []
        self._same: list[tuple[str, Namespace, str, object]] = []
        self._cells: list[tuple[str, types.CellType, object]] = []
        self._seen: set[int] = set()
        self._collect(function, "", 0)
        for value in arguments:
            self._collect(value, type(value).__name__, 1)
        self._same_namespaces = [namespace for _, namespace, _, _ in self._same]
        self._same_keys = [key for _, _, key, _ in self._same]
        self._same_values = [value for _, _, _, value in self._same]

    def changed(self) -> str:
        """Returns a text about the first changed value; "" if none has changed."""
        values = list(map(dict.get, self._namespaces, self._keys))
        if values != self._values:
            for name, was, value in zip(self._names, self._values, values, strict=True):
                if was != value:
                    return f"{name} changed from {was!r} to {value!r}"
        if not all(map(is_, map(dict.get, self._same_namespaces, self._same_keys), self._same_values)):
            return next(
                f"{name} is another object" for name, owner, key, value in self._same if owner.get(key) is not value
            )
        for name, cell, value in self._cells:
            now = _content(cell)
            if now is not value and not (_is_scalar(value) and _is_scalar(now) and now == value):
                return f"{name} changed" + (f" from {value!r} to {now!r}" if _is_scalar(value) else "")
        return ""

    # -- collecting -------------------------------------------------------------------------------------------------

    def _note(self, name: str, namespace: Namespace, key: str, depth: int) -> None:
        value = namespace.get(key, _MISSING)
        if value is _MISSING:
            return
        if _is_scalar(value):
            self._names.append(name)
            self._namespaces.append(namespace)
            self._keys.append(key)
            self._values.append(value)
            return
        self._same.append((name, namespace, key, value))
        self._collect(value, name, depth + 1)

    def _collect(self, value: object, name: str, depth: int) -> None:
        if id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        match value:
            case types.FunctionType():
                self._function(value, depth)
            case types.MethodType():
                self._collect(value.__self__, name or "self", depth)
                self._collect(value.__func__, name, depth)
            case functools.partial():
                for part in (value.func, *value.args, *value.keywords.values()):
                    self._collect(part, name, depth)
            case torch.nn.Module():
                self._module(value, name, depth)
            case torch.optim.Optimizer():
                self.optimizers.append(value)
                for index, group in enumerate(value.param_groups):
                    for key in group:
                        if key != "params":
                            self._note(f"{name}.param_groups[{index}][{key!r}]", group, key, depth)
            case list() | tuple() | dict():
                items = list(value.values() if isinstance(value, dict) else value)
                for index, item in enumerate(items[:_MAX_ITEMS]):
                    self._collect(item, f"{name}[{index}]", depth + 1)
            case type() | types.ModuleType() | torch.Tensor():
                return
            case _:
                self._object(value, name, depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if function.__code__.co_filename.startswith(library_folders()):
            return
        for name in _global_names(function.__code__):
            self._note(name, function.__globals__, name, depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _content(cell)
            self._cells.append((name, cell, value))
            self._collect(value, name, depth + 1)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._collect(value, function.__name__, depth + 1)

    def _module(self, module: torch.nn.Module, name: str, depth: int) -> None:
        for path, submodule in module.named_modules(prefix=name):
            self._seen.add(id(submodule))
            namespace = vars(submodule)
            for key, value in tuple(namespace.items()):
                if _is_scalar(value) and not key.startswith("_"):
                    self._note(f"{path}.{key}", namespace, key, depth)
            for key in submodule._parameters:
                self._note(f"{path}.{key}", submodule._parameters, key, depth)
            self._collect(type(submodule).forward, path, depth)

    def _object(self, value: object, name: str, depth: int) -> None:
        if type(value).__module__.partition(".")[0] in ("torch", "builtins", "monarch_nb", "numpy"):
            return
        for key in tuple(getattr(value, "__dict__", ())):
            self._note(f"{name}.{key}", value.__dict__, key, depth)
        if callable(value):
            self._collect(type(value).__call__, name, depth)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_scalar(value: object) -> bool:
    return isinstance(value, _SCALARS) or (type(value) is tuple and all(map(_is_scalar, value)))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet, or emptied
        return _MISSING
