"""A proc's descriptors and sys streams, pointed at the files of its spool."""

import io
import os
import sys

from monarch_nb.host.linux import line_buffer_c_stdio
from monarch_nb.logs.forgiving import ForgivingText
from monarch_nb.logs.journal import Journal
from monarch_nb.logs.marks import ERR, OUT, TEXT


def redirect(base: str) -> Journal | None:
    """Point stdin at nothing and stdout and stderr, Python's and C's, at the files of the spool `base`.

    Gives the journal; None where there can be none, then all output is dropped.
    """
    _onto(os.devnull, os.O_RDONLY, 0)
    journal = None
    try:
        if base:
            for kind, target in ((TEXT, None), (OUT, 1), (ERR, 2)):
                _onto(base + kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND, target)
            journal = Journal(base)
    except OSError:
        pass
    if journal is None:
        for target in (1, 2):
            _onto(os.devnull, os.O_WRONLY, target)
    line_buffer_c_stdio()
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]
    out, err = journal.texts if journal is not None else (_plain(1), _plain(2))
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc]
    return journal


def journal_of_this_process() -> Journal | None:
    """The one that `redirect` has made here."""
    return getattr(sys.__stdout__, "journal", None)


def _onto(path: str, flags: int, target: int | None) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if target is not None:
        os.dup2(fd, target)
    if fd != target:
        os.close(fd)


def _plain(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return ForgivingText(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
