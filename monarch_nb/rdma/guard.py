"""Who writes to memory of this process from outside: a lock per region, in a file that other processes can open.

A writer of another process holds a shared lock on the byte with the region's number while it writes, and the owner does
not let go of memory as long as there is one. The kernel takes the lock back when the writer is killed. The locks belong
to the opened file (fcntl(2), "open file description locks"), not to a process.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator

__all__ = ["Guard", "writing"]

_FLOCK = struct.Struct("hhqqi")  # <fcntl.h>, struct flock: type, whence, start, length, pid


def _lock(descriptor: int, kind: int, number: int) -> bool:
    """Takes, or gives back, a lock on one byte; False where somebody else's is in the way."""
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
        """Whether a process writes to that region just now; does not block."""
        if self.descriptor < 0:
            return False
        if not _lock(self.descriptor, fcntl.F_WRLCK, number):
            return True
        _lock(self.descriptor, fcntl.F_UNLCK, number)
        return False

    def close(self) -> None:
        """Gives up the file."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def writing(pid: int, descriptor: int, numbers: "list[int]") -> Iterator[bool]:
    """The writer's side: keeps regions of process `pid` where they are. False where one is about to go.

    Raises OSError where that file cannot be opened: FileNotFoundError if the process is gone, PermissionError if it
    lets nobody in.
    """
    guard = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield all(_lock(guard, fcntl.F_RDLCK, number) for number in numbers)
    finally:
        os.close(guard)  # which ends the locks
