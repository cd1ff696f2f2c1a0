"""Locks against releasing memory while other processes write to it: one per region, in a file that they can open.

A writer holds a shared lock on the byte with the number of the region, and the owner releases no memory that is locked.
The kernel releases the lock of a killed writer. Locks belong to the opened file (fcntl(2), "open file description
locks"), not to a process.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator

__all__ = ["Guard", "writing"]

_FLOCK = struct.Struct("hhqqi")  # <fcntl.h>, struct flock: type, whence, start, length, pid


def _lock(descriptor: int, kind: int, number: int) -> bool:
    """Takes or releases the lock of one byte; False if another lock conflicts."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


class Guard:
    """The owner's side. Without memory files (no Linux) there are no writers from outside."""

    def __init__(self) -> None:
        self.descriptor = -1
        with contextlib.suppress(OSError, AttributeError):
            self.descriptor = os.memfd_create("monarch-rdma-guard", os.MFD_CLOEXEC)

    def written(self, number: int) -> bool:
        """Returns whether a process writes to a region now. Does not block."""
        if self.descriptor < 0:
            return False
        if not _lock(self.descriptor, fcntl.F_WRLCK, number):
            return True
        _lock(self.descriptor, fcntl.F_UNLCK, number)
        return False

    def close(self) -> None:
        """Closes the file."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def writing(pid: int, descriptor: int, numbers: "list[int]") -> Iterator[bool]:
    """The writer's side: retains regions of process `pid`. Yields False if one is being released.

    Raises OSError if the file cannot be opened: FileNotFoundError if the process has ended, PermissionError without
    access.
    """
    guard = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield all(_lock(guard, fcntl.F_RDLCK, number) for number in numbers)
    finally:
        os.close(guard)  # which ends the locks
