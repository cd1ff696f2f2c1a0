"""Running a cell on the ranks of a mesh."""

from typing import Any

from monarch_nb.debug.errors import StoppedAtBreakpoint
from monarch_nb.mesh import ValueMesh, run_on

from .display.errors import cell_syntax


def run_cell(shell: Any, mesh: Any, source: str, filename: str) -> ValueMesh[Any] | None:
    """Runs source on every rank and waits; the values of its last expression, or None when all are None.

    Where the wait ends before the cell does, since ranks have stopped in the debugger or by Ctrl-C, the future is the
    output of the cell in the notebook: `Out[3].get()` waits again.
    """
    with cell_syntax():
        future = run_on(mesh, source, filename=filename)
    try:
        values = future.get()
    except (StoppedAtBreakpoint, KeyboardInterrupt) as error:
        number = shell.displayhook.prompt_count
        shell.user_ns.setdefault("_oh", {})[number] = shell.user_ns[f"_{number}"] = future
        if error.args:
            text = str(error.args[0]).replace(" .get() ", f" Out[{number}].get() ")
            error.args = (text, *error.args[1:])
        raise
    return values if any(value is not None for value in values.values()) else None
