"""Value meshes as compact tables, or side by side where the values are pictures and the like; and futures."""

import sys
from importlib import import_module
from typing import Any

from monarch_nb.mesh.value import places_in
from monarch_nb.mesh.value_text import grouped, nothing_in
from monarch_nb.runtime.output.forms import Forms, forms_of, may_be_rich
from monarch_nb.wire import counted, error_line

from .html import framed, heading, table
from .rich import can_stand_beside, part_of, side_by_side

ROWS = 20  # that are shown at once; those beyond can be unfolded,
UNFOLDED = 1000  # up to so many
RICH = 16  # different values that are shown side by side at once; those beyond can be unfolded
RICH_LOOKED_AT = 64  # values
RICH_BYTES = 8 << 20


def value_mesh_html(mesh: Any) -> str:
    """Returns a row for each different value."""
    count = len(mesh)
    dims = " ".join(f"{label}={size}" for label, size in mesh.extent.items())
    if count and nothing_in(count, mesh.get):
        return framed(heading("ValueMesh", dims, "None on its rank" if count == 1 else f"None on all {count} ranks"))
    head = heading("ValueMesh", dims, f"{counted(count, 'value')}")
    if _has_rich(mesh):
        return _rich_html(mesh, head)
    groups, unseen = grouped(count, mesh.get)
    rows = [(places_in(mesh, ranks) or "value", text) for ranks, text in groups[:UNFOLDED]]
    hidden = sum(len(ranks) for ranks, _ in groups[UNFOLDED:]) + unseen
    if hidden:
        rows.append(("…", f"{hidden} more; see .items() or .get(rank)"))
    parts = [head, table(("where", "value"), rows[:ROWS], mono=(1,))]
    if rows[ROWS:]:
        rest = table(("where", "value"), rows[ROWS:], mono=(1,))
        parts.append(f"<details><summary>{counted(len(rows) - ROWS, 'more row')}</summary>{rest}</details>")
    return framed(*parts)


def _has_rich(mesh: Any) -> bool:
    return any(may_be_rich(_value(mesh, rank)) for rank in range(min(len(mesh), RICH_LOOKED_AT)))


def _value(mesh: Any, rank: int) -> Any:
    try:
        return mesh.get(rank)
    except Exception as error:  # a class that is missing here must not hide the other values
        return f"<cannot be decoded: {error_line(error)}>"


def _rich_html(mesh: Any, head: str) -> str:
    """Equal values once, with their places."""
    groups: dict[str, tuple[Forms, list[int]]] = {}
    size = 0
    hidden = max(0, len(mesh) - RICH_LOOKED_AT)
    for rank in range(len(mesh) - hidden):
        forms = _forms(_value(mesh, rank))
        rich = {kind: form for kind, form in forms.data.items() if kind != "text/plain"} or forms.data
        key = repr(rich)
        if key not in groups and size + len(key) > RICH_BYTES:
            hidden += 1
            continue
        size += len(key) if key not in groups else 0
        groups.setdefault(key, (forms, []))[1].append(rank)
    named = [(places_in(mesh, ranks) or "value", forms) for forms, ranks in groups.values()]
    parts = [(label, part_of(*forms, label)) for label, forms in named]
    more = []
    if rest := parts[RICH:]:
        more.append(f"<details><summary>{counted(len(rest), 'more value')}</summary>{side_by_side(rest)}</details>")
    if hidden:
        more.append(f'<div class="mnb-s">{hidden} more; see .items() or .get(rank)</div>')
    return framed(head) + side_by_side(parts[:RICH]) + (framed(*more) if more else "")


def _forms(value: object) -> Forms:
    if not may_be_rich(value):
        return Forms({"text/plain": grouped(1, lambda _: value)[0][0][1]}, {})
    forms = forms_of(value)
    if "matplotlib.pyplot" in sys.modules:  # the copy of a figure that is open on its rank opens here, too
        import_module("monarch_nb.runtime.output.figures").close(value)  # it would be shown again
    if can_stand_beside(forms.data):
        return forms
    return Forms({"text/plain": forms.data["text/plain"]}, {})


def future_html(future: object) -> str:
    """Returns a future; looking at it waits for nothing and decodes nothing."""
    text = repr(future).strip("<>").removeprefix("Future ")
    state, _, rest = text.partition(": ")
    hint = "wait for it with .get(), or with await" if state == "pending" else ""
    return framed(heading("Future", state, rest, hint))
