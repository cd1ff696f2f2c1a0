"""Files of cells, by the names that people know them by."""

import re
from typing import TYPE_CHECKING

from .jupyter import cell_text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_FILE = re.compile(r'File "([^"]+)", line (\d+)')


def cell_name(shell: "InteractiveShell", filename: str) -> str:
    """Display name of the cell with this file name, such as "Cell In[3]"; "" if there is none."""
    form = getattr(shell.compile, "format_code_name", None)
    if form is None:
        number = _number(shell, filename)
        return f"Cell In[{number}]" if number else ""
    name = form(filename)
    return " ".join(name) if name else ""


def _number(shell: "InteractiveShell", filename: str) -> int:
    """Returns the number of the newest cell with this file's text, or 0: IPython 7 has no map of files to numbers."""
    cell = cell_text(filename)
    if cell is None:
        return 0
    text = cell.rstrip("\n")
    cells: list[str] = list(getattr(shell.history_manager, "input_hist_parsed", ()))
    return next((number for number in range(len(cells) - 1, 0, -1) if cells[number].rstrip("\n") == text), 0)


def with_cells(shell: "InteractiveShell", text: str) -> str:
    """Returns a traceback in which cells have their names."""

    def named(match: re.Match[str]) -> str:
        cell = cell_name(shell, match[1])
        return f"{cell}, line {match[2]}" if cell else match[0]

    return _FILE.sub(named, text)
