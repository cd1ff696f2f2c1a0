"""The stubs of `monarch` and the public modules of `monarch_nb` agree, both ways.

A stub re-exports its module by star, so that the names themselves are written down once: in the module's `__all__`.
"""

import ast
import importlib
from pathlib import Path

import pytest

import monarch_nb
from monarch_nb._parsing import parsed

pytestmark = pytest.mark.sources
ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "monarch_nb"
STUBS = ROOT / "kernel_ext" / "monarch-stubs"
# In the library's folder beside the public modules, but started or read rather than imported.
NOT_PUBLIC = frozenset({"__init__", "__main__", "_package", "cli"})


def source_of(name: str) -> Path | None:
    for path in (LIBRARY / f"{name}.py", LIBRARY / name / "__init__.py"):
        if path.is_file():
            return path
    return None


def public_modules() -> list[str]:
    return sorted(name for name in monarch_nb._MODULES if source_of(name))


def static_all(path: Path) -> list[str]:
    """`__all__` as a type checker sees it: a literal list at the top of the module."""
    for node in parsed(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names) | ast.Tuple(elts=names)):
                return [name.value for name in names if isinstance(name, ast.Constant)]
    pytest.fail(f"{path} has no literal __all__")


def test_every_single_module_beside_the_packages_is_declared_public() -> None:
    modules = {path.stem for path in LIBRARY.glob("*.py")} - NOT_PUBLIC
    undeclared = {name for name in modules - monarch_nb._MODULES if not name.startswith("_")}
    assert undeclared == set(), "name them in monarch_nb/__init__.py: _MODULES"


def test_each_public_module_has_a_stub_and_each_stub_its_module() -> None:
    stubs = {path.stem for path in STUBS.glob("*.pyi")} - {"__init__"}
    assert stubs == set(public_modules()), "a stub is two lines; see those in kernel_ext/monarch-stubs"


@pytest.mark.parametrize("name", public_modules())
def test_a_stub_re_exports_its_module(name: str) -> None:
    lines = (STUBS / f"{name}.pyi").read_text().splitlines()
    assert f"from monarch_nb.{name} import *" in lines
    assert f"from monarch_nb.{name} import __all__ as __all__" in lines


@pytest.mark.parametrize("name", public_modules())
def test_the_names_that_type_checkers_see_are_there_at_run_time(name: str) -> None:
    path = source_of(name)
    assert path is not None
    names = static_all(path)
    module = importlib.import_module(f"monarch_nb.{name}")
    assert list(module.__all__) == names
    assert len(set(names)) == len(names)
    assert [item for item in names if not hasattr(module, item)] == []


def test_lazy_names_of_the_package_are_those_that_type_checkers_see() -> None:
    declared = {}
    for node in parsed((LIBRARY / "__init__.py").read_text()).body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                for statement in body:
                    if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("monarch_nb."):
                        declared.update({alias.name: statement.module for alias in statement.names})
    assert declared == monarch_nb._HOMES
    assert sorted(monarch_nb.__all__) == sorted({*declared, "__version__"})
    for name in declared:
        assert getattr(monarch_nb, name) is getattr(importlib.import_module(declared[name]), name)
