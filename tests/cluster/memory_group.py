"""Control groups of memory that tests make for programs of their own; of cgroup v1 or v2, whichever exists."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = -1


class MemoryGroup:
    """A group with only the processes that `enter` moved there, and their descendants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._v2 = (folder / "memory.max").exists()

    def enter(self) -> None:
        """Moves this process, and those that it starts later, into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def used(self) -> int:
        """Bytes in use, without pages of files, which can be reclaimed."""
        total = int((self.folder / ("memory.current" if self._v2 else "memory.usage_in_bytes")).read_text())
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return total - int(stat["inactive_file"]) - int(stat["active_file"])

    def limit(self, size: int) -> None:
        """Limits the group to `size` bytes without swap; -1 is no limit."""
        names = [("memory.swap.max", 0), ("memory.max", size)] if self._v2 else [
            ("memory.swappiness", 0), ("memory.limit_in_bytes", size)
        ]  # fmt: skip
        for name, value in names:
            file = self.folder / name
            if file.exists():
                file.write_text("max" if self._v2 and value == _UNLIMITED else str(value))

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed for memory in it."""
        text = (self.folder / ("memory.events" if self._v2 else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def remove(self) -> None:
        """Kills the remaining processes and removes the group."""
        deadline = time.monotonic() + 20
        while pids := (self.folder / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            assert time.monotonic() < deadline, f"processes {pids} stay in {self.folder}"
            time.sleep(0.02)
        self.folder.rmdir()


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new group below that of the tests; skips the test if none can be made."""
    refusals: list[str] = []
    for parent in _parents():
        folder = parent / f"monarch-nb-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            refusals.append(f"{parent}: {error.strerror}")
            continue
        group = MemoryGroup(folder)
        if _can_hold(group, refusals):
            try:
                yield group
            finally:
                group.remove()
            return
        folder.rmdir()
    pytest.skip(f"NOT TESTED: no control group of memory can be made here ({'; '.join(refusals) or f'none at {ROOT}'})")


def _can_hold(group: MemoryGroup, refusals: list[str]) -> bool:
    """Whether the group counts memory, and this user's processes may enter it."""
    if not any((group.folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
        refusals.append(f"{group.folder.parent}: the memory controller is not given to groups below it")
        return False
    pid = os.fork()
    if not pid:
        try:
            group.enter()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        refusals.append(f"{group.folder.parent}: {os.strerror(code)}")
    return not code


def _parents() -> Iterator[Path]:
    """Groups that may have another below them: of v1 the tests' own, of v2 those above it, the nearest first."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        relative = Path(path.lstrip("/"))
        if "memory" in controllers.split(","):
            own = ROOT / "memory" / relative
            yield own if own.is_dir() else ROOT / "memory"  # in a container its own group is mounted there
        elif not controllers and (ROOT / "cgroup.controllers").exists():
            yield from ((ROOT / group) for group in (relative, *relative.parents) if (ROOT / group).is_dir())
