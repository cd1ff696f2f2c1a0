"""Ends of processes: children are reaped by pidfd where there is one, by SIGCHLD everywhere, adopted orphans too.

A report has the status in words, the last lines, and whether the kernel was out of memory.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

from monarch_nb.host.linux import has_pidfd, portable
from monarch_nb.host.loop import READ, Loop
from monarch_nb.logs.spool import last_lines as last_lines_of
from monarch_nb.settings import settings

_FEWEST = 20  # the owner may want more than this agent was configured with
_MOST = 4000
_LAST_BYTES = 16 * 1024
_PACKAGE = str(Path(__file__).resolve().parents[2])
RECENT_S = 5.0  # a kill for memory may take that long to end a process
_CRASHED = "Fatal Python error: "  # first words of faulthandler's output

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


def exit_outcome(status: int) -> tuple[int | None, int | None]:
    """Splits a wait status into (exit code, signal), one of which is None."""
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, -code)


def exit_reason(exitcode: int | None, signum: int | None, *, oom: bool = False) -> str:
    """Returns one line with the words people search for."""
    if signum is not None:
        text = f"Killed(sig={signum})"
        name = _signal_name(signum)
        extra = "the kernel was out of memory" if oom else name
        return f"the process this actor was running on failed: {text}" + (f" ({extra})" if extra else "")
    if exitcode == 0:
        return "the process this actor was running on ended: Exited(code=0)"
    return f"the process this actor was running on failed: Exited(code={exitcode})"


def last_lines(base: str, count: int | None = None) -> tuple[str, ...]:
    """Returns the last lines a process wrote to its spool; empty if that cannot be read."""
    return last_words(base, count)[0]


def last_words(base: str, count: int | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the last lines a process wrote and, separately, faulthandler's dump of the crash, if any."""
    if count is None:
        count = max(_FEWEST, settings.tail_log_lines)
    lines = last_lines_of(base, _MOST, _LAST_BYTES) if base else ()
    crash = next((index for index, line in enumerate(lines) if line.startswith(_CRASHED)), len(lines))
    dump = lines[crash:]
    thread = next((index for index, line in enumerate(dump) if line.startswith("Current thread")), len(dump))
    stack = tuple(itertools.takewhile(str.strip, dump[thread:]))
    return lines[:crash][-count:], (*dump[:1], *_without_engine_frames(stack)[:_FEWEST])


def _without_engine_frames(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Strips the frames that run the user's code from the end of a faulthandler stack."""
    end = len(stack)
    if end and 'File "<string>"' in stack[-1]:  # the command line of a host agent
        end -= 1
    while end > 1 and (f'"{_PACKAGE}{os.sep}' in stack[end - 1] or f'{os.sep}threading.py"' in stack[end - 1]):
        end -= 1
    return stack[: end if end > 1 else len(stack)]


class OomCounter:
    """Counts kills by the kernel's out-of-memory killer in this control group, and which ends they explain.

    The kernel counts before it kills, so the count covers every process that has ended of it; each kill explains one
    end. If the group's count cannot be read, it uses that of this machine.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"),
                 machine: Path = Path("/proc/vmstat")) -> None:  # fmt: skip
        files = [file for file in _candidates(root, membership) if file.is_file()]
        self._files = files or [machine]  # the whole machine's, if no control group counts
        self._explained = self._lately = self._read()  # kills that have explained an end, or are too old to
        self._checked_at = 0.0

    def look(self, now: float) -> None:
        """Forgets old kills, which do not explain later ends; to be called periodically."""
        if now - self._checked_at >= RECENT_S:
            self._explained = max(self._explained, self._lately)
            self._checked_at, self._lately = now, self._read()

    def struck(self) -> bool:
        """Returns whether a process was killed for memory: an unexplained kill since the last two checks.

        Call it once for each process that a SIGKILL has ended.
        """
        if self._explained >= self._read():
            return False
        self._explained += 1
        return True

    def _read(self) -> int:
        total = 0
        for file in self._files:
            try:
                for line in file.read_text().splitlines():
                    if line.startswith("oom_kill "):
                        total += int(line.split()[1])
            except (OSError, ValueError):
                pass
        return total


def _candidates(root: Path, membership: Path) -> list[Path]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = path.lstrip("/")
        if not controllers:
            files += [root / group / "memory.events", root / "unified" / group / "memory.events"]
        elif "memory" in controllers.split(","):
            files += [root / "memory" / group / "memory.oom_control", root / "memory" / "memory.oom_control"]
    return files


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return ""
