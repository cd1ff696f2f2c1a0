"""Metrics of a mesh, and the use of resources over the last hour, as curves: `%metrics NAME` and `%history NAME`."""

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from IPython.core.error import UsageError

from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, state_of
from monarch_nb.profiling import Timeline
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime, current_runtime, started
from monarch_nb.store.history import UsagePart, UsageSample
from monarch_nb.telemetry import History, Metrics
from monarch_nb.telemetry.exports import TARGETS, MetricsExport
from monarch_nb.telemetry.histories import HEAD, Measure
from monarch_nb.telemetry.points import METRICS as POINTS
from monarch_nb.telemetry.points import Points
from monarch_nb.telemetry.verbs import MetricPoint

from ..display.html import framed, heading, table
from ..jupyter import line_magic_of
from ..session import Session
from .channel import Message
from .live import LiveView, Shown, Watch, bundled
from .timelines import TIMELINES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SEND_S = 0.1  # between two messages
Rows = dict[str, list[tuple[int, float, float, float]]]  # name -> (index of the rank, step, when, value)
_PLACES = {"tensorboard": "folder", "wandb": "project", "mlflow": "experiment"}  # what a word after a target names
AGAIN_S = 5.0  # between two messages: processes report about as often
SINGLE = 8  # ranks with a curve each; of more, the highest, the mean and the lowest are drawn
PARTS = 120  # of the time, at most, of such curves
COST = 0.03  # of the time: where gathering takes longer, it is done less often


class Curves:
    """Sends stored points, then new ones, for a `watch` message. Ends with `close`."""

    def __init__(self, runtime: Runtime, send: Callable[[Message], None], watch: Message) -> None:
        self._runtime = runtime
        self._send = send
        self._id = watch.get("id")
        state = runtime.meshes.get(str(watch.get("mesh")))
        if state is None:
            raise LookupError(f"there is no mesh {watch.get('mesh')!r}")
        self._state = state
        self._index = {base: index for index, base in enumerate(state.region.ranks())}
        self._waiting: Rows = {}
        self._lock = threading.Lock()
        self._planned = self._closed = False
        points = runtime.feature(POINTS)
        self._stop = points.listen(self._on_points)
        send({"type": "metrics", "id": self._id, "reset": True, "points": rows(points, state)})

    def close(self) -> None:
        """Stops sending."""
        self._closed = True
        self._stop()

    def _on_points(self, points: list[MetricPoint]) -> None:
        state = self._state
        with self._lock:
            for point in points:
                is_watched = point.mesh == state.uid or (isinstance(state, ProcState) and point.mesh in state.actors)
                index = self._index.get(point.rank) if is_watched else None
                if index is not None:
                    row = (index, point.step or 0.0, point.at, point.value)
                    self._waiting.setdefault(point.name, []).append(row)
            if self._planned or not self._waiting:
                return
            self._planned = True
        self._runtime.later(SEND_S, self._send_points)

    def _send_points(self) -> None:
        with self._lock:
            points, self._waiting = self._waiting, {}
            self._planned = False
        if not self._closed:
            self._send({"type": "metrics", "id": self._id, "points": points})


def rows(points: Points, state: MeshState) -> Rows:
    """Returns all stored points of a mesh, and of the actors on it if it is of procs."""
    index = {base: index for index, base in enumerate(state.region.ranks())}
    by_name: Rows = {}
    for uid in (state.uid, *(state.actors if isinstance(state, ProcState) else ())):
        for name, ranks in points.of(uid).items():
            for base, line in ranks.items():
                if base in index:
                    by_name.setdefault(name, []).extend((index[base], step, when, value) for step, when, value in line)
    return by_name


def metrics(session: Session, line: str) -> Metrics | MetricsExport:
    """Show what the actors of a mesh report with monarch.telemetry.log, as curves, or have it written elsewhere.

    %metrics NAME
    %metrics NAME --to tensorboard FOLDER
    %metrics NAME --to wandb PROJECT [option=value ...]
    %metrics NAME --to mlflow EXPERIMENT [option=value ...]

    An export that a cell has begun goes on when the cell is run again. From Python: trainers.metrics,
    trainers.metrics["loss"] for the numbers, and trainers.metrics.export("tensorboard").
    """
    try:
        name, *words = shlex.split(line)
    except ValueError:  # no words, or a quote that is not closed
        raise UsageError("%metrics takes a name: %metrics trainers") from None
    of_mesh: Metrics = session.find(name).metrics
    return _export(of_mesh, words) if words else of_mesh


def _export(metrics: Metrics, words: list[str]) -> MetricsExport:
    """Begins to write metrics as the words of the line say. Raises UsageError, and what the package raises."""
    option, target, *rest = (*words, "", "")
    if option != "--to" or target not in TARGETS:
        raise UsageError(f"write %metrics {metrics.name}, or %metrics {metrics.name} --to {'|'.join(TARGETS)} [PLACE]")
    options: dict[str, object] = {}
    for word in filter(None, rest):
        label, equals, value = word.partition("=")
        label, value = (label, value) if equals else (_PLACES.get(target, ""), word)
        if not label.isidentifier() or label in options:
            raise UsageError(f"%metrics --to {target}: {word!r} is one word too many; options are written name=value")
        options[label] = value
    for export in metrics.exports:
        if (export.target, export.options) == (target, options):
            return export
    try:
        return metrics.export(target, **options)
    except ImportError as error:
        raise UsageError(f"%metrics --to {target}: {error}") from None


