"""`monarch.Simulator`: a mesh without processes, the simulated times of its ranks, and their trace for Perfetto and
chrome://tracing.
"""

import enum
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self, TypeAlias, TypeVar

from monarch_nb.mesh import ActorMesh, ProcMesh
from monarch_nb.runtime import Future, resolved_future
from monarch_nb.shape import Extent, NDSlice, Region, check_sizes
from monarch_nb.tensor import device, simulated
from monarch_nb.tensor.commands import DrawFrom
from monarch_nb.tensor.errors import CallSite, ContentsLostError, TensorError, origin_of, stopped_text
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.kernels import prepare
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.propagation import MeshLayout, Propagator
from monarch_nb.tensor.ranks.streams import MAIN
from monarch_nb.tensor.ranks.streams import Stream as Lane
from monarch_nb.tensor.simulated.stream import SimulatedStream, Simulation
from monarch_nb.tensor.simulated.timeline import SimulatedTimeline, groups, labels, lane_name, ranks_named

if TYPE_CHECKING:
    from monarch_nb.tensor.processes import Observer
    from monarch_nb.tensor.stream import Stream
    from monarch_nb.tensor.workers.actor import TensorWorker

NAME = "simulated"
_CONTROLLER = 1  # its number as a process
E = TypeVar("E", bound=enum.Enum)
Event: TypeAlias = dict[str, object]


class SimulatedProcesses:
    """Replaces the processes of a mesh that has none."""

    observer: "Observer | None" = None
    over = -1

    def __init__(self) -> None:
        self.draws: dict[int, DrawFrom] = {}

    def failure(self, stream: int, number: int) -> TensorError | None:
        """Returns None: nothing fails."""
        return None

    def regroup(self, over: int) -> None:
        """Does nothing: there is no group."""

    def revive(self, stream: "Stream") -> None:
        """Raises ContentsLostError for a stopped stream, which cannot be revived."""
        if stream.lost is not None:
            raise ContentsLostError(stream.lost)


class SimulatedMesh(Mesh):
    """A mesh of ranks that are simulated; see `monarch.Simulator`. Slices of it are on the same ranks."""

    def __init__(self, simulation: Simulation, region: Region, lane: Lane | None = None) -> None:
        if not region.labels:
            region = Region(("rank",), NDSlice(region.ndslice.offset, (1,), (1,)))
        self._simulation, self._own_region = simulation, region
        self._entered = []
        key = (region, lane)
        stream = simulation.streams.get(key)
        if stream is None:
            stream = simulation.streams[key] = self._new_stream(lane)
        self._stream = stream

    def _new_stream(self, lane: Lane | None) -> SimulatedStream:
        prepare()
        simulation, region = self._simulation, self._own_region
        propagator = Propagator(self.layout, leaf=MeshTensor)
        stream = SimulatedStream(simulation, NAME, region, propagator, device.new_device(), SimulatedProcesses(), lane)
        device.occupy(stream, None, lambda stream: SimulatedMesh(simulation, region, lane))
        return stream

    @property
    def _region(self) -> Region:
        return self._own_region

    def _new_with_region(self, region: Region) -> Self:
        return type(self)(self._simulation, region, self.stream.lane)

    @property
    def procs(self) -> ProcMesh:
        """Raises TypeError: there are no processes."""
        raise TypeError(f"{self!r} has no processes")

    @property
    def layout(self) -> MeshLayout:
        """Sizes and names of the dimensions."""
        return MeshLayout(tuple(self.region.extent.sizes), tuple(self.region.labels), "cpu")

    def on(self, lane: Lane | None) -> Mesh:
        """Returns this mesh on a stream of the program."""
        lane = None if lane is MAIN else lane
        return self if self.stream.lane is lane else type(self)(self._simulation, self._own_region, lane)

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks among all simulated ranks."""
        return tuple(self._own_region.ranks())

    def shares_processes(self, other: Mesh) -> bool:
        """Returns whether both are simulated together."""
        return isinstance(other, SimulatedMesh) and other._simulation is self._simulation

    def to_table(self) -> str:
        """Returns a table of text: each rank and its coordinates."""
        rows = [
            ", ".join(f"{name}={position}" for name, position in self.region.extent.point(rank).items())
            for rank in range(len(self))
        ]
        return "\n".join(f"simulated rank {base}: {row}" for base, row in zip(self.members, rows, strict=True))

    @property
    def workers(self) -> "ActorMesh[TensorWorker]":
        """Raises TypeError: there are no processes."""
        raise TypeError(f"{self!r} has no processes")

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Does nothing, as no messages are sent."""
        yield

    def shrunk(self) -> Self:
        """Returns this mesh: no rank is lost."""
        return self

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Ends the simulation of its tensors, which cannot be used any more."""
        self.stream.lose(stopped_text(reason))
        return resolved_future(None)

    def exit(self) -> None:
        """Ends the simulation; writes its trace, if the simulator has a file for it."""
        self._simulation.finish()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a simulated mesh is part of the process that made it: make one there, with monarch.Simulator")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        return f"<Mesh of simulated ranks {{{sizes}}}>"


class SimulatorBackendMode(enum.Enum):
    """The work of a simulator on operations."""

    SIMULATE = enum.auto()  # simulates them, and writes a trace
    SIMULATE_WITH_REPORT_ONLY = enum.auto()  # simulates them only
    COMMAND_HISTORY = enum.auto()  # simulates them, and keeps a list of them
    EVERYTHING = enum.auto()  # writes a trace, and keeps a list


class SimulatorTraceMode(enum.Enum):
    """The content of a simulator's trace."""

    STREAM_ONLY = enum.auto()  # the streams of the ranks, as if the controller took no time
    CONTROLLER_TRACE_ONLY = enum.auto()  # the commands of the controller, with their times
    EVERYTHING = enum.auto()  # both: nothing begins before it was issued


