"""Static HTML that reads well live and saved, light and dark, and still as plain tables without its style."""

import json
from collections.abc import Iterable, Sequence
from html import escape

STATES = {  # the colours of ranks, and of their edges; translucent, so that they are right on any background
    "idle": ("rgba(46,160,67,.25)", "rgba(46,160,67,.8)"),
    "busy": ("rgba(0,114,178,.45)", "rgba(0,114,178,1)"),
    "failed": ("rgba(218,54,51,.35)", "rgba(218,54,51,1)"),
    "healing": ("rgba(210,153,34,.3)", "rgba(210,153,34,.9)"),
    "starting": ("rgba(56,139,253,.22)", "rgba(56,139,253,.8)"),
    "unresponsive": ("rgba(219,109,40,.3)", "rgba(219,109,40,.9)"),
    "paused": ("rgba(163,113,247,.28)", "rgba(163,113,247,.9)"),
    "stopped": ("rgba(128,128,128,.18)", "rgba(128,128,128,.5)"),
}
_STATES = "".join(
    f".mnb .mnb-{state}{{background:{fill}!important;border-color:{edge}!important}}"
    for state, (fill, edge) in STATES.items()
)
# Colours are translucent and texts in the theme's own. Lab styles all tables in outputs, hence the resets.
STYLE = """
.mnb{font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px;line-height:1.45;
color:var(--jp-ui-font-color1,currentColor);max-width:100%;overflow-x:auto}
.mnb code,.mnb pre,.mnb .mnb-m{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;
background:none;color:inherit;padding:0;border:0}
.mnb pre{margin:2px 0 4px;white-space:pre-wrap;overflow-wrap:anywhere}
.mnb .mnb-h{margin:2px 0 4px}.mnb .mnb-s,.mnb th{opacity:.68;font-weight:400}
.mnb table{border-collapse:separate;border-spacing:0;margin:2px 0 4px!important;border:0;font-size:inherit;width:auto;
table-layout:auto;color:inherit}
.mnb table tr,.mnb table tbody tr:nth-child(odd),.mnb table tbody tr:hover{background:none!important}
.mnb table td,.mnb table th{text-align:left!important;padding:2px 14px 2px 0;vertical-align:baseline;border:0;
max-width:none;white-space:pre-wrap;color:inherit}
.mnb table td.mnb-m{padding:2px 14px 2px 0}
.mnb table.mnb-t td,.mnb table.mnb-t th{border-bottom:1px solid rgba(128,128,128,.25)}
.mnb table.mnb-t th{white-space:nowrap}
.mnb table.mnb-t td:first-child{max-width:60ch;overflow-wrap:break-word}
@media (max-width:480px){.mnb.mnb-d>table.mnb-t td{display:block;overflow-wrap:anywhere}
.mnb.mnb-d>table.mnb-t td:first-child{border-bottom:0;padding-bottom:0}}
.mnb table.mnb-g{border-spacing:3px;margin-left:-3px!important}
.mnb table.mnb-g th{padding:2px 8px 2px 3px;white-space:nowrap}
.mnb table.mnb-g td{text-align:center!important;padding:2px 4px;min-width:20px;border-radius:4px;
border:1px solid rgba(128,128,128,.5);font-size:12px}
.mnb .mnb-failed{font-weight:700}.mnb .mnb-stopped{opacity:.75}
.mnb .mnb-lab{display:none;margin:2px 0 4px;padding:1px 9px;border:1px solid rgba(128,128,128,.5);border-radius:4px;
background:transparent;color:inherit;font:inherit;font-size:12px;cursor:pointer}
.mnb.mnb-f{border-left:3px solid rgba(218,54,51,.9);padding-left:10px}
.mnb.mnb-f .mnb-h b{color:rgb(218,54,51)}.mnb.mnb-f th{min-width:52px}
""".replace("\n", "") + _STATES  # fmt: skip


LEFT = ' style="text-align:left"'  # of a cell: Lab aligns tables to the right, and removes other style sheets


def framed(*parts: str, kind: str = "") -> str:
    """Returns a display: its parts within the scope of the style."""
    return f'<div class="mnb{f" {kind}" if kind else ""}"><style>{STYLE}</style>{"".join(parts)}</div>'


def heading(title: str, *facts: str) -> str:
    """Returns the first line: a title, and a few facts."""
    shown = " · ".join(f'<span class="mnb-s">{escape(fact)}</span>' for fact in facts if fact)
    return f'<div class="mnb-h"><b>{escape(title)}</b>{" · " if shown else ""}{shown}</div>'


def swatch(state: str) -> str:
    """Returns a small box in the colour of a state, also for front ends that remove style sheets."""
    fill, edge = STATES[state]
    box = "display:inline-block;width:9px;height:9px;border-radius:3px;margin-right:4px"
    return f'<span style="{box};border:1px solid {edge};background-color:{fill}"></span>'


def table_head(names: Iterable[str]) -> str:
    """Returns the first row of a table; a column without a name has a plain cell there, for screen readers."""
    cells = "".join(f"<th{LEFT}>{escape(name)}</th>" if name else "<td></td>" for name in names)
    return f"<thead><tr>{cells}</tr></thead>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, mono: Sequence[int] = ()) -> str:
    """Returns a table of texts; the columns `mono` in the code font."""
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=mnb-m' if column in mono else ''}{LEFT}>{escape(text)}</td>"
            for column, text in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="mnb-t">{table_head(head)}<tbody>{body}</tbody></table>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Rows of labels and values."""
    body = "".join(f"<tr><th{LEFT}>{escape(label)}</th><td{LEFT}>{escape(value)}</td></tr>" for label, value in rows)
    return f"<table><tbody>{body}</tbody></table>" if body else ""


def lab_button(label: str, command: str, arguments: dict[str, object]) -> str:
    """Returns a button that runs a command of the JupyterLab panel, whose style sheet shows it; hidden elsewhere."""
    # `hidden` with a value: where a notebook is not trusted, JupyterLab drops our styles and attributes that are empty.
    data = f'data-commandlinker-command="{escape(command)}" data-commandlinker-args="{escape(json.dumps(arguments))}"'
    return f'<button type="button" class="mnb-lab" hidden="hidden" {data}>{escape(label)}</button>'


def folded(summary: str, text: str, *, opened: bool = False) -> str:
    """Long text behind one line."""
    return (
        f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
    )
