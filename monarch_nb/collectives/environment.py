"""Environment variables as torchrun sets them, computed where a mesh is spawned."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Collection

import msgspec

from monarch_nb.shape import RegionForm

OURS = "MONARCH_NB_TORCHRUN"  # names the variables in a process's environment that were set here, not by the user
_FROM = 15_000  # below are ports of well-known services
_TRIES = 64
_lock, _last = threading.Lock(), 0


def of_rank(rank: int, size: int, local_rank: int, local_size: int, master: tuple[str, int]) -> dict[str, str]:
    """The variables of one process; hosts have `local_size` each."""
    group = rank // local_size
    groups = -(-size // local_size)
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": groups,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "rank",
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }
    return {name: str(value) for name, value in values.items()}


class RendezvousEnvironment(msgspec.Struct, array_like=True, frozen=True):
    """The part of the environment that the processes of a mesh share."""

    mesh: str  # of the processes
    region: RegionForm
    per_host: int
    master: tuple[str, int]  # ("", 0) where no host can be named

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of the process of a base rank."""
        region = self.region.region
        index = region.point_of_base_rank(rank).rank
        found = of_rank(index, len(region), rank % self.per_host, self.per_host, self.master)
        return {name: value for name, value in found.items() if self.master[0] or not name.startswith("MASTER_")}


def fresh_number() -> int:
    """Returns an increasing number, at which the names of new process groups begin."""
    global _last
    with _lock:
        _last = max(_last + 1, time.time_ns() // 1_000_000)
        return _last


def free_port(besides: Collection[int] = ()) -> int:
    """A TCP port on which nobody listens on this host, and that the kernel gives to nobody who does not ask for it.

    Ports of its own range, which `bind` to port 0 gives, may be taken by any connection until they are used.
    """
    first = _first_of_kernel()
    for _ in range(_TRIES if first > _FROM + 1000 else 0):
        port = random.SystemRandom().randrange(_FROM, first)
        if port not in besides and _is_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as door:
        door.bind(("", 0))
        return int(door.getsockname()[1])


def _first_of_kernel() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/sys/net/ipv4/ip_local_port_range") as given:
        return int(given.read().split()[0])
    return 32768


def _is_free(port: int) -> bool:
    try:
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:  # no descriptor is left to try it with
        return True
    with door:
        try:
            door.bind(("", port))
        except OSError:
            return False
    return True
