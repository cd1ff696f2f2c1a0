"""Rules of imports. Inside monarch_nb a module imports only from its own row of ROWS or from rows above it."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from monarch_nb._parsing import parsed

pytestmark = pytest.mark.sources
ROOT = Path(__file__).parents[2]

# From the ground up; packages and single modules of monarch_nb. A module that is not named is part of the public face.
ROWS = (
    ("_deferred", "_package", "_parsing", "_private"),  # modules that import nothing of ours
    ("settings", "gpu"),  # what every layer reads: time-outs and limits; `config` is its public face
    ("shape", "wire"),
    ("routing",),
    ("transport",),
    ("runtime",),
    ("supervision",),
    ("mesh", "collectives", "lifecycle", "connect", "code", "logs", "host"),
    ("store",),  # the one state, which features may read as displays do
    ("rdma", "data", "debug", "diagnosis", "telemetry", "profiling", "tensor", "job", "top", "doctor", "compat"),
    ("engine",),  # where all of the above is put together
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
PUBLIC_ROW = len(ROWS)
FEATURES = frozenset(ROWS[-2])

# Of one row, also from the ground up: handles, groups, transport of code, starts and stops, connections of hosts.
ASCENDING = ("mesh", "collectives", "code", "lifecycle", "connect")

# Packages that only the kernel's side may import.
KERNEL_SIDE = frozenset(
    {
        "monarch",
        "monarch_kernel",
        "IPython",
        "ipykernel",
        "ipywidgets",
        "anywidget",
        "comm",
        "jupyter_client",
        "traitlets",
    }
)
# The one way up: `%load_ext monarch_nb` finds the kernel's side through the package itself.
KERNEL_SIDE_EXCEPTIONS = frozenset(
    {
        ("monarch_nb", "monarch_kernel"),
        ("monarch_nb", "IPython.core.interactiveshell.InteractiveShell"),  # for type checkers only
    }
)


def module_name(path: Path, source_root: Path) -> str:
    parts = path.relative_to(source_root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(source: str, module: str, *, is_package: bool, for_types: bool = True) -> tuple[str, ...]:
    """Every import anywhere in the source: in functions, by a literal import_module(), `for_types` those of types too.

    `from a import b` counts as a.b: the row is the same whether b is a module or a name in a.
    """
    return tuple(_imports(source, module, is_package=is_package, for_types=for_types))


def _statements(tree: ast.AST, *, for_types: bool) -> Iterator[ast.AST]:
    """All nodes of a tree, with or without those under `if TYPE_CHECKING`."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if not for_types:
                continue
        yield from _statements(node, for_types=for_types)


