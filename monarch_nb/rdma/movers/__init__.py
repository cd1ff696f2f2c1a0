"""The ways of moving bytes from the memory of one process into that of another, a file each, and their interface."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from monarch_nb.rdma.errors import Limit
from monarch_nb.rdma.memory import Memory
from monarch_nb.rdma.verbs import BufferHandle


class CannotReachError(Exception):
    """The mover cannot reach a process, so that the next one is tried. The text, if any, is shown as the reason."""


class Move(Struct, frozen=True):
    """A transfer between a buffer, from `offset` on, and as many bytes of memory of this process."""

    handle: BufferHandle
    offset: int
    local: Memory


def is_of_host(moves: Sequence[Move]) -> bool:
    """Returns whether all buffers lie in memory of the host."""
    return not [move for move in moves if move.handle.device is not None]  # `all` takes longer for a few


def is_to_host(moves: Sequence[Move]) -> bool:
    """Returns whether the memory of this process is memory of the host in all of them."""
    return not [move for move in moves if move.local.device is not None]


class Mover(Protocol):
    """Moves bytes between this process and others. Methods block, and are called from any thread.

    They raise CannotReachError before any byte is moved if the mover cannot reach the owner, later BufferDroppedError,
    OwnerLostError and what `Limit.remaining` raises.
    """

    alone: bool  # needs no thread of the owner, so that few bytes are moved without a thread here

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Reads buffers of one owner into memory of this process."""

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Writes memory of this process into buffers of one owner."""

    def close(self) -> None:
        """Releases all resources."""


__all__ = ["CannotReachError", "Move", "Mover", "is_of_host", "is_to_host"]
