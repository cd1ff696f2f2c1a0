"""The process group of all processes of a proc mesh, on one of them. Each generation is a new group.

Its processes find each other through a store that the first of them keeps, and exchange data over connections of
gloo's, or NCCL's, own. Neither is encrypted nor authenticated. On one host both listen on the loopback interface alone.
"""

import datetime
import os
import socket
import sys
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_LOOPBACK = "127.0.0.1"
_TIMEOUT = datetime.timedelta(minutes=30)  # of a collective; who waits is freed long before, by what ends the wait


class StoreAt(msgspec.Struct, array_like=True, frozen=True):
    """Where the store of a world is."""

    host: str
    port: int


class World:
    """This process's part in it."""

    def __init__(self) -> None:
        self.generation = -1
        self._store: Any = None  # where this process keeps it
        self._ours = False  # the default group of this process is this world

    def keep_store(self, one_host: bool) -> StoreAt:
        """Starts the store, in the process of rank 0; another generation uses the same."""
        if self._store is None:
            host = _LOOPBACK if one_host else _name()
            door = socket.create_server((_LOOPBACK if one_host else "", 0), backlog=2048)
            port = door.getsockname()[1]
            self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
            self._at = StoreAt(host, port)
        return self._at

    def join(self, at: StoreAt, generation: int, rank: int, size: int, per_host: int, device: str) -> None:
        """Becomes a member; blocks until all are. One of an earlier generation is let go first.

        Raises RuntimeError where the process has a group of somebody else's.
        """
        if dist.is_initialized() and not self._ours:
            raise RuntimeError(
                "this process has a torch.distributed process group already, and a tensor mesh needs its own: wrap "
                "processes that have none, or call torch.distributed.destroy_process_group() there first"
            )
        self.leave()
        _share_cores(per_host)
        if at.host == _LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        store = TCPStore(at.host, at.port, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=size,
            store=PrefixStore(f"generation {generation}", store),
            timeout=_TIMEOUT,
        )
        self._ours, self.generation = True, generation

    def leave(self) -> None:
        """Lets the group go, without taking leave of its members."""
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()
        self._ours = False


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
