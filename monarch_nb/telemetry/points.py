"""Values that actors tell of their work: `log` in the actor, `mesh.metrics` in the process that spawned the mesh."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.runtime import Runtime, current, started
from monarch_nb.runtime.features import feature
from monarch_nb.transport import TransportError
from monarch_nb.wire import Header

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

SENT_S = 0.2  # how long points are gathered
MOST = 5000  # points that are sent at once; of more the oldest are left out
KEPT = 4096  # of one name and rank; beyond that every other one of the older half goes
FORMER = 64  # meshes whose points are kept


class Point(msgspec.Struct, array_like=True, frozen=True):
    """One value. `step` is None where the program has counted none."""

    mesh: str
    rank: int  # base rank
    name: str
    step: float | None
    at: float  # wall clock
    value: float


Listener = Callable[[list[Point]], None]


def log(*, step: float | None = None, **values: Any) -> None:
    """Tells values, such as `log(step=3, loss=loss)`, for `mesh.metrics` and the live curves. Does not block.

    Values are numbers, or tensors and arrays of one element. Without `step` each name counts for itself. Raises
    TypeError for what is no number. Outside of actors it notes nothing.
    """
    numbers = {name: _number(name, value) for name, value in values.items()}
    context, engine = current.get(), started()
    if engine is None or context is None or context.actor_instance.cell is None:
        return
    instance = context.actor_instance
    at = round(time.time(), 3)
    count = None if step is None else _number("step", step)
    mine: Points = feature(engine, "metrics")
    mine.note([Point(instance.mesh, instance.base_rank, name, count, at, value) for name, value in numbers.items()])


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"log: {name}={value!r} is not a number") from None


class Points:
    """One per process: gathers what its actors tell and sends it to where they were spawned from; there it is kept."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._waiting: list[Point] = []
        self._planned = False
        self._kept: dict[str, dict[str, dict[int, list[tuple[float, float, float]]]]] = {}
        self._steps: dict[tuple[str, int, str], Iterator[int]] = {}
        self._listeners: list[Listener] = []
        engine.controls["metrics.told"] = self._told

    # -- where actors are -------------------------------------------------------------------------------------------

    def _home(self) -> str:
        """The process that this one was spawned from, "" if it is the first."""
        mesh = self._engine.keeper._mesh
        home = mesh._state.home if mesh is not None else ""
        return "" if home == self._engine.address else home

    def note(self, points: list[Point]) -> None:
        """Takes what an actor of this process has told."""
        with self._lock:
            points = [point if point.step is not None else self._counted(point) for point in points]
            if self._home():
                self._waiting += points
                if self._planned:
                    return
                self._planned = True
                self._engine.later(SENT_S, self._send)
                return
        self._keep(points)

    def _counted(self, point: Point) -> Point:
        key = (point.mesh, point.rank, point.name)
        counter = self._steps.get(key)
        if counter is None:
            counter = self._steps[key] = itertools.count()
        return msgspec.structs.replace(point, step=float(next(counter)))

    def _send(self) -> None:
        with self._lock:
            points, self._waiting = self._waiting[-MOST:], []
            self._planned = False
        try:
            self._engine.control(self._home(), "metrics.told", points, lane=0)
        except TransportError:
            return  # nobody is there to hear it

    def flush(self) -> None:
        """Sends what waits now."""
        if self._waiting:
            self._send()

    # -- where they were spawned from -------------------------------------------------------------------------------

    def _told(self, header: Header, parcel: "Parcel") -> None:
        points = msgspec.msgpack.decode(parcel.frames[0], type=list[Point])
        home = self._home()
        if home:
            self._engine.control(home, "metrics.told", points, lane=0)
        else:
            self._keep(points)

    def _keep(self, points: list[Point]) -> None:
        with self._lock:
            for point in points:
                ranks = self._kept.setdefault(point.mesh, {}).setdefault(point.name, {})
                line = ranks.setdefault(point.rank, [])
                line.append((point.step or 0.0, point.at, point.value))
                if len(line) >= KEPT:
                    line[: KEPT // 2] = line[: KEPT // 2 : 2]
            while len(self._kept) > FORMER:
                self._kept.pop(next(iter(self._kept)))
            for listener in tuple(self._listeners):
                listener(points)

    def of(self, mesh: str) -> dict[str, dict[int, list[tuple[float, float, float]]]]:
        """What is kept of a mesh: name -> base rank -> (step, when, value)."""
        with self._lock:
            return {
                name: {rank: list(line) for rank, line in ranks.items()}
                for name, ranks in self._kept.get(mesh, {}).items()
            }

    def of_mesh(self, mesh: Any) -> "Metrics":
        """What there is of a mesh or slice, as people look at it."""
        return Metrics(mesh, self)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(points)` with what comes; the result ends that. It must not block."""
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None


class Metrics:
    """What the actors of a mesh (or of the procs of one) have told with `monarch.telemetry.log`."""

    def __init__(self, mesh: Any, points: Points) -> None:
        self._mesh = mesh
        self._points = points

    @property
    def mesh(self) -> Any:
        """The mesh, or slice, that they are of."""
        return self._mesh

    @property
    def name(self) -> str:
        """Its name."""
        return str(self._mesh._state.name)

    def _read(self) -> dict[str, dict[int, list[tuple[float, float, float]]]]:
        bases = {base: index for index, base in enumerate(self._mesh._region.ranks())}
        found: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
        for state in (self._mesh._state, *getattr(self._mesh._state, "actors", {}).values()):
            for name, ranks in self._points.of(state.uid).items():
                for base, line in ranks.items():
                    if base in bases:
                        found.setdefault(name, {}).setdefault(bases[base], []).extend(line)
        return found

    def __getitem__(self, name: str) -> dict[int, list[tuple[float, float]]]:
        """The (step, value) pairs of each rank. Raises KeyError for a name nobody has told."""
        return {rank: [(step, value) for step, _, value in line] for rank, line in self._read()[name].items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def latest(self) -> Mapping[str, dict[int, float]]:
        """The newest value of each name, by rank."""
        return {name: {rank: line[-1][2] for rank, line in ranks.items()} for name, ranks in self._read().items()}

    def __repr__(self) -> str:
        found = self._read()
        if not found:
            return "<no metrics yet: call monarch.telemetry.log(loss=..., step=...) in an actor>"
        rows = [("metric", "ranks", "steps", "latest (mean)", "lowest", "highest")]
        for name, ranks in found.items():
            last = [line[-1][2] for line in ranks.values()]
            values = [value for line in ranks.values() for _, _, value in line]
            most = max(len(line) for line in ranks.values())
            cells = (f"{sum(last) / len(last):.6g}", f"{min(values):.6g}", f"{max(values):.6g}")
            rows.append((name, str(len(ranks)), str(most), *cells))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def attach(engine: Runtime) -> Points:
    """Takes `metrics` messages from now on."""
    return Points(engine)
