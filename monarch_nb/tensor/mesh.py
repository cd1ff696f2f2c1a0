"""Meshes for sharded tensors: processes that execute the controller's operations on their shards."""

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from math import prod
from types import TracebackType
from typing import Self, TypeVar, cast

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Replicate

from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, ValueMesh, as_it_is, part_of, region_of, state_of, this_host
from monarch_nb.runtime import Future, current_runtime
from monarch_nb.shape import Extent, MeshTrait, NDSlice, Region, Selector
from monarch_nb.supervision import DeviceMeshError, Driver
from monarch_nb.tensor import device, factories
from monarch_nb.tensor.commands import Locals, MakeParts, Open, RunFunction, TensorOf, mapped
from monarch_nb.tensor.errors import CallSite, call_site, stopped_text
from monarch_nb.tensor.handle import Destination, MeshTensor, current, redistributed, upload
from monarch_nb.tensor.kernels import prepare
from monarch_nb.tensor.lanes import ACTIVE
from monarch_nb.tensor.processes import Observer, processes_of, shrunk
from monarch_nb.tensor.propagation import MeshLayout, Meta, Propagator, own_values
from monarch_nb.tensor.ranks.active import Activation, active_mesh, deactivate, disabled
from monarch_nb.tensor.ranks.remote import RemoteProcessGroup
from monarch_nb.tensor.ranks.streams import MAIN
from monarch_nb.tensor.ranks.streams import Stream as Lane
from monarch_nb.tensor.ranks.tensor import RankTensor
from monarch_nb.tensor.sharding import LocalTensors, ShardingSpec, locals_of, placements_of, put_together
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import rewriting
from monarch_nb.tensor.workers.actor import TensorWorker

aten = torch.ops.aten
R = TypeVar("R")
_rank_meshes: "dict[tuple[str, Region], Mesh]" = {}  # for the main stream; other streams hold their own
_making_lock = threading.RLock()  # held while a mesh is made
_LARGE = 1 << 16  # bytes of local tensors that are sent without waiting for the next batch
_MAX_CHOICES = 4096  # slices to compare when processes are lost; above it, all are left out along one dimension
_STRIDES = 8  # every second, …, every eighth


