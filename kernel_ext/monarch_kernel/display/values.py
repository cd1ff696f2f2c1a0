"""Value meshes as compact tables, and futures."""

from typing import Any

from monarch_nb.mesh.value_text import grouped, nothing_in

from .html import framed, heading, table

ROWS = 20


def value_mesh_html(mesh: Any) -> str:
    """One row for each different value."""
    count = len(mesh)
    dims = " ".join(f"{label}={size}" for label, size in mesh.extent.items())
    if count and nothing_in(count, mesh.get):
        return framed(heading("ValueMesh", dims, "None on its rank" if count == 1 else f"None on all {count} ranks"))
    head = heading("ValueMesh", dims, f"{count} value{'' if count == 1 else 's'}")
    groups, unseen = grouped(count, mesh.get)
    rows = [(mesh._where(ranks) or "value", text) for ranks, text in groups[:ROWS]]
    hidden = sum(len(ranks) for ranks, _ in groups[ROWS:]) + unseen
    if hidden:
        rows.append(("…", f"{hidden} more; see .items() or .get(rank)"))
    return framed(head, table(("where", "value"), rows, mono=(1,)))


def future_html(future: Any) -> str:
    """A future; looking at it waits for nothing and decodes nothing."""
    text = repr(future).strip("<>").removeprefix("Future ")
    state, _, rest = text.partition(": ")
    hint = ".get() waits for it, or await it" if state == "pending" else ""
    return framed(heading("Future", state, rest, hint))
