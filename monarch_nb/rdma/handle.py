"""Reference to a buffer of another process: owner and its identity, address, and the secret that grants access."""

import functools
import os
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, array_like=True, frozen=True):
    """Boot of the machine, namespaces of process ids and networks, and process id of a process."""

    boot: str
    namespace: int
    pid: int
    network: int = 0

    def same_machine(self, other: "ProcessIdentity") -> bool:
        """Returns whether both run on one machine, possibly in different containers."""
        return bool(self.boot) and self.boot == other.boot

    def same_namespace(self, other: "ProcessIdentity") -> bool:
        """Returns whether both use the same process ids."""
        return self.same_machine(other) and self.namespace != 0 and self.namespace == other.namespace

    def same_network(self, other: "ProcessIdentity") -> bool:
        """Returns whether they reach each other by the loopback address."""
        return self.same_machine(other) and self.network != 0 and self.network == other.network


def own_identity() -> ProcessIdentity:
    """Returns the identity of this process, also in a forked child."""
    return _identity(os.getpid())


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> ProcessIdentity:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace, network = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    except OSError:  # not on Linux: no access to memory of other processes
        return ProcessIdentity("", 0, pid)
    return ProcessIdentity(boot, namespace, pid, network)


class DeviceRegion(msgspec.Struct, array_like=True, frozen=True):
    """The location of a buffer on a GPU."""

    identity: str  # of the device, as its driver names it
    lent: bytes  # opens its allocation in other processes; empty if that cannot be lent
    offset: int  # in the allocation, bytes


class BufferHandle(msgspec.Struct, array_like=True, frozen=True):
    """A capability: a holder may read the buffer, and write it unless it is read-only. Sent between authenticated
    processes only."""

    process: str  # the address of the process that owns the memory
    owner: str  # display name of the actor that made the buffer
    number: int
    secret: bytes
    size: int  # bytes
    readonly: bool
    identity: ProcessIdentity
    address: int  # in the owner's memory
    mark: int  # address of the mark, which holds the secret until the buffer is dropped
    guard: int = -1  # the owner's descriptor of its `Guard` file; -1 if there is none
    device: DeviceRegion | None = None  # None: memory of the host

    def __str__(self) -> str:
        return f"buffer {self.number} of {self.owner} ({self.process}, {self.size:,} bytes)"
