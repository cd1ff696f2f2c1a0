"""The parts of a host agent that need no process."""

import contextlib
import errno
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.host import folders
from monarch_nb.host.launch import _first_line
from monarch_nb.host.loop import Loop
from monarch_nb.host.mesh_leases import Idleness, OwnerLeases
from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.procs.environment import HELD_BACK, held_back, overlaid, reason_for_cold_start, wanted_threads
from monarch_nb.host.procs.forker import Forker, SpareProcs, binding_prefix
from monarch_nb.host.procs.proc_main import forget_folders
from monarch_nb.host.procs.reaper import OomCounter, Reaper, exit_reason, last_lines, last_words
from monarch_nb.host.procs.template import _serve
from monarch_nb.host.protocol import KeepSpares
from monarch_nb.logs.spool import ERR, TEXT
from monarch_nb.transport import TransportError

pytestmark = pytest.mark.timeout(10)


def test_a_folder_made_since_the_template_looked_is_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "later"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(ImportError):
        importlib.import_module("made_after_the_template")
    folder.mkdir()
    (folder / "made_after_the_template.py").write_text("MADE = True")
    forget_folders()
    assert importlib.import_module("made_after_the_template").MADE
    monkeypatch.delitem(sys.modules, "made_after_the_template")


def test_a_template_sets_thread_limits_that_its_forks_drop_again() -> None:
    base = {"OMP_NUM_THREADS": "8", "PATH": "/bin"}
    env = held_back(base)
    assert env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == "1"
    assert int(env["OPENBLAS_THREAD_TIMEOUT"]) < 26  # the default of OpenBLAS
    assert held_back({"OPENBLAS_THREAD_TIMEOUT": "28"})["OPENBLAS_THREAD_TIMEOUT"] == "28"
    assert overlaid(env, {name: base.get(name) for name in HELD_BACK}) == base


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "OMP_PROC_BIND", "MKL_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONPATH", "CUDA_HOME"]
)
def test_variables_that_libraries_read_at_load_need_a_cold_start(name: str) -> None:
    assert name in reason_for_cold_start({name: "1"}, {})
    assert name in reason_for_cold_start({name: None}, {name: "1"})
    assert not reason_for_cold_start({name: "1"}, {name: "1"})  # the template has it as well


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "RANK", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "KMP_DUPLICATE_LIB_OK"],
)
def test_variables_that_are_read_late_need_no_cold_start(name: str) -> None:
    assert not reason_for_cold_start({name: "1"}, {})


def test_a_request_has_a_waiting_template_import_at_once(tmp_path: Path) -> None:
    loop = Loop()
    own, peer = socket.socketpair()
    forker = Forker(loop, tmp_path, {}, -1, lambda *_: None, Reaper(loop, lambda: None))
    forker.adopt(own, None)
    forker.fork([])
    assert peer.recv(4, socket.MSG_PEEK) == bytes(4)
    own.shutdown(socket.SHUT_WR)
    assert _serve(peer, -1, []) is None  # the end, before which nothing was to be forked
    peer.close()
    assert own.recv(1) == b""


def test_an_overlay_adds_replaces_and_removes() -> None:
    assert overlaid({"a": "1", "b": "2"}, {"a": None, "b": "3", "c": "4", "d": None}) == {"b": "3", "c": "4"}


def test_pools_are_as_large_as_asked_for_or_as_the_machine() -> None:
    assert wanted_threads({"OMP_NUM_THREADS": "3,2"}, "OMP_NUM_THREADS") == 3
    assert wanted_threads({"OMP_NUM_THREADS": "none"}, "OMP_NUM_THREADS") == len(os.sched_getaffinity(0))


def test_a_host_is_idle_since_its_last_use_not_counting_freezes() -> None:
    idle = Idleness(10.0)
    assert not any(idle.over(False, float(now)) for now in range(10))
    assert idle.over(False, 10.0)
    assert not idle.over(True, 11.0)
    assert not any(idle.over(False, float(now)) for now in range(12, 21))
    assert idle.over(False, 21.0)
    frozen = Idleness(10.0)
    frozen.over(False, 0.0)
    assert not frozen.over(False, 1000.0)
    assert not any(Idleness(None).over(False, float(now)) for now in range(1000))


