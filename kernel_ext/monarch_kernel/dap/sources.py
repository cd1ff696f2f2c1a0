"""Texts of files and cells, as this process has them."""

import linecache
import os
from pathlib import Path

from ..jupyter import cell_file, cell_files

LONGEST = 4 << 20  # bytes of a file that are shown


class Sources:
    """Cells are known by the files that their code is said to come from; those that were dumped are written there, for
    debuggers that read files.
    """

    def __init__(self) -> None:
        self._cells: dict[str, str] = {}

    def dump(self, code: str) -> str:
        """Keeps the text of a cell; gives its file."""
        path = cell_file(code)
        self._cells[path] = code
        try:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(path).write_text(code, encoding="utf-8")
        except OSError:  # a full disk: whoever reads files does without
            pass
        return path

    def named_here(self, path: str) -> str:
        """The file of a cell as this kernel names it: a mesh may come from a kernel before, which has run the same."""
        name = os.path.basename(path)
        same = (each for each in self._cells if each != path and os.path.basename(each) == name)
        return path if path in self._cells else next(same, path)

    def text(self, path: str) -> str | None:
        """The text of a file or a cell; None where it is not to be had here."""
        known = self._cells.get(path)
        if known is not None:
            return known
        try:
            if os.path.getsize(path) <= LONGEST:
                return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
        lines = linecache.getlines(path)
        return "".join(lines) if lines else None

    @staticmethod
    def info() -> dict[str, object]:
        """How front ends find the file of a cell."""
        prefix, suffix, seed = cell_files()
        return {"hashMethod": "Murmur2", "hashSeed": seed, "tmpFilePrefix": prefix, "tmpFileSuffix": suffix}
