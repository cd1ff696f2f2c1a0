"""Files of cells, by the names that people know them by."""

import re
from typing import Any

_FILE = re.compile(r'File "([^"]+)", line (\d+)')


def cell_name(shell: Any, filename: str) -> str:
    """What people call the cell with this file name, such as "Cell In[3]"; "" if it is none or IPython is too old."""
    form = getattr(shell.compile, "format_code_name", None)
    found = form(filename) if form is not None else None
    return " ".join(found) if found else ""


def with_cells(shell: Any, text: str) -> str:
    """A traceback in which cells have their names."""

    def named(found: re.Match[str]) -> str:
        cell = cell_name(shell, found[1])
        return f"{cell}, line {found[2]}" if cell else found[0]

    return _FILE.sub(named, text)
