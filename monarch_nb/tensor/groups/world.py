"""The process group of all processes of a proc mesh, those along dimensions of its meshes, and membership of a process.

Each generation is a new group, since a group is unusable once a member has failed or left a collective. Its processes
find each other through a store in the first of them, and exchange data over connections of gloo or NCCL. Neither the
store nor the connections are encrypted or authenticated. On a single host both listen on the loopback interface only.
"""

import contextlib
import datetime
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore, _resolve_process_group
from torch._ops import OpOverload
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from monarch_nb.collectives.connections import CAN_CUT, Connections
from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.runtime import Runtime
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.propagation import MeshLayout
from monarch_nb.tensor.verbs import (
    FAILED,
    INTERRUPTED,
    AskValues,
    CutGroup,
    Failure,
    GoOn,
    Interrupted,
    MemoryUsed,
    RankFailed,
    Values,
)

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_SHARED = "cpu:gloo,cuda:gloo"  # the backends of ranks that share a device
_TIMEOUT = datetime.timedelta(minutes=30)  # of a collective; the end of a generation frees waiting ranks long before
INTERRUPT_GRACE_S = 0.3  # time for an interrupt to end the running code without further help

# By namespace; torch/csrc/distributed/c10d/Functional.cpp has their schemas.
_OPERATIONS = {
    "_dtensor": ("shard_dim_alltoall",),
    "_c10d_functional": (
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "broadcast",
        "broadcast_",
    ),
}


class Staging:
    """Collectives of ranks that share a GPU, through the host's memory; `end` removes these kernels from this process.

    NCCL refuses two ranks on one device. Gloo takes tensors of a device in the plain collectives of torch.distributed,
    and ends the process (a segmentation fault, seen with PyTorch 2.11) in the functional ones, which DTensor and
    compiled code call: those get a kernel for CUDA tensors here that copies to the CPU, exchanges there, and copies
    back.
    """

    def __init__(self, key: str = "CUDA") -> None:
        make: Any = torch.library.Library  # without types
        self._libraries: list[Any] = []
        for space, names in _OPERATIONS.items():
            library = make(space, "IMPL")
            self._libraries.append(library)
            for name in names:
                packet = getattr(getattr(torch.ops, space), name, None)
                if packet is not None:  # older versions of PyTorch lack some
                    library.impl(name, _stage(packet.default), key)

    def end(self) -> None:
        """Removes the kernels."""
        while self._libraries:
            self._libraries.pop()._destroy()


def _stage(operation: OpOverload) -> Callable[..., object]:
    in_place = operation._schema.name.endswith("_")

    def call(*args: object, **kwargs: object) -> object:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = inputs[0].device
        copies, options = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
        results = operation(*copies, **options)
        results = tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor.default, results)
        target = args[0] if in_place else kwargs.get("out")
        if target is not None:
            for output, result in zip(tree_leaves(target), tree_leaves(results), strict=True):
                output.copy_(result)
            return target
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), results)

    return call


class StoreAddress(msgspec.Struct, array_like=True, frozen=True):
    """Host and port of the store of a world."""

    host: str
    port: int


class GroupSpec(msgspec.Struct, array_like=True, frozen=True):
    """Everything that a process needs to join a generation."""

    group: str  # the uid of the proc mesh
    controller: str  # address of the process that coordinates the group
    generation: int
    members: tuple[int, ...]  # ranks of the proc mesh; the positions are the ranks of the group
    per_host: int  # processes that share the cores of a host
    device: str


