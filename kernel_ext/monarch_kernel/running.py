"""Running a cell on the ranks of a mesh."""

from typing import Any

from monarch_nb.mesh import ValueMesh, run_on

from .display.errors import cell_syntax


def run_cell(mesh: Any, source: str, filename: str) -> ValueMesh[Any] | None:
    """Runs source on every rank and waits; the values of its last expression, or None when all are None."""
    with cell_syntax():
        future = run_on(mesh, source, filename=filename)
    values = future.get()
    return values if any(value is not None for value in values.values()) else None
