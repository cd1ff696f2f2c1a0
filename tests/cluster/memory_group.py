"""Control groups of memory that tests make for programs of their own; of cgroup v1 or v2, whichever is there."""

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
    """One group, with nothing in it but what `enter` moved there and what that has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._v2 = (folder / "memory.max").exists()

    def enter(self) -> None:
        """This process, and what it starts from now on, belongs to the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def used(self) -> int:
        """Bytes in use, without pages of files, which go when others are needed."""
        total = int((self.folder / ("memory.current" if self._v2 else "memory.usage_in_bytes")).read_text())
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return total - int(stat["inactive_file"]) - int(stat["active_file"])

    def limit(self, size: int) -> None:
        """No more than so many bytes from now on, of which none go to swap; -1 is without a limit."""
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
        """Ends what is left in it, and takes it away."""
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
    """A new group below that of the tests; skips where these may not make any."""
    tried: list[str] = []
    for parent in _parents():
        folder = parent / f"monarch-nb-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        group = MemoryGroup(folder)
        if _can_hold(group, tried):
            try:
                yield group
            finally:
                group.remove()
            return
        folder.rmdir()
    pytest.skip(f"NOT TESTED: no control group of memory can be made here ({'; '.join(tried) or f'none at {ROOT}'})")


def _can_hold(group: MemoryGroup, tried: list[str]) -> bool:
    """Whether memory is counted there, and processes of ours may enter."""
    if not any((group.folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
        tried.append(f"{group.folder.parent}: the memory controller is not given to groups below it")
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
        tried.append(f"{group.folder.parent}: {os.strerror(code)}")
    return not code


def _parents() -> Iterator[Path]:
    """Groups that may have another below them: of v1 the tests' own, of v2 those above it, the nearest first."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        below = Path(path.lstrip("/"))
        if "memory" in controllers.split(","):
            own = ROOT / "memory" / below
            yield own if own.is_dir() else ROOT / "memory"  # in a container its own group is mounted there
        elif not controllers and (ROOT / "cgroup.controllers").exists():
            yield from ((ROOT / above) for above in (below, *below.parents) if (ROOT / above).is_dir())
