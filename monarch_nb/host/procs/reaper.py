"""Reaping children: by pidfd where there is one, by SIGCHLD everywhere; adopted orphans too."""

import contextlib
import os
import signal
from collections.abc import Callable, Collection

from monarch_nb.host.linux import has_pidfd, portable
from monarch_nb.host.loop import READ, Loop

Died = Callable[[int], None]


class Reaper:
    """Calls back with the wait status of each watched child, once. `before_orphans` may still claim unknown pids."""

    def __init__(self, loop: Loop, before_orphans: Callable[[], None]) -> None:
        self._loop = loop
        self._before_orphans = before_orphans
        self._watched: dict[int, Died] = {}
        self._pidfds: dict[int, int] = {}
        self.on_stopped: Callable[[Collection[int]], None] = lambda pids: None  # for stop and continue signals
        self._use_pidfd = has_pidfd()
        self._adopts = not portable()
        loop.on_child_signal(self._signalled)

    def watch(self, pid: int, died: Died) -> None:
        """Calls `died(status)` once child `pid` has ended. Until then the pid denotes that child and no other."""
        self._watched[pid] = died
        if self._use_pidfd:
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                self._loop.post(self._sweep)  # already dead, or no descriptors left: SIGCHLD arrives as well
                return
            self._pidfds[pid] = fd
            self._loop.register(fd, READ, lambda _events: self._reap(pid))

    def _reap(self, pid: int) -> None:
        """Takes the status of a child known to be dead."""
        fd = self._pidfds.pop(pid, -1)
        if fd >= 0:
            self._loop.unregister(fd)
            os.close(fd)
        died = self._watched.pop(pid, None)
        if died is not None:
            kill_group(pid)  # with its session, while the zombie still reserves the number
        try:
            status = os.waitpid(pid, 0)[1]
        except ChildProcessError:
            if died is not None:
                self._watched[pid] = died  # its forker still runs; SIGCHLD arrives once it is adopted here
            return
        if died is not None:
            died(status)

    def _signalled(self) -> None:
        self._sweep()
        pids = self._stopped() if self._adopts else self._watched
        if pids:
            self.on_stopped(pids)

    @staticmethod
    def _stopped() -> set[int]:
        """Returns children that a signal has stopped or continued since the last call."""
        pids: set[int] = set()
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)) is not None:
                pids.add(child.si_pid)
        return pids

    def _sweep(self) -> None:
        if not self._adopts:
            self._poll()
            return
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid not in self._watched:
                self._before_orphans()
            self._reap(ended.si_pid)

    def _poll(self) -> None:
        for pid, died in list(self._watched.items()):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if done:
                del self._watched[pid]
                kill_group(pid)
                died(status)


def kill_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Signals the process group of a process; does nothing if it is empty."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def end_all_descendants() -> None:
    """SIGKILLs every child, and adopted orphans of these; blocks until there are none (Linux)."""
    while end_descendants():
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return


def end_descendants() -> bool:
    """SIGKILLs every remaining child, adopted ones too (Linux); False if they cannot be found."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            pids = [int(word) for word in file.read().split()]
    except OSError:
        return False
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    return True