class TorchGroups:
    """Torch's process groups in this process: the default group and the groups of meshes."""

    def __init__(self) -> None:
        self.generation = -1
        self.rank = 0
        self.connections = Connections()
        self.size = 0
        self._store: TCPStore | None = None  # in the process of rank 0
        self._store_address: StoreAddress | None = None
        self._on_loopback = False  # True if this class has set the interface
        self._is_ours = False  # True if the default group of this process was made here
        self._meshes: dict[str, DeviceMesh] = {}
        self._unconnected: set[str] = set()  # names of meshes without groups so far
        self._lines: dict[tuple[int, ...], c10d.GroupName] = {}  # groups of this generation, by their members
        self._staging: Staging | None = None  # if ranks share a device

    def keep_store(self, one_host: bool) -> StoreAddress:
        """Starts the store, in the process of rank 0. Later generations reuse it unless they span more hosts."""
        if self._store_address is None or (self._store_address.host == _LOOPBACK and not one_host):
            host = _LOOPBACK if one_host else _host_name()
            listener = socket.create_server((_LOOPBACK if one_host else "", 0), backlog=2048)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            self._store_address = StoreAddress(host, port)
        return self._store_address

    def join(self, address: StoreAddress, spec: GroupSpec, rank: int, connections: Connections) -> None:
        """Joins a generation, after leaving the previous one; blocks until all members have joined.

        Meshes of the previous generation continue in this one. `connections` records the connections that are opened.
        Raises RuntimeError if the process has another default group, or if this generation is cut meanwhile.
        """
        if dist.is_initialized() and not self._is_ours:
            raise RuntimeError(
                "this process has a torch.distributed process group already, and a tensor mesh needs its own: wrap "
                "processes that have none, or call torch.distributed.destroy_process_group() there first"
            )
        self.leave()
        _share_cores(spec.per_host)
        if address.host == _LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
            self._on_loopback = True
        elif address.host != _LOOPBACK and self._on_loopback:
            self._on_loopback = False
            del os.environ["GLOO_SOCKET_IFNAME"]
        os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # all connections have to be open to be recorded
        self.rank, self.size, self.generation = rank, len(spec.members), spec.generation
        c10d._world.group_count = 0  # group names must agree on all ranks, also after a failed attempt
        with (
            PROCESS_GROUPS.apart(),
            connections.noted(address.port),  # and the store's: frees ranks that wait there for a dead member
        ):
            store = TCPStore(address.host, address.port, is_master=False)
            group_store = PrefixStore(f"generation {spec.generation}", store)
            backend = "gloo" if spec.device == "cpu" else _backend_of(_devices(group_store, rank, self.size))
            if backend == _SHARED:
                self._staging = Staging()
            dist.init_process_group(backend, rank=rank, world_size=self.size, store=group_store, timeout=_TIMEOUT)
            self._is_ours = True
            dist.barrier()
        for name, mesh in sorted(self._meshes.items()):
            self._connect(name, mesh)

    def mesh(self, name: str, layout: MeshLayout, ranks: Sequence[int], *, connected: bool = True) -> DeviceMesh:
        """Makes the mesh of these members; all of them call this, in the same order as other collectives.

        `name` identifies the mesh. The mesh continues in later generations. One that is not `connected` has no groups
        until `connect`, and need not be made in order.
        """
        members = torch.tensor(ranks, dtype=torch.int).view(layout.shape)
        mesh = DeviceMesh(layout.device, members, mesh_dim_names=layout.names, _init_backend=False, _rank=self.rank)
        if connected:
            self._connect(name, mesh)
        else:
            self._unconnected.add(name)
        self._meshes[name] = mesh
        return mesh

    def connect(self, name: str) -> None:
        """Makes the groups of a mesh that has none; all of its members call this, in order with other collectives."""
        if name in self._unconnected:
            self._connect(name, self._meshes[name])

    def own_group(self, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """Makes a CPU group of this generation for exclusive use by `name`; all of its members call this."""
        return _resolve_process_group(self._group(name, list(members), shared=False, backend="gloo"))

    def group_along(self, mesh: DeviceMesh, dims: Sequence[int]) -> dist.ProcessGroup:
        """Returns the group of the ranks that differ in these coordinates of a mesh; all of them call this."""
        if len(dims) == 1:
            return mesh.get_group(dims[0])
        members = _members_along(mesh, dims, self.rank)
        return _resolve_process_group(self._line(f"ranks {members}", members))

    def drop(self, name: str) -> None:
        """Removes a mesh from later generations."""
        self._meshes.pop(name, None)
        self._unconnected.discard(name)

    def abort(self) -> None:
        """Aborts pending collectives of NCCL, whose kernels wait on the device. May block; any thread.

        Collectives of gloo end with their connections.
        """
        for group in tuple(c10d._world.pg_map):
            with contextlib.suppress(RuntimeError, AttributeError):  # without a backend, or being destroyed
                backend = group._get_backend(torch.device("cuda"))
                if backend.name() == "nccl":
                    backend.abort()

    def leave(self) -> None:
        """Destroys the group without notifying its members."""
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()
        self._is_ours = False
        self._lines.clear()
        if self._staging is not None:
            self._staging.end()
            self._staging = None

    def _connect(self, name: str, mesh: DeviceMesh) -> None:
        """Makes the groups along the dimensions of a mesh, with names that agree on all ranks and in all generations.

        Meshes share the groups of equal members, since each process executes its commands in one order.
        PyTorch's own names count the groups of a process, which differ between ranks that share no mesh.
        """
        names = [self._line(f"{name}/{dim}", _members_along(mesh, [dim], self.rank)) for dim in range(mesh.ndim)]
        mesh._dim_group_names = names
        mesh._pg_registry = {group: _resolve_process_group(group) for group in names}
        self._unconnected.discard(name)

    def _line(self, name: str, members: tuple[int, ...]) -> c10d.GroupName:
        """Returns the group of these members; makes it, with this name, if there is none."""
        if members not in self._lines:
            self._lines[members] = self._group(name, list(members))
        return self._lines[members]

    def _group(
        self, name: str, members: list[int], *, shared: bool = True, backend: str | None = None
    ) -> c10d.GroupName:
        default = c10d._get_default_group()
        if shared and len(members) == self.size:
            default_name: c10d.GroupName = default.group_name
            return default_name
        default_backend, store = c10d._world.pg_map[default]
        with PROCESS_GROUPS.apart(), self.connections.noted():
            group, _ = c10d._new_process_group_helper(
                len(members),
                members.index(self.rank),
                members,
                c10d.Backend(backend or default_backend),
                store,
                group_name=c10d.GroupName(f"{name} of {members[0]}"),
                timeout=_TIMEOUT,
                group_desc=name,
            )
        c10d._world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(members)}
        group_name: c10d.GroupName = group.group_name
        return group_name


