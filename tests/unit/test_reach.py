"""No package uses a private name of another: what others need has a public name."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from monarch_nb._parsing import parsed

pytestmark = [pytest.mark.slow, pytest.mark.sources]
ROOT = Path(__file__).parents[2]

# Exceptions: (package that reaches, name) and the reason. Entries leave this table; none is added without a reason.
REASONS: dict[tuple[str, str], str] = {
    ("supervision", "_handle_undeliverable_message"): "a hook of actors, under the name that torchmonarch gave it",
    ("collectives", "_timeout"): "PyTorch's: of the options of a process group's backend",
    ("tensor", "_base"): "PyTorch's: the tensor that a tensor is a view of",
    ("tensor", "_version"): "PyTorch's: how often a tensor was written to",
}
# Names that belong to Jupyter, IPython or ipykernel are patched or read in this one module of the kernel's side.
JUPYTER = "kernel_ext/monarch_kernel/jupyter.py"


def package(path: Path) -> str:
    """The package that a file belongs to; the kernel's side is one."""
    top, *inner = path.relative_to(ROOT).parts
    if top == "kernel_ext":
        return "monarch_kernel"
    return inner[0].removesuffix(".py")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def definitions(tree: ast.AST) -> Iterator[str]:
    """Private names that a module gives to itself, its classes and their objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from (part.value for part in ast.walk(value) if isinstance(part, ast.Constant))


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that a module takes from something that is not `self`, with the line."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "sys" | "os")) | ast.Attribute(attr="_replace"):
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name, lineno=line) if is_private(name):
                yield line, name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if is_private(name):
                    yield node.lineno, name
            case ast.ImportFrom(names=names, lineno=line):
                yield from ((line, alias.name) for alias in names if is_private(alias.name))


class Module(NamedTuple):
    """Private names of a file."""

    path: Path
    own: frozenset[str]
    reached: tuple[tuple[int, str], ...]


@functools.cache
def modules() -> list[Module]:
    result = []
    for top in ("monarch_nb", "kernel_ext"):
        for path in sorted((ROOT / top).rglob("*.py")):
            tree = parsed(path.read_text(), str(path))
            result.append(Module(path, frozenset(filter(is_private, definitions(tree))), tuple(uses(tree))))
    return result


def own_names() -> dict[str, set[str]]:
    """Private names by the package that defines them."""
    names: dict[str, set[str]] = {}
    for module in modules():
        names.setdefault(package(module.path), set()).update(module.own)
    return names


def test_no_package_reaches_past_an_underscore_of_another() -> None:
    names = own_names()
    faults, used = [], set()
    for path, _, reaches in modules():
        user = package(path)
        for line, name in reaches:
            owners = sorted(owner for owner, private in names.items() if name in private and owner != user)
            if name in names[user] or not owners:
                continue
            if (user, name) in REASONS:
                used.add((user, name))
            else:
                faults.append(f"{path.relative_to(ROOT)}:{line} takes {name} of {' or '.join(owners)}")
    assert not faults, "\n".join(faults)
    assert REASONS.keys() - used == set(), "nobody reaches for these any more: take them out of the table"


def test_private_names_of_jupyter_are_known_to_one_kernel_module() -> None:
    names = set().union(*own_names().values())
    faults = [
        f"{path.relative_to(ROOT)}:{line} takes {name}"
        for path, _, reaches in modules()
        if package(path) == "monarch_kernel" and str(path.relative_to(ROOT)) != JUPYTER
        for line, name in reaches
        if name not in names
    ]
    assert not faults, "\n".join(faults)
