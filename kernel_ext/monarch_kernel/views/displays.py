"""Displays besides meshes: failures, findings, lines and metrics, each as text, as HTML, and live."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from monarch_nb.logs import logs_of
from monarch_nb.runtime import current_runtime
from monarch_nb.store import store_of
from monarch_nb.store.failures import clock, state
from monarch_nb.telemetry import Metrics

from ..display.html import LEFT, facts, folded, framed, heading, swatch, table
from ..session import Session
from .bundle import bundled
from .live import LiveView, Shown

if TYPE_CHECKING:
    from monarch_nb.diagnosis import Diagnosis, Finding, MemoryWatch, StragglerWatch, ValueWatch

LINES = 200  # of the static form
Line = tuple[int, float, str, str]  # index of the rank, when, level, text


class Failures:
    """All failures of this kernel's cluster so far, the latest first."""

    def __init__(self) -> None:
        failures = store_of(current_runtime()).document()["failures"].values()
        self.records: list[dict[str, Any]] = sorted(failures, key=lambda failure: -failure["at"])

    def __repr__(self) -> str:
        if not self.records:
            return "nothing has failed so far"
        return "\n".join(f"{clock(failure['at'])}  {state(failure):<10} {failure['title']}" for failure in self.records)

    def html(self) -> str:
        """The static form."""
        if not self.records:
            return framed('<div class="mnb-s">nothing has failed so far</div>')
        parts = [heading("Failures", f"{len(self.records)} so far")]
        for failure in self.records[:20]:
            parts.append(folded(f"{clock(failure['at'])} {failure['title']} · {state(failure)}", failure["report"]))
        return framed(*parts, kind="mnb-f")


class LogView:
    """The last lines of a mesh, as they are when this is shown; live where widgets are."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.logs = logs_of(mesh)

    @property
    def lines(self) -> list[Line]:
        """The lines in the form of views."""
        return [(line.rank.rank, round(line.time, 3), "", line.text) for line in self.logs[-LINES:]]

    def __repr__(self) -> str:
        return repr(self.logs)


def metrics_html(metrics: Metrics) -> str:
    """The static form of the metrics that actors reported."""
    lines = repr(metrics).split("\n")
    if len(lines) < 2:
        return framed(f'<div class="mnb-s">{lines[0].strip("<>")}</div>')
    rows = [[cell for cell in line.split("  ") if cell] for line in lines]
    return framed(heading(metrics.name), table([cell.strip() for cell in rows[0]], rows[1:]), facts([]))


def diagnosis_html(diagnosis: "Diagnosis") -> str:
    """The static form of a diagnosis."""
    ended = [diagnosis.ended] if diagnosis.ended else []
    return _findings_html(diagnosis.findings, "nothing found", [f"inspected: {diagnosis.inspected}", *ended])


def watch_html(watch: "StragglerWatch | MemoryWatch") -> str:
    """The static form of what a watch has found."""
    return diagnosis_html(watch.diagnosis)


def values_html(watch: "ValueWatch") -> str:
    """The static form of what `watch` has found."""
    return _findings_html(watch.findings, "no NaN was found", watch.notes)


def _findings_html(findings: "Sequence[Finding]", nothing: str, notes: Sequence[str]) -> str:
    """A table of findings, the certain ones marked in another colour, and lines beneath it."""
    rows = [
        f'<tr><td style="text-align:left;white-space:nowrap">'
        f"{swatch('failed' if finding.sure else 'unresponsive')}{finding.kind.replace('_', ' ')}"
        f"{', perhaps' if finding.is_suspicion else ''}</td><td{LEFT}>{escape(finding.mesh)}</td>"
        f"<td{LEFT}>{escape(finding.text)}</td></tr>"
        for finding in findings
    ]
    shown = f'<table class="mnb-t"><tbody>{"".join(rows)}</tbody></table>' if rows else heading(nothing)
    beneath = "".join(f'<div class="mnb-s">{escape(note)}</div>' for note in notes)
    return framed(shown, beneath, kind="mnb-f" if any(finding.sure for finding in findings) else "")


def failures(session: Session, line: str) -> Failures:
    """Show what has failed so far: when, why, who was notified, the last lines of output, and what to do.

    %failures
    """
    if line.strip():
        raise UsageError("%failures takes no arguments")
    return Failures()


FAILURES = LiveView(
    name="failures", **bundled("failures"), shows={Failures: lambda failures: Shown(key="failures")}, magic=failures
)
