"""Environment variables that torchrun would set, computed in the process that spawns a mesh."""

import contextlib
import ipaddress
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator

import msgspec

from monarch_nb.shape import RegionForm

OURS = "MONARCH_NB_TORCHRUN"  # lists the variables in a process's environment that were set here, not by the user
_FROM = 15_000  # ports below are those of well-known services
_TRIES = 64
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # netdevice(7)
_NO_HOST = "192.0.2.1"  # an address that no machine has (RFC 5737); nothing is sent there
_lock, _last = threading.Lock(), 0


def of_rank(rank: int, size: int, local_rank: int, local_size: int, master: tuple[str, int]) -> dict[str, str]:
    """Returns the variables of one process; each host has `local_size` processes."""
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
    master: tuple[str, int]  # ("", 0) if no host is known

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the variables of the process of a base rank."""
        region = self.region.region
        index = region.point_of_base_rank(rank).rank
        variables = of_rank(index, len(region), rank % self.per_host, self.per_host, self.master)
        return {name: value for name, value in variables.items() if self.master[0] or not name.startswith("MASTER_")}


def fresh_number() -> int:
    """Returns an increasing number, at which the names of new process groups begin."""
    global _last
    with _lock:
        _last = max(_last + 1, time.time_ns() // 1_000_000)
        return _last


def free_port(besides: Collection[int] = ()) -> int:
    """Returns a TCP port that is free on this host, and that the kernel does not assign by itself.

    Ports of the kernel's own range, as from `bind` to port 0, may be taken by any connection until they are used.
    """
    first = _first_of_kernel()
    for _ in range(_TRIES if first > _FROM + 1000 else 0):
        port = random.SystemRandom().randrange(_FROM, first)
        if port not in besides and _is_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _first_of_kernel() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        return int(file.read().split()[0])
    return 32768


def _is_free(port: int) -> bool:
    try:
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:  # no descriptor is left for the test
        return True
    with probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def gloo_interface(store: str) -> Iterator[None]:
    """Makes gloo groups that are created within the context listen at addresses that other machines can reach.

    gloo listens at the address of the machine's own name, which many machines resolve to a loopback address. For a mesh
    on several hosts, it is given the interface to `store`, the host of the group's store, unless the user has named
    one.
    """
    spans_hosts = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    if not spans_hosts or _INTERFACE in os.environ or sys.platform != "linux" or not _is_loopback(socket.gethostname()):
        yield
        return
    name = _interface_to(store if store and not _is_loopback(store) else _NO_HOST)
    if name:
        os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def _is_loopback(host: str) -> bool:
    """Returns whether a name has only loopback addresses."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in addresses)


def _interface_to(host: str) -> str:
    """Returns the network interface through which a host is reached over IPv4; "" if there is none."""
    import fcntl  # not on Windows

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if reply[20:24] == own:
                    return name
    return ""
