"""Values that actors report: `log` in the actor, `mesh.metrics` in the process that spawned the mesh."""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from monarch_nb.mesh import Handle, region_of, state_of
from monarch_nb.mesh.mesh_events import Event, MeshEvents, MeshStopped, OwnerChanged
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import RequestError, request
from monarch_nb.runtime import Feature, MeshState, ProcState, Runtime, current, proc_state_of, started
from monarch_nb.shape import places_of
from monarch_nb.store import describe
from monarch_nb.telemetry.exports import MetricsExport
from monarch_nb.telemetry.metrics import Metrics
from monarch_nb.telemetry.series import ByName, MetricPoint, Series
from monarch_nb.telemetry.verbs import REPORT, TAKE, MetricPoints
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker, Done, number_of

SENT_S = 0.2  # for which points are gathered
TAKE_S = 1.0  # for which a reader waits for points that are still being gathered,
MOST_RANKS = 256  # of at most so many ranks
MOST = 5000  # points that are sent at once, beyond which the oldest are left out


Listener = Callable[[list[MetricPoint]], None]


def log(*, step: float | None = None, **values: Any) -> None:
    """Reports values, such as `log(step=3, loss=loss)`, for `mesh.metrics` and the live curves. Does not block.

    Values are numbers, or tensors and arrays of one element. Without `step` each name has its own count. Raises
    TypeError for other values. Outside actors it records nothing.
    """
    numbers = {name: _number(name, value) for name, value in values.items()}
    context, runtime = current.get(), started()
    if runtime is None or context is None or context.actor_instance.cell is None:
        return
    instance = context.actor_instance
    now = round(time.time(), 3)
    count = None if step is None else _number("step", step)
    collector = runtime.feature(METRICS)
    collector.note(
        [MetricPoint(instance.mesh, instance.base_rank, name, count, now, value) for name, value in numbers.items()]
    )


def _number(name: str, value: Any) -> float:
    try:
        return number_of(value)
    except (TypeError, ValueError, RuntimeError):  # the last for a tensor of several elements
        raise TypeError(f"log: {name}={value!r} is not a number") from None


