"""The guide and the doctor's findings, as tables."""

from html import escape
from typing import TYPE_CHECKING

from ..guide import Guide, manual, running, title
from .html import LEFT, framed, swatch, table
from .meshes import overview_html

if TYPE_CHECKING:
    from monarch_nb.doctor import Check

    from ..doctor import Checkup

_LOOKS = {"ok": "idle", "warning": "healing", "error": "failed"}  # like ranks in these states


def guide_html(guide: Guide) -> str:
    """HTML of %monarch."""
    parts = [f"<div><b>{escape(title())}</b></div><div>{escape(running(guide.meshes))}</div>"]
    if guide.meshes.rows:
        parts.append(overview_html(guide.meshes))
    parts += [table((heading, ""), rows, mono=(0,)) for heading, rows in guide.steps]
    parts.append(
        f'<div style="overflow-wrap:anywhere">The manual: <a href="{escape(manual())}">{escape(manual())}</a></div>'
    )
    return framed(*parts, kind="mnb-d")


def checkup_html(diagnosis: "Checkup") -> str:
    """HTML of %monarch doctor."""
    parts = [f"<div><b>{escape(diagnosis.summary)}</b></div>"]
    for name, findings in diagnosis.findings.items():
        rows = "".join(map(_row, findings))
        head = f'<thead><tr><th colspan="2"{LEFT}>{escape(name)}</th></tr></thead>'
        parts.append(f'<table class="mnb-t">{head}<tbody>{rows}</tbody></table>')
    return framed(*parts, kind="mnb-d")


def _row(finding: "Check") -> str:
    title = f"{finding.mark} {finding.about}"
    advice = f"<div><b>{escape(finding.advice)}</b></div>" if finding.advice else ""
    mark = swatch(_LOOKS[finding.level])
    return f"<tr><td{LEFT}>{mark}{escape(title)}</td><td{LEFT}>{escape(finding.found)}{advice}</td></tr>"