def _devices(store: PrefixStore, rank: int, size: int) -> list[str]:
    """Returns the names of the devices of all members, by rank; blocks until all have sent theirs."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # its watchdog aborts, and does not end the process
    device = torch.cuda.current_device()
    torch.cuda.set_device(device)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", os.environ.get("CUDA_VISIBLE_DEVICES", device))
    store.set(f"device {rank}", f"{socket.gethostname()} {uuid}")
    return [store.get(f"device {member}").decode() for member in range(size)]


def _backend_of(devices: Sequence[str]) -> str:
    """Returns NCCL if each member has a device of its own, else gloo, since NCCL refuses members that share one."""
    if len(set(devices)) == len(devices):
        return "cpu:gloo,cuda:nccl"
    logger.info("processes share a GPU: collectives go by gloo, through the host's memory")
    return _SHARED


def _members_along(mesh: DeviceMesh, dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns the members of a mesh that differ from a rank in these coordinates at most."""
    ranks = mesh.mesh
    index = (ranks == rank).nonzero()[0].tolist()
    for dim in dims:
        index[dim] = slice(None)
    return tuple(ranks[tuple(index)].flatten().tolist())


def _share_cores(processes: int) -> None:
    """Limits threads to this process's share of the cores, since surplus threads spin and slow down collectives."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // processes))


def _host_name() -> str:
    """Returns the name of this host under which other hosts reach it."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror:  # the host's own name does not resolve, so that there can be no other hosts
        return "localhost"
    return name


