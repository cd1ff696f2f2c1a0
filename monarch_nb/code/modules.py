"""Source files of modules: finding and reloading those that were edited, and display names of files."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import linecache
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple, cast

from monarch_nb._deferred import sysconfig
from monarch_nb._parsing import parsed
from monarch_nb.host.linux import process_state, seconds_since
from monarch_nb.wire import travels_by_value

Namer = Callable[[str], str]

namers: list[Namer] = []  # of source files; each returns "" for a file without a name; a notebook adds its own
_lock = threading.RLock()
_stamps: dict[str, tuple[int, int]] = {}  # module -> time and size of its file as it was loaded here
_OURS = ("monarch_nb", "monarch_kernel", "monarch")


class Reloaded(NamedTuple):
    """Reloaded modules, in order."""

    modules: tuple[str, ...]


# -- finding edited modules --------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _start_ns(pid: int) -> int:
    """Returns the start of this process in wall-clock nanoseconds: modules were loaded after that."""
    try:
        _, ticks = process_state(pid)
        return time.time_ns() - int(seconds_since(ticks) * 1e9)
    except (OSError, ValueError, AttributeError):  # not Linux, where /proc is more exact than psutil
        import psutil

        return int(psutil.Process(pid).create_time() * 1e9)


@functools.lru_cache(maxsize=1)
def _foreign() -> tuple[str, ...]:
    """Returns the folders of the interpreter and of installed packages, which are not edited."""
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)


def _source(module: object) -> str | None:
    """Returns the path of a module's source file; None for modules without one, and for our own."""
    if not isinstance(module, types.ModuleType) or module.__name__.partition(".")[0] in _OURS:
        return None
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    # A module whose name is another one's alias, or that is run as a script, cannot be reloaded.
    if not isinstance(file, str) or not file.endswith(".py") or spec is None or spec.name != module.__name__:
        return None
    return os.path.realpath(file)


def local_modules(roots: Sequence[str] = ()) -> dict[str, str]:
    """Returns loaded modules with their files: those below `roots`, or else all that are no installed packages."""
    prefixes = tuple(f"{os.path.realpath(root)}{os.sep}" for root in roots)
    files = {}
    for name, module in tuple(sys.modules.copy().items()):
        file = _source(module) if name == getattr(module, "__name__", None) else None
        if file is None or file.startswith(_foreign()) or "site-packages" in file:
            continue
        if not prefixes or file.startswith(prefixes):
            files[name] = file
    return files


def edited(roots: Sequence[str] = ()) -> list[str]:
    """Returns local modules whose files have changed since this process loaded them."""
    return [name for name, file in local_modules(roots).items() if _is_edited(name, file)]


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size


def _is_edited(name: str, file: str) -> bool:
    current, loaded = _stamp(file), _stamps.get(name)
    if current is None:
        return False
    return current != loaded if loaded is not None else current[0] > _start_ns(os.getpid())


# -- loading them again ------------------------------------------------------------------------------------------------


def reload_edited(roots: Sequence[str] = (), also: Iterable[str] = ()) -> Reloaded:
    """Loads edited modules again, and those modules of `roots` that import them; names in `__main__` follow.

    `also` names modules to load again in any case. Raises SyntaxError before anything has changed, and later whatever
    a module raises when it is loaded.
    """
    with _lock:
        importlib.invalidate_caches()
        local = local_modules(roots)
        changed = {name for name, file in local.items() if _is_edited(name, file)}
        changed |= {name for name in also if name in local}
        if not changed:
            return Reloaded(())
        order = _in_order(changed, local)
        for name in order:
            linecache.checkcache(local[name])
            compile(Path(local[name]).read_bytes(), local[name], "exec", dont_inherit=True)
        for name in order:
            _load_again(name, local[name])
        return Reloaded(tuple(order))


def _load_again(name: str, file: str) -> None:
    module = sys.modules[name]
    before = {id(value): (attribute, value) for attribute, value in vars(module).items() if _defined_in(value, name)}
    stamp = _stamp(file)
    with contextlib.suppress(OSError, NotImplementedError):  # a cache is compared by whole seconds only
        os.unlink(importlib.util.cache_from_source(file))
    importlib.reload(module)
    if stamp is not None:
        _stamps[name] = stamp
    _rebind(vars(sys.modules["__main__"]), before, vars(module))


def _defined_in(value: object, module: str) -> bool:
    return isinstance(value, type | types.FunctionType) and value.__module__ == module


def _rebind(namespace: dict[str, object], before: Mapping[int, tuple[str, object]], new: Mapping[str, object]) -> None:
    """Rebinds names that were imported from the module to its new objects."""
    for name, value in tuple(namespace.items()):
        attribute, old = before.get(id(value), ("", None))
        if attribute and old is value and attribute in new:
            namespace[name] = new[attribute]


def _in_order(changed: set[str], local: dict[str, str]) -> list[str]:
    """Returns the changed modules and their importers, each after the modules that it imports."""
    imports = {name: _imports(name, file) & local.keys() for name, file in local.items()}
    affected = set(changed)
    while importers := {name for name, used in imports.items() if used & affected} - affected:
        affected |= importers
    order: list[str] = []
    entered: set[str] = set()

    def enter(name: str) -> None:
        if name not in entered:
            entered.add(name)
            for used in sorted(imports[name] & affected):
                enter(used)
            order.append(name)

    for name in sorted(affected):
        enter(name)
    return order


def _imports(name: str, file: str) -> set[str]:
    try:
        tree = parsed(Path(file).read_bytes(), file)
    except (OSError, SyntaxError, ValueError):
        return set()
    return {imported for node in ast.walk(tree) for imported in _named(node, name)} - {name}


def _named(node: ast.AST, name: str) -> Iterator[str]:
    """Yields the names of modules that an import statement may refer to."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = getattr(sys.modules.get(name), "__package__", None) or ""
            try:
                base = importlib.util.resolve_name("." * node.level + base, package)
            except ImportError:
                return
        yield base
        for alias in node.names:
            yield f"{base}.{alias.name}"


# -- classes of modules ------------------------------------------------------------------------------------------------


class Newest:
    """A class in a message that arrives as its newest definition: the receiver reloads its module if it was edited."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __reduce__(self) -> tuple[object, ...]:
        if travels_by_value(self.cls):
            return _same, (self.cls,)
        return newest, (self.cls.__module__, self.cls.__qualname__)


def _same(cls: type) -> type:
    return cls


def newest(module: str, qualname: str) -> type:
    """Returns a class by its name; reloads its module if the file has changed."""
    definition = importlib.import_module(module)
    with _lock:
        file = _source(definition)
        if file is not None and not file.startswith(_foreign()) and _is_edited(module, file):
            linecache.checkcache(file)
            _load_again(module, file)
    for part in qualname.split("."):
        definition = getattr(definition, part)
    return cast(type, definition)


# -- names of files ----------------------------------------------------------------------------------------------------


def name_of(file: str) -> str:
    """Returns `Cell In[3]` for a cell of a notebook; for any other file its own name."""
    return next((name for namer in namers if (name := namer(file))), file)


def line_name(source: str) -> str:
    """Returns `train.py:41` for a line `/home/train.py:41`, and `Cell In[3]:7` in a cell of a notebook."""
    file, _, line = source.rpartition(":")
    return f"{PurePath(name_of(file)).name}:{line}"
