"""What a test may not leave behind: processes, sockets and files, descriptors, threads, memory files."""

import contextlib
import gc
import os
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import proc_stat

MARK = f"MNB_TEST_MARK={os.getpid()}-{secrets.token_hex(4)}"
CHECKED = ("test_faults_", "test_job_", "test_spawn_options", "test_spmd", "test_worker_loop")  # modules
PATIENCE = 20.0  # seconds; asynchronous clean-up takes far less, even on a busy machine


def marked() -> dict[int, str]:
    """Living descendants of this process, however remote: pid -> command line."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if MARK.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if proc_stat(entry)[0] != "Z":
                name = (entry / "comm").read_text().strip()
                line = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
                processes[int(entry.name)] = f"{name}: {line[-60:]}"
    return processes


def zombies() -> list[int]:
    """Children of this process that ended and were not waited for."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = proc_stat(entry)[:2]
                if state == "Z" and int(parent) == os.getpid():
                    pids.append(int(entry.name))
    return pids


def descriptors() -> Counter[str]:
    """This process's open descriptors by what they are: `socket`, `memfd`, a path..."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            kinds["memfd" if target.startswith("/memfd:") else target.partition(":[")[0]] += 1
    kinds.pop(f"/proc/{os.getpid()}/fd", None)
    return kinds


def threads() -> Counter[str]:
    """Names of the threads of this process: Python's, and how many others."""
    tasks = {int(name) for name in os.listdir("/proc/self/task")}
    ours = threading.enumerate()
    names = Counter(thread.name for thread in ours)
    # By number: if a thread begins or ends between the two reads, a difference of counts would be one too low.
    names.pop("monarch-forgotten", None)  # comes with the first call, and stays
    names["(not Python's)"] = len(tasks - {thread.native_id for thread in ours})
    return Counter({name: count for name, count in names.items() if not name.startswith("pytest_timeout")})


def sockets_in(folder: Path) -> set[str]:
    """Socket files below a folder."""
    paths = set()
    for directory, _, names in os.walk(folder):  # tolerates folders that vanish during the walk
        for name in names:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK((Path(directory) / name).lstat().st_mode):
                    paths.add(f"{directory}/{name}")
    return paths


def _names(processes: dict[int, str]) -> Counter[str]:
    """Counts by name, since a template that died may have a successor."""
    return Counter(line.partition(": ")[0] for line in processes.values())


class Before:
    """A snapshot of processes, descriptors, threads and files, to compare with later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = _names(marked())
        self.names["mnb-template"] = max(self.names["mnb-template"], self.names["mnb-agent"])  # each agent has one
        self.descriptors = descriptors()
        self.threads = threads()
        self.sockets = sockets_in(folder)
        self.folders = set(folder.iterdir())
        self.zombies = set(zombies())

    def more(self) -> list[str]:
        """What has been added since the snapshot."""
        return [
            *(f"process {line}" for line in (_names(marked()) - self.names).elements()),
            *(f"descriptor {kind} x{count}" for kind, count in (descriptors() - self.descriptors).items()),
            *(f"thread {name} x{count}" for name, count in (threads() - self.threads).items()),
            *(f"socket file {path}" for path in sockets_in(self.folder) - self.sockets),
            *(f"folder {path}" for path in set(self.folder.iterdir()) - self.folders),
            *(f"zombie {pid}" for pid in set(zombies()) - self.zombies),
        ]

    def check(self) -> None:
        """Fails if anything remains after `PATIENCE` seconds."""
        deadline = time.monotonic() + PATIENCE
        pause = 0.01
        while leftovers := self.more():
            if time.monotonic() > deadline:
                raise AssertionError("left behind:\n  " + "\n  ".join(leftovers))
            if pause > 0.05:  # slow in a process with all tests in it, and seldom needed
                gc.collect()
            time.sleep(pause)  # the operating system reports no event for these
            pause = min(2 * pause, 0.25)


@pytest.fixture(scope="session", autouse=True)
def own_place() -> Iterator[Path]:
    """Run folders of this test session go to a short folder of its own, and its processes carry a mark.

    Jobs of processes are listed by that folder, so those of concurrent sessions are not among them.
    """
    from monarch_nb.connect.own_hosts import shutdown

    shutdown()  # the controller of an earlier module, with another folder
    folder = Path(f"/tmp/mt{secrets.token_hex(3)}")
    folder.mkdir(mode=0o700)
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    yield folder
    del os.environ[name]
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


def _checked(request: pytest.FixtureRequest) -> bool:
    return request.module.__name__.rpartition(".")[2].startswith(CHECKED)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_by_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module leaves no process, socket, folder, descriptor or thread; its controller is shut down first."""
    if not _checked(request):
        yield
        return
    from monarch_nb.connect.own_hosts import shutdown

    session_folder = request.getfixturevalue("own_place")
    shutdown()  # the controller of an earlier module
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2].startswith("test_faults_"):
            # Many hosts are started here, and none of them needs torch, whose import is slow.
            folder = request.getfixturevalue("tmp_path_factory").mktemp("without")
            (folder / "torch.py").write_text("raise ModuleNotFoundError('torch is left out in these tests')\n")
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
        before = Before(session_folder)
        yield
        shutdown()
        before.check()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, nothing_left_by_module: None) -> Iterator[None]:
    """A test leaves nothing either. Module fixtures that start something are set up before."""
    if not _checked(request):
        yield
        return
    before = Before(request.getfixturevalue("own_place"))
    yield
    before.check()
