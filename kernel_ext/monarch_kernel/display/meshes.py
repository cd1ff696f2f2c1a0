"""Meshes as small grids along their dimensions, coloured by the state of each rank."""

from collections import Counter
from html import escape
from math import prod
from typing import Any

from monarch_nb.store import WORST_FIRST, MeshView, RankView, describe, kind_rows, kinds_text
from monarch_nb.wire import counted, host_name

from ..namespace import HEADINGS, Overview, hosts, kind, refers, shape, states
from .html import LEFT, STATES, framed, heading, lab_button, swatch, table, table_head

ACROSS = 32  # ranks in one line
LINES = 16  # of a grid; further ones are summed up
SIGNS = {"failed": "✕", "healing": "↻", "paused": "■", "unresponsive": "…"}  # not by colour only
DETAILED = 4  # failed ranks with a line of their own
MANY = 256  # ranks; more are shown by their hosts, and what differs among them as a table
CELLS = 512  # of the hosts: where there are more, a cell stands for several


def mesh_html(mesh: Any, *more: str) -> str:
    """Returns a proc or actor mesh, or a slice of one; with more facts about it."""
    view = describe(mesh)
    count = len(view.ranks)
    actors = f"actors: {', '.join(view.actors)}" if view.actors else ""
    location = f"host {hosts(view)}" if len(view.hosts) == 1 else f"hosts {hosts(view)}"
    stopped = f"stopped: {view.stopped}" if view.stopped else ""
    head = heading(
        view.name,
        counted(count, view.actor_class or "proc"),
        shape(view) if view.labels else "",
        location,
        actors,
        *more,
        stopped,
    )
    if count > MANY:
        return framed(head, host_grid(view), legend(view), differences(view), noticed(view))
    return framed(head, grid(view), legend(view), troubles(view), noticed(view))


def mesh_text(mesh: Any, printer: Any, cycle: bool) -> None:
    """Returns a mesh as text: its repr, and, if it has many ranks, their differences."""
    printer.text(repr(mesh))
    view = describe(mesh)
    if len(view.ranks) > ACROSS:
        printer.text(f"\n{kinds_text(view)}")
    for line in view.notices:
        printer.text(f"\n{line}")


