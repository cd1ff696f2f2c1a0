"""Displays of meshes, failures, lines, metrics, findings and the panel, each as text, as HTML, and live."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from monarch_nb.diagnosis.slow import phase_shares
from monarch_nb.logs import USUAL_LINES, Logs, MeshLogs, Written, logs_of
from monarch_nb.mesh import ActorMesh, ProcMesh, region_of, state_of
from monarch_nb.runtime import Runtime, current_runtime, proc_state_of
from monarch_nb.store import store_of
from monarch_nb.store.failures import clock, state
from monarch_nb.telemetry import Metrics
from monarch_nb.wire import parse_address

from ..display.html import LEFT, facts, folded, framed, heading, swatch, table
from ..display.tensors import MESH as TENSOR_MESH
from ..display.tensors import mesh_facts
from ..namespace import Namespace, Overview
from ..session import Session
from .channel import Message
from .live import LiveView, Shown, bundled

if TYPE_CHECKING:
    from monarch_nb.diagnosis import Diagnosis, Finding, MemoryWatch, StragglerWatch, ValueWatch
    from monarch_nb.diagnosis.slow import MeasuredProcs

SEND_S = 0.1  # between two messages
MOST_LINES = 2000  # lines of one message
FIRST_LINES = 500  # of the first message
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
MOST_BARS = 64  # ranks of a mesh whose phases are drawn
LINES = 200  # of the static form
Line = tuple[int, float, str, str]  # index of the rank, when, level, text
_LEVEL_STYLES = ((40, "color:rgb(218,54,51)"), (30, "color:rgb(191,135,0)"))
_PHASE_COLOURS = {
    "data iterator": "#e69f00",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "optimizer": "#009e73",
    "other": "#cc79a7",
    "garbage collection": "#d55e00",
    "replies": "#f0e442",
    "collective": "repeating-linear-gradient(45deg,#8a8f94 0 3px,transparent 3px 6px)",
    "idle": "color-mix(in srgb,currentColor 12%,transparent)",
}


def options_of(mesh: Any) -> dict[str, Any]:
    """Returns the mesh for a front end; of a slice, the indices of its ranks in the mesh as it was spawned."""
    state, region = state_of(mesh), region_of(mesh)
    options: dict[str, Any] = {"mesh": state.uid}
    if region != state.region:
        indices = {base: index for index, base in enumerate(state.region.ranks())}
        options["ranks"] = [indices[base] for base in region.ranks()]
    return options


def _shown_mesh(mesh: Any) -> Shown:
    region = region_of(mesh)
    options = options_of(mesh)
    if "ranks" in options:
        options["labels"], options["sizes"] = list(region.labels), list(region.extent.sizes)
    return Shown(options, (options["mesh"], region))


def _of_tensors(mesh: Any) -> Shown:
    shown = _shown_mesh(mesh.procs)
    facts = list(mesh_facts(mesh)[:1])  # how many tensors there are, `%tensors` shows as it changes
    return Shown({**shown.options, "facts": facts}, ("tensors", mesh.stream.number, shown.key))


MESH = LiveView(
    name="mesh", **bundled("mesh"), shows={ProcMesh: _shown_mesh, ActorMesh: _shown_mesh, TENSOR_MESH: _of_tensors}
)


class Failures:
    """All failures of this kernel's cluster so far, the latest first."""

    def __init__(self) -> None:
        failures = store_of(current_runtime()).document()["failures"].values()
        self.records = sorted(failures, key=lambda failure: -failure["at"])

    def __repr__(self) -> str:
        if not self.records:
            return "nothing has failed so far"
        return "\n".join(f"{clock(failure['at'])}  {state(failure):<10} {failure['title']}" for failure in self.records)

    def html(self) -> str:
        """Returns the static form."""
        if not self.records:
            return framed('<div class="mnb-s">nothing has failed so far</div>')
        parts = [heading("Failures", f"{len(self.records)} so far")]
        for failure in self.records[:20]:
            parts.append(folded(f"{clock(failure['at'])} {failure['title']} · {state(failure)}", failure["report"]))
        return framed(*parts, kind="mnb-f")


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