def ends(leases: OwnerLeases, first: int, last: int) -> dict[str, int]:
    """When leases end, if they are checked once a second."""
    return {owner: now for now in range(first, last + 1) for owner in leases.expired(float(now))}


def test_a_lease_lives_from_sign_to_sign_of_life() -> None:
    leases = OwnerLeases(10.0)
    leases.grant("a/c", 0.0)
    leases.grant("b/c", 0.0, 100.0)
    assert ends(leases, 1, 8) == {}
    leases.renew("a/c", 8.0)
    leases.renew("nobody", 8.0)
    assert ends(leases, 9, 99) == {"a/c": 18}
    leases.renew("b/c", 99.0)  # as long as it was granted for
    assert ends(leases, 100, 198) == {}
    leases.end("b/c")
    assert not leases


def test_time_in_which_nobody_looked_at_the_leases_ends_none() -> None:
    leases = OwnerLeases(10.0)
    leases.grant("a/c", 0.0)
    assert ends(leases, 1, 9) == {}
    assert ends(leases, 1000, 1000) == {}  # frozen from 9 to 1000: messages of owners since then are unread
    leases.renew("a/c", 1000.5)
    assert ends(leases, 1001, 1030) == {"a/c": 1011}
    leases.grant("b/c", 5000.0)  # nothing is checked while there is no lease
    assert ends(leases, 5001, 5030) == {"b/c": 5010}
    leases.grant("c/c", 6000.0)
    assert ends(leases, 6100, 6130) == {"c/c": 6110}


@pytest.mark.parametrize("uptime", [100, 1])
def test_owners_are_asked_after_four_times_in_a_lease(uptime: int) -> None:
    leases = OwnerLeases(8.0)
    leases.grant("a/c", float(uptime))
    times = [now - uptime for now in range(uptime, uptime + 8) if leases.due(float(now))]
    assert times == [0, 2, 4, 6]


def test_waits_of_years_are_longer_than_the_system_takes_at_once() -> None:
    loop = Loop()
    loop.call_later(1e9, loop.stop)
    threading.Timer(0.05, loop.post, [loop.stop]).start()
    loop.run()
    reading, writing = os.pipe()
    threading.Timer(0.05, os.write, [writing, b"ready\n"]).start()
    assert _first_line(reading, 1e9) == b"ready\n"
    for end in (reading, writing):
        os.close(end)
    for wake in (loop._wake_read, loop._wake_write):
        wake.close()


def test_the_words_for_an_end_are_those_people_search_for() -> None:
    assert "the process this actor was running on failed: Killed(sig=9)" in exit_reason(None, 9)
    assert "out of memory" in exit_reason(None, 9, oom=True)
    assert exit_reason(3, None).endswith("failed: Exited(code=3)")


def test_last_lines_of_a_long_log_are_the_last(tmp_path: Path) -> None:
    base = tmp_path / "p0.0.0"
    (tmp_path / f"p0.0.0{TEXT}").write_bytes(b"\xff early\n" * 100_000 + b"a\n")
    (tmp_path / f"p0.0.0{ERR}").write_bytes(b"b\n")
    assert last_lines(str(base), 2) == ("a", "b")
    assert last_lines(str(tmp_path / "none")) == ()


@pytest.mark.parametrize(
    ("line", "file"), [("0::/job", "job/memory.events"), ("4:memory:/job", "memory/job/memory.oom_control")]
)
def test_each_kill_for_memory_explains_one_end(tmp_path: Path, line: str, file: str) -> None:
    (tmp_path / "cgroup").write_text(line + "\n")
    counter = tmp_path / file
    counter.parent.mkdir(parents=True)
    counter.write_text("oom 4\noom_kill 1\n")
    oom = OomCounter(tmp_path, tmp_path / "cgroup")
    assert not oom.struck()
    counter.write_text("oom 7\noom_kill 4\n")
    assert [oom.struck() for _ in range(4)] == [True, True, True, False]  # each kill explains one end


