"""Pages of the documentation as cells: their fenced blocks, and the results that they state.

A block ```python is a cell; `EXPRESSION  # -> VALUE` in it says what the expression gives, `python raises NAME` what
the cell raises. A block ```output is what the cell before it shows, line by line and in any order. A cell of
`python machines` needs the machines that it names; `sh` is for a shell; `text` is neither.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.notebook.notebook import ANSI, Cell, Notebook

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/configuration.md",
    *(f"docs/coming-from-{name}.md" for name in ("ipyparallel", "lightning", "ray", "torchmonarch", "torchrun")),
    "docs/frameworks/lightning.md",
    *sorted(f"docs/manual/{path.name}" for path in ROOT.glob("docs/manual/*.md")),
    *(f"docs/guides/{name}.md" for name in ("colab", "jupyterhub", "lightning", "marimo", "vscode")),
    "docs/frameworks/pytorch.md",
)
# Those of the others need what `make setup` does not install: tests/frameworks runs them.
FRAMEWORKS = tuple(sorted(f"docs/frameworks/{path.name}" for path in ROOT.glob("docs/frameworks/*.md")))
KINDS = re.compile(r"python( raises \w+| machines)?|output|sh|text")
CHECK = "def _check(found, wanted): assert found == wanted, f'{found!r} is not {wanted!r}'"

_FENCED = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_CHECKED = re.compile(r"^(?P<expression>\S.*?)  # -> (?P<value>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def raises(self) -> str | None:
        """The name of the error that ends the cell, where it is meant to."""
        return self.kind.removeprefix("python raises ") if self.kind.startswith("python raises ") else None

    @property
    def is_cell(self) -> bool:
        """Whether it runs with nothing but a kernel."""
        return self.kind == "python" or self.raises is not None

    @property
    def cell(self) -> str:
        """Its code; lines that state a value fail if they give another. CHECK has run before it."""
        return _CHECKED.sub(r"_check(\g<expression>, \g<value>)", self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["kind"].strip(), match["text"])
        for match in _FENCED.finditer(text)
    ]


def run_page(page: str, notebook: Notebook, *, timeout: float = 60, warns: bool = False) -> None:
    """Runs a page's cells from top to bottom, and compares their outputs with those on the page.

    `timeout` is that of a cell, in seconds. If a page `warns`, what is written to stderr does not matter.
    """
    notebook.aside(CHECK)
    shown = Cell()
    for block in blocks(page):
        if block.is_cell:
            shown = notebook.run(block.cell, timeout=timeout)
            if warns:
                shown.stderr = ""
            ended = shown.error["ename"] if shown.error else None
            assert (ended, shown.stderr) == (block.raises, ""), f"{block}\n{shown.traceback}"
        elif block.kind == "output":
            assert _lines(shown) == sorted(block.text.splitlines()), block


def _lines(shown: Cell) -> list[str]:
    return sorted(ANSI.sub("", f"{shown.stdout}{shown.stderr}{shown.text}").splitlines())
