"""What every mover does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.memory import Memory

__all__ = ["CannotReachError", "Move", "Mover"]


class CannotReachError(Exception):
    """This mover has no way to that process. Another is tried; the text, if there is any, is shown as the reason."""


@dataclass(frozen=True, slots=True)
class Move:
    """One piece of work: between a buffer, from `offset` on, and as many bytes of memory of this process."""

    handle: Handle
    offset: int
    local: Memory


class Mover(Protocol):
    """Moves bytes between this process and others. Methods block, and are called from any thread.

    They raise CannotReachError before they have moved anything where this mover has no way to the owner;
    BufferDroppedError, OwnerLostError and what `Limit.left` raises after that.
    """

    alone: bool  # whether it needs nothing of the owner's threads, so that few bytes are moved at once

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """From buffers of one owner into memory of this process."""

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """From memory of this process into buffers of one owner."""

    def close(self) -> None:
        """Gives up what it holds."""
