"""The process group of all processes of a proc mesh, on one of them, and those along the dimensions of its meshes.

Each generation is a new group: one of which a member has failed, or has left a collective, is of no use any more. Its
processes find each other through a store that the first of them keeps, and exchange data over connections of gloo's, or
NCCL's, own. Neither is encrypted nor authenticated. On one host both listen on the loopback interface alone.
"""

import datetime
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore, _resolve_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from monarch_nb.collectives.connections import Connections
from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.tensor.propagation import Layout

_LOOPBACK = "127.0.0.1"
_TIMEOUT = datetime.timedelta(minutes=30)  # of a collective; who waits is freed long before, by what ends the wait


class StoreAt(msgspec.Struct, array_like=True, frozen=True):
    """Where the store of a world is."""

    host: str
    port: int


class Place(msgspec.Struct, array_like=True, frozen=True):
    """What a process has to know of a generation to become a member."""

    group: str  # the uid of the proc mesh
    controller: str  # address of the process that keeps the group
    generation: int
    members: tuple[int, ...]  # ranks of the proc mesh; those of the group are the places in it
    per_host: int  # processes that share the cores of a host
    device: str


class World:
    """This process's part in it."""

    def __init__(self) -> None:
        self.generation = -1
        self.rank = 0
        self.connections = Connections()
        self.size = 0
        self._store: Any = None  # where this process keeps it
        self._at: StoreAt | None = None
        self._on_loopback = False  # the interface is this class's choice
        self._ours = False  # the default group of this process is this world
        self._meshes: dict[str, DeviceMesh] = {}

    def keep_store(self, one_host: bool) -> StoreAt:
        """Starts the store, in the process of rank 0; another generation uses the same, unless it has more hosts."""
        if self._at is None or (self._at.host == _LOOPBACK and not one_host):
            host = _LOOPBACK if one_host else _name()
            door = socket.create_server((_LOOPBACK if one_host else "", 0), backlog=2048)
            port = door.getsockname()[1]
            self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
            self._at = StoreAt(host, port)
        return self._at

    def join(self, at: StoreAt, place: Place, rank: int, connections: Connections) -> None:
        """Becomes a member; blocks until all are. One of an earlier generation is let go first.

        Meshes that were made in that one go on in this one. `connections` takes note of what is opened. Raises
        RuntimeError where the process has a group of somebody else's, or where this one is cut meanwhile.
        """
        if dist.is_initialized() and not self._ours:
            raise RuntimeError(
                "this process has a torch.distributed process group already, and a tensor mesh needs its own: wrap "
                "processes that have none, or call torch.distributed.destroy_process_group() there first"
            )
        self.leave()
        _share_cores(place.per_host)
        if at.host == _LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
            self._on_loopback = True
        elif at.host != _LOOPBACK and self._on_loopback:
            self._on_loopback = False
            del os.environ["GLOO_SOCKET_IFNAME"]
        os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # connections have to be there to be known
        self.rank, self.size, self.generation = rank, len(place.members), place.generation
        c10d._world.group_count = 0  # the group's name has to be the same on all, also where an earlier attempt failed
        with (
            PROCESS_GROUPS.apart(),
            connections.noted(at.port),  # the store's, too: who waits there for a dead member is freed
        ):
            store = TCPStore(at.host, at.port, is_master=False)
            backend = "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                rank=rank,
                world_size=self.size,
                store=PrefixStore(f"generation {place.generation}", store),
                timeout=_TIMEOUT,
            )
            self._ours = True
            dist.barrier()
        for name, mesh in sorted(self._meshes.items()):
            self._connect(name, mesh)

    def mesh(self, name: str, layout: Layout, ranks: Sequence[int]) -> DeviceMesh:
        """The mesh of these members; all of them call this, in the same order as other collectives.

        `name` tells it from others. It goes on in later generations.
        """
        members = torch.tensor(ranks, dtype=torch.int).view(layout.shape)
        mesh = DeviceMesh(layout.device, members, mesh_dim_names=layout.names, _init_backend=False, _rank=self.rank)
        self._connect(name, mesh)
        self._meshes[name] = mesh
        return mesh

    def own_group(self, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """A group for nothing else than `name`, of this generation; all of its members call this. On the CPU."""
        return _resolve_process_group(self._group(name, list(members), shared=False, backend="gloo"))

    def drop(self, name: str) -> None:
        """A mesh is not needed any more."""
        self._meshes.pop(name, None)

    def leave(self) -> None:
        """Lets the group go, without taking leave of its members."""
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()
        self._ours = False

    def _connect(self, name: str, mesh: DeviceMesh) -> None:
        """Makes the groups along a mesh's dimensions, under names that are the same in each generation and rank.

        PyTorch's own names count what a process has made before, which differs between ranks that share no mesh.
        """
        names = []
        for dim in range(mesh.ndim):
            members = [int(rank) for rank in _along(mesh, dim, self.rank)]
            names.append(self._group(f"{name}/{dim}", members))
        mesh._dim_group_names = names
        mesh._pg_registry = {each: _resolve_process_group(each) for each in names}

    def _group(self, name: str, members: list[int], *, shared: bool = True, backend: str | None = None) -> Any:
        default = c10d._get_default_group()
        if shared and len(members) == self.size:
            return default.group_name
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
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
        return group.group_name


def _along(mesh: DeviceMesh, dim: int, rank: int) -> Sequence[int]:
    """The members of a mesh that differ from a rank along one dimension only, itself among them."""
    ranks = mesh.mesh
    place = (ranks == rank).nonzero()[0].tolist()
    place[dim] = slice(None)
    return ranks[tuple(place)].tolist()


def _share_cores(processes: int) -> None:
    """More threads than cores would wait for each other, spinning: collectives then take tens of milliseconds."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // processes))


def _name() -> str:
    """The name or address of this host that others can use."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror:  # a host whose own name leads nowhere: this machine alone can be meant
        return "localhost"
    return name
