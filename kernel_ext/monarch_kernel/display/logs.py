"""Logs of a mesh: the last lines of all ranks, and behind them a line for each rank."""

from html import escape
from typing import Any

from monarch_nb.logs import SHOWN

from .html import framed, heading, table

_STYLES = ((40, "color:rgb(218,54,51)"), (30, "color:rgb(191,135,0)"))


def logs_html(logs: Any) -> str:
    """Warnings and errors in colour; where the files are behind a fold."""
    lines = []
    for record in logs[-SHOWN:]:
        style = next((style for level, style in _STYLES if record.level >= level), "")
        text = escape(str(record))
        lines.append(f'<span style="{style}">{text}</span>' if style else text)
    files = table(("rank", "file"), ((str(rank), path) for rank, path in sorted(logs.files.items())), mono=(1,))
    folded = f"<details><summary>the files that hold all of it</summary>{files}</details>" if logs.files else ""
    shown = "\n".join(lines)
    return framed(heading(logs.heading), f"<pre>{shown}</pre>", folded)