def _mode(kind: type[E], value: str | E, option: str) -> E:
    if isinstance(value, kind):
        return value
    mode = kind.__members__.get(str(value).upper())
    if mode is None:
        raise ValueError(f"{option}={value!r} is none of {', '.join(repr(name.lower()) for name in kind.__members__)}")
    return mode


class Simulator:
    """A mesh of `hosts` × `gpus` simulated ranks, with the dimensions "host" and "gpu".

    Programs on `mesh` run without processes and without values: fetched values are zeros. Each operation takes 10 µs of
    simulated time, an exchange between ranks 100 µs; work of several streams overlaps, and borrows wait for each other.
    """

    def __init__(
        self,
        hosts: int,
        gpus: int,
        *,
        simulate_mode: str | SimulatorBackendMode = SimulatorBackendMode.SIMULATE,
        trace_mode: str | SimulatorTraceMode = SimulatorTraceMode.STREAM_ONLY,
        upload_trace: bool = False,
        trace_path: str = "trace.json",
        command_history_path: str = "command_history.json",
        group_workers: bool = False,
        build_ir: bool = False,
    ) -> None:
        check_sizes({"hosts": hosts, "gpus": gpus})
        self._mode = _mode(SimulatorBackendMode, simulate_mode, "simulate_mode")
        self._traces = _mode(SimulatorTraceMode, trace_mode, "trace_mode")
        self._trace_path, self._history_path, self.group_workers = Path(trace_path), command_history_path, group_workers
        is_kept = self._mode in (SimulatorBackendMode.COMMAND_HISTORY, SimulatorBackendMode.EVERYTHING)
        began = time.perf_counter()
        clock = None if self._traces is SimulatorTraceMode.STREAM_ONLY else lambda: (time.perf_counter() - began) * 1e6
        self._simulation = Simulation(records=build_ir or is_kept, clock=clock)
        self._simulation.finish = self._finish
        self._history_is_kept = is_kept
        self.mesh = SimulatedMesh(self._simulation, Extent(("host", "gpu"), (hosts, gpus)).region)
        if upload_trace:
            raise ValueError("upload_trace: traces are not sent anywhere; display() writes one that Perfetto opens")

    @property
    def timeline(self) -> SimulatedTimeline:
        """The tasks of each stream of each rank, with their times."""
        return self._simulation.timeline

    @property
    def elapsed(self) -> float:
        """Time at which all issued commands are done, in microseconds of simulated time."""
        return self.timeline.elapsed

    @property
    def peak_memory(self) -> int:
        """The most bytes of tensors that a rank holds at a time."""
        return self.timeline.peak

    @property
    def trace_file(self) -> Path | None:
        """The file of the trace, which Perfetto opens; None without a trace."""
        is_written = self._mode is not SimulatorBackendMode.SIMULATE_WITH_REPORT_ONLY
        return self._trace_path.absolute() if is_written else None

    def display(self) -> None:
        """Shows the tasks of the ranks over time, in the notebook, and writes a trace to `trace_path` for Perfetto."""
        self._write()
        simulated.show(self)

    def upload(self) -> None:
        """Writes the trace, and prints its path: it is not sent anywhere."""
        self._write()
        sys.stdout.write(f"the trace is in {self.trace_file}; https://ui.perfetto.dev opens it\n")

    def export_ir(self, ir_path: str) -> None:
        """Writes the issued commands to a file, as JSON: for each its stream, ranks, tensors and line.

        Raises ValueError without `build_ir=True`.
        """
        if self._simulation.records is None:
            raise ValueError("export_ir: the commands were not kept: use Simulator(..., build_ir=True)")
        Path(ir_path).write_text(json.dumps({"commands": self._simulation.records}, indent=1) + "\n", encoding="utf-8")

    def _write(self) -> None:
        if self.trace_file is not None:
            events = trace_events(self.timeline, self._traces.name.lower(), grouped=self.group_workers)
            self.trace_file.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    def _finish(self) -> None:
        """Writes the trace, and the history if it is kept."""
        self._write()
        if self._history_is_kept:
            self.export_ir(self._history_path)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.sizes.items())
        return (
            f"<Simulator {{{sizes}}}: {self.elapsed:g} µs, {self.timeline.commands} commands, at most "
            f"{self.peak_memory:,} bytes on a rank>"
        )