def _shown_metrics(metrics: Metrics) -> Shown:
    runtime, state = started(), state_of(metrics.mesh)
    points = rows(runtime.feature(POINTS), state) if runtime is not None else {}
    return Shown({"mesh": state.uid, "points": points})


METRICS = LiveView(
    name="metrics",
    **bundled("metrics"),
    feed=lambda watch: Curves(watch.runtime, watch.send, watch.message).close,
    shows={Metrics: _shown_metrics},
    magic=metrics,
)


def with_usage(shell: "InteractiveShell", session: Session) -> Any:
    """IPython's %history, which shows the usage of a mesh if its line is the name of one."""
    before = line_magic_of(shell, "history")

    def run(line: str = "") -> object:
        name = line.strip()
        if name.isidentifier() or name in session.names():  # no line of IPython's is a name alone
            return History(session.find(name))
        return before(line)

    run.__doc__ = f"""{before.__doc__}

With the name of a mesh, show what its processes have used over the last hour: CPU, memory, GPU, bytes in and out.

    %history trainers

A click on a peak shows the timeline at that moment, where one was recorded. From Python:
monarch.telemetry.history(trainers).
"""
    return run


def history_html(history: History) -> str:
    """Returns the static form."""
    rows = history.rows()
    if not rows:
        return framed(heading(f"History of {history.name}"), '<div class="mnb-s">no samples yet</div>')
    return framed(heading(f"History of {history.name}"), table(HEAD, rows, mono=(5,)))


def usage_curves(history: History) -> Message:
    """Returns the data for a front end."""
    now = time.time()
    parts, ranks = history.parts, history.ranks
    samples = history.samples if len(ranks) <= SINGLE else {}
    measures = []
    for measure in history.measured(parts):
        peak = history.peak(measure.field, parts)
        timeline = next((candidate for candidate in TIMELINES.all if _covers(candidate, history, peak.at)), None)
        when = time.strftime("%H:%M:%S", time.localtime(peak.at))
        measures.append(
            {
                "name": measure.title,
                "lines": _usage_lines(history, measure, samples, now) if samples else common_lines(measure, parts, now),
                "peak": f"{measure.text(peak.value)} · {history.where(peak.rank)} · {when}",
                "at": peak.at,
                "timeline": "" if timeline is None else timeline.key,
            }
        )
    return {"name": history.name, "ranks": len(ranks), "measures": measures}


def _covers(timeline: Timeline, history: History, moment: float) -> bool:
    return bool(timeline.procs == history.procs and timeline.began <= moment <= timeline.now)


def _usage_lines(
    history: History, measure: Measure, samples: dict[int, list[UsageSample]], now: float
) -> list[dict[str, object]]:
    return [
        {
            "label": history.where(rank),
            "points": [(_minutes(sample.at, now), getattr(sample, measure.field) / measure.unit) for sample in series],
        }
        for rank, series in samples.items()
    ]


def common_lines(measure: Measure, parts: Sequence[UsagePart], now: float) -> list[dict[str, object]]:
    """Returns the highest, the mean and the lowest of many ranks; combines adjacent times if there are many."""
    index = measure.place
    count = -(-len(parts) // PARTS)
    drawn = [parts[begin : begin + count] for begin in range(0, len(parts), count)]
    kinds: dict[str, Callable[[Sequence[UsagePart]], float]] = {
        "highest": lambda some: max(part.high[index] for part in some),
        "mean": lambda some: sum(part.mean[index] for part in some) / len(some),
        "lowest": lambda some: min(part.low[index] for part in some),
    }
    return [
        {"label": label, "points": [(_minutes(some[-1].at, now), kind(some) / measure.unit) for some in drawn]}
        for label, kind in kinds.items()
    ]


def _minutes(moment: float, now: float) -> float:
    return round((moment - now) / 60, 3)


def _feed_usage(watch: Watch) -> Callable[[], None]:
    state = watch.runtime.meshes.get(str(watch.message.get("mesh")))
    if state is None:
        raise LookupError(f"there is no mesh {watch.message.get('mesh')!r}")
    mesh: AnyMesh
    if isinstance(state, ActorState):
        mesh = ActorMesh(state, state.region)
    else:
        mesh = ProcMesh(cast(ProcState, state), state.region)
    history, closed = History(mesh), threading.Event()

    def publish() -> None:
        while not closed.is_set() and current_runtime() is watch.runtime:
            began = time.thread_time()
            watch.publish(**usage_curves(history))
            closed.wait(max(AGAIN_S, (time.thread_time() - began) / COST))

    threading.Thread(target=publish, name="monarch-history-view", daemon=True).start()
    return closed.set


def _shown_usage(history: History) -> Shown:
    state = state_of(history.mesh)
    return Shown({"mesh": state.uid, "shown": usage_curves(history)}, state.uid)


HISTORY = LiveView(name="history", **bundled("history"), feed=_feed_usage, shows={History: _shown_usage})
