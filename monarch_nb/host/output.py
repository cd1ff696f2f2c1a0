"""Where a proc writes: a file its agent tails. Writing never blocks on a reader, and a full disk harms nobody."""

import io
import os
import sys

from monarch_nb.host.linux import line_buffer_c_stdio


class ForgivingFile(io.RawIOBase):
    """A raw stream on a descriptor that drops what cannot be written, and says how much once it can again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lost = 0
        self._why = ""

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: object, /) -> int:
        """Write what can be written; never raises for lack of space."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self.lost:
                os.write(self._fd, f"[{self.lost} bytes of output were lost: {self._why}]\n".encode())
                self.lost = 0
            done = os.write(self._fd, view)
            if done == len(view):
                return done
        except OSError as error:
            self._why = error.strerror or str(error)
            done = 0
        else:
            return done  # the buffer above writes the rest, and meets the error if there is one
        self.lost += len(view) - done
        return len(view)


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
    return io.TextIOWrapper(io.BufferedWriter(ForgivingFile(fd)), "utf-8", "backslashreplace", line_buffering=True)
