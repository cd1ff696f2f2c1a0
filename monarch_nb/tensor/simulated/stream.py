"""The stream of a simulated mesh: its commands become tasks of a timeline, and fetched values are zeros."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from monarch_nb.mesh import ValueMesh
from monarch_nb.runtime import Future, resolved_future
from monarch_nb.shape import Region
from monarch_nb.tensor.commands import (
    NUMBER,
    OBJECT,
    OWN,
    SHARDS,
    WHOLE,
    CallRemote,
    Define,
    GiveBack,
    GroupOf,
    Locals,
    MakeParts,
    PutTensor,
    RunFunction,
    Send,
    Take,
    TensorOf,
)
from monarch_nb.tensor.errors import CallSite, ContentsLostError, call_site, origin_of
from monarch_nb.tensor.propagation import LocalStep, Meta, Propagator, Redistribute
from monarch_nb.tensor.ranks.active import disabled
from monarch_nb.tensor.references import LiveEntry, LogicalMemory, Reference, WriteRecord
from monarch_nb.tensor.simulated.timeline import SimulatedMemory, SimulatedTimeline
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.workers.calls import Returned, function_at, to_returned
from monarch_nb.tensor.workers.plans import PlanSignature

if TYPE_CHECKING:
    from monarch_nb.tensor.handle import MeshTensor
    from monarch_nb.tensor.ranks.streams import Stream as Lane
    from monarch_nb.tensor.simulated.simulator import SimulatedProcesses


class SimulatedBorrow:
    """Memory that a stream has borrowed: when the lender had done its earlier commands, and whether it was used."""

    def __init__(self, recorded: dict[int, float], source: "SimulatedStream", memory: SimulatedMemory) -> None:
        self.recorded, self.source, self.memory, self.used = recorded, source, memory, False


class Simulation:
    """The state that the streams of one simulated set of ranks share.

    `records` has each command, if requested. With a `clock` nothing begins before it was issued.
    """

    def __init__(self, *, records: bool = False, clock: Callable[[], float] | None = None) -> None:
        self.timeline = SimulatedTimeline()
        self.streams: weakref.WeakValueDictionary[tuple[Region, Lane | None], SimulatedStream] = (
            weakref.WeakValueDictionary()
        )
        self.finish: Callable[[], object] = bool  # called at the end of the simulation
        self.records: list[dict[str, object]] | None = [] if records else None
        self.under_way: dict[int, tuple[SimulatedStream, int]] = {}  # sent tensors, by tag
        self.borrows: dict[int, SimulatedBorrow] = {}  # by tag
        self._clock = clock

    def begin(self, name: str, stream: "SimulatedStream", site: CallSite | None, **details: object) -> None:
        """Begins a command."""
        timeline = self.timeline
        timeline.commands += 1
        if self._clock is not None:
            timeline.now = self._clock()
            timeline.issued.append((name, timeline.now, timeline.commands, site))
        if self.records is not None:
            self.records.append(
                {
                    "command": timeline.commands,
                    "name": name,
                    "stream": stream.lane_name,
                    "ranks": list(stream.ranks),
                    "line": str(origin_of(site)).partition("\n")[0] if site else "",
                    **details,
                }
            )


class SimulatedStream(Stream):
    """A stream without workers. Commands are simulated as they are issued."""

    is_simulated = True

    def __init__(
        self,
        simulation: Simulation,
        title: str,
        region: Region,
        propagator: "Propagator[MeshTensor]",
        device: torch.device,
        processes: "SimulatedProcesses",
        lane: "Lane | None",
    ) -> None:
        super().__init__(title, propagator, device, _nothing_is_sent, processes)
        self.simulation, self.lane = simulation, lane
        self.ranks, self._own_region = tuple(region.ranks()), region
        self._memories: dict[int, SimulatedMemory] = {}  # of tensors, by number
        self._borrowed: dict[int, SimulatedBorrow] = {}
        self._shared: weakref.WeakKeyDictionary[LogicalMemory, SimulatedMemory] = weakref.WeakKeyDictionary()
        self._signatures: dict[int, PlanSignature] = {}

    @property
    def lane_name(self) -> str:
        """The name of the program's stream."""
        return "main" if self.lane is None else self.lane.name

    # -- issuing ----------------------------------------------------------------------------------------------------

    def issue(self, command: tuple[object, ...], site: CallSite | None, written: Sequence[WriteRecord] = ()) -> None:
        """Simulates an operation. Raises ContentsLostError if the mesh was stopped."""
        self.resume_if_healed()
        self.free()
        if self.watcher is not None:
            self.watcher.issued(command, site)
        if command[0] == OBJECT:
            self._run_object(command[1], site)
        else:
            self._operation(command, site)

    def free(self) -> None:
        """Frees unreferenced tensors of all streams in simulated time."""
        for stream in tuple(self.simulation.streams.values()):
            queue = stream.queue
            while queue:
                entry = queue.popleft()
                assert isinstance(entry, LiveEntry)
                stream._release(entry.number)

    def _release(self, number: int) -> None:
        self.held.forget((number,))
        self._borrowed.pop(number, None)
        memory = self._memories.pop(number, None)
        if memory is not None:
            self.simulation.timeline.release(memory)

    def handed_out(self, reference: Reference, func: torch._ops.OpOverload) -> None:
        """Counts another handle of a tensor as an operation."""
        self._run(str(func).removesuffix(".default"), (reference.number,), call_site(2))

    def _operation(self, command: tuple[object, ...], site: CallSite | None) -> None:
        number = command[0]
        assert isinstance(number, int)
        definition = self.defined[number]
        signature = self._signatures.get(number)
        if signature is None or signature.operation != definition.operation:
            signature = self._signatures[number] = PlanSignature(definition)
        inputs, results = (cast(Sequence[int], command[part]) for part in (signature.tensors, signature.results))
        name = definition.operation.removesuffix(".default")
        dims = _exchange_dims(definition) if isinstance(definition, Define) else ()
        self._run(name, inputs, site, results=results, writes=[inputs[index] for index in signature.writes], dims=dims)

    def _run(
        self,
        name: str,
        inputs: Sequence[int],
        site: CallSite | None,
        results: Sequence[int] = (),
        writes: Sequence[int] = (),
        dims: Sequence[int] = (),
    ) -> None:
        """Simulates a command that reads some tensors and makes others; ranks exchange values along `dims`."""
        timeline = self.simulation.timeline
        for number in inputs:
            self._use(number, site)
        self.simulation.begin(name, self, site, reads=list(inputs), makes=list(results), writes=list(writes))
        if dims:
            timeline.exchange(self._groups(dims), self.lane, name, site)
        else:
            timeline.operate(self.ranks, self.lane, name, site)
        self._make(results, inputs)

    def _make(self, results: Sequence[int], inputs: Sequence[int] = ()) -> None:
        for number, reference in zip(results, self.held.references(results), strict=True):
            shared = None if reference is None else reference.memory
            memory = None if shared is None else self._shared.get(shared)
            if memory is None and shared is not None:
                sources = zip(inputs, self.held.references(inputs), strict=True)
                base = next((source for source, ref in sources if ref is not None and ref.memory is shared), None)
                if base is not None and base in self._memories:
                    memory = self._shared[shared] = self._memories[base]
                    if base in self._borrowed:
                        self._borrowed[number] = self._borrowed[base]
            if memory is None:
                nbytes = self.held.entries[number].meta.nbytes
                memory = self.simulation.timeline.allocate(nbytes, self.ranks, self.lane)
            else:
                memory.holders += 1
            self._memories[number] = memory

    def _use(self, number: int, site: CallSite | None) -> None:
        """Waits for the lender of a tensor at its first use."""
        borrow = self._borrowed.get(number)
        if borrow is not None and not borrow.used:
            borrow.used = True
            name = f"waiting for {borrow.source.lane_name}"
            self.simulation.begin(name, self, site, reads=[number])
            self.simulation.timeline.wait(self.lane, borrow.recorded, name, site)

    def _groups(self, dims: Sequence[int]) -> Iterator[list[int]]:
        """Yields the ranks that exchange values along dimensions of the mesh."""
        slice_ = self._own_region.ndslice
        sizes = list(slice_.sizes)
        outer = [range(size) if dim not in dims else range(1) for dim, size in enumerate(sizes)]
        inner = [range(size) if dim in dims else range(1) for dim, size in enumerate(sizes)]
        for start in product(*outer):
            yield [slice_.nditem([a + b for a, b in zip(start, point, strict=True)]) for point in product(*inner)]

    # -- commands other than operations -----------------------------------------------------------------------------

    def _run_object(self, command: object, site: CallSite | None) -> None:
        simulation, timeline = self.simulation, self.simulation.timeline
        match command:
            case PutTensor() | Locals() | MakeParts():
                self._run("send", (), site, results=(command.result,))
            case CallRemote():
                numbers = [leaf.number for leaf in tree_leaves((command.args, command.kwargs)) if _is_tensor(leaf)]
                self._run(command.name, numbers, site, results=command.results, writes=command.writes)
            case RunFunction():
                self._run(getattr(command.function, "__name__", "execute"), (), site)
            case Send(lends=True):
                recorded = timeline.recorded(self.ranks, self.lane)
                memory = self._memories[command.number]
                memory.holders += 1
                simulation.borrows[command.tag] = SimulatedBorrow(recorded, self, memory)
                simulation.begin("borrow", self, site, reads=[command.number])
            case Take(lends=True):
                borrow = self._borrowed[command.result] = simulation.borrows[command.tag]
                borrow.memory.holders += 1
                self._memories[command.result] = borrow.memory
                [reference] = self.held.references((command.result,))
                if reference is not None and reference.memory is not None:
                    self._shared[reference.memory] = borrow.memory
            case GiveBack():
                self._give_back(simulation.borrows.pop(command.tag), site)
            case Send():
                simulation.under_way[command.tag] = self, command.number
            case Take():
                self._take(command, site)

    def _give_back(self, borrow: SimulatedBorrow, site: CallSite | None) -> None:
        name = f"waiting for {self.lane_name}"
        timeline = self.simulation.timeline
        self.simulation.begin(name, borrow.source, site)
        timeline.wait(borrow.source.lane, timeline.recorded(self.ranks, self.lane), name, site)
        timeline.release(borrow.memory)

    def _take(self, command: Take, site: CallSite | None) -> None:
        source, number = self.simulation.under_way.pop(command.tag)
        source._use(number, site)
        self.simulation.begin("to_mesh", self, site, reads=[number], makes=[command.result])
        routes = list(zip(command.sources, self.ranks, strict=True))
        self.simulation.timeline.send(routes, source.lane, self.lane, site)
        self._make((command.result,))

    # -- values -----------------------------------------------------------------------------------------------------

    def ask(self, command: tuple[object, ...], operation: str, written: Sequence[WriteRecord] = ()) -> ValueMesh[Any]:
        """Returns zeros, or None where a function would return something."""
        self.resume_if_healed()
        self.free()
        return self._value(command, call_site())

    def requested(self, commands: Sequence[tuple[object, ...]], operation: str) -> Future[list[ValueMesh[Any]]]:
        """Like `ask`, for several commands."""
        self.resume_if_healed()
        self.free()
        site = call_site()
        return resolved_future([self._value(command, site) for command in commands])

    def _value(self, command: tuple[object, ...], site: CallSite | None) -> ValueMesh[Any]:
        extent, count, subject = self._own_region.extent, len(self.ranks), command[1]
        if command[0] == OBJECT:
            self._run_object(subject, site)
            if isinstance(subject, CallRemote) and subject.bundle is not None:
                shown = self._predict(subject)
                return ValueMesh(extent, [shown] * count)
            return ValueMesh(extent, [None] * count)
        assert isinstance(subject, int)
        self._use(subject, site)
        meta = self.held.entries[subject].meta
        if command[0] == NUMBER:
            return ValueMesh(extent, [0] * count)
        assert command[0] in (OWN, SHARDS, WHOLE)
        return ValueMesh(extent, [_zeros(meta) for _ in range(count)])

    def _predict(self, command: CallRemote) -> Returned:
        """Returns the result of a function for tensors without values."""
        function: Any = function_at(command.function) if isinstance(command.function, str) else command.function
        fakes: dict[int, torch.Tensor] = {}
        with disabled(), FakeTensorMode(), torch.no_grad():

            def fake(leaf: TensorOf) -> torch.Tensor:
                meta = self.held.entries[leaf.number].meta
                if leaf.number not in fakes:
                    fakes[leaf.number] = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
                return fakes[leaf.number]

            args, kwargs = tree_map_only(TensorOf, fake, (command.args, command.kwargs))
            args, kwargs = tree_map_only(GroupOf, lambda _: None, (args, kwargs))
            inputs = list(fakes.values())
            versions = [tensor._version for tensor in inputs]
            return to_returned(function(*args, **kwargs), inputs, versions, self.layout)

    # -- methods of streams with workers ----------------------------------------------------------------------------

    def resume_if_healed(self) -> None:
        """Raises ContentsLostError if the mesh was stopped."""
        if self.lost is not None:
            raise ContentsLostError(self.lost)

    def repeat(self, command: object, sites: object, written: object) -> NoReturn:
        """Always raises NotImplementedError."""
        raise NotImplementedError("a compiled step is not simulated: call the function that was compiled")

    def begin_cell(self) -> None:
        """Starts the records of another cell."""
        self.table.clear()

    def flush(self) -> None:
        """Does nothing, as no command waits."""

    wait_for_window = flush_nowait = tick = synchronise = flush

    def sent(self) -> int:
        """Returns the number of commands so far."""
        return self.simulation.timeline.commands


def _nothing_is_sent(*batch: object) -> NoReturn:
    raise AssertionError("a simulated mesh has no workers")


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, TensorOf)


def _zeros(meta: Meta) -> torch.Tensor:
    with disabled():
        return torch.zeros(meta.shape, dtype=meta.dtype)


def _exchange_dims(definition: Define) -> tuple[int, ...]:
    """Returns the dimensions of the mesh along which a plan exchanges values."""
    steps = definition.program.steps
    if not any(isinstance(step, Redistribute) for step in steps):
        return ()
    metas = [meta for step in steps if isinstance(step, LocalStep) for meta in step.metas if meta is not None]
    metas += [step.meta for step in steps if isinstance(step, Redistribute)]
    return tuple(
        dim
        for dim in range(len(metas[0].layout.shape))
        if any(not (meta.is_own or meta.placements[dim].is_replicate()) for meta in metas)
    )
