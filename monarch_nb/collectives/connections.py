"""The connections that a process group has opened in this process, and functions that cut them.

No PyTorch call wakes a thread that waits in one of gloo's collectives (`abort`, `shutdown` and a shorter time-out have
no effect on it). The thread waits on a socket, though, and the collective raises within milliseconds once that socket
is shut down. PyTorch does not expose gloo's sockets, but the kernel does: gloo runs one thread for each group, which
sleeps in epoll, and the sockets registered there are the group's.

The kernel exposes a thread's epoll descriptor only while the thread sleeps in it. On a loaded machine gloo's thread
often waits for a core instead, so the descriptor is polled for when the group is created, and remembered.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from monarch_nb.host.linux import process_state

logger = logging.getLogger(__name__)

_FDS = "/proc/self/fd"
_TASKS = "/proc/self/task"
_LOOP = "gloo_tcp_loop"  # the name of gloo's threads; older versions do not name them
_MADE_S = 5.0  # limit for the threads of a new group to fall asleep
_CUT_S = 0.05  # the same for threads whose epoll is still unknown when connections are cut
_AGAIN_S = (0.1, 0.5, 2.0, 5.0)  # pauses after which a cut is repeated, for connections that it has missed
CAN_CUT = sys.platform == "linux"  # other systems do not expose what a descriptor is


class Connections:
    """Connections of a process group, or of a generation of groups. Any thread may call `cut`, also while they are
    opened."""

    def __init__(self) -> None:
        self._inodes: set[str] = set()  # descriptors are reused, inodes are not
        self._loops: set[TransportThread] = set()  # they may open connections later
        self._epolls: dict[TransportThread, int] = {}  # descriptors
        self._before: tuple[frozenset[str], frozenset[TransportThread]] | None = None  # the creation of a group
        self._ports: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self.is_cut = False

    @contextmanager
    def noted(self, *ports: int) -> Iterator[None]:
        """Assigns gloo's connections, and those to a store at one of `ports`, opened within the context to the group.

        Raises ConnectionAbortedError if the group has been cut already.
        """
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("the process group was given up while it was being made")
            self._before = frozenset(_sockets().values()), frozenset(_loop_threads())
            self._ports = frozenset(ports)
        try:
            yield
        finally:
            new = set(_loop_threads()) - self._before[1]
            self._find_epolls(new, _MADE_S)
            with self._lock:
                is_ours = self._ownership_test()
                self._inodes |= {inode for fd, inode in _sockets().items() if is_ours(fd, inode)}
                self._loops |= new
                self._before = None

    def cut(self) -> int:
        """Shuts down all connections, also those being opened; returns their number.

        Repeats the cut a few times in the background: a connection that was just being opened, or whose thread was not
        asleep, would keep its waiter for ever.
        """
        first = not self.is_cut
        count = self._cut()
        if first and CAN_CUT:
            threading.Thread(target=self._cut_again, name="monarch-cut", daemon=True).start()
        return count

    def _cut(self) -> int:
        with self._lock:
            self.is_cut = True
            is_ours = self._ownership_test()
            return sum(is_ours(fd, inode) and _shut_down(fd, inode) for fd, inode in _sockets().items())

    def _cut_again(self) -> None:
        for pause in _AGAIN_S:
            time.sleep(pause)
            if missed := self._cut():
                logger.debug("%d connections of a process group were cut late", missed)

    def _ownership_test(self) -> Callable[[int, str], bool]:
        """Returns a predicate that tests whether a socket, by descriptor and inode, belongs to the group."""
        before, ports, inodes = self._before, self._ports, self._inodes
        new = set(_loop_threads()) - before[1] if before is not None else set()
        self._find_epolls(self._loops | new, _CUT_S)
        watched = self._watched_sockets(self._loops | new)

        def is_ours(fd: int, inode: str) -> bool:
            if inode in inodes or inode in watched:
                return True
            if before is None or inode in before[0]:
                return False
            # Older versions of PyTorch do not name gloo's threads: there, every new socket counts.
            return _peer_port(fd) in ports or not new

        return is_ours

    def _find_epolls(self, loops: "set[TransportThread]", patience: float) -> None:
        """Looks up the unknown epolls of threads; blocks up to `patience` seconds."""
        deadline = time.monotonic() + patience
        for loop in loops - self._epolls.keys():
            with contextlib.suppress(OSError):  # it has ended, or the kernel refuses
                while (epoll := loop.epoll()) is None and time.monotonic() < deadline:
                    time.sleep(0.001)
                if epoll is not None:
                    self._epolls[loop] = epoll

    def _watched_sockets(self, loops: "set[TransportThread]") -> set[str]:
        """Returns the inodes of the sockets registered in the epolls of these threads."""
        watched: set[str] = set()
        for loop in loops & self._epolls.keys():
            sockets = _registered(self._epolls[loop])
            if loop.is_alive():  # else another epoll may have the descriptor now
                watched |= sockets
        return watched


def connections_to(ports: set[int]) -> dict[int, str]:
    """Returns this process's connections to servers at these ports, by descriptor."""
    return {fd: inode for fd, inode in _sockets().items() if _peer_port(fd) in ports}


