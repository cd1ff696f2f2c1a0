"""A mesh whose ranks are simulated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Self

from monarch_nb.mesh import ActorMesh, ProcMesh
from monarch_nb.runtime import Future, resolved_future
from monarch_nb.shape import NDSlice, Region
from monarch_nb.tensor import device
from monarch_nb.tensor.commands import DrawFrom
from monarch_nb.tensor.errors import ContentsLostError, TensorError, stopped_text
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.kernels import prepare
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.propagation import MeshLayout, Propagator
from monarch_nb.tensor.ranks.streams import MAIN
from monarch_nb.tensor.ranks.streams import Stream as Lane
from monarch_nb.tensor.simulated.stream import SimulatedStream, Simulation

if TYPE_CHECKING:
    from monarch_nb.tensor.processes import Observer
    from monarch_nb.tensor.stream import Stream
    from monarch_nb.tensor.workers.actor import TensorWorker

NAME = "simulated"


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
