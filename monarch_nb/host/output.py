"""Where a proc writes: a file its agent tails. Writing never blocks on a reader, and a full disk harms nobody."""

import io
import os
import sys

from monarch_nb.host.linux import line_buffer_c_stdio


class ForgivingText(io.TextIOWrapper):
    """A text stream that never raises for lack of space; what could not be written is said once something can be again.

    All below it is C: an interrupt cannot come between writing a line and knowing that it was written.
    """

    _why = ""

    def write(self, text: str, /) -> int:
        """Write what can be written."""
        try:
            if self._why:
                super().write(f"[output was lost here: {self._why}]\n")
                super().flush()
                self._why = ""
            return super().write(text)
        except OSError as error:
            self._why = error.strerror or str(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, if it can be written."""
        try:
            super().flush()
        except OSError as error:
            self._why = error.strerror or str(error)


def redirect(path: str) -> None:
    """Point stdin at nothing and stdout and stderr, Python's and C's, at `path`, line by line."""
    _onto(os.devnull, os.O_RDONLY, 0)
    try:
        _onto(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 1)
    except OSError:
        _onto(os.devnull, os.O_WRONLY, 1)
    os.dup2(1, 2)
    line_buffer_c_stdio()
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]


def _onto(path: str, flags: int, target: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.dup2(fd, target)
    if fd != target:
        os.close(fd)


def _text(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return ForgivingText(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