class Mesh(MeshTrait, Destination):
    """Processes over which tensors are sharded.

    `Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))` spawns eight processes on this host;
    `Mesh.of(procs)` uses those of a proc mesh. Blocks until they are ready. A slice is a mesh with tensors of its own.

    With `spares`, each host keeps that many additional processes: they run nothing, and `heal_mesh` uses one to replace
    a lost rank, which is faster than starting a process.
    """

    _is_shared = False  # one mesh for all users of these processes: see `for_ranks`

    def __init__(
        self,
        shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        *,
        device: str = "cpu",
        name: str = "tensors",
        spares: int = 0,
    ) -> None:
        if not isinstance(shape, Sequence) or not shape:
            raise TypeError(
                f"Mesh: the shape is {shape!r}. Mesh(shape=(2, 4)) spawns processes, Mesh.of(procs) takes those of a "
                "proc mesh"
            )
        names = tuple(mesh_dim_names) if mesh_dim_names is not None else tuple(f"dim_{n}" for n in range(len(shape)))
        _check_names(names, len(shape))
        _check_spares(spares)
        procs = this_host().spawn_procs(dict(zip(names, shape, strict=True)), name=name)
        self._begin(procs, device)
        self._processes.keep_spares(spares)

    @classmethod
    def of(
        cls, procs: ProcMesh, mesh_dim_names: Sequence[str] | None = None, *, device: str = "cpu", spares: int = 0
    ) -> Self:
        """Makes a tensor mesh on the processes of a proc mesh, with its dimensions; blocks until they are ready.

        `mesh_dim_names` renames the dimensions; `spares` is as for `Mesh`. Raises RuntimeError if the processes are in
        a torch.distributed group.
        """
        if mesh_dim_names is not None:
            _check_names(mesh_dim_names, len(procs.extent))
            procs = procs.rename(**dict(zip(procs.extent, mesh_dim_names, strict=True)))
        _check_spares(spares)
        mesh = cls.__new__(cls)
        mesh._begin(procs, device)
        mesh._processes.keep_spares(spares)
        return mesh

    def _begin(self, procs: ProcMesh, kind: str, lane: "Lane | None" = None) -> None:
        if not len(procs.extent):
            procs = part_of(procs, Region(("rank",), NDSlice(region_of(procs).ndslice.offset, (1,), (1,))))
        self._procs, self._kind = as_it_is(procs), kind  # tensors do not move when the proc mesh grows
        self._entered: list[AbstractContextManager[None]] = []
        self._processes = processes_of(procs, kind)
        self._stream = self._open_stream(lane)

    # -- dimensions -------------------------------------------------------------------------------------------------

    @property
    def _region(self) -> Region:
        return region_of(self._procs)

    @property
    def region(self) -> Region:
        """The region of its processes in the proc mesh."""
        return self._region

    def _new_with_region(self, region: Region) -> Self:
        if self._is_shared:
            return self.for_ranks(part_of(self._procs, region))
        mesh = type(self).__new__(type(self))
        mesh._begin(part_of(self._procs, region), self._kind)
        return mesh

    def __call__(self, /, **dims: Selector) -> Self:
        """The same as `slice`, for programs of torchmonarch, where it is deprecated as well."""
        warnings.warn("mesh(host=0) is deprecated: use mesh.slice(host=0)", DeprecationWarning, stacklevel=2)
        return self.slice(**dims)

    @property
    def procs(self) -> ProcMesh:
        """The proc mesh of its processes."""
        return self._procs

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions, outermost first."""
        return self.layout.shape

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return self.layout.names

    @property
    def layout(self) -> MeshLayout:
        """Sizes, names and the kind of device."""
        extent: Extent = self._procs.extent
        return MeshLayout(tuple(extent.sizes), tuple(extent.labels), self._kind)

    @property
    def device(self) -> torch.device:
        """The device of its tensors: `torch.arange(8, device=mesh.device)`."""
        device: torch.device = self.stream.device
        return device

    @property
    def stream(self) -> Stream:
        """The stream on which operations are issued."""
        return self._stream

    def _open_stream(self, lane: "Lane | None") -> Stream:
        prepare()
        layout, region = self.layout, region_of(self._procs)
        propagator = Propagator(layout, leaf=MeshTensor)
        processes, opening = (
            self._processes,
            Open(layout, self._processes.members_of(region), lane.number if lane else 0),
        )
        send = processes.sender(region, lane)
        stream = Stream(self._procs.name, propagator, device.new_device(), send, processes)
        stream.lane = lane
        processes.add_stream(stream, opening)
        stream.issue_object(opening)  # the first command, before a seed
        device.occupy(stream, self._procs, self._finder())
        return stream

    def _finder(self) -> Callable[[Stream], "Mesh"]:
        """Returns a function from the stream to this mesh, or to a new equal one if only tensors refer to it."""
        mesh_ref, cls, procs, kind, processes = weakref.ref(self), type(self), self._procs, self._kind, self._processes

        def find(stream: Stream) -> Mesh:
            nonlocal mesh_ref
            mesh = mesh_ref()
            if mesh is None:
                mesh = cls.__new__(cls)
                mesh._procs, mesh._kind, mesh._entered = procs, kind, []
                mesh._processes, mesh._stream = processes, stream
                mesh_ref = weakref.ref(mesh)
            return mesh

        return find

    # -- tensors ----------------------------------------------------------------------------------------------------

    def distribute(self, tensor: torch.Tensor, sharding_spec: ShardingSpec = None) -> MeshTensor:
        """See `monarch.distribute`."""
        placements = placements_of(sharding_spec, self.layout, tensor.dim())
        if isinstance(tensor, MeshTensor):
            if tensor.reference.stream is self.stream:
                return redistributed(tensor, placements)
            tensor = tensor.full_tensor()
        result = upload(self.stream, tensor, placements)
        result.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return result

    def from_local(self, local_tensors: LocalTensors, sharding_spec: ShardingSpec) -> MeshTensor:
        """See `monarch.from_local`."""
        parts = locals_of(local_tensors, self.layout)
        placements = placements_of(sharding_spec, self.layout, parts[0].dim())
        meta = put_together(parts, self.layout, placements)
        copies = {id(part): part.detach().cpu().contiguous().clone() for part in parts}
        reference = self.stream.hold(meta, call_site())
        self.stream.issue_object(Locals(tuple(copies[id(part)] for part in parts), meta, reference.number))
        if sum(part.nbytes for part in copies.values()) > _LARGE:
            self.stream.flush()
        return MeshTensor(meta, reference)

    def bring(self, tensor: MeshTensor) -> MeshTensor:
        """Copies a tensor of another mesh: sharded along dimensions of equal names, replicated along others.

        Blocks, since the tensor passes through the controller.
        """
        before = tensor.meta.layout
        by_name = dict(zip(before.names, tensor.placements, strict=True))
        replicate = Replicate()
        placements = [by_name.get(name, replicate) for name in self.layout.names]
        return self.distribute(tensor, [replicate if placement.is_partial() else placement for placement in placements])

    def _make(
        self,
        operation: OpOverload,
        args: Sequence[object],
        sharding_spec: ShardingSpec,
        options: Mapping[str, object],
        ndim: int,
    ) -> MeshTensor:
        unknown = set(options) - {"dtype", "requires_grad"}
        if unknown:
            raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
        placements = placements_of(sharding_spec, self.layout, ndim)
        dtype = {name: value for name, value in options.items() if name == "dtype"}
        result = factories.make(self.stream, operation, args, dtype, placements)
        result.requires_grad_(bool(options.get("requires_grad", False)))
        return result

    def zeros(self, *size: int | Sequence[int], sharding_spec: ShardingSpec = None, **options: object) -> MeshTensor:
        """As torch.zeros; each process makes its own part. `options` are dtype and requires_grad. Does not block."""
        sizes = factories.size_of(size)
        return self._make(aten.zeros.default, (sizes,), sharding_spec, options, len(sizes))

    def ones(self, *size: int | Sequence[int], sharding_spec: ShardingSpec = None, **options: object) -> MeshTensor:
        """As torch.ones; see `zeros`."""
        sizes = factories.size_of(size)
        return self._make(aten.ones.default, (sizes,), sharding_spec, options, len(sizes))

    def empty(self, *size: int | Sequence[int], sharding_spec: ShardingSpec = None, **options: object) -> MeshTensor:
        """As torch.empty; see `zeros`."""
        sizes = factories.size_of(size)
        return self._make(aten.empty.memory_format, (sizes,), sharding_spec, options, len(sizes))

    def full(
        self, size: Sequence[int], fill_value: complex, *, sharding_spec: ShardingSpec = None, **options: object
    ) -> MeshTensor:
        """As torch.full; see `zeros`."""
        sizes = factories.size_of(size)
        return self._make(aten.full.default, (sizes, fill_value), sharding_spec, options, len(sizes))

    def rand(self, *size: int | Sequence[int], sharding_spec: ShardingSpec = None, **options: object) -> MeshTensor:
        """As torch.rand: shards draw different numbers, replicas equal ones, the same again after a seed."""
        sizes = factories.size_of(size)
        return self._make(aten.rand.default, (sizes,), sharding_spec, options, len(sizes))

    def randn(self, *size: int | Sequence[int], sharding_spec: ShardingSpec = None, **options: object) -> MeshTensor:
        """As torch.randn: shards draw different numbers, replicas equal ones, the same again after a seed."""
        sizes = factories.size_of(size)
        return self._make(aten.randn.default, (sizes,), sharding_spec, options, len(sizes))

    def randint(
        self, low: int, high: int, size: Sequence[int], *, sharding_spec: ShardingSpec = None, **options: object
    ) -> MeshTensor:
        """As torch.randint(low, high, size); see `zeros`."""
        sizes = factories.size_of(size)
        return self._make(aten.randint.low, (low, high, sizes), sharding_spec, options, len(sizes))

    def arange(self, *bounds: float, sharding_spec: ShardingSpec = None, **options: object) -> MeshTensor:
        """As torch.arange; see `zeros`."""
        operation = (aten.arange.default, aten.arange.start, aten.arange.start_step)[len(bounds) - 1]
        return self._make(operation, bounds, sharding_spec, options, 1)

    def from_parts(
        self,
        function: Callable[..., torch.Tensor],
        *args: object,
        size: Sequence[int],
        dtype: torch.dtype = torch.float32,
        sharding_spec: ShardingSpec = None,
    ) -> MeshTensor:
        """Makes a tensor from `function(part, *args)`, called in each process for its part.

        `part` has a slice for each dimension of the whole; the result has that size and `dtype`. Does not block; errors
        of the function are raised by the next call that waits.
        """
        placements = placements_of(sharding_spec, self.layout, len(size))
        meta = Meta.of(self.layout, size, dtype, placements)
        reference = self.stream.hold(meta, call_site())
        self.stream.draws.announce(self.stream)
        self.stream.issue_object(MakeParts(function, args, meta, reference.number).pack(self.stream))
        return MeshTensor(meta, reference)

    # -- values of the ranks' own ----------------------------------------------------------------------------------

    @classmethod
    def for_ranks(cls, procs: ProcMesh, lane: "Lane | None" = None) -> Self:
        """Returns the tensor mesh of a proc mesh for values of the ranks' own, always the same, created at first use.

        `lane` is a stream of the program; None is the main one.
        """
        key, meshes = (state_of(procs).uid, region_of(procs)), _rank_meshes if lane is None else lane.meshes
        with _making_lock:
            mesh = meshes.get(key)
            if mesh is not None and mesh.stream.lost is not None:
                try:
                    mesh.stream.resume_if_healed()
                except DeviceMeshError:  # its processes have ended or were replaced
                    mesh = None
            if mesh is None:
                mesh = cls.__new__(cls)
                mesh._begin(procs, "cuda" if torch.cuda.is_available() else "cpu", lane)
                mesh._is_shared = True
                meshes[key] = mesh
        assert isinstance(mesh, cls)
        return mesh

    def on(self, lane: "Lane | None") -> "Mesh":
        """Returns this mesh on a stream of the program."""
        lane = None if lane is MAIN else lane
        return self if self.stream.lane is lane else self.for_ranks(self._procs, lane)

    def activate(self) -> AbstractContextManager[Self]:
        """Makes all tensor factories create tensors on each rank of this mesh, in a `with` block.

        `torch.rand(3)` there draws on each rank, and returns a `monarch.Tensor`. Operations on such tensors need no
        active mesh. Without `with` it remains active until `deactivate()`, in this thread.
        """
        return Activation(self)

    def deactivate(self) -> None:
        """Ends the last `activate()`; does nothing without one."""
        deactivate(self)

    def rank_tensor(self, dims: str | Sequence[str]) -> RankTensor:
        """Returns a tensor with each rank's coordinate along a dimension; along several, their row-major index.

        While a mesh on some of these ranks is active, the tensor is on that one, with the coordinates in this mesh.
        Raises KeyError for an unknown dimension.
        """
        names = [dims] if isinstance(dims, str) else list(dims)
        layout = self.layout
        unknown = [name for name in names if name not in layout.names]
        if unknown:
            raise KeyError(f"{self!r} has no dimension {unknown[0]!r}; it has {', '.join(map(repr, layout.names))}")
        numbers = []
        for point in product(*map(range, layout.shape)):
            number = 0
            for name in names:
                dim = layout.names.index(name)
                number = number * layout.shape[dim] + point[dim]
            numbers.append(number)
        return self._own_numbers(numbers)

    def _own_numbers(self, numbers: Sequence[int]) -> RankTensor:
        """Returns a tensor with one of these numbers on each rank; on the ranks of an active mesh on some of them."""
        active = active_mesh()
        if active is not None and active.region != self.region and active.shares_processes(self):
            own = dict(zip(self.members, numbers, strict=True))
            if own.keys() >= set(active.members):
                return active._own_numbers([own[member] for member in active.members])
        stream, layout = self.on(ACTIVE.stream).stream, self.stream.layout
        meta = Meta.of(layout, (), torch.int64, own_values(layout))
        reference = stream.hold(meta, call_site())
        with disabled():
            parts = tuple(torch.tensor(number, device="cpu") for number in numbers)
        stream.issue_object(Locals(parts, meta, reference.number))
        return cast(RankTensor, MeshTensor(meta, reference))

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of its ranks in the group of all workers of its processes."""
        return self._processes.members_of(self._region)

    def shares_processes(self, other: "Mesh") -> bool:
        """Returns whether both are on processes of one proc mesh, in one group."""
        return self._processes is other._processes

    def rank(self, dims: str | Sequence[str]) -> RankTensor:
        """As `rank_tensor`."""
        return self.rank_tensor(dims)

    def rank_tensors(self) -> dict[str, RankTensor]:
        """Returns the `rank_tensor` of each dimension, by name."""
        return {name: self.rank_tensor(name) for name in self.mesh_dim_names}

    @property
    def ranks(self) -> dict[str, RankTensor]:
        """The result of `rank_tensors()`."""
        return self.rank_tensors()

    def process_idx(self) -> RankTensor:
        """Returns a tensor with the number of each rank's process in the proc mesh."""
        return self._own_numbers(list(self.region.ranks()))

    @property
    def names(self) -> tuple[str, ...]:
        """The same as `mesh_dim_names`."""
        return self.mesh_dim_names

    @property
    def processes(self) -> NDSlice:
        """The numbers of its processes in the proc mesh."""
        return self.region.ndslice

    @property
    def client(self) -> "Client":
        """The controller of the mesh, as in programs of torchmonarch."""
        return Client(self)

    def process_group(self, dims: str | Sequence[str]) -> RemoteProcessGroup:
        """Returns the process group of each rank along dimensions, as an argument of a remote function."""
        return RemoteProcessGroup(self, [dims] if isinstance(dims, str) else dims)

    def to_table(self) -> str:
        """Returns a table as text: for each rank of the mesh its host, and the number of its process there."""
        return self._procs.to_table()

    # -- observation ------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> ActorMesh[TensorWorker]:
        """The actors that execute the operations."""
        return part_of(self._processes.workers, region_of(self._procs))

    @property
    def executors(self) -> list[AnyMesh]:
        """The workers, and the actors that execute the operations of streams beside the main one."""
        return self._processes.executors(self._region)

    def observe(
        self,
        issued: Callable[[CallSite | None], CallSite | None] | None,
        sent: Callable[[int, int, Sequence[CallSite | None]], None],
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        """Calls functions for operations issued on all meshes of these processes; replaces earlier functions.

        `issued` gets the call site of each operation, and returns it or its own form; `sent` gets the number of a
        stream, that of the first operation sent, and the call sites; `joined` is called for further `executors`. None
        ends the observation.
        """
        self._processes.observer = None if issued is None else Observer(issued, sent, joined)

    def in_order(self) -> AbstractContextManager[None]:
        """Sends issued operations; messages to workers in the block arrive in order with them. May block."""
        return self._processes.in_order()

    # -- programs ---------------------------------------------------------------------------------------------------

    def execute(self, function: Callable[..., R], *args: object, **kwargs: object) -> ValueMesh[R]:
        """Runs `function(*args, **kwargs)` in each process, in order with the operations on its tensors.

        Tensors of the mesh among the arguments are passed as their shards, which may be written to. Returns the result
        of each process; blocks. Raises TensorError with the errors by rank.
        """
        written: list[MeshTensor] = []
        sent_args, sent_kwargs = mapped((args, kwargs), lambda leaf: _as_reference(leaf, written))
        command = RunFunction(function, sent_args, sent_kwargs).pack(self.stream)
        with rewriting(tensor.reference for tensor in written):
            return self.stream.run_everywhere(command, [tensor.reference for tensor in written])

    def synchronise(self) -> None:
        """Blocks until all issued operations have run. Raises TensorError for one that failed."""
        self.stream.synchronise()

    def shrunk(self) -> Self:
        """Returns a mesh of the largest slice without lost processes; this mesh if none is lost.

        This mesh cannot be used afterwards. Blocks. Raises ValueError if all processes are lost.
        """
        region = self._region
        lost = [
            rank for rank in current_runtime().part(Driver).failed(state_of(self._procs).uid) if rank in region.ranks()
        ]
        if not lost:
            return self
        ranges = largest_slice(self.sizes, [region.point_of_base_rank(rank) for rank in lost])
        slices = {label: slice(indices.start, indices.stop, indices.step) for label, indices in ranges.items()}
        processes = shrunk(self._procs.slice(**slices), self._kind)
        mesh = type(self).__new__(type(self))
        mesh._begin(self._procs.slice(**slices), self._kind)
        assert mesh._processes is processes
        return mesh

    def exit(self) -> None:
        """Waits for all issued operations. Raises TensorError for one that failed, fetched or not."""
        for stream in (self.stream, *self._processes.streams_beside):
            stream.raise_unseen()

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Ends the processes, and with them all tensors."""
        self.stream.lose(stopped_text(reason))
        return self._procs.stop(reason)

    def __enter__(self) -> Self:
        entered = device.entered(self.stream)
        entered.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        return f"<Mesh {self._procs.name!r} {{{sizes}}} on {self.device}>"


class Client:
    """The controller of a mesh of tensors, for programs of torchmonarch: `mesh.client`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def shutdown(self, destroy_pg: bool = True, error_reason: object = None) -> None:
        """Waits for all issued operations. Raises TensorError for one that failed."""
        self._mesh.exit()


def _check_names(names: Sequence[str], dims: int) -> None:
    if len(names) != dims:
        raise ValueError(f"mesh_dim_names={names!r} for a shape of {dims} dimensions: give one name for each")


def _check_spares(count: int) -> None:
    if count < 0:
        raise ValueError(f"spares={count}: a number of processes, 0 or more")


def _as_reference(value: object, tensors: list[MeshTensor]) -> object:
    if not isinstance(value, MeshTensor):
        return value
    value.reference.stream.held.require_contents((value.reference.number,))
    tensors.append(value)
    return TensorOf(current(value))


def largest_slice(sizes: Mapping[str, int], lost: Sequence[Mapping[str, int]]) -> dict[str, range]:
    """Returns the remaining indices along each dimension; `lost` are the coordinates of the lost ranks.

    Of equally large slices takes the one that omits along the outermost dimension. Raises ValueError if none is left.
    """
    labels = list(sizes)
    choices: Collection[Sequence[str]] = [[label] * len(lost) for label in labels]
    if len(labels) ** len(lost) <= _MAX_CHOICES:
        choices = list(product(labels, repeat=len(lost)))
    candidates = [_slice_without(sizes, lost, along) for along in choices]
    best = max(candidates, key=lambda ranges: prod(map(len, ranges.values())), default={})
    if not best or not all(best.values()):
        raise ValueError("nothing is left of the mesh: all of it is lost")
    return best


def _slice_without(
    sizes: Mapping[str, int], lost: Sequence[Mapping[str, int]], along: Sequence[str]
) -> dict[str, range]:
    """Returns the slice that leaves each lost point out along one dimension."""
    excluded: dict[str, set[int]] = {label: set() for label in sizes}
    for point, label in zip(lost, along, strict=True):
        excluded[label].add(point[label])
    return {label: _longest(size, excluded[label]) for label, size in sizes.items()}


def _longest(size: int, excluded: Collection[int]) -> range:
    """Returns the first of the longest ranges of indices, with any stride, without the excluded ones."""
    best = range(0)
    for stride in range(1, min(size, _STRIDES) + 1):
        for start in range(size):
            stop = start
            while stop < size and stop not in excluded:
                stop += stride
            if len(indices := range(start, stop, stride)) > len(best):
                best = indices
        if not excluded:
            break
    return best
