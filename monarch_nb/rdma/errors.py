"""Exceptions of transfers."""

from monarch_nb._package import more


class RDMAError(RuntimeError):
    """A transfer failed. The text names the buffer, its owner, the mover, and what to do."""


class BufferDroppedError(RDMAError):
    """The buffer was dropped, or its owner stopped: its memory is no longer on offer."""


class OwnerLostError(RDMAError):
    """The process that owns the memory has ended, or cannot be reached."""


def owner_lost(buffer: object, reason: str) -> OwnerLostError:
    """Returns the error for a buffer whose process does not answer, with the remedy."""
    return OwnerLostError(
        f"{buffer} cannot be reached: {reason}. Heal its mesh (monarch.actor.heal_mesh) and make a new buffer there"
        + more("manual/data.md#how-long-a-buffer-lives")
    )


class TransferCancelledError(RDMAError):
    """The transfer was cancelled before its end."""
