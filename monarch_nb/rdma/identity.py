"""Identity of a process: decides whether another process can reach its memory, and under which process id."""

import functools
import os
from pathlib import Path

import msgspec

__all__ = ["ProcessIdentity", "own_identity"]


class ProcessIdentity(msgspec.Struct, array_like=True, frozen=True):
    """Boot of the machine, namespaces of process ids and networks, and process id of a process."""

    boot: str
    namespace: int
    pid: int
    network: int = 0

    def same_machine(self, other: "ProcessIdentity") -> bool:
        """Returns whether both run on one machine, perhaps in different containers."""
        return bool(self.boot) and self.boot == other.boot

    def same_namespace(self, other: "ProcessIdentity") -> bool:
        """Returns whether both use the same process ids."""
        return self.same_machine(other) and self.namespace != 0 and self.namespace == other.namespace

    def same_network(self, other: "ProcessIdentity") -> bool:
        """Returns whether they reach each other by the loopback address."""
        return self.same_machine(other) and self.network != 0 and self.network == other.network


def own_identity() -> ProcessIdentity:
    """The identity of this process, also in a forked child."""
    return _identity(os.getpid())


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> ProcessIdentity:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace, network = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    except OSError:  # not on Linux: no access to memory of other processes
        return ProcessIdentity("", 0, pid)
    return ProcessIdentity(boot, namespace, pid, network)
