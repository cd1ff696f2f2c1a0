"""What names a buffer outside its process: who owns it, where it lies, and the secret that proves the right to it."""

import msgspec

from monarch_nb.rdma.place import Place

__all__ = ["Handle"]


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """It travels inside messages of authenticated processes only; whoever has it may read, and write if it says so."""

    process: str  # the address of the process that owns the memory
    owner: str  # the actor in it that made the buffer, as people read it
    number: int
    secret: bytes
    size: int  # bytes
    readonly: bool
    place: Place
    address: int  # in the owner's memory
    mark: int  # address of the region's mark, which holds the secret while the buffer is there
    guard: int = -1  # the owner's descriptor of the file in which writers from outside are counted; -1: there is none

    def __str__(self) -> str:
        return f"buffer {self.number} of {self.owner} ({self.process}, {self.size:,} bytes)"
