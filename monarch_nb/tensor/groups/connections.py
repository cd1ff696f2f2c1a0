"""The connections that a process group has opened in this process, and how they are cut.

A thread that waits in a collective of gloo's cannot be woken by any call of PyTorch's (`abort`, `shutdown`, a shorter
time-out: none has an effect on what waits). It waits on a socket, though: once that is shut down, the collective raises
within milliseconds. Nobody tells which sockets are gloo's, so those are noted that appear while a group is made.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FDS = "/proc/self/fd"
CAN_CUT = sys.platform == "linux"  # elsewhere nobody tells what a descriptor is


class Connections:
    """Those of one generation of groups. `cut` may come from any thread, also while they are being made."""

    def __init__(self) -> None:
        self._inodes: set[str] = set()  # numbers of descriptors are used again: these are not
        self._before: frozenset[str] | None = None  # what was open when a group began to be made
        self._lock = threading.Lock()
        self.is_cut = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What is opened inside of it is a group's. Raises ConnectionAbortedError where they are cut already."""
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("the process group was given up while it was being made")
            self._before = frozenset(_sockets().values())
        try:
            yield
        finally:
            with self._lock:
                self._inodes |= set(_sockets().values()) - self._before
                self._before = None

    def cut(self) -> int:
        """Shuts them down, those too that are being made; gives how many there were."""
        with self._lock:
            self.is_cut = True
            return sum(self._is_ours(inode) and _shut_down(fd, inode) for fd, inode in _sockets().items())

    def _is_ours(self, inode: str) -> bool:
        return inode in self._inodes or (self._before is not None and inode not in self._before)


def _sockets() -> dict[int, str]:
    """Sockets of this process, by descriptor."""
    found: dict[int, str] = {}
    if not CAN_CUT:
        return found
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
        except OSError:  # the descriptor that lists them, or one closed meanwhile
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


def _shut_down(fd: int, inode: str) -> bool:
    """Ends both directions of a connection of the network; leaves descriptors to whoever owns them."""
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    with duplicate:
        try:
            if os.readlink(f"{_FDS}/{duplicate.fileno()}") != inode or duplicate.family == socket.AF_UNIX:
                return False
            duplicate.getpeername()  # gloo ends the process when it finds that it cannot listen any more
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed by the other end, or not connected
            return False
    return True
