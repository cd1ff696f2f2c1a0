"""Batches of commands, and the interfaces between a stream and its observers."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from monarch_nb.runtime import Future
from monarch_nb.tensor.origin import CallSite

NEVER = -1  # the number of the last write to a tensor that no operation has written to
UNSENT = sys.maxsize  # the same where the operation was not sent, so that it never runs


class WriteRecord(Protocol):
    """What keeps the number of the last operation that writes to a tensor."""

    written: int


# A command, and the call site that issued it. The object of an `OBJECT` command is part of it until it is sent.
# Last, what keeps the numbers of writes, for each tensor that the command writes to.
Item = tuple[tuple[Any, ...], "CallSite | CallSites | None", Sequence[WriteRecord]]


class CommandBatch:
    """Commands that were sent together: number of the first operation, and the call site of each.

    `first_byte` counts the bytes of tensors that were sent before.
    """

    def __init__(self, first: int, sites: list[CallSite | None], first_byte: int, future: Future[Any]) -> None:
        self.first, self.sites, self.first_byte, self.future = first, sites, first_byte, future


class CallSites(tuple[CallSite | None, ...]):
    """Call sites of the operations that one replay command runs."""

    __slots__ = ()


class CommandObserver(Protocol):
    """Observes commands as they are issued."""

    def issued(self, command: tuple[Any, ...], where: CallSite | None) -> None:
        """Called with each command that is issued."""

    def asked(self, what: str, where: CallSite | None) -> None:
        """Called when the program waits for a value."""


class OperationGroup(Protocol):
    """The process group in which the operations of a stream run."""

    @property
    def over(self) -> int:
        """The current generation if it was ended, so that commands sent to it would not run; else -1."""

    def regroup(self, over: int) -> None:
        """Makes the generation after `over`. Blocks. Raises DeviceMeshError if processes are missing."""

    def revive(self, stream: Any) -> None:
        """Resumes a lost stream if the mesh was healed, else raises ContentsLostError. Blocks."""