def host_grid(view: MeshView) -> str:
    """Returns a cell for each host, or for several of very many, coloured by the worst state of its ranks."""
    by_host: dict[str, list[RankView]] = {}
    for rank in view.ranks:
        by_host.setdefault(rank.host, []).append(rank)
    hosts = list(by_host)
    per_cell = -(-len(hosts) // CELLS)
    cells = [_host_cell(hosts[start : start + per_cell], by_host) for start in range(0, len(hosts), per_cell)]
    rows = "".join(f"<tr>{''.join(cells[start : start + ACROSS])}</tr>" for start in range(0, len(cells), ACROSS))
    legend = f"a cell is {per_cell} hosts" if per_cell > 1 else "a cell is a host"
    note = f'<div class="mnb-s">{legend}, in the colour of its worst rank</div>'
    return f'<table class="mnb-g"><tbody>{rows}</tbody></table>{note}'


def _host_cell(hosts: list[str], by_host: dict[str, list[RankView]]) -> str:
    states = Counter(rank.state for host in hosts for rank in by_host[host])
    worst = min(states, key=WORST_FIRST.index)
    named = hosts[0] if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
    title = f"{named[:60]}: {', '.join(f'{count} {state}' for state, count in states.most_common())}"
    text = f"{states[worst]}{SIGNS[worst]}" if worst in SIGNS else "&nbsp;"
    return f'<td class="mnb-{worst}" style="background-color:{STATES[worst][0]}" title="{escape(title)}">{text}</td>'


def differences(view: MeshView) -> str:
    """Groups of ranks that are alike, and where those are that differ from most."""
    if view.stopped:
        return ""
    listed = table(("ranks", "state", "what", "where"), kind_rows(view))
    if not view.having("failed"):
        return listed
    heal = lab_button(f"Heal {view.name}", "monarch-nb:heal", {"mesh": view.uid})
    return f'{listed}<div class="mnb-s">{_advice(view)}</div>{heal}'


def _advice(view: MeshView) -> str:
    return f"%heal {escape(view.name)}, or heal_mesh(…), starts what is lost again"


def grid(view: MeshView) -> str:
    """Returns the ranks: the last dimension runs across, the others down."""
    if not view.ranks:
        return ""
    across = view.sizes[-1] if view.sizes else 1
    lines = []
    for start in range(0, len(view.ranks), across):
        ranks = view.ranks[start : start + across]
        for offset in range(0, across, ACROSS):
            lines.append((_outer(view, ranks[0], offset, across), ranks[offset : offset + ACROSS]))
    rows = [
        f"<tr><th>{escape(label)}</th>{''.join(_cell(view, rank) for rank in ranks)}</tr>"
        for label, ranks in lines[:LINES]
    ]
    hidden = sum(len(ranks) for _, ranks in lines[LINES:])
    more = f'<div class="mnb-s">… and {hidden} more ranks</div>' if hidden else ""
    return f'<table class="mnb-g"><tbody>{"".join(rows)}</tbody></table>{more}'


def _outer(view: MeshView, first: RankView, offset: int, across: int) -> str:
    outer = " ".join(f"{label}={index}" for label, index in zip(view.labels[:-1], first.point[:-1], strict=False))
    inner = view.labels[-1] if view.labels else ""
    if across > ACROSS:
        inner = f"{inner} {offset}–{min(offset + ACROSS, across) - 1}"
    return " ".join(filter(None, (outer, inner)))


def _cell(view: MeshView, rank: RankView) -> str:
    coordinates = ", ".join(f"{label}={index}" for label, index in zip(view.labels, rank.point, strict=True)) or "one"
    facts = [coordinates, rank.state + (f": {rank.detail}" if rank.detail else ""), f"host {rank.host}"]
    if rank.pid:
        facts.append(f"pid {rank.pid}")
    text = str(rank.point[-1] if rank.point else rank.rank)
    sign = SIGNS.get(rank.state, "")
    # Front ends that do not trust a notebook take its style sheets away.
    style = f"background-color:{STATES[rank.state][0]}"
    return f'<td class="mnb-{rank.state}" style="{style}" title="{escape(" · ".join(facts))}">{text}{sign}</td>'


def legend(view: MeshView) -> str:
    """Rank counts by state."""
    parts = [f'{swatch(state)}<span class="mnb-s">{count} {state}</span>' for state, count in view.counts.items()]
    return f"<div>{'&ensp;'.join(parts)}</div>"


def troubles(view: MeshView) -> str:
    """Details of the first failed ranks, and what to do."""
    failed = view.having("failed")
    if not failed or view.stopped:
        return ""
    rows = []
    for rank in failed[:DETAILED]:
        coordinates = ", ".join(f"{label}={index}" for label, index in zip(view.labels, rank.point, strict=True))
        rows.append((coordinates or view.name, rank.detail))
    if len(failed) > DETAILED:
        rows.append(("…", f"{len(failed) - DETAILED} more"))
    advice = f'<div class="mnb-s">{_advice(view)}</div>'
    return (
        table(("failed", "why"), rows) + advice + lab_button(f"Heal {view.name}", "monarch-nb:heal", {"mesh": view.uid})
    )


def noticed(view: MeshView) -> str:
    """Its hosts that are about to be withdrawn."""
    return "".join(f'<div class="mnb-s">{escape(line)}</div>' for line in view.notices)


def host_mesh_html(mesh: Any) -> str:
    """Returns a mesh of hosts."""
    extent = mesh.extent
    dims = " ".join(f"{label}={size}" for label, size in extent.items())
    count = prod(extent.sizes)
    names = [host_name(mesh.host_ids[rank]) for rank in mesh.region.ranks()]
    rows = [
        (" ".join(f"{label}={index}" for label, index in extent.point(number).items()) or "this host", name)
        for number, name in enumerate(names[:LINES])
    ]
    more = [("…", f"{count - LINES} more")] if count > LINES else []
    more += [("spare", host_name(host)) for host in mesh.spares]
    head = heading(mesh.name, f"{counted(count, 'host')}", dims)
    return framed(head, table(("where", "host"), [*rows, *more]))


def overview_html(overview: Overview) -> str:
    """Returns the table of %meshes."""
    if not overview.rows:
        return framed('<div class="mnb-s">There are no meshes yet. <code>%mesh workers gpus=4</code> makes one.</div>')
    body = []
    for row in overview.rows:
        swatches = "".join(map(swatch, row.view.counts))
        cells = [
            f"<b>{escape(row.view.name)}</b>",
            escape(kind(row.view)),
            escape(shape(row.view)),
            swatches + escape(states(row.view)),
            escape(hosts(row.view)),
            escape(refers(row)),
        ]
        body.append(f"<tr>{''.join(f'<td{LEFT}>{cell}</td>' for cell in cells)}</tr>")
    note = ""
    if overview.unused:
        note = f'<div class="mnb-s">{escape(overview.advice)}</div>'
    return framed(f'<table class="mnb-t">{table_head(HEADINGS)}<tbody>{"".join(body)}</tbody></table>', note)
