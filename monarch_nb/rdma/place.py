"""Where a process is, seen from another: whether one may reach into the other's memory, and by which process id."""

import functools
import os
from pathlib import Path

import msgspec

__all__ = ["Place", "here"]


class Place(msgspec.Struct, array_like=True, frozen=True):
    """A process: on which boot of which machine, in which namespaces of process ids and networks, by which id."""

    boot: str
    namespace: int
    pid: int
    network: int = 0

    def same_machine(self, other: "Place") -> bool:
        """Whether both run on one machine, perhaps in different containers."""
        return bool(self.boot) and self.boot == other.boot

    def same_namespace(self, other: "Place") -> bool:
        """Whether the process ids of one mean the same for the other."""
        return self.same_machine(other) and self.namespace != 0 and self.namespace == other.namespace

    def same_network(self, other: "Place") -> bool:
        """Whether the loopback address leads from one to the other."""
        return self.same_machine(other) and self.network != 0 and self.network == other.network


def here() -> Place:
    """This process; also true in a child that was forked a moment ago."""
    return _place(os.getpid())


@functools.lru_cache(maxsize=1)
def _place(pid: int) -> Place:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace, network = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    except OSError:  # no Linux: nobody reaches into anybody's memory
        return Place("", 0, pid)
    return Place(boot, namespace, pid, network)
