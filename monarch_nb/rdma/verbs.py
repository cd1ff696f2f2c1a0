"""Messages about memory of other processes. They carry bytes only if no better mover works."""

import msgspec

from monarch_nb.rdma.handle import ProcessIdentity
from monarch_nb.rdma.wire import Key
from monarch_nb.wire import Lane, Verb


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
