"""What people mean by a place in an actor's code: `train.py:42`, `Trainer.step`."""

import linecache
import os
import re
import sys
from typing import Any

from monarch_nb.runtime import EndpointProperty

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)")


def resolve(where: str, obj: Any) -> tuple[str, int, str]:
    """File, line and (of a function) its name, as the actor `obj` knows them. Raises LookupError."""
    place = _PLACE.fullmatch(where)
    if place is not None:
        return file_of(place["file"], obj), int(place["line"]), ""
    names = where.split(".")
    target: Any = next(
        (each for each in (_dig(scope, names) for scope in _scopes(obj, names[0])) if each is not None), None
    )
    target = target.method if isinstance(target, EndpointProperty) else target
    while hasattr(target, "__wrapped__"):
        target = target.__wrapped__
    code = getattr(target, "__code__", None)
    if code is None:
        raise LookupError(f"{where} is neither file:line nor a function that {type(obj).__name__} or its module has")
    return code.co_filename, code.co_firstlineno, code.co_name


def _scopes(obj: Any, first: str) -> list[Any]:
    """Where a function is looked for: the class by its name, in it, in what its methods see, in its modules, in all."""
    cls = type(obj)
    scopes: list[Any] = [{first: cls}] if first == cls.__name__ else []
    scopes.append(cls)
    for method in vars(cls).values():
        inner = method.method if isinstance(method, EndpointProperty) else method
        if hasattr(inner, "__globals__"):
            scopes.append(inner.__globals__)
            break
    return [*scopes, *(sys.modules.get(base.__module__) for base in cls.__mro__[:-1]), sys.modules]


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
