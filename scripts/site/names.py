"""The public names of the library, where each is defined, and tested code of the documentation that uses it."""

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import monarch_nb
from tests.notebook.pages import PAGES, Block, blocks

# Public packages that are no modules of `monarch` by that list.
ALSO = ("profiling", "telemetry")
ELSEWHERE = {"builtins", "timer"}  # modules of torchmonarch's, served under the name `monarch` alone


@dataclass(frozen=True)
class Name:
    """A public name: `monarch.actor.Actor`."""

    module: str  # "actor"; "" for monarch itself
    name: str

    @property
    def full(self) -> str:
        """As users write it."""
        return f"{module_path(self.module)}.{self.name}"

    @property
    def anchor(self) -> str:
        """The anchor of its heading; Markdown would take underscores around a word for emphasis."""
        return f"{module_path(self.module)}.{self.name.strip('_')}"

    @property
    def value(self) -> Any:
        """The object itself."""
        return getattr(module_of(self.module), self.name)

    @property
    def home(self) -> str:
        """Where it is defined, as a path that documentation tools find; "" for plain values."""
        value = self.value
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        return f"{module}.{path}" if module and path else ""

    @property
    def kind(self) -> str:
        """Its kind in a word."""
        value = self.value
        if inspect.isclass(value):
            return "exception" if issubclass(value, BaseException) else "class"
        return "function" if inspect.isfunction(value) else "value"


def modules() -> list[str]:
    """The public modules, that of `monarch` itself first."""
    return ["", *sorted({*monarch_nb._MODULES, *ALSO} - ELSEWHERE)]


def module_of(module: str) -> ModuleType:
    """A public module."""
    return importlib.import_module(f"monarch_nb.{module}" if module else "monarch_nb")


def module_path(module: str) -> str:
    """As users write it."""
    return f"monarch.{module}" if module else "monarch"


def names(module: str) -> list[Name]:
    """Its public names, classes first."""
    entries = [Name(module, name) for name in module_of(module).__all__]
    order = {"class": 0, "function": 1, "exception": 2, "value": 3}
    return sorted(entries, key=lambda entry: (order[entry.kind], entry.name))


@cache
def first_home() -> dict[str, Name]:
    """By what is named, the name under which the site describes it: that of the module that is not `monarch` itself."""
    homes: dict[str, Name] = {}
    for module in [*modules()[1:], ""]:
        for name in names(module):
            if name.home:
                homes.setdefault(name.home, name)
    return homes


@cache
def _cells() -> tuple[Block, ...]:
    return tuple(block for page in PAGES for block in blocks(page) if block.is_cell)


def example(name: Name) -> Block | None:
    """The shortest cell of the documentation that uses a name, if any does. All cells are run by tests."""
    if name.name.startswith("__"):
        return None
    word = re.escape(name.name)
    # As `debug.wait`, or as `monarch.profile` where `monarch` has it too; else bare, on a page that imports it.
    modules_of_it = [name.module or "monarch", *(["monarch"] if name.name in module_of("").__all__ else [])]
    dotted = re.compile(rf"\b({'|'.join(modules_of_it)})\.{word}\b")
    imported = re.compile(rf"from monarch(?:_nb)?\b[\w.]* import [^\n]*\b{word}\b|^\s+{word},$", re.MULTILINE)
    used = re.compile(rf"\b{word}\b")
    cells = [block for block in _cells() if dotted.search(block.text)]
    if not cells:
        pages = {block.page for block in _cells() if imported.search(block.text)}
        cells = [block for block in _cells() if block.page in pages and _uses(used, block.text)]
    return min(cells, key=lambda block: (len(block.text), str(block)), default=None)


def _uses(used: re.Pattern[str], text: str) -> bool:
    return any(used.search(line) and not re.match(r"\s*(from|import) ", line) for line in text.splitlines())
