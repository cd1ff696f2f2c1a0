"""Transfers between the memory of processes, as a small matrix and tables."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_nb.rdma import TransferTable

from monarch_nb.wire import counted

from .html import framed, heading, table

_MOST = 16  # processes in the matrix


def transfers_html(transfers: "TransferTable") -> str:
    """Returns the static form."""
    from monarch_nb.rdma.table import MOVED, NOTHING, OFFERED

    moved, offered = transfers.moved, transfers.offered
    if not moved and not offered:
        return framed(f'<div class="mnb-s">{escape(NOTHING)}</div>')
    parts = [heading("Transfers", f"{counted(len(moved), 'route')}")]
    names = sorted({name for row in moved for name in row[:2]})
    if 1 < len(names) <= _MOST:
        parts.append(_matrix(names, moved))
    if moved:
        parts.append(table(MOVED, moved))
    if offered:
        parts.append(table(OFFERED, offered))
    return framed(*parts)


def _matrix(names: Sequence[str], moved: Sequence[tuple[str, ...]]) -> str:
    routes = {(source, target): (size, mover) for source, target, mover, size, *_ in reversed(moved)}
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for source in names:
        cells = (
            f'<td title="{escape(routes[source, target][1])}">{escape(routes[source, target][0])}</td>'
            if (source, target) in routes
            else "<td></td>"
            for target in names
        )
        rows.append(f"<tr><th>{escape(source)}</th>{''.join(cells)}</tr>")
    return f'<table class="mnb-g"><tbody><tr><th>from \\ to</th>{head}</tr>{"".join(rows)}</tbody></table>'
