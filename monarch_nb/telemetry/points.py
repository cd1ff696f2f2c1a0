"""Values that actors report: `log` in the actor, `mesh.metrics` in the process that spawned the mesh and stores them.

They are stored by mesh, name and rank; long series are thinned from their old end.
"""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from monarch_nb.mesh import Handle, region_of, state_of
from monarch_nb.mesh.mesh_events import Event, MeshEvents, MeshStopped, OwnerChanged
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import RequestError, request
from monarch_nb.runtime import Feature, MeshState, ProcState, Runtime, current, proc_state_of, started
from monarch_nb.shape import places_of
from monarch_nb.store import describe
from monarch_nb.telemetry.exports import MetricsExport
from monarch_nb.telemetry.verbs import REPORT, TAKE, MetricPoint, MetricPoints
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker, Done, number_of, text_table

MOST_VALUES = 4096  # values of one name and rank; beyond it every other one of the older half is dropped
FORMER = 64  # meshes whose values are kept
SENT_S = 0.2  # for which points are gathered
TAKE_S = 1.0  # for which a reader waits for points that are still being gathered,
MOST_RANKS = 256  # of at most so many ranks
LARGEST_STEP = 2.0**63  # what exports can write

Listener = Callable[[list[MetricPoint]], None]


class Sample(NamedTuple):
    """A value of a series."""

    step: float
    at: float  # wall clock
    value: float


ByName = dict[str, dict[int, list[Sample]]]  # name -> base rank -> values


