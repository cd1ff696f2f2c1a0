"""What people mean by a place in an actor's code: `train.py:42`, `Trainer.step`, `transformers.Trainer.train`."""

import importlib
import linecache
import os
import re
import sys
from typing import Any

from monarch_nb.mesh.console import Console
from monarch_nb.runtime import EndpointProperty
from monarch_nb.wire import error_line, text_of

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)")


def resolve(where: str, obj: Any, *, imports: bool = False) -> tuple[str, int, str]:
    """File, line and (of a function) its name, as the actor `obj` knows them; with `imports`, modules that the name
    begins with are imported. Raises LookupError.
    """
    place = _PLACE.fullmatch(where)
    if place is not None:
        return file_of(place["file"], obj), int(place["line"]), ""
    names = where.split(".")
    target: Any = next(
        (each for each in (_dig(scope, names) for scope in _scopes(obj, names[0])) if each is not None), None
    )
    if target is None and imports:
        target = _imported(names, where)
    target = target.method if isinstance(target, EndpointProperty) else target
    while hasattr(target, "__wrapped__"):
        target = target.__wrapped__
    code = getattr(target, "__code__", None)
    if code is None:
        known = "that is known in cells here" if isinstance(obj, Console) else f"of {type(obj).__name__} or its module"
        raise LookupError(f"{where} is neither file:line, nor a function {known}, nor one of a module by its full name")
    return code.co_filename, code.co_firstlineno, code.co_name


def _scopes(obj: Any, first: str) -> list[Any]:
    """Where a function is looked for: the class by its name, in it, in what its methods see, in its modules, in all."""
    cls = type(obj)
    if isinstance(obj, Console):
        return [obj.namespace, sys.modules]
    scopes: list[Any] = [{first: cls}] if first == cls.__name__ else []
    scopes.append(cls)
    for method in vars(cls).values():
        inner = method.method if isinstance(method, EndpointProperty) else method
        if hasattr(inner, "__globals__"):
            scopes.append(inner.__globals__)
            break
    return [*scopes, *(sys.modules.get(base.__module__) for base in cls.__mro__[:-1]), sys.modules]


def _imported(names: list[str], where: str) -> Any:
    """What a full name means, with its module imported; None if there is no such module."""
    for length in range(len(names) - 1, 0, -1):
        name = ".".join(names[:length])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise LookupError(f"{where}: {name} cannot be imported: {text_of(error)}") from error
        except Exception as error:
            raise LookupError(f"{where}: {name} cannot be imported: {error_line(error)}") from error
        return _dig(module, names[length:])
    return None


def _dig(scope: Any, names: list[str]) -> Any:
    at = scope
    for name in names:
        at = at.get(name) if isinstance(at, dict) else getattr(at, "__dict__", {}).get(name, getattr(at, name, None))
        if at is None:
            return None
    return at


def file_of(name: str, obj: Any) -> str:
    """The file that people mean by a short name: one that code of this process came from. Raises LookupError."""
    if os.path.isabs(name) or name.startswith("<"):
        return name
    files = {getattr(module, "__file__", None) or "" for module in tuple(sys.modules.values())}
    own = getattr(sys.modules.get(type(obj).__module__), "__file__", None)
    ending = os.sep + name.replace("/", os.sep)
    matching = sorted(file for file in {*files, *linecache.cache, own or ""} if file == name or file.endswith(ending))
    if own in matching:
        return str(own)
    if not matching:
        raise LookupError(
            f"no code in this process comes from a file {name}: check the name, or write more of its path"
        )
    if len(matching) > 1:
        raise LookupError(f"{name} may be {', '.join(matching[:4])}: write more of its path")
    return matching[0]
