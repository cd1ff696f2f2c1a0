"""The page that leads from the design to its tests names tests that there are."""

import ast
import functools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "design-tests.md"
SECTIONS = [
    "Messages",
    "Processes",
    "Supervision and healing",
    "Trust",
    "The notebook",
    "The debugger",
    "Names and layers",
    "Every day",
]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@functools.cache
def defined(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def rows() -> list[tuple[str, list[str]]]:
    """Each row of a table with the section it is in."""
    found, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith("| claim |"):
            found.append((section, [cell.strip() for cell in line.strip("|").split("|")]))
    return found


def test_every_section_has_its_claims() -> None:
    assert list(dict.fromkeys(section for section, _ in rows())) == SECTIONS


def test_every_row_names_tests_that_exist_or_says_why_not_yet() -> None:
    for _, cells in rows():
        assert len(cells) == 3, cells
        claim, tests, verdict = cells
        named = NAMED.findall(tests)
        for path, name in named:
            assert name in defined(path), f"{claim}: there is no {path}::{name}"
        assert NAMED.sub("", tests).strip(" ,") == "", tests
        if verdict.startswith("not yet"):
            assert re.match(r"not yet: \w", verdict), f"{claim}: say why"
        else:
            assert verdict.startswith("holds")
            assert named, f"{claim}: no test"


def test_what_is_proved_every_day_is_not_slow() -> None:
    named = [test for section, cells in rows() if section == "Every day" for test in NAMED.findall(cells[1])]
    assert named
    for path, name in named:
        tree = ast.parse((TESTS / path).read_text())
        [test] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert "pytest.mark.slow" not in map(ast.unparse, test.decorator_list), f"{path}::{name}"


def test_no_claim_is_made_twice() -> None:
    claims = [(section, cells[0]) for section, cells in rows()]
    assert len(set(claims)) == len(claims)


def test_the_errors_are_related_as_the_design_says() -> None:
    from monarch_nb import exceptions
    from monarch_nb.actor import ActorError, MeshFailure, SupervisionError

    assert issubclass(SupervisionError, exceptions.DeviceMeshError)
    assert issubclass(exceptions.DeviceMeshError, RuntimeError)
    assert not issubclass(ActorError, exceptions.DeviceMeshError)
    assert not issubclass(MeshFailure, BaseException)
