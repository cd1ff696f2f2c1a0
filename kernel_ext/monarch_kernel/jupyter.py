"""The private names of IPython and ipykernel that are used here: all of them, and where they were tried.

IPython 7.34 to 9.18, ipykernel 6.17 to 7.4: `make test-slow` runs the notebook tests in these kernels. A name that a
later version does not have any more is done without.
"""

import linecache
from typing import Any


def show_error(shell: Any, kind: type[BaseException], error: BaseException, lines: list[str]) -> None:
    """Shows lines as the output of a cell that has raised, and sends them with the error."""
    shell._showtraceback(kind, error, lines)


def last_lines(shell: Any) -> list[str]:
    """What IPython itself has shown of the last error."""
    return list(getattr(shell, "_last_traceback", None) or [])


def obey_subshells(comm: Any) -> None:
    """Has messages to a comm handled on the subshell that the front end asks for.

    ipykernel 7.4 takes them to the shell that last sent on the comm instead: they would wait for the cell that runs.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


def takes_input(kernel: Any) -> bool:
    """Whether the front end of the running cell takes questions."""
    return bool(getattr(kernel, "_allow_stdin", True))


def cell_text(filename: str) -> str | None:
    """The text of a cell by its file name, as IPython 7 keeps it; None if it is not there."""
    entry = getattr(linecache, "_ipython_cache", {}).get(filename)
    return None if entry is None else "".join(entry[2])
