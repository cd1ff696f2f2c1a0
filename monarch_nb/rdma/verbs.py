"""Messages about memory of other processes, and its handles. They carry bytes only if no better mover works."""

import functools
import os
from pathlib import Path

import msgspec

from monarch_nb.rdma.wire import Key
from monarch_nb.wire import Lane, Verb


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


class TransferOutcome(msgspec.Struct, array_like=True, frozen=True):
    """Outcome: "done", "dropped" (no longer offered), "refused", or "lost" (no answer)."""

    how: str
    text: str = ""
    data: bytes = b""  # the bytes read


class ReadRequest(msgspec.Struct, array_like=True, frozen=True):
    """Asks for bytes of a buffer."""

    number: int
    secret: bytes
    offset: int
    size: int


class WriteRequest(msgspec.Struct, array_like=True, frozen=True):
    """Bytes to be written into a buffer."""

    number: int
    secret: bytes
    offset: int
    data: bytes


class Atomic(msgspec.Struct, array_like=True, frozen=True):
    """Adds `operand` to 8 bytes of a buffer, or sets it if they are `expected`; requests the previous value."""

    number: int
    secret: bytes
    offset: int
    operand: int
    expected: int | None = None


class DropBuffer(msgspec.Struct, array_like=True, frozen=True):
    """Ends the offer of a buffer."""

    number: int
    secret: bytes


class Dial(msgspec.Struct, array_like=True, frozen=True):
    """Asks a process for its addresses for streams."""

    identity: ProcessIdentity  # the asker's
    plain: bool = False  # the asker allows unencrypted streams to other machines


class StreamAddresses(msgspec.Struct, array_like=True, frozen=True):
    """Addresses at which a process accepts streams, and the key."""

    addresses: tuple[tuple[str, int], ...]
    key: Key


class LocateValue(msgspec.Struct, array_like=True, frozen=True):
    """Asks the owner of a value for its location on the host of the asker."""

    number: int
    token: bytes
    identity: ProcessIdentity  # the asker's
    missing: bool = False  # the asker found nothing at the last location, or has waited in vain


class ValueLocation(msgspec.Struct, array_like=True, frozen=True):
    """Location of a value: "there", "fetch" (the asker is to fetch it for its host), or "dropped"."""

    how: str
    pid: int = 0
    descriptor: int = -1


class Holds(msgspec.Struct, array_like=True, frozen=True):
    """Reports that the sender has fetched a value for its host."""

    number: int
    identity: ProcessIdentity
    descriptor: int


class Forget(msgspec.Struct, array_like=True, frozen=True):
    """Reports that the owner has dropped a value."""

    token: bytes


class LeaseRequest(msgspec.Struct, array_like=True, frozen=True):
    """Requests access to buffers by an RDMA device, by number and secret."""

    regions: tuple[tuple[int, bytes], ...]
    write: bool
    asked_for: bool = False  # the settings name this mover, which then works without a device


class LeaseReply(msgspec.Struct, array_like=True, frozen=True):
    """Outcome of a lease request, the buffer concerned, and the data to reach the buffers if it is "done"."""

    how: str
    text: str = ""
    index: int = 0  # of the buffer concerned, in the request
    lease: int = 0
    agent: str = ""
    words: bytes = b""  # for the asker's NIXL agent


class RenewMemoryLease(msgspec.Struct, array_like=True, frozen=True):
    """Renews a lease that is in use."""

    lease: int


class ReleaseMemoryLease(msgspec.Struct, array_like=True, frozen=True):
    """Returns a lease."""

    lease: int


class Flow(msgspec.Struct, array_like=True):
    """Bytes moved from one process to another by one mover, in total."""

    source: str  # address of the process whose memory is read
    target: str
    mover: str
    size: int = 0  # bytes
    transfers: int = 0
    seconds: float = 0.0  # spent in transfers, measured by the side that requested them

    @property
    def key(self) -> tuple[str, str, str]:
        """Source, target and mover."""
        return self.source, self.target, self.mover


class OfferedMemory(msgspec.Struct, array_like=True, frozen=True):
    """Memory that a process offers now."""

    regions: int
    size: int  # bytes


class TrafficReport(msgspec.Struct, array_like=True, frozen=True):
    """Report of one process: its flows that have changed, and the memory that it offers."""

    process: str
    flows: list[Flow]
    offered: OfferedMemory
    at: float  # seconds since the epoch


READ = Verb(
    "rdma.read",
    ReadRequest,
    TransferOutcome,
    doc="the bytes of a buffer, where no better way leads to it",
    lane=Lane.DATA,
)
WRITE = Verb(
    "rdma.write",
    WriteRequest,
    TransferOutcome,
    doc="bytes for a buffer, where no better way leads to it",
    lane=Lane.DATA,
)
ATOMIC = Verb("rdma.atomic", Atomic, TransferOutcome, doc="adds to, or swaps, 8 bytes of a buffer")
DROP = Verb("rdma.drop", DropBuffer, TransferOutcome, doc="a buffer is not needed any more")
DIAL = Verb("rdma.dial", Dial, StreamAddresses, doc="at which address do you accept streams?")
LEASE = Verb("rdma.lease", LeaseRequest, LeaseReply, doc="may I reach these buffers by the RDMA devices?")
RENEW = Verb("rdma.renew", RenewMemoryLease, TransferOutcome, doc="I still move bytes of what I have leased")
RELEASE = Verb("rdma.release", ReleaseMemoryLease, doc="I move no more bytes of what I have leased")
LOCATE = Verb("rdma.where", LocateValue, ValueLocation, doc="where is a value that you have put stored on my host?")
HOLDS = Verb("rdma.holds", Holds, doc="I have fetched a value of yours for my host")
FORGET = Verb("rdma.forget", Forget, doc="a value of mine that you hold was dropped")
MOVED = Verb("rdma.moved", TrafficReport, doc="what has moved between my memory and that of others", lane=Lane.DATA)
