"""One file of a spool, read while its proc writes it; the disk space of what was taken is given back."""

import os

from msgspec import Struct

from monarch_nb.host.linux import punch_hole

PUNCH_EVERY = 1 << 20  # bytes that were taken are given back to the disk in pieces of that size
KEPT = 64 * 1024  # and so many stay, for the last lines of a proc that dies


class SpoolFile(Struct):
    """How far it was taken, and how far it was given back."""

    path: str
    at: int = 0
    punched: int = 0
    fd: int = -1

    def size(self) -> int:
        """Bytes in it now; 0 if it is not there (yet)."""
        if self.fd < 0:
            try:
                self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return 0
        return os.fstat(self.fd).st_size

    def read(self, start: int, limit: int) -> bytes:
        """What there is from `start` on."""
        left = min(limit, self.size() - start)
        return os.pread(self.fd, left, start) if left > 0 else b""

    def give_back(self) -> None:
        """The disk space of what was taken long enough ago."""
        if self.at - self.punched > PUNCH_EVERY:
            until = self.at - KEPT
            if punch_hole(self.fd, self.punched, until - self.punched):
                self.punched = until
            else:
                self.punched = 1 << 62  # not to be had here: the files grow as long as their proc lives

    def close(self) -> None:
        """Read no more of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
