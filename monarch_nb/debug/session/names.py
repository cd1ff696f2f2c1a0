"""Names in the namespace of the cells that a rank runs: completed and described without running code of the program.

A rank that is busy, or stopped, answers as well: this runs on the thread that reads messages. Attributes are read as
they are stored; properties, and `__getattr__`, are code of the program.
"""

import builtins
import inspect
import keyword
import linecache
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from monarch_nb.debug import messages as m
from monarch_nb.debug import verbs
from monarch_nb.mesh.console import Console
from monarch_nb.runtime import ActorCell, Runtime
from monarch_nb.wire import Asker

MOST = 400  # names of an answer
_TEXT = 20_000  # characters of a docstring, or of source
_SHOWN = 80  # characters of a value
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_TYPES = ("types", "typing", "collections.abc")  # what annotations are made of
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)  # attributes that C keeps


class NameHandlers:
    """The handlers of one process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        runtime.verbs.handle(verbs.COMPLETE, self._complete)
        runtime.verbs.handle(verbs.DESCRIBE, self._describe)

    def _complete(self, wanted: m.CompleteName, asker: Asker[m.Names]) -> m.Names:
        return m.Names(tuple(completions(self._namespace(wanted.mesh, wanted.rank), wanted.text)))

    def _describe(self, wanted: m.DescribeName, asker: Asker[m.NameText]) -> m.NameText:
        namespace = self._namespace(wanted.mesh, wanted.rank)
        return m.NameText(description(namespace, wanted.name, source=wanted.source))

    def _namespace(self, mesh: str, rank: int) -> Mapping[str, object]:
        cell = self._runtime.cells.get((mesh, rank))
        return {} if cell is None else _namespace_of(cell)


def _namespace_of(cell: ActorCell) -> Mapping[str, object]:
    if isinstance(cell.obj, Console):
        return cell.obj.namespace
    return {**cell.cell_namespace, **({} if cell.obj is None else {"self": cell.obj})}


def completions(namespace: Mapping[str, object], text: str) -> list[str]:
    """Returns what `text`, such as `model.la`, can become. Names that begin with `_` only where that was typed."""
    before, dot, begun = text.rpartition(".")
    if dot:
        try:
            names: Iterable[str] = _attributes(_found(namespace, before.split(".")))
        except LookupError:
            return []
    else:
        names = {*namespace, *vars(builtins), *keyword.kwlist}
    chosen = sorted(
        name for name in tuple(names) if name.startswith(begun) and (begun.startswith("_") or not name.startswith("_"))
    )
    return [f"{before}{dot}{name}" for name in chosen[:MOST]]


def description(namespace: Mapping[str, object], name: str, *, source: bool = False) -> str:
    """Returns what is known of a name: signature, type, value, docstring or source; "" for one that is not there."""
    try:
        value = _found(namespace, name.split("."))
    except LookupError:
        return ""
    parts = {
        "Signature": _signature(name.rpartition(".")[2], value),
        "Type": type(value).__name__,
        "Value": "" if isinstance(value, (*_CALLED, types.ModuleType)) else _shown(value),
        "File": _file(value),
        "Source": _source(value) if source else "",
        "Docstring": _docstring(value),
    }
    if parts["Source"]:
        del parts["Docstring"]
    lines = [f"{f'{label}:':<11}{text}" for label, text in parts.items() if text and "\n" not in text]
    return "\n".join([*lines, *(f"{label}:\n{text}" for label, text in parts.items() if "\n" in text)])


def _found(namespace: Mapping[str, object], path: Sequence[str]) -> object:
    """Raises LookupError."""
    first, *others = path
    value = namespace[first] if first in namespace else vars(builtins)[first]
    for name in others:
        value = _attribute(value, name)
    return value


def _attribute(value: object, name: str) -> object:
    if isinstance(value, types.ModuleType):
        return vars(value)[name]
    try:
        found = inspect.getattr_static(value, name)
    except AttributeError:
        raise LookupError(name) from None
    if isinstance(found, _SLOTS) and not isinstance(value, type):
        try:
            return found.__get__(value)
        except AttributeError:
            raise LookupError(name) from None
    if isinstance(found, classmethod | staticmethod):
        return found.__func__
    if isinstance(found, types.FunctionType) and not isinstance(value, type):
        return types.MethodType(found, value)
    if isinstance(found, property):
        raise LookupError(f"{name} is computed by the program")
    return found


def _attributes(value: object) -> set[str]:
    if isinstance(value, types.ModuleType):
        return set(vars(value))
    kinds = type.mro(value) if isinstance(value, type) and value is not type else type(value).__mro__
    names = {name for kind in kinds for name in vars(kind)}
    try:
        names |= set(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        pass
    return {name for name in names if isinstance(name, str)}


def _signature(name: str, value: object) -> str:
    if not isinstance(value, _CALLED):
        return ""
    try:
        found = inspect.signature(value)
        parameters = [
            each.replace(default=_readable(each.default, each.empty), annotation=_readable(each.annotation, each.empty))
            for each in found.parameters.values()
        ]
        returned = _readable(found.return_annotation, found.empty)
        return f"{name}{found.replace(parameters=parameters, return_annotation=returned)}"
    except Exception:
        return f"{name}(...)"


def _readable(value: object, nothing: object) -> object:
    """A default or an annotation whose text is no code of the program; for others, that it is left out."""
    known = value is nothing or type(value) in _PLAIN or isinstance(value, type) or type(value).__module__ in _TYPES
    return value if known else _ELIDED


class _Elided:
    def __repr__(self) -> str:
        return "…"


_ELIDED = _Elided()


def _shown(value: object) -> str:
    """A value, where that runs no code of the program."""
    kind = type(value)
    if kind in _PLAIN:
        return _cut(repr(value))
    if kind in (list, tuple, set, frozenset, dict) and isinstance(value, list | tuple | set | frozenset | dict):
        size = f"{len(value)} {'item' if len(value) == 1 else 'items'}"
        inside = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
        alike = all(type(each) in _PLAIN for each in inside)
        return _cut(repr(value)) if len(value) <= 20 and alike else size
    shape, dtype = (_slot(value, name) for name in ("shape", "dtype"))
    if shape is None or dtype is None:
        return ""
    device = _slot(value, "device")
    return f"shape {tuple(cast('tuple[int, ...]', shape))}, {dtype}" + (f", on {device}" if device is not None else "")


def _slot(value: object, name: str) -> object:
    """What a tensor or an array keeps of itself; None for others."""
    try:
        found = inspect.getattr_static(value, name)
        return found.__get__(value) if isinstance(found, _SLOTS) else None
    except Exception:
        return None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _code(value: object) -> types.CodeType | None:
    while isinstance(value, types.MethodType):
        value = value.__func__
    return value.__code__ if isinstance(value, types.FunctionType) else None


def _file(value: object) -> str:
    code = _code(value)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return str(vars(value).get("__file__") or "") if isinstance(value, types.ModuleType) else ""


def _source(value: object) -> str:
    code = _code(value)
    if code is None:
        return ""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    return "".join(inspect.getblock(lines))[:_TEXT].rstrip() if lines else ""


def _docstring(value: object) -> str:
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        found: object = value.__doc__
    elif isinstance(value, _PLAIN):
        return ""
    else:
        found = inspect.getattr_static(value, "__doc__", None)
    return inspect.cleandoc(found)[:_TEXT] if isinstance(found, str) else ""
