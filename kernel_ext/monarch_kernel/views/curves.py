"""Metrics of a mesh as curves: the data of a front end that watches them, and `%metrics`."""

import shlex
import threading
from collections.abc import Callable

from IPython.core.error import UsageError

from monarch_nb.mesh import state_of
from monarch_nb.runtime import MeshState, ProcState, Runtime, started
from monarch_nb.telemetry import Metrics
from monarch_nb.telemetry.exports import TARGETS, MetricsExport
from monarch_nb.telemetry.points import METRICS as POINTS
from monarch_nb.telemetry.points import Points
from monarch_nb.telemetry.series import MetricPoint

from ..session import Session
from .bundle import bundled
from .channel import Message
from .live import LiveView, Shown

SEND_S = 0.1
Rows = dict[str, list[tuple[int, float, float, float]]]  # name -> (index of the rank, step, when, value)


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


_PLACES = {"tensorboard": "folder", "wandb": "project", "mlflow": "experiment"}  # what a word after a target names


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


def _shown(metrics: Metrics) -> Shown:
    runtime, state = started(), state_of(metrics.mesh)
    points = rows(runtime.feature(POINTS), state) if runtime is not None else {}
    return Shown({"mesh": state.uid, "points": points})


METRICS = LiveView(
    name="metrics",
    **bundled("metrics"),
    feed=lambda watch: Curves(watch.runtime, watch.send, watch.message).close,
    shows={Metrics: _shown},
    magic=metrics,
)
