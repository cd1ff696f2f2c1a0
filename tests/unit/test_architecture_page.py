"""The page on the architecture names the rows that the layer test enforces, and modules that there are."""

import re
from pathlib import Path

import pytest

from tests.unit.test_layers import ROWS

pytestmark = pytest.mark.sources
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PLACES = (ROOT / "monarch_nb", ROOT / "kernel_ext", ROOT / "labextension" / "src")
MODULE = re.compile(r"(?<![\w./-])[a-z_]+(?:/[a-z_]+)+(?![\w/-])")
# The rows of the page leave out what needs nothing of ours.
PACKAGES = [[name for name in row if (ROOT / "monarch_nb" / name).is_dir()] for row in ROWS[1:]]


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def drawn(title: str) -> list[tuple[int, str]]:
    """The modules in the pictures of a section that have a number, with it: the row that they lie in."""
    pictures = "\n".join(re.findall(r"```\n(.*?)```", section(title), re.DOTALL))
    return [(int(row), name) for row, name in re.findall(r"(?<!\w)(\d+)  ([a-z_]+(?:/[a-z_]+)*)", pictures)]


def test_the_table_has_the_rows_that_are_enforced() -> None:
    table = re.findall(r"^\| (\d+) \| ([^|]+) \|", section("Packages"), re.MULTILINE)
    assert [(int(row), re.findall(r"`(\w+)`", names)) for row, names in table] == list(enumerate(PACKAGES, 1))


@pytest.mark.parametrize("name", sorted(set(MODULE.findall(TEXT))))
def test_each_module_that_is_named_exists(name: str) -> None:
    endings = ("", ".py", ".ts", "/__init__.py")
    assert any((place / f"{name}{ending}").exists() for place in PLACES for ending in endings)


@pytest.mark.parametrize("title", ["A call and its reply", "A failure", "A breakpoint"])
def test_the_pictures_give_each_module_the_row_that_it_lies_in(title: str) -> None:
    rows = {name: row for row, names in enumerate(PACKAGES, 1) for name in names}
    assert [(name, row) for row, name in drawn(title) if rows[name.partition("/")[0]] != row] == []


def test_a_call_and_its_reply_pass_at_most_eighteen_modules() -> None:
    modules = {name for _, name in drawn("A call and its reply")} | {"routing/link", "wire/body"}  # that these ask
    assert len(modules) <= 18
    assert f"pass {len(modules)} modules" in section("A call and its reply")
