"""The table that %meshes shows."""

from monarch_nb.store import MeshView
from monarch_nb.wire import text_table

from .namespace import MeshRow


class Overview:
    """All meshes, one per row, as text; the HTML form is registered with the other displays."""

    def __init__(self, rows: list[MeshRow]) -> None:
        self.rows = rows

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the table as text: name, kind, shape, state, where, variables."""
        return [
            (row.view.name, kind(row.view), shape(row.view), states(row.view), hosts(row.view), refers(row))
            for row in self.rows
        ]

    @property
    def unused(self) -> int:
        """Number of meshes that nothing refers to any more."""
        return sum(not row.used for row in self.rows)

    @property
    def advice(self) -> str:
        """Advice about unused meshes."""
        if self.unused == 1:
            return "No variable refers to one of these meshes any more. %stop --unused stops it."
        return f"No variable refers to {self.unused} of these meshes any more. %stop --unused stops them."

    def __repr__(self) -> str:
        if not self.rows:
            return "There are no meshes yet. %mesh workers gpus=4 makes one."
        table = text_table([HEADINGS, *self.cells()])
        return f"{table}\n{self.advice}" if self.unused else table


HEADINGS = ("mesh", "kind", "shape", "ranks", "hosts", "variables")


def kind(view: MeshView) -> str:
    """Returns the kind of its members."""
    return view.actor_class or "procs"


def shape(view: MeshView) -> str:
    """Its dimensions."""
    return " ".join(f"{label}={size}" for label, size in zip(view.labels, view.sizes, strict=True)) or "one"


def states(view: MeshView) -> str:
    """Rank counts by state."""
    return ", ".join(f"{count} {state}" for state, count in view.counts.items())


def hosts(view: MeshView) -> str:
    """Its hosts."""
    hosts = view.hosts
    return ", ".join(hosts[:3]) + (f", … ({len(hosts)})" if len(hosts) > 3 else "")


def refers(row: MeshRow) -> str:
    """Variables that refer to it."""
    return ", ".join(row.variables) or ("(held by another object)" if row.used else "(nothing)")
