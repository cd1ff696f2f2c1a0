"""Names in the namespace of a rank's cells: completed, described and listed without running its code.

A rank that is busy, or stopped, answers as well: this runs on the thread that reads messages. Attributes are read as
they are stored; properties, and `__getattr__`, are code of the program.
"""

import builtins
import inspect
import keyword
import linecache
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast, overload

from monarch_nb.debug import verbs
from monarch_nb.mesh.console import Console
from monarch_nb.runtime import ActorCell, Runtime
from monarch_nb.wire import Asker

T = TypeVar("T")
MOST = 400  # names of an answer
_TEXT = 20_000  # characters of a docstring, or of source
_SHOWN = 80  # characters of a value
_ITEMS = 20  # of a container that is shown completely
_BITS = 10_000  # of an integer that is shown
_GIVEN = frozenset({"mesh", "point", "rank"})  # names in every cell
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_TYPES = ("types", "typing", "collections.abc")  # of types in annotations
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)  # attributes that C keeps


class NameHandlers:
    """The handlers of one process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        runtime.verbs.handle(verbs.COMPLETE, self._complete)
        runtime.verbs.handle(verbs.DESCRIBE, self._describe)
        runtime.verbs.handle(verbs.NAMESPACE, self._list)

    def _complete(self, request: verbs.CompleteName, asker: Asker[verbs.Names]) -> verbs.Names:
        return verbs.Names(tuple(completions(self._namespace(request.mesh, request.rank), request.text)))

    def _describe(self, request: verbs.DescribeName, asker: Asker[verbs.NameText]) -> verbs.NameText:
        namespace = self._namespace(request.mesh, request.rank)
        return verbs.NameText(description(namespace, request.name, source=request.source))

    def _list(self, request: verbs.ReadNamespace, asker: Asker[verbs.NamespaceVariables]) -> verbs.NamespaceVariables:
        cells = tuple(self._runtime.cells.items())
        rows = next((variables(_namespace_of(cell)) for (mesh, _), cell in cells if mesh == request.mesh), [])
        return verbs.NamespaceVariables(tuple(rows[:MOST]), max(0, len(rows) - MOST))

    def _namespace(self, mesh: str, rank: int) -> Mapping[str, object]:
        cell = self._runtime.cells.get((mesh, rank))
        return {} if cell is None else _namespace_of(cell)


def _namespace_of(cell: ActorCell) -> Mapping[str, object]:
    if _is(cell.obj, Console):
        return cell.obj.namespace
    return {**cell.cell_namespace, **({} if cell.obj is None else {"self": cell.obj})}


def completions(namespace: Mapping[str, object], text: str) -> list[str]:
    """Returns completions of `text`, such as `model.la`; names that begin with `_` only if that was typed."""
    before, dot, stem = text.rpartition(".")
    if dot:
        try:
            names: Iterable[str] = _attributes(_value_at(namespace, before.split(".")))
        except LookupError:
            return []
    else:
        names = {*namespace, *vars(builtins), *keyword.kwlist}
    chosen = sorted(
        name for name in tuple(names) if name.startswith(stem) and (stem.startswith("_") or not name.startswith("_"))
    )
    return [f"{before}{dot}{name}" for name in chosen[:MOST]]


def description(namespace: Mapping[str, object], name: str, *, source: bool = False) -> str:
    """Returns a text about a name: signature, type, value, docstring or source; "" for an unknown one."""
    try:
        value = _value_at(namespace, name.split("."))
    except LookupError:
        return ""
    parts = {
        "Signature": _signature(name.rpartition(".")[2], value),
        "Type": type(value).__name__,
        "Value": "" if _is(value, (*_CALLED, types.ModuleType)) else _shown(value),
        "File": _file(value),
        "Source": _source(value) if source else "",
        "Docstring": _docstring(value),
    }
    if parts["Source"]:
        del parts["Docstring"]
    lines = [f"{f'{label}:':<11}{text}" for label, text in parts.items() if text and "\n" not in text]
    return "\n".join([*lines, *(f"{label}:\n{text}" for label, text in parts.items() if "\n" in text)])


def variables(namespace: Mapping[str, object]) -> list[verbs.NamespaceVariable]:
    """Returns the variables of a namespace and the attributes of an actor's `self`, by name.

    Modules, names that begin with `_`, and those that every cell has, such as `rank`, are left out.
    """
    values = {name: value for name, value in tuple(namespace.items()) if name not in _GIVEN}
    values |= {f"self.{name}": value for name, value in _instance_dict(namespace.get("self")).items()}
    return [
        verbs.NamespaceVariable(name, type(value).__name__, _signature("", value) or _shown(value))
        for name, value in sorted(values.items())
        if not name.removeprefix("self.").startswith("_") and not _is(value, types.ModuleType)
    ]


def _value_at(namespace: Mapping[str, object], path: Sequence[str]) -> object:
    """Returns the value of a path of names. Raises LookupError."""
    first, *rest = path
    value = namespace[first] if first in namespace else vars(builtins)[first]
    for name in rest:
        value = _attribute(value, name)
    return value


@overload
def _is(value: object, kind: type[T]) -> TypeGuard[T]: ...


@overload
def _is(value: object, kind: tuple[type, ...]) -> TypeGuard[Any]: ...


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    """Returns whether a value is of a type: `isinstance` also reads `__class__`, which may run code of the program."""
    return issubclass(type(value), kind)


def _attribute(value: object, name: str) -> object:
    if _is(value, types.ModuleType):
        return vars(value)[name]
    try:
        attribute = inspect.getattr_static(value, name)
    except AttributeError:
        raise LookupError(name) from None
    if _is(attribute, _SLOTS) and not _is(value, type):
        try:
            return attribute.__get__(value)
        except AttributeError:
            raise LookupError(name) from None
    if _is(attribute, (classmethod, staticmethod)):
        return attribute.__func__
    if _is(attribute, types.FunctionType) and not _is(value, type):
        return types.MethodType(attribute, value)
    if _is(attribute, property):
        raise LookupError(f"{name} is computed by the program")
    return attribute


def _attributes(value: object) -> set[str]:
    if _is(value, types.ModuleType):
        return set(vars(value))
    kinds = type.mro(value) if _is(value, type) and value is not type else type(value).__mro__
    names = {name for kind in kinds for name in vars(kind)}
    return {name for name in (*names, *_instance_dict(value)) if isinstance(name, str)}


def _instance_dict(value: object) -> dict[str, object]:
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _signature(name: str, value: object) -> str:
    if not _is(value, _CALLED):
        return ""
    try:
        signature = inspect.signature(value)
        parameters = [
            param.replace(default=_safe(param.default, param.empty), annotation=_safe(param.annotation, param.empty))
            for param in signature.parameters.values()
        ]
        returned = _safe(signature.return_annotation, signature.empty)
        return f"{name}{signature.replace(parameters=parameters, return_annotation=returned)}"
    except Exception:
        return f"{name}(...)"


def _safe(value: object, nothing: object) -> object:
    """Returns a default or an annotation, or an ellipsis for it if its text would run code of the program."""
    is_safe = value is nothing or type(value) in _PLAIN or _is(value, type) or type(value).__module__ in _TYPES
    return value if is_safe else _ELIDED


class _Elided:
    def __repr__(self) -> str:
        return "…"


_ELIDED = _Elided()


def _shown(value: object) -> str:
    """Returns the text of a value, or of its size, where that runs no code of the program."""
    kind = type(value)
    if kind in (str, bytes) and isinstance(value, str | bytes) and not _is_brief(value):
        return f"{_cut(repr(value[: 2 * _SHOWN]))} ({len(value)} {'characters' if kind is str else 'bytes'})"
    if kind in _PLAIN:
        return _cut(repr(value)) if _is_brief(value) else ""
    if kind in (list, tuple, set, frozenset, dict) and isinstance(value, list | tuple | set | frozenset | dict):
        size = f"{len(value)} {'item' if len(value) == 1 else 'items'}"
        if len(value) > _ITEMS:
            return size
        items = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
        return _cut(repr(value)) if all(type(item) in _PLAIN and _is_brief(item) for item in items) else size
    shape, dtype = (_slot(value, name) for name in ("shape", "dtype"))
    if shape is None or dtype is None:
        return ""
    device = _slot(value, "device")
    return f"shape {tuple(cast('tuple[int, ...]', shape))}, {dtype}" + (f", on {device}" if device is not None else "")


def _is_brief(value: object) -> bool:
    """Returns whether a plain value is small enough for its text: Python refuses to format very large numbers."""
    if isinstance(value, int):
        return value.bit_length() < _BITS
    return not isinstance(value, str | bytes) or len(value) <= _TEXT


def _slot(value: object, name: str) -> object:
    """Returns an attribute of a tensor or an array that C stores; None for other values."""
    try:
        attribute = inspect.getattr_static(value, name)
        return attribute.__get__(value) if _is(attribute, _SLOTS) else None
    except Exception:
        return None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _code(value: object) -> types.CodeType | None:
    while _is(value, types.MethodType):
        value = value.__func__
    return value.__code__ if _is(value, types.FunctionType) else None


def _file(value: object) -> str:
    code = _code(value)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return str(vars(value).get("__file__") or "") if _is(value, types.ModuleType) else ""


def _source(value: object) -> str:
    code = _code(value)
    if code is None:
        return ""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    return "".join(inspect.getblock(lines))[:_TEXT].rstrip() if lines else ""


def _docstring(value: object) -> str:
    if _is(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        text: object = value.__doc__
    elif _is(value, _PLAIN):
        return ""
    else:
        text = inspect.getattr_static(value, "__doc__", None)
    return inspect.cleandoc(text)[:_TEXT] if isinstance(text, str) else ""
