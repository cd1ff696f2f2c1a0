"""`monarch.Simulator`: a mesh without processes, and the simulated times of its ranks."""

import enum
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from monarch_nb.shape import Extent
from monarch_nb.tensor import simulated
from monarch_nb.tensor.simulated import trace
from monarch_nb.tensor.simulated.mesh import SimulatedMesh
from monarch_nb.tensor.simulated.stream import Simulation
from monarch_nb.tensor.simulated.timeline import SimulatedTimeline, labels

E = TypeVar("E", bound=enum.Enum)


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
            events = trace.events(self.timeline, self._traces.name.lower(), grouped=self.group_workers)
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
