"""The connections that a process group has opened in this process, and how they are cut.

A thread that waits in a collective of gloo's cannot be woken by any call of PyTorch's (`abort`, `shutdown`, a shorter
time-out: none has an effect on what waits). It waits on a socket, though: once that is shut down, the collective raises
within milliseconds. PyTorch does not say which sockets are gloo's. The kernel does: gloo has a thread for each group,
which sleeps in epoll, and the sockets that are registered there are those of the group.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FDS = "/proc/self/fd"
_TASKS = "/proc/self/task"
_LOOP = "gloo_tcp_loop"  # what gloo calls its threads; older versions do not name them
_LOOKS = 5  # at a thread that is not asleep at this moment
CAN_CUT = sys.platform == "linux"  # elsewhere nobody tells what a descriptor is


class Connections:
    """Those of one process group, or of one generation of them. `cut` may come from any thread, also while they are
    being made."""

    def __init__(self) -> None:
        self._inodes: set[str] = set()  # numbers of descriptors are used again: these are not
        self._loops: set[int] = set()  # threads of gloo's; connections of theirs may be opened later
        self._before: tuple[frozenset[str], frozenset[int]] | None = None  # when a group began to be made
        self._ports: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self.is_cut = False

    @contextmanager
    def noted(self, *ports: int) -> Iterator[None]:
        """Gloo's connections, and those to a store at one of `ports`, that are opened inside of it are a group's.

        Raises ConnectionAbortedError where they are cut already.
        """
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("the process group was given up while it was being made")
            self._before = frozenset(_sockets().values()), frozenset(_loop_threads())
            self._ports = frozenset(ports)
        try:
            yield
        finally:
            with self._lock:
                is_ours = self._judge()
                self._inodes |= {inode for fd, inode in _sockets().items() if is_ours(fd, inode)}
                self._loops |= set(_loop_threads()) - self._before[1]
                self._before = None

    def cut(self) -> int:
        """Shuts them down, those too that are being made; gives how many there were."""
        with self._lock:
            self.is_cut = True
            is_ours = self._judge()
            return sum(is_ours(fd, inode) and _shut_down(fd, inode) for fd, inode in _sockets().items())

    def _judge(self) -> Callable[[int, str], bool]:
        """Whether a socket is one of them."""
        before, ports, known = self._before, self._ports, self._inodes
        new = set(_loop_threads()) - before[1] if before is not None else set()
        watched = _watched(self._loops | new)

        def is_ours(fd: int, inode: str) -> bool:
            if inode in known or inode in watched:
                return True
            if before is None or inode in before[0]:
                return False
            # Without gloo's threads, all that is new: they have no names in older versions of PyTorch.
            return _peer_port(fd) in ports or not new

        return is_ours


def cut_to(ports: set[int]) -> int:
    """Shuts down this process's connections to servers at these ports; gives how many there were."""
    return sum(_peer_port(fd) in ports and _shut_down(fd, inode) for fd, inode in _sockets().items())


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


def _loop_threads() -> list[int]:
    """Gloo's threads in this process."""
    found = []
    for name in os.listdir(_TASKS) if CAN_CUT else ():
        try:
            with open(f"{_TASKS}/{name}/comm") as comm:
                if comm.read().strip() == _LOOP:
                    found.append(int(name))
        except OSError:  # it has ended
            continue
    return found


def _watched(threads: set[int]) -> set[str]:
    """The sockets in the epolls that these threads sleep in."""
    found: set[str] = set()
    for thread in threads:
        for _ in range(_LOOKS):
            try:
                with open(f"{_TASKS}/{thread}/syscall") as asleep:
                    words = asleep.read().split()
                if len(words) < 2 or words[0] == "-1":  # it runs
                    time.sleep(0.001)
                    continue
                with open(f"/proc/self/fdinfo/{int(words[1], 16)}") as info:
                    fds = [int(line.split()[1]) for line in info if line.startswith("tfd:")]
                found.update(target for fd in fds if (target := os.readlink(f"{_FDS}/{fd}")).startswith("socket:"))
            except (OSError, ValueError):  # it has ended, or may not be looked at
                pass
            break
    return found


def _peer_port(fd: int) -> int:
    """The port at the other end of a connection of the network; 0 for what is none."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            return int(duplicate.getpeername()[1]) if duplicate.family != socket.AF_UNIX else 0
    except (OSError, IndexError, TypeError):
        return 0


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
