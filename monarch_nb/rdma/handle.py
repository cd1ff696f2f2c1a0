"""Reference to a buffer of another process: owner, address, and the secret that grants access."""

import msgspec

from monarch_nb.rdma.identity import ProcessIdentity

__all__ = ["BufferHandle", "DeviceRegion"]


class DeviceRegion(msgspec.Struct, array_like=True, frozen=True):
    """Where a buffer lies on a GPU."""

    identity: str  # of the device, as its driver names it
    lent: bytes  # opens the allocation that it lies in, in other processes; empty if that cannot be lent
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
