"""Prints the figures by which the shape of the code is judged, and with --check fails where one is above its limit.

A limit goes down with what is folded, renamed or typed, in the same commit; up only by what a new package, or the mend
of a defect, needs.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.unit.test_layers import circles, graph  # noqa: E402 - needs the path above

SOURCES = ("monarch_nb", "kernel_ext")
HOUSE_WORDS = re.compile(
    r"(?<![a-z])(un)?(tell|tells|telling|told|hear|hears|hearing|heard|heed|heeds|story|stories)(?![a-z])",
    re.IGNORECASE,
)
# Pronouns, adverbs and participles, which say nothing about the thing that they name.
VAGUE = re.compile(
    "asked|at|behind|born|came|each|found|given|gone|held|here|kept|known|later|made|near|one|others?|places?|said|seen|"
    "taken|there|told|wanted|what|where|which|who|whole|why"
)
SHORT_MODULE = 40  # lines
_BODIES = (ast.stmt, ast.excepthandler, ast.match_case)  # the parents of statements


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@dataclass(frozen=True)
class Figure:
    name: str
    count: Callable[[], float]
    limit: float  # of --check
    goal: float

    def row(self, value: float) -> str:
        return f"| {self.name} | {_number(value)} | {_number(self.limit)} | {_number(self.goal)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    texts = [(path, path.read_text()) for path in paths]
    return tuple(Source(path, text, ast.parse(text)) for path, text in texts)


def files() -> int:
    return len(sources(*SOURCES))


def lines(*folders: str) -> int:
    return sum(source.lines for source in sources(*folders))


def any_per_thousand_lines() -> float:
    words = sum(len(re.findall(r"\bAny\b", source.text)) for source in sources(*SOURCES))
    return round(1000 * words / lines(*SOURCES), 1)


def house_words() -> int:
    return sum(len(HOUSE_WORDS.findall(source.text)) for source in sources(*SOURCES))


def vague_names() -> int:
    """Variables, parameters, functions and attributes, each where it is bound."""
    nodes = (node for source in sources(*SOURCES) for node in ast.walk(source.tree))
    return sum(VAGUE.fullmatch(_bound_name(node).strip("_")) is not None for node in nodes)


def _bound_name(node: ast.AST) -> str:
    match node:
        case (
            ast.Name(id=name, ctx=ast.Store())
            | ast.Attribute(attr=name, ctx=ast.Store())
            | ast.arg(arg=name)
            | ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
        ):
            return name
    return ""


def suppressions() -> int:
    pattern = re.compile(r"#\s*(type:\s*ignore|noqa)\b")
    return sum(len(pattern.findall(source.text)) for source in sources(*SOURCES))


def imports_in_functions() -> int:
    """Import statements below a `def`, each counted once."""

    def below(node: ast.AST, in_function: bool) -> int:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return int(in_function)
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        return sum(below(child, inside) for child in ast.iter_child_nodes(node) if isinstance(child, _BODIES))

    return sum(below(source.tree, False) for source in sources(*SOURCES))


def short_modules() -> int:
    return sum(source.lines < SHORT_MODULE for source in sources(*SOURCES) if source.path.name != "__init__.py")


def classes() -> Iterator[ast.ClassDef]:
    for source in sources(*SOURCES):
        yield from (node for node in source.tree.body if isinstance(node, ast.ClassDef))


def single_protocols() -> int:
    """Protocols of whose members at most one class has all, its own and those of its bases."""
    bases: dict[str, set[str]] = {}
    members: dict[str, set[str]] = {}
    protocols: list[str] = []
    for node in classes():
        names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        if "Protocol" in names:
            protocols.append(node.name)
        bases[node.name] = names
        members[node.name] = _members(node)

    def all_members(name: str) -> set[str]:
        return members[name].union(*(all_members(base) for base in bases[name] if base in members and base != name))

    concrete = [all_members(name) for name in members if name not in protocols]
    return sum(sum(members[name] <= own for own in concrete) <= 1 for name in protocols)


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, annotated names, and what `__init__` and others assign to self."""
    members: set[str] = set()
    for item in node.body:
        match item:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                members.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                members.add(name)
    for item in ast.walk(node):
        match item:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                members.add(name)
    return members - {"__slots__", "__doc__"}


def repeated_class_names() -> int:
    return sum(count > 1 for count in Counter(node.name for node in classes()).values())


def circles_of_imports() -> int:
    return len(circles(graph()))


def long_test_names() -> int:
    names = re.compile(r"def test_(\w+)\(")
    return sum(name.count("_") >= 11 for source in sources("tests") for name in names.findall(source.text))


def modules_of_a_call() -> int:
    """As docs/architecture.md states; a test counts the modules of its drawing."""
    sentence = re.search(r"call and its reply pass (\d+) modules", (ROOT / "docs" / "architecture.md").read_text())
    return int(sentence[1]) if sentence else 0


FIGURES = (
    Figure("files of monarch_nb and kernel_ext", files, 521, 600),
    Figure("lines of monarch_nb and kernel_ext", lambda: lines(*SOURCES), 123_100, 74_000),
    Figure("`Any` per thousand lines, the word", any_per_thousand_lines, 8.8, 9),
    Figure("tell, hear, heed, story and their kin", house_words, 13, 60),
    Figure("names that are pronouns, adverbs or participles", vague_names, 300, 300),
    Figure("type-ignores and noqa", suppressions, 56, 75),
    Figure("imports in functions", imports_in_functions, 72, 75),
    Figure("modules under 40 lines, `__init__` aside", short_modules, 9, 30),
    Figure("Protocols with one implementation", single_protocols, 10, 12),
    Figure("class names used more than once", repeated_class_names, 5, 25),
    Figure("circles of imports", circles_of_imports, 0, 0),
    Figure("lines of tests", lambda: lines("tests"), 91_820, 54_000),
    Figure("names of tests of twelve words and more", long_test_names, 0, 0),
    Figure("modules that a call and its reply pass", modules_of_a_call, 13, 14),
)


def main(check: bool) -> int:
    print("| figure | now | limit | goal |\n| --- | ---: | ---: | ---: |")
    above = []
    for figure in FIGURES:
        value = figure.count()
        print(figure.row(value))
        if value > figure.limit:
            above.append(f"{figure.name}: {_number(value)} is above the limit of {_number(figure.limit)}")
    if check and above:
        print("\n".join(["", *above]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