def test_a_kill_for_memory_of_long_ago_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/job\n")
    counter = tmp_path / "job" / "memory.events"
    counter.parent.mkdir()
    counter.write_text("oom_kill 1\n")
    oom = OomCounter(tmp_path, tmp_path / "cgroup")
    counter.write_text("oom_kill 2\n")
    oom.look(100.0)
    assert oom.struck()  # a moment ago: the process may just be ending
    counter.write_text("oom_kill 3\n")
    oom.look(200.0)
    oom.look(300.0)
    assert not oom.struck()


def test_without_a_control_group_the_machine_tells_of_kills_for_memory(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    machine = tmp_path / "vmstat"
    machine.write_text("oom_kill 3\n")
    oom = OomCounter(tmp_path, tmp_path / "cgroup", machine)
    machine.write_text("oom_kill 4\n")
    assert oom.struck()
    assert not oom.struck()


def test_the_crashed_thread_is_separated_from_the_last_lines(tmp_path: Path) -> None:
    stack = [
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x1:",
        "  File a",
        "",
        "Current thread 0x2:",
        "  File b",
    ]
    (tmp_path / f"p{TEXT}").write_text("before\n")
    (tmp_path / f"p{ERR}").write_text("\n".join([*stack, "", "Extension modules: x"]) + "\n")
    lines, dump = last_words(str(tmp_path / "p"))
    assert lines == ("before",)
    assert dump == ("Fatal Python error: Segmentation fault", "Current thread 0x2:", "  File b")


def test_sweeping_removes_only_old_folders_that_nobody_holds(tmp_path: Path) -> None:
    names = ["old", "young", "held"]
    for name in names:
        path = folders.run_folder_for(name, tmp_path)
        folders.make_run_folder(path)
        os.close(folders.hold(path))
        folders.release(path)
    used = folders.run_folder_for("used", tmp_path)
    folders.make_run_folder(used)  # by this process
    os.utime(used, (0, 0))
    fd = folders.hold(folders.run_folder_for("held", tmp_path))
    for name in ("old", "held"):
        os.utime(folders.run_folder_for(name, tmp_path), (time.time() - 100,) * 2)
    assert folders.sweep(tmp_path) == [folders.run_folder_for("old", tmp_path)]
    assert sorted(path.name.rpartition("-")[2] for path in tmp_path.iterdir()) == ["held", "used", "young"]
    os.close(fd)
    folders.remove_run_folder(used)


def test_a_folder_goes_while_others_still_make_files_in_it(tmp_path: Path) -> None:
    stop = threading.Event()
    refused = threading.Event()
    folder = folders.run_folder_for("busy", tmp_path)

    def make() -> None:
        for number in itertools.count():
            try:
                (folder / "logs" / f"{number}").touch()
                (folder / f"{number}").touch()
            except FileNotFoundError:
                refused.set()
            if stop.is_set():
                return

    makers = [threading.Thread(target=make) for _ in range(2)]
    try:
        for _ in range(20):
            refused.clear()
            folders.make_run_folder(folder)
            for maker in makers:
                if maker.ident is None:
                    maker.start()
            folders.remove_run_folder(folder)
            assert list(tmp_path.iterdir()) == []
            assert refused.wait(10)
    finally:
        stop.set()
        for maker in makers:
            maker.join()


def test_a_run_folder_without_room_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_inode(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", no_inode)
    with pytest.raises(TransportError, match=r"mnb-\d+-h cannot be made: No space left.*`df -i`.*TMPDIR"):
        folders.make_run_folder(folders.run_folder_for("h", tmp_path))


@pytest.mark.parametrize("listening", [True, False])
def test_the_folder_of_a_killed_client_without_an_agent_is_swept(listening: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as base:  # paths of sockets are short
        folder = folders.run_folder_for("client", Path(base))
        folders.make_run_folder(folder)
        folders.release(folder)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(folder / "c0.0.0"))
            if listening:
                door.listen()
            os.utime(folder, (0, 0))
            assert bool(folders.sweep(Path(base))) != listening


class Planted:
    """A folder where everybody may make files, and another user's files in it under this user's names."""

    def __init__(self, base: Path, target: Path) -> None:
        self.base, self.target = base, target
        base.chmod(0o1777)
        target.mkdir()
        self.mark = f"mnb-{os.geteuid()}-"

    def folder(self, host: str, mode: int = 0o755) -> Path:
        folder = self.base / f"{self.mark}{host}"
        folder.mkdir()
        folder.chmod(mode)
        return folder

    def give_away(self, path: Path) -> None:
        os.chown(path, 4242, 4242, follow_symlinks=False)
        os.utime(path, (0, 0), follow_symlinks=False)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as root:  # paths of sockets are short
        base = Path(root) / "tmp"
        base.mkdir()
        monkeypatch.setattr(folders, "_chosen", {})
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        Path(root).chmod(0o755)
        yield Planted(base, Path(root) / "other")


def listing(base: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_uid, path.lstat().st_mode) for path in base.rglob("*"))


@pytest.mark.timeout(20)
def test_files_planted_by_another_user_are_neither_opened_nor_awaited(planted: Planted) -> None:
    for number, mode in enumerate((0o700, 0o755, 0o777)):
        trap = planted.folder(f"lock{number}", mode)
        (trap / "lock").symlink_to(planted.target / f"made{number}")
        planted.give_away(trap)
    queue = planted.folder("queue")
    (queue / "c0.0.0").parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as full, contextlib.ExitStack() as callers:
        full.bind(str(queue / "c0.0.0"))
        full.listen(0)
        for _ in range(3):  # a waiting room with no seat left
            caller = callers.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(str(queue / "c0.0.0"))
        planted.give_away(queue)
        fifo = planted.base / f"{planted.mark}fifo"
        os.mkfifo(fifo)
        link = planted.base / f"{planted.mark}link"
        link.symlink_to(planted.target)
        for entry in (fifo, link):
            planted.give_away(entry)
        before = listing(planted.base)
        assert folders.sweep() == []
        assert folders.sweep(planted.base) == []
        for path in planted.base.iterdir():
            folders.remove_run_folder(path)
            folders.clear_run_folder(path, keep="")
        assert listing(planted.base) == before
    assert list(planted.target.iterdir()) == []


@pytest.mark.timeout(20)
def test_a_hung_process_keeps_its_folder_and_nobody_waits(planted: Planted) -> None:
    hung = planted.folder("hung", 0o700)
    with socket.socket(socket.AF_UNIX) as full, contextlib.ExitStack() as callers:
        full.bind(str(hung / "c0.0.0"))
        full.listen(0)
        for _ in range(3):
            caller = callers.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(str(hung / "c0.0.0"))
        os.utime(hung, (0, 0))
        assert folders.sweep() == []
    os.utime(hung, (0, 0))
    assert folders.sweep() == [hung]


@pytest.mark.parametrize("kind", ["folder", "open folder", "link", "file"])
def test_a_host_with_a_fixed_port_starts_despite_a_planted_folder(planted: Planted, kind: str) -> None:
    host = folders.lasting_host_id("tcp://127.0.0.1:22222") or ""
    trap = planted.base / f"{planted.mark}{host}"
    if kind == "link":
        trap.symlink_to(planted.target)
    elif kind == "file":
        trap.touch()
    else:
        planted.folder(host, 0o777 if kind == "open folder" else 0o700)
    planted.give_away(trap)
    folder = folders.run_folder_for(host)
    assert folder != trap
    assert folders.host_of_folder(folder) == host
    folders.make_run_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folders.run_folder_for(host) == folder
    folders.remove_run_folder(folder)
    assert not folder.exists()
    with pytest.raises(PermissionError, match="4242"):
        folders.make_run_folder(trap)


def test_the_sessions_runtime_folder_is_used_if_the_user_owns_it(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = planted.base / "run"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert folders.base_folder() == own
    own.chmod(0o750)
    assert folders.base_folder() == planted.base
    own.chmod(0o700)
    planted.give_away(own)
    assert folders.base_folder() == planted.base
    long = planted.base / ("x" * 40)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert folders.base_folder() == planted.base
    planted.base.chmod(0o777)  # others may replace our folders
    assert folders.base_folder() == Path("/tmp")


def test_a_folder_swept_while_being_made_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders.run_folder_for("late", tmp_path)
    opened, swept = folders.open_private, []

    def open_late(folder: Path) -> int:
        fd = opened(folder)
        if len(swept) < 3:
            swept.append(folder)
            os.rmdir(folder)
        return fd

    monkeypatch.setattr(folders, "open_private", open_late)
    folders.make_run_folder(path)
    assert len(swept) == 3
    assert (path / "logs").is_dir()
    folders.remove_run_folder(path)


def test_a_host_keeps_its_folder_when_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_chosen", {})
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as old, tempfile.TemporaryDirectory(dir="/tmp") as new:
        monkeypatch.setenv("XDG_RUNTIME_DIR", old)
        folder = folders.run_folder_for("mine")
        assert folder.parent == Path(old)
        monkeypatch.setenv("XDG_RUNTIME_DIR", new)
        assert folders.run_folder_for("mine") == folder  # where its sockets are
        assert folders.run_folder_for("another").parent == Path(new)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="can be entered by others"):
        folders.make_run_folder(path)


def test_binding_falls_back_to_taskset_and_knows_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert binding_prefix({"cpus": "0-3"}) == []
    for tool in ("taskset", "numactl"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o700)
        expected = {"taskset": ["taskset", "-c", "0-3"], "numactl": ["numactl", "--physcpubind=0-3"]}[tool]
        assert binding_prefix({"cpus": "0-3"}) == expected
    with pytest.raises(ValueError, match="unknown proc_bind keys"):
        binding_prefix({"gpus": "1"})


@pytest.fixture
def world() -> "Iterator[SpareWorld]":
    world = SpareWorld()
    yield world
    for channel in world.forks:
        channel.close()


class SpareWorld:
    """A loop, a template and a reaper that only record their requests."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] = []
        self.forks: list[ProcChannel] = []
        self.died: dict[int, Callable[[int], None]] = {}
        world: Any = self
        self.spares = SpareProcs(world, world, world)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.deferred.append(call)

    def fork(self, channels: Sequence[ProcChannel]) -> None:
        self.forks += channels

    def watch(self, pid: int, died: Callable[[int], None]) -> None:
        self.died[pid] = died

    def register(self, *_: object) -> None: ...

    modify = unregister = forked = register

    def keep(self, count: int = 1) -> None:
        self.spares.keep(KeepSpares(mesh="p1", owner="controller", count=count, prepare="module:call"))
        self.pass_time()

    def pass_time(self) -> None:
        due, self.deferred = self.deferred, []
        for call in due:
            call()

    def say(self, text: str) -> None:
        """Writes as the process that was forked last."""
        os.write(self.forks[-1].far_fd, text.encode())
        self.forks[-1].drain()


def test_a_spare_is_taken_when_ready_and_replaced_later(world: SpareWorld) -> None:
    world.keep()
    world.say("pid 7\n")
    assert world.spares.take("p1") is None
    world.say("ready\n")
    assert world.spares.take("another") is None
    spare = world.spares.take("p1")
    assert spare is not None
    assert (spare.pid, world.spares.take("p1"), len(world.forks)) == (7, None, 1)
    world.pass_time()
    assert len(world.forks) == 2
    world.spares.owner_gone("controller")
    with subprocess.Popen(["sleep", "60"]) as child:
        world.say(f"pid {child.pid}\nready\n")  # it was on its way
    assert child.returncode == -signal.SIGKILL
    world.pass_time()
    assert (world.spares.take("p1"), len(world.forks)) == (None, 2)


def test_spares_that_keep_dying_are_given_up_until_the_next_heal(world: SpareWorld) -> None:
    world.keep()
    for pid in (7, 8, 9):
        world.say(f"pid {pid}\nready\n")
        world.died[pid](9)
        world.pass_time()
    assert (len(world.forks), world.spares.take("p1")) == (3, None)
    world.keep()
    assert len(world.forks) == 4
    assert world.spares.refused(world.forks[-1], "no template")
    world.pass_time()
    assert len(world.forks) == 5