class LogView:
    """The last lines of a mesh at the time of its creation; live in front ends with widgets."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.logs = logs_of(mesh)

    @property
    def lines(self) -> list[Line]:
        """The lines in the form of views."""
        return [(line.rank.rank, round(line.time, 3), "", line.text) for line in self.logs[-LINES:]]

    def __repr__(self) -> str:
        return repr(self.logs)


def logs_html(logs: Logs) -> str:
    """Returns the static form of lines: warnings and errors in colour; the paths of the files behind a fold."""
    lines = []
    for record in logs[-USUAL_LINES:]:
        style = next((style for level, style in _LEVEL_STYLES if record.level >= level), "")
        text = escape(str(record))
        lines.append(f'<span style="{style}">{text}</span>' if style else text)
    files = table(("rank", "file"), ((str(rank), path) for rank, path in sorted(logs.files.items())), mono=(1,))
    folded = f"<details><summary>the files that hold all of it</summary>{files}</details>" if logs.files else ""
    shown = "\n".join(lines)
    return framed(heading(logs.heading), f"<pre>{shown}</pre>", folded)


class LineFeed:
    """Sends stored lines, then new ones, for a `watch` message. Ends with `close`."""

    def __init__(self, runtime: Runtime, send: Callable[[Message], None], watch: Message) -> None:
        self._runtime = runtime
        self._send = send
        self._id = watch.get("id")
        self._text = str(watch.get("text") or "").lower()
        self._level = LEVELS.get(str(watch.get("level") or "").lower(), 0)
        state = runtime.meshes.get(str(watch.get("mesh")))
        if state is None:
            raise LookupError(f"there is no mesh {watch.get('mesh')!r}")
        self._procs = proc_state_of(state)
        indices = watch.get("ranks")
        bases = list(state.region.ranks())
        self._index = {base: index for index, base in enumerate(bases) if indices is None or index in indices}
        self._waiting: deque[Line] = deque(maxlen=MOST_LINES)
        self._skipped = 0
        self._lock = threading.Lock()
        self._planned = False
        self._closed = False
        receiver = runtime.part(MeshLogs).receiver
        self._stop = receiver.listen(self._wrote)
        first: list[Line] = []
        for base, index in self._index.items():
            first += self._lines(index, receiver.written(self._procs.address(base)))
        first.sort(key=lambda line: line[1])
        most = int(watch.get("lines") or FIRST_LINES)
        send({"type": "logs", "id": self._id, "reset": True, "lines": first[-most:]})

    def close(self) -> None:
        """Stops sending."""
        self._closed = True
        self._stop()

    def _lines(self, index: int, written: Iterable[Written]) -> Iterator[Line]:
        """Lines that match the view's filter."""
        for block in written:
            if block.level < self._level:
                continue
            level = next((name for name, number in LEVELS.items() if number >= block.level), "critical")
            for text in block.lines:
                if not self._text or self._text in text.lower():
                    yield index, round(block.at, 3), level if block.level else "", text

    def _wrote(self, address: str, written: Sequence[Written]) -> None:  # reading thread
        uid, rank, _ = parse_address(address).place
        if uid != self._procs.uid or not written:
            return
        index = self._index.get(rank)
        if index is None:
            return
        with self._lock:
            for line in self._lines(index, written):
                self._skipped += len(self._waiting) == MOST_LINES
                self._waiting.append(line)
            if self._planned or not self._waiting:
                return
            self._planned = True
        self._runtime.later(SEND_S, self._send_lines)

    def _send_lines(self) -> None:
        with self._lock:
            lines, skipped = list(self._waiting), self._skipped
            self._waiting.clear()
            self._skipped, self._planned = 0, False
        if not self._closed:
            more = {"skipped": skipped} if skipped else {}
            self._send({"type": "logs", "id": self._id, "lines": lines, **more})


LOGS = LiveView(
    name="logs",
    **bundled("logs"),
    feed=lambda watch: LineFeed(watch.runtime, watch.send, watch.message).close,
    shows={LogView: lambda view: Shown({**options_of(view.mesh), "lines": view.lines})},
)


def metrics_html(metrics: Metrics) -> str:
    """Returns the static form of the metrics that actors reported."""
    lines = repr(metrics).split("\n")
    if len(lines) < 2:
        return framed(f'<div class="mnb-s">{lines[0].strip("<>")}</div>')
    rows = [[cell for cell in line.split("  ") if cell] for line in lines]
    return framed(heading(metrics.name), table([cell.strip() for cell in rows[0]], rows[1:]), facts([]))


