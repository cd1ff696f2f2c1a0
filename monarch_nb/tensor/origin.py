"""The line of the user's program that issued an operation."""

import linecache
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from monarch_nb.code.file_names import name_of

_LIBRARIES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # of this package
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
    "<frozen",
)
_is_library: dict[str, bool] = {}  # by file name

# A frame's position: cheap to record; its line is computed on demand.
CallSite = tuple[CodeType, int]


class ProgramLine(NamedTuple):
    """A line of a program."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The text of the line; "" if it is not available."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        location = f"{name_of(self.file)}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")
        return f"{location}\n    {self.source}" if self.source else location


def call_site(depth: int = 1) -> CallSite | None:
    """Returns the position of the innermost frame above the caller outside libraries; None if there is none."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        library = _is_library.get(code.co_filename)
        if library is None:
            library = _is_library[code.co_filename] = _is_library_file(code.co_filename)
        if not library:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def _is_library_file(file: str) -> bool:
    return file.startswith(_LIBRARIES)


def origin_of(site: CallSite | None) -> ProgramLine | None:
    """Returns the source line of a call site."""
    if site is None:
        return None
    code, instruction = site
    line = next((line for start, line in _lines(code) if start >= instruction), code.co_firstlineno)
    return ProgramLine(code.co_filename, line, code.co_qualname)


def _lines(code: CodeType) -> Iterator[tuple[int, int]]:
    """Yields the last instruction of each code range, and its line."""
    for _, end, line in code.co_lines():
        if line is not None:
            yield end - 1, line
