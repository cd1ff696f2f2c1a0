"""The notebooks of examples/, run cell by cell in a kernel that several of them share, and their outputs."""

from pathlib import Path

from tests.notebook.notebook import ANSI, Cell, Notebook

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Example:
    """The outputs of a notebook, by the ids of its cells."""

    def __init__(self, name: str) -> None:
        import nbformat  # here: Jupyter's libraries take seconds, and collecting tests must not

        self.path = EXAMPLES / name
        self.cells = [cell for cell in nbformat.read(self.path, as_version=4).cells if cell.cell_type == "code"]
        self.shown: dict[str, Cell] = {}

    def run(self, kernel: Notebook) -> "Example":
        """All of its cells, in the folder it lies in; only those that are meant to raise do."""
        kernel.aside(f"import os; os.chdir({str(self.path.parent)!r})")
        for cell in self.cells:
            self.shown[cell.id] = shown = kernel.run(cell.source, timeout=120)
            meant = "raises-exception" in cell.metadata.get("tags", ())
            assert (shown.error is not None) == meant, f"{self.path.name}, {cell.id}\n{shown.traceback}"
        return self

    def text(self, cell_id: str) -> str:
        """All output of a cell, as text."""
        shown = self.shown[cell_id]
        displays = [str(data.get("text/plain", "")) for data in [*shown.displays, shown.result]]
        return ANSI.sub("", "\n".join(filter(None, [shown.stdout, shown.stderr, *displays, shown.traceback])))

    def html(self, cell_id: str) -> str:
        shown = self.shown[cell_id]
        return "".join(str(data.get("text/html", "")) for data in [*shown.displays, shown.result])