def diagnosis_html(diagnosis: "Diagnosis") -> str:
    """Returns the static form of a diagnosis."""
    ended = [diagnosis.ended] if diagnosis.ended else []
    return _findings_html(diagnosis.findings, "nothing found", [f"inspected: {diagnosis.inspected}", *ended])


def slow_html(watch: "StragglerWatch") -> str:
    """Returns the static form of the findings of `StragglerWatch`, with the phases of the ranks."""
    return diagnosis_html(watch.diagnosis) + _phases_html(watch.measured)


def memory_html(watch: "MemoryWatch") -> str:
    """Returns the static form of the findings of `MemoryWatch`, with the contents of the highest peak."""
    lines = "".join(
        f'<div class="mnb-s" style="white-space:pre-wrap">{escape(line)}</div>' for line in watch.peak_lines
    )
    return diagnosis_html(watch.diagnosis) + (framed(lines) if lines else "")


def _phases_html(meshes: "Sequence[MeasuredProcs]") -> str:
    """Returns a bar for each rank: its time by phases."""

    rows, used = list[str](), dict.fromkeys(_PHASE_COLOURS, 0.0)
    for procs in meshes:
        for rank, shares in list(phase_shares(procs).items())[:MOST_BARS]:
            parts = [(phase, share) for phase, share in shares.items() if share >= 0.005]
            used.update({phase: max(used[phase], share) for phase, share in parts})
            label = ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in parts)
            bar = "".join(
                f'<i style="width:{100 * share:.2f}%;background:{_PHASE_COLOURS[phase]}"></i>' for phase, share in parts
            )
            name = f"{procs.name} {procs.where([rank])}" if len(meshes) > 1 else procs.where([rank])
            style = "display:flex;height:14px;border-radius:3px;overflow:hidden"
            rows.append(
                f'<tr><td{LEFT}>{escape(name)}</td><td title="{label}" style="width:100%">'
                f'<div role="img" aria-label="{label}" style="{style}">{bar}</div></td></tr>'
            )
    if not rows:
        return ""
    legend = "".join(
        f'<span style="margin-right:12px"><i style="display:inline-block;width:9px;height:9px;margin-right:5px;'
        f'border-radius:2px;background:{_PHASE_COLOURS[phase]}"></i>{phase}</span>'
        for phase, share in used.items()
        if share
    )
    table = f'<table class="mnb-t" style="width:min(100%,720px)"><tbody>{"".join(rows)}</tbody></table>'
    return framed(table, f'<div class="mnb-s">{legend}</div>')


def values_html(watch: "ValueWatch") -> str:
    """Returns the static form of the findings of `watch`."""
    return _findings_html(watch.findings, "no NaN was found", watch.notes)


def _findings_html(findings: "Sequence[Finding]", nothing: str, notes: Sequence[str]) -> str:
    """Returns a table of findings, the certain ones marked in another colour, and lines beneath it."""
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


class ClusterPanel:
    """The cluster of this kernel; a table of its meshes where no script runs."""

    def __init__(self, meshes: Namespace | None = None) -> None:
        """`meshes` are those of a notebook with magics. Without them, no code of the panel's actions is shown."""
        nothing: Any = SimpleNamespace(user_ns={}, user_ns_hidden={})
        self.code = meshes is not None
        self.meshes = Overview((meshes or Namespace(nothing)).rows())

    def __repr__(self) -> str:
        return repr(self.meshes)


def _show_panel(session: Session, line: str) -> ClusterPanel:
    """Show the cluster of this notebook: what runs, and what can be done to it.

    %panel

    It is JupyterLab's side panel in a cell, for front ends that have none: a tree of meshes, hosts, processes and
    actors, with a menu and keys for what can be done to them, failures, logs, the debugger and the rest.
    From Python: monarch_kernel.panel(), as in marimo.
    """
    if line.strip():
        raise UsageError("%panel takes no arguments: what is selected in its tree is acted on")
    return ClusterPanel(session)


PANEL = LiveView(
    name="panel",
    **bundled("panel"),
    shows={ClusterPanel: lambda panel: Shown({"code": panel.code}, "panel")},
    magic=_show_panel,
)