class Points:
    """Collects reports of this process's actors and sends them to the process that spawned them, which stores them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._waiting: list[MetricPoint] = []
        self._planned = False
        self._series = Series()
        self._steps: dict[tuple[str, int, str], Iterator[int]] = {}
        self._listeners: list[Listener] = []
        self._exports: list[tuple[Handle[MeshState], MetricsExport]] = []
        runtime.verbs.handle(TAKE, self._on_take)
        runtime.verbs.handle(REPORT, self._on_report)
        runtime.part(MeshEvents).listeners.append(self._on_event)

    # -- on processes with actors -----------------------------------------------------------------------------------

    def _home(self) -> str:
        """Returns the process that has spawned this one; "" in the first process."""
        home = self._runtime.part(MeshRegistry).started_by
        return "" if home == self._runtime.address else home

    def note(self, points: list[MetricPoint]) -> None:
        """Adds reports of an actor of this process."""
        with self._lock:
            points = [point if point.step is not None else self._with_step(point) for point in points]
            if self._home():
                self._waiting += points
                if self._planned:
                    return
                self._planned = True
                self._runtime.later(SENT_S, self._send)
                return
        self._store(points)

    def _with_step(self, point: MetricPoint) -> MetricPoint:
        key = (point.mesh, point.rank, point.name)
        counter = self._steps.get(key)
        if counter is None:
            counter = self._steps[key] = itertools.count()
        return msgspec.structs.replace(point, step=float(next(counter)))

    def _send(self) -> None:
        with self._lock:
            self._planned = False
            if self._runtime.part(MeshRegistry).is_left:  # the points wait for the next owner
                self._waiting = self._waiting[-MOST:]
                return
            points, self._waiting = self._waiting[-MOST:], []
        try:
            self._runtime.post(self._home(), REPORT, MetricPoints(points))
        except TransportError:
            return  # the owner has ended

    def _on_event(self, event: Event) -> None:
        if isinstance(event, OwnerChanged) and event.owner and self._waiting:
            self._runtime.later(0.0, self._send)
        elif isinstance(event, MeshStopped) and event.mesh.stopped is not None:
            for mesh, export in tuple(self._exports):
                state = state_of(mesh)
                if event.mesh.uid == state.uid or state.uid in _actors(event.mesh):
                    threading.Thread(target=export.close, name="monarch-metrics-end").start()

    # -- on the process that has spawned them -----------------------------------------------------------------------

    def _on_report(self, message: MetricPoints, asker: Asker[None]) -> None:
        home = self._home()
        if home:
            self._runtime.post(home, REPORT, message)
        else:
            self._store(message.points)

    def _on_take(self, _: Done, asker: Asker[MetricPoints]) -> MetricPoints:
        with self._lock:
            points, self._waiting = self._waiting[-MOST:], []
        return MetricPoints(points)

    def _fetch(self, mesh: Handle[MeshState]) -> None:
        """Fetches unsent points from the processes of a mesh: all that were reported before a call was answered.

        Blocks for their answers, at most `TAKE_S`; large meshes are not asked.
        """
        state = state_of(mesh)
        procs = proc_state_of(state)
        ranks = tuple(region_of(mesh).ranks())
        if self._home() or len(ranks) > MOST_RANKS or state.stopped is not None:
            return
        failed = {rank.rank for rank in describe(procs).having("failed")}
        addresses = dict.fromkeys(procs.address(rank) for rank in ranks if rank not in failed)
        requests = [request(self._runtime, address, TAKE, Done()) for address in addresses]
        deadline = time.monotonic() + TAKE_S
        for future in requests:
            try:
                self._store(future.get(max(0.0, deadline - time.monotonic())).points)
            except (TimeoutError, RequestError):
                continue  # they are sent later anyway

    def _store(self, points: list[MetricPoint]) -> None:
        with self._lock:
            self._series.add(points)
            for listener in tuple(self._listeners):
                listener(points)

    def of(self, mesh: str) -> ByName:
        """Returns the stored values of a mesh."""
        with self._lock:
            return self._series.of(mesh)

    def of_mesh(self, mesh: Handle[MeshState]) -> Metrics:
        """Returns the metrics of a mesh or slice, for people."""
        return Metrics(mesh, self.of, self._fetch, self._export, self._exports_of)

    def _export(self, mesh: Handle[MeshState], target: str, options: dict[str, object]) -> MetricsExport:
        """Begins to write the values of a mesh or slice elsewhere, from the first stored one."""
        state, region = state_of(mesh), region_of(mesh)
        texts = {base: places_of(region, [base]) if len(region) > 1 else "" for base in region.ranks()}

        def rank_of(point: MetricPoint) -> str | None:
            return texts.get(point.rank) if point.mesh == state.uid or point.mesh in _actors(state) else None

        export = MetricsExport(state.name, target, options, rank_of, lambda export: self._end_export(mesh, export))
        with self._lock:
            for uid in (state.uid, *_actors(state)):
                for name, ranks in self._series.of(uid).items():
                    for rank, samples in ranks.items():
                        export.put([MetricPoint(uid, rank, name, *sample) for sample in samples])
            self._listeners.append(export.put)
            self._exports.append((mesh, export))
        return export

    def _exports_of(self, mesh: Handle[MeshState]) -> list[MetricsExport]:
        """Returns the exports of a mesh or slice that have not ended."""
        uid, ranks = state_of(mesh).uid, tuple(region_of(mesh).ranks())
        with self._lock:
            return [
                export
                for of_mesh, export in self._exports
                if state_of(of_mesh).uid == uid and tuple(region_of(of_mesh).ranks()) == ranks
            ]

    def _end_export(self, mesh: Handle[MeshState], export: MetricsExport) -> None:
        if not self._runtime.closed:
            self._fetch(mesh)
        with self._lock:
            self._listeners.remove(export.put)
            self._exports = [entry for entry in self._exports if entry[1] is not export]

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(points)`, which must not block, with new points; the result ends that."""
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None


def _actors(state: MeshState) -> Collection[str]:
    """Returns the actor meshes on processes."""
    return state.actors if isinstance(state, ProcState) else ()


METRICS: Feature[Points] = Feature("metrics")


def attach(runtime: Runtime) -> Points:
    """Registers the handlers of `metrics` messages."""
    return Points(runtime)