@contextmanager
def set_meta(new_value: object) -> Iterator[None]:
    """Adds a word to the names of simulated tasks in a `with` block."""
    labels.append(str(new_value))
    try:
        yield
    finally:
        labels.pop()


def simulated_engine(extent: Extent) -> SimulatedMesh:
    """Returns a simulated mesh of this extent, which `patch_tensor_engine` uses in place of a mesh of processes."""
    return SimulatedMesh(Simulation(), extent.region)


def trace_events(timeline: SimulatedTimeline, shown: str, *, grouped: bool) -> list[Event]:
    """The events of a trace. `shown` is a trace mode: "stream_only", "controller_trace_only" or "everything"."""
    entries: list[Event] = []
    if shown != "stream_only":
        entries += _name_events("process", _CONTROLLER, 0, "Controller")
        entries += _name_events("thread", _CONTROLLER, _CONTROLLER, "Controller")
        for name, when, command, site in timeline.issued:
            entries.append(_event(name, "issued", when, 0, _CONTROLLER, _CONTROLLER, command, site))
    if shown == "controller_trace_only":
        return entries
    number = _CONTROLLER
    for ranks in groups(timeline) if grouped else [[rank] for rank in sorted(timeline.tasks)]:
        number += 1
        process, first = number, ranks[0]
        entries += _name_events("process", process, 0, ranks_named(ranks))
        for lane, tasks in timeline.tasks[first].items():
            number += 1
            entries += _name_events("thread", process, number, lane_name(lane))
            for task in tasks:
                if task.end > task.start:
                    entries.append(
                        _event(
                            task.name,
                            task.kind,
                            task.start,
                            task.end - task.start,
                            process,
                            number,
                            task.command,
                            task.site,
                        )
                    )
        for when, nbytes in timeline.memory_of(first):
            entries.append(
                {"name": "memory", "cat": "memory", "ph": "C", "ts": when, "pid": process, "args": {"bytes": nbytes}}
            )
    return entries


def _name_events(kind: str, process: int, thread: int, name: str) -> list[Event]:
    return [{"name": f"{kind}_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}]


def _event(
    name: str, kind: str, start: float, duration: float, process: int, thread: int, command: int, site: CallSite | None
) -> Event:
    details = {"command": command, "line": str(origin_of(site)) if site else ""}
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": start,
        "dur": duration,
        "pid": process,
        "tid": thread,
        "args": details,
    }