def _imports(source: str, module: str, *, is_package: bool, for_types: bool) -> Iterator[str]:
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in _statements(parsed(source, module), for_types=for_types):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                origin = [*package[: len(package) - level + 1], *([base] if base else [])] if level else [base or ""]
                yield from (".".join([*origin, alias.name]) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def package_of(dotted: str) -> str:
    """The package or module of monarch_nb that a dotted name lies in; "" for the top package and its names."""
    head = dotted.split(".")[1:2]
    if head and ((ROOT / "monarch_nb" / head[0]).is_dir() or (ROOT / "monarch_nb" / f"{head[0]}.py").is_file()):
        return head[0]
    return head[0] if head and head[0] in ROW_OF else ""


def row(package: str) -> int:
    return ROW_OF.get(package, PUBLIC_ROW)


def fault(importer: str, imported: str) -> str | None:
    """The error of one import, in words."""
    root = imported.partition(".")[0]
    if importer.partition(".")[0] == "monarch_nb" and root in KERNEL_SIDE:
        if (importer, imported) in KERNEL_SIDE_EXCEPTIONS:
            return None
        return f"{importer} imports {imported}: the library does not know the kernel's side"
    if root != "monarch_nb" or importer.partition(".")[0] != "monarch_nb":
        return None
    source, target = package_of(importer), package_of(imported)
    if source == target:
        return None
    if row(target) > row(source):
        return f"{importer} (row {row(source)}) imports {imported} (row {row(target)}): only its own row or rows above"
    if source in ASCENDING and target in ASCENDING[ASCENDING.index(source) :]:
        return f"{importer} imports {imported}: of {', '.join(ASCENDING)} each knows only those before it"
    if source in FEATURES and target in FEATURES:
        return f"{importer} imports {imported}: features do not know each other"
    return None


def faults_in(source_root: Path, files: list[Path]) -> list[str]:
    faults = []
    for path in files:
        module = module_name(path, source_root)
        for imported in imports(path.read_text(), module, is_package=path.name == "__init__.py"):
            if problem := fault(module, imported):
                faults.append(problem)
    return faults


@pytest.mark.slow
def test_every_module_imports_only_from_its_row_or_above() -> None:
    assert faults_in(ROOT, sorted((ROOT / "monarch_nb").rglob("*.py"))) == []


LARGEST_CIRCLE = 3  # files
LARGEST_PACKAGE = 30  # modules of its own, without those of packages in it
LONGEST_MODULE = 600  # lines; a longer one is to be split
USUAL_MODULE = 250  # the median


def graph() -> dict[str, set[str]]:
    """Which module of the library imports which when it runs, with imports inside functions.

    Imports for types alone are left out: a part names its owner's class, and runs nothing of it.
    """
    files = {module_name(path, ROOT): path for path in (ROOT / "monarch_nb").rglob("*.py")}

    def module_of(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    edges: dict[str, set[str]] = {}
    for module, path in files.items():
        names = imports(path.read_text(), module, is_package=path.name == "__init__.py", for_types=False)
        edges[module] = {target for name in names if (target := module_of(name)) and target != module}
    return edges


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules each of which reaches all others of its set (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    components: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for target in edges[module]:
            if target not in order:
                visit(target)
            if target in path:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            start = path.index(module)
            components.append(set(path[start:]))
            del path[start:]

    for module in edges:
        if module not in order:
            visit(module)
    return [circle for circle in components if len(circle) > 1]


@pytest.mark.slow
def test_no_circle_of_imports_is_larger_than_three_files() -> None:
    assert [sorted(circle) for circle in circles(graph()) if len(circle) > LARGEST_CIRCLE] == []


def test_circles_of_imports_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f", "a"}}
    assert circles(edges) == [{"a", "b", "c"}]


def test_modules_are_short_and_packages_are_small() -> None:
    paths = [path for top in ("monarch_nb", "kernel_ext") for path in (ROOT / top).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: count for name, count in lines.items() if count > LONGEST_MODULE} == {}
    assert median(lines.values()) <= USUAL_MODULE
    modules = Counter(path.parent for path in paths if path.name != "__init__.py")
    assert {str(package): count for package, count in modules.items() if count > LARGEST_PACKAGE} == {}


def test_every_package_of_the_library_has_a_row() -> None:
    packages = {path.parent.name for path in (ROOT / "monarch_nb").glob("*/*.py")}
    assert packages - ROW_OF.keys() == set()


def test_only_tests_import_tests() -> None:
    for source_root, folder in ((ROOT, "monarch_nb"), (ROOT / "kernel_ext", "")):
        for path in (source_root / folder).rglob("*.py"):
            if "tests" in (text := path.read_text()):
                names = imports(text, module_name(path, source_root), is_package=path.name == "__init__.py")
                assert not [name for name in names if name.partition(".")[0] == "tests"], path


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("monarch_nb.shape.region", "monarch_nb.wire.header", True),
        ("monarch_nb.routing.link", "monarch_nb.wire.Header", True),
        ("monarch_nb.wire.header", "monarch_nb._package.__version__", True),
        ("monarch_nb.wire.header", "monarch_nb.routing.link", False),
        ("monarch_nb.host.agent", "monarch_nb.mesh.proc", True),
        ("monarch_nb.runtime.loop", "monarch_nb.host.agent", False),
        ("monarch_nb.rdma.buffer", "monarch_nb.mesh.proc", True),
        ("monarch_nb.rdma.buffer", "monarch_nb.job.process", False),
        ("monarch_nb.connect.hosts", "monarch_nb.mesh.host", True),
        ("monarch_nb.mesh.host", "monarch_nb.lifecycle.proc_spawn", False),
        ("monarch_nb.code.reload", "monarch_nb.connect.routes", False),
        ("monarch_nb.mesh.proc", "monarch_nb.actor.Actor", False),
        ("monarch_nb.mesh.proc", "monarch_nb.Extent", False),
        ("monarch_nb.actor", "monarch_nb.rdma", True),
        ("monarch_nb.mesh.proc", "IPython", False),
        ("monarch_nb.mesh.proc", "monarch_kernel.magics", False),
        ("monarch_nb", "monarch_kernel", True),
        ("monarch_kernel.magics", "monarch_nb.mesh.proc", True),
        ("monarch_kernel.magics", "IPython.core", True),
    ],
)
def test_imports_are_judged_by_their_rows(importer: str, imported: str, allowed: bool) -> None:
    assert (fault(importer, imported) is None) is allowed


def test_imports_are_seen_wherever_they_hide() -> None:
    source = """
import monarch_nb.a
from . import b
from ..c import d
if TYPE_CHECKING:
    from monarch_nb.e import f
def later():
    from monarch_nb import g
    importlib.import_module("monarch_nb.h")
"""
    modules = list(imports(source, "monarch_nb.mesh.proc", is_package=False))
    assert sorted(modules) == [
        "monarch_nb.a",
        "monarch_nb.c.d",
        "monarch_nb.e.f",
        "monarch_nb.g",
        "monarch_nb.h",
        "monarch_nb.mesh.b",
    ]