def cut_to(ports: set[int]) -> int:
    """Shuts down this process's connections to servers at these ports; returns their number."""
    return cut_each(connections_to(ports))


def cut_each(connections: Mapping[int, str]) -> int:
    """Shuts down connections whose descriptors have not been reused; returns their number."""
    return sum(_shut_down(fd, inode) for fd, inode in connections.items())


def _sockets() -> dict[int, str]:
    """Returns the inodes of this process's sockets, by descriptor."""
    sockets: dict[int, str] = {}
    if not CAN_CUT:
        return sockets
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
        except OSError:  # the descriptor that lists them, or one closed meanwhile
            continue
        if target.startswith("socket:"):
            sockets[int(name)] = target
    return sockets


@dataclass(frozen=True)
class TransportThread:
    """A thread of gloo; thread ids are reused, so the start time (clock ticks since boot) is part of it."""

    tid: int
    started: int

    def is_alive(self) -> bool:
        """Returns whether the thread still runs."""
        return _start_time(self.tid) == self.started

    def epoll(self) -> int | None:
        """Returns the descriptor of the epoll in which the thread sleeps; None while it runs or sleeps elsewhere.

        Raises OSError once the thread has ended, or if the kernel refuses to answer.
        """
        with open(f"{_TASKS}/{self.tid}/syscall") as asleep:
            words = asleep.read().split()
        if len(words) < 2 or words[0] == "-1":
            return None
        fd = int(words[1], 16)
        try:
            return fd if os.readlink(f"{_FDS}/{fd}") == "anon_inode:[eventpoll]" else None
        except OSError:  # the first argument of another system call
            return None


def _loop_threads() -> list[TransportThread]:
    """Returns gloo's threads in this process."""
    threads = []
    for name in os.listdir(_TASKS) if CAN_CUT else ():
        try:
            with open(f"{_TASKS}/{name}/comm") as comm:
                is_loop = comm.read().strip() == _LOOP
        except OSError:  # it has ended
            continue
        if is_loop and (started := _start_time(int(name))):
            threads.append(TransportThread(int(name), started))
    return threads


def _start_time(tid: int) -> int:
    """Returns the start time of a thread, which the kernel lists like a process; 0 once it has ended."""
    try:
        return process_state(tid)[1]
    except OSError:
        return 0


def _registered(epoll: int) -> set[str]:
    """Returns the inodes of the sockets registered in an epoll."""
    inodes: set[str] = set()
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as info:
            fds = [int(line.split()[1]) for line in info if line.startswith("tfd:")]
    except OSError:
        return inodes
    for fd in fds:
        with contextlib.suppress(OSError):
            target = os.readlink(f"{_FDS}/{fd}")
            if target.startswith("socket:"):
                inodes.add(target)
    return inodes


def _peer_port(fd: int) -> int:
    """Returns the port at the other end of a network connection; 0 for other descriptors."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            return int(duplicate.getpeername()[1]) if duplicate.family != socket.AF_UNIX else 0
    except (OSError, IndexError, TypeError):
        return 0


def _shut_down(fd: int, inode: str) -> bool:
    """Shuts down both directions of a network connection; leaves its descriptors to their owners."""
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    with duplicate:
        try:
            if os.readlink(f"{_FDS}/{duplicate.fileno()}") != inode or duplicate.family == socket.AF_UNIX:
                return False
            duplicate.getpeername()  # not a listening socket: gloo ends the process if it cannot listen
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed by the other end, or not connected
            return False
    return True
