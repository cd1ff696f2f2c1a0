"""The package's own data and helpers, for every layer: version and home page, names that are imported at first use,
hooks for modules that the program imports, errors about missing parts, and the way a process becomes a controller.
Imports nothing of the project.

Error texts link to the home page, since a user who has installed a wheel has no other copy of the pages.
"""

import atexit
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

Change = Callable[[Any], None]  # of a module that has been imported

__version__ = "0.1.0"
HOMEPAGE = "https://github.com/monarch-nb/monarch-nb"


def page(name: str) -> str:
    """Returns the address of a page of docs/, or of a heading of one: `manual/hosts.md#who-is-trusted`.

    A test compares all addresses in the code with the existing pages and headings.
    """
    return f"{HOMEPAGE}/blob/main/docs/{name}"


def more(name: str) -> str:
    """Returns the last line of an error text: the address of the page that explains the error."""
    return f"\nMore: {page(name)}"


PAGE = page("compatibility.md")


def open_streams() -> None:
    """Opens the null device as standard streams that are closed: other files would get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # gets the lowest free number, its own


class NotYetError(ModuleNotFoundError):
    """A part of torchmonarch that this version does not have; the text says which, and where to read on.

    `name` is the package that lacks the part. With the part's own name, `from package import part` would take this
    error for a plain missing module and leave its text out.
    """


def sentence(subject: str, part: str, instead: str = "") -> str:
    """Returns the text that `subject` is missing, with its part of torchmonarch and what to do instead."""
    return (
        f"{subject} is not part of Monarch-NB yet: it belongs to {part}, see {PAGE}{'. ' + instead if instead else ''}"
    )


def refuse(subject: str, part: str, instead: str = "") -> NoReturn:
    """Raises NotImplementedError for the use of a name without an implementation."""
    raise NotImplementedError(sentence(subject, part, instead))


# Makes a process outside any cluster a controller; set by the top package.
_become: Callable[[], None] | None = None


def set_becoming(become: Callable[[], None]) -> None:
    """Sets the function that makes this process a controller and installs it."""
    global _become
    _become = become


def become_controller() -> None:
    """Makes this process a controller."""
    assert _become is not None
    _become()


def on_exit(function: Callable[[], object]) -> Callable[[], None]:
    """Calls `function` when this process exits, but not when a fork of it does; call the result to cancel that."""
    process = os.getpid()

    def run() -> None:
        if os.getpid() == process:
            function()

    atexit.register(run)
    return functools.partial(atexit.unregister, run)


def lazy_names(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package; `homes` maps its modules to the public names that each defines."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def look_up(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return look_up


def refuse_old_torch(error: ImportError) -> None:
    """Raises the error that says which PyTorch sharded tensors need, unless it is there and another module is not."""
    torch = sys.modules.get("torch")
    if torch is not None and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise ImportError(
            f"sharded tensors need PyTorch 2.10 or later, and this is {torch.__version__}; everything else works with "
            "it. pip install -U torch"
        ) from error


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


def imported(name: str) -> Any:
    """Returns the module of a complete import; None before it, and while another thread is in the middle of it."""
    module = sys.modules.get(name)
    return None if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def when_imported(name: str, change: Change) -> None:
    """Calls `change` with a module: now if it is imported already, and after each later execution of the module."""
    _finder.changes[name] = change
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if (module := imported(name)) is not None:
        change(module)