class Series:
    """The latest values of all meshes. One thread at a time."""

    def __init__(self) -> None:
        self._meshes: dict[str, ByName] = {}

    def add(self, points: Iterable[MetricPoint]) -> None:
        """Adds values."""
        for point in points:
            ranks = self._meshes.setdefault(point.mesh, {}).setdefault(point.name, {})
            samples = ranks.setdefault(point.rank, [])
            samples.append(Sample(point.step or 0.0, point.at, point.value))
            if len(samples) >= MOST_VALUES:
                samples[: MOST_VALUES // 2] = samples[: MOST_VALUES // 2 : 2]
        while len(self._meshes) > FORMER:
            self._meshes.pop(next(iter(self._meshes)))

    def points(self, meshes: Collection[str] | None = None) -> list[MetricPoint]:
        """Returns the values of some meshes, or of all."""
        return [
            MetricPoint(mesh, rank, name, *sample)
            for mesh in (self._meshes if meshes is None else meshes)
            for name, ranks in self._meshes.get(mesh, {}).items()
            for rank, samples in ranks.items()
            for sample in samples
        ]

    def of(self, mesh: str) -> ByName:
        """Returns a copy of the values of a mesh."""
        by_name = self._meshes.get(mesh, {})
        return {name: {rank: list(samples) for rank, samples in ranks.items()} for name, ranks in by_name.items()}


def log(*, step: float | None = None, **values: Any) -> None:
    """Reports values, such as `log(step=3, loss=loss)`, for `mesh.metrics` and the live curves. Does not block.

    Values are numbers, or tensors and arrays of one element. Without `step` each name has its own count. Raises
    TypeError for other values, ValueError for a step that is not finite. Outside actors it records nothing.
    """
    numbers = {name: _number(name, value) for name, value in values.items()}
    count = None if step is None else _number("step", step)
    if count is not None and not abs(count) < LARGEST_STEP:  # nan is not, either
        raise ValueError(f"log: step={step!r} is not the number of a step")
    context, runtime = current.get(), started()
    if runtime is None or context is None or context.actor_instance.cell is None:
        return
    instance = context.actor_instance
    now = round(time.time(), 3)
    collector = runtime.feature(METRICS)
    collector.note(
        [MetricPoint(instance.mesh, instance.base_rank, name, count, now, value) for name, value in numbers.items()]
    )


def _number(name: str, value: Any) -> float:
    try:
        return number_of(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last for a tensor of several elements
        raise TypeError(f"log: {name}={value!r} is not a number") from None


def _actors(state: MeshState) -> Collection[str]:
    """Returns the actor meshes on processes."""
    return state.actors if isinstance(state, ProcState) else ()


class Metrics:
    """Values that the actors of a mesh (or of the procs of one) have reported with `monarch.telemetry.log`.

    `series_of` returns the stored values of a mesh by its uid; `fetch` fetches unsent values; `export` begins to write
    values elsewhere, and `exports_of` returns the exports that have begun.
    """

    def __init__(
        self,
        mesh: Handle[MeshState],
        series_of: Callable[[str], ByName],
        fetch: Callable[[Handle[MeshState]], None] = lambda mesh: None,
        export: Callable[[Handle[MeshState], str, dict[str, object]], MetricsExport] | None = None,
        exports_of: Callable[[Handle[MeshState]], Sequence[MetricsExport]] = lambda mesh: (),
    ) -> None:
        self._mesh = mesh
        self._series_of = series_of
        self._fetch = fetch
        self._export = export
        self._exports_of = exports_of

    @property
    def mesh(self) -> Handle[MeshState]:
        """The mesh, or slice, whose values these are."""
        return self._mesh

    @property
    def name(self) -> str:
        """The name of the mesh."""
        return str(state_of(self._mesh).name)

    def _read(self) -> ByName:
        """Returns the values of the ranks of the mesh, or slice."""
        self._fetch(self._mesh)
        bases = {base: index for index, base in enumerate(region_of(self._mesh).ranks())}
        by_name: ByName = {}
        for state in (state_of(self._mesh), *getattr(state_of(self._mesh), "actors", {}).values()):
            for name, ranks in self._series_of(state.uid).items():
                for base, samples in ranks.items():
                    if base in bases:
                        by_name.setdefault(name, {}).setdefault(bases[base], []).extend(samples)
        return by_name

    def __getitem__(self, name: str) -> dict[int, list[tuple[float, float]]]:
        """Returns the (step, value) pairs of each rank. Raises KeyError for a name without reports."""
        series = self._read()[name]
        return {rank: [(sample.step, sample.value) for sample in samples] for rank, samples in series.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def latest(self) -> Mapping[str, dict[int, float]]:
        """Returns the newest value of each name, by rank."""
        return {
            name: {rank: samples[-1].value for rank, samples in ranks.items()} for name, ranks in self._read().items()
        }

    def export(self, target: str, **options: object) -> MetricsExport:
        """Writes these values, and all later ones, to "tensorboard", "wandb" or "mlflow". Does not block afterwards.

        The controller writes; the ranks need none of these packages. `options` are `folder` of TensorBoard (by default
        `runs/NAME`), those of `wandb.init`, or `experiment` and those of `mlflow.start_run`. The export ends with the
        mesh, the program, or `close()` of the result. A later failure is reported once, and writes are tried again.
        Raises ValueError for another target, ImportError without its package, and the package's own errors.
        """
        if self._export is None:
            raise ValueError("only metrics of a mesh can be exported")
        return self._export(self._mesh, target, options)

    @property
    def exports(self) -> Sequence[MetricsExport]:
        """The exports of the mesh, or of this slice, that have not ended."""
        return self._exports_of(self._mesh)

    def __repr__(self) -> str:
        by_name = self._read()
        if not by_name:
            return "<no metrics yet: call monarch.telemetry.log(loss=..., step=...) in an actor>"
        rows = [("metric", "ranks", "steps", "latest (mean)", "lowest", "highest")]
        for name, ranks in by_name.items():
            latest = [samples[-1].value for samples in ranks.values()]
            values = [sample.value for samples in ranks.values() for sample in samples]
            most = max(len(samples) for samples in ranks.values())
            cells = (f"{sum(latest) / len(latest):.6g}", f"{min(values):.6g}", f"{max(values):.6g}")
            rows.append((name, str(len(ranks)), str(most), *cells))
        return text_table(rows)


class Points:
    """Collects reports of this process's actors and sends them to the process that spawned them, which stores them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._waiting = Series()  # not sent yet
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
                self._waiting.add(points)
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
            if self._runtime.part(MeshRegistry).is_left:
                return  # the points wait for the next owner
            points = self._take_points()
        if not points:
            return  # a reader has fetched them
        try:
            self._runtime.post(self._home(), REPORT, MetricPoints(points))
        except TransportError:
            return  # the owner has ended

    def _take_points(self) -> list[MetricPoint]:
        """Returns the unsent points, which count as sent from then on. Under the lock."""
        waiting, self._waiting = self._waiting, Series()
        return waiting.points()

    def close(self) -> None:
        """Sends the unsent points, as the process ends."""
        if self._home():
            self._send()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, OwnerChanged) and event.owner:
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
            return MetricPoints(self._take_points())

    def _fetch(self, mesh: Handle[MeshState]) -> None:
        """Fetches unsent points from the processes of a mesh: all that were reported before a call was answered.

        Blocks for their answers, at most `TAKE_S`; large meshes are not asked.
        """
        state = state_of(mesh)
        procs = proc_state_of(state)
        ranks = tuple(region_of(mesh).ranks())
        if self._home() or len(ranks) > MOST_RANKS or procs.stopped is not None:
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
            export.put(self._series.points((state.uid, *_actors(state))))
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


METRICS: Feature[Points] = Feature("metrics")


def attach(runtime: Runtime) -> Points:
    """Registers the handlers of `metrics` messages."""
    return Points(runtime)