class Membership:
    """This process as a member of the group of a proc mesh.

    `group` is the uid of the proc mesh. `progress` returns the number of operations of a stream that this process has
    done, `running` the number of the batch that it executes (0 for none), `usage` the memory and time of a stream,
    `values` the local values of a tensor, which blocks. `settle` is called on any thread before the collectives of an
    ended generation are aborted: results that its device has not computed by then are lost.
    """

    def __init__(
        self,
        runtime: Runtime,
        progress: Callable[[int], int],
        running: Callable[[], int],
        usage: Callable[[int], MemoryUsed],
        values: Callable[[AskValues], Values],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.world = TorchGroups()
        self.progress, self._running, self.usage, self.values = progress, running, usage, values
        self.group = ""
        self.over: CutGroup | None = None  # the message that ended this generation
        self._runtime, self._settle = runtime, settle
        self._controller, self._generation = "", -1
        self._failed_everywhere: dict[int, int] = {}  # by stream, the last operation known to have failed on all ranks
        self._cut: CutGroup | None = None  # the last one received
        self._changed = threading.Condition()
        runtime.feature(GROUPS).membership = self

    def join(self, store: StoreAddress, spec: GroupSpec, rank: int) -> None:
        """Joins the next generation; blocks and raises as `TorchGroups.join`."""
        with self._changed:
            self.group, self._controller, self._generation = spec.group, spec.controller, spec.generation
            self._failed_everywhere.clear()
            cut = self._cut
            self.over = (
                cut if cut is not None and (cut.group, cut.generation) == (spec.group, spec.generation) else None
            )
            connections = self.world.connections = Connections()
            if self.over is not None:
                connections.cut()
        self.world.join(store, spec, rank, connections)

    def all_failed(self, failure: Failure, ranks: tuple[int, ...], begun: int | None = None) -> bool:
        """Returns whether an operation that failed here failed on all its ranks; blocks until that is known.

        If it did not, this generation is over. `begun` is the first operation of the compiled step that it belongs to.
        """
        if len(ranks) == 1:
            return True
        if self.over is None:
            report = RankFailed(self.group, self._generation, self.world.rank, ranks, failure, begun)
            self._runtime.post(self._controller, FAILED, report)
        with self._changed:
            self._changed.wait_for(
                lambda: self.over is not None or self._failed_everywhere.get(failure.stream, -1) >= failure.number
            )
            return self.over is None

    # -- any thread -------------------------------------------------------------------------------------------------

    @property
    def held(self) -> str:
        """The reason why this process may be unable to leave an ended generation; "" if it can, or has."""
        if CAN_CUT or self.over is None or not self._running():
            return ""
        return f"connections of gloo cannot be cut on {sys.platform}"

    def interrupted(self, running: Callable[[], int]) -> None:
        """Reports an interrupt to the controller if it does not end the code of a thread, which `running` numbers."""
        before, report = running(), Interrupted(self.group, self._generation)

        def check() -> None:
            if before and running() == before:
                self._runtime.post(self._controller, INTERRUPTED, report)

        self._runtime.later(INTERRUPT_GRACE_S, check)

    def go_on(self, message: GoOn) -> None:
        """Releases the executing thread: all ranks have failed in the same operation."""
        with self._changed:
            if (message.group, message.generation) == (self.group, self._generation):
                # The message of an earlier operation may arrive once more after that of a later one.
                self._failed_everywhere[message.stream] = max(
                    message.number, self._failed_everywhere.get(message.stream, -1)
                )
                self._changed.notify_all()

    def cut(self, message: CutGroup) -> None:
        """Ends this generation, which frees a thread that waits in one of its collectives."""
        with self._changed:
            self._cut = message  # may be of a generation that will be joined later
            if (message.group, message.generation) != (self.group, self._generation) or self.over is not None:
                return
            self.over = message
            self._settle()
            self._changed.notify_all()
            connections = self.world.connections
        connections.cut()
        threading.Thread(target=self.world.abort, name="monarch-abort", daemon=True).start()
