"""Controllers in processes of their own, for tests that kill, interrupt or starve them."""

import contextlib
import faulthandler
import gc
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_nb.actor import Channel, ProcMesh, SupervisionError, current_runtime, endpoint, heal_mesh, this_host
from monarch_nb.config import configure
from monarch_nb.engine import controller as engine_controller
from monarch_nb.engine.in_process import in_process_host, inline_host, kill
from monarch_nb.exceptions import DescriptorLimitError, HealError
from monarch_nb.lifecycle import notebook_mode
from monarch_nb.routing.actions import LinkConfig
from monarch_nb.runtime import ProcState
from monarch_nb.store import describe, store_of
from monarch_nb.transport import peer
from tests.cluster.fault_tools import SOON, Worker, agent, begun, status
from tests.cluster.interrupt_steps import Steps
from tests.cluster.memory_group import MemoryGroup
from tests.polling import until
from tests.processes import say


def spawn(count: int = 2, **options: Any) -> tuple[Any, Any]:
    procs = this_host().spawn_procs(per_host={"gpus": count}, name="procs", **options)
    return procs, procs.spawn("workers", Worker)


def quiet() -> None:
    """Failures end nothing, as in a notebook."""
    current_runtime()
    notebook_mode(lambda failure: say("shown", failure.mesh_name))


# -- to be killed ----------------------------------------------------------------------------------------------------


def killed(stage: str) -> None:
    """Prints `at <stage>` and waits there to be killed."""
    quiet()
    if stage == "spawning":
        spawn(4)
        say("at", stage)
        signal.pause()
    setup = "import time\nif rank == 1: time.sleep(600)" if stage == "set-up" else None
    procs, workers = spawn(setup=setup)
    port, receiver = Channel.open()
    if stage == "set-up":
        until(lambda: [proc for proc in status().procs if proc.state == "running"])
        say("at", stage)
        procs.initialized.get()
    workers.pid.call().get(SOON)
    if stage == "idle":
        say("at", stage)
        signal.pause()
    if stage == "call":
        call = workers.hang.call(port)
        begun(receiver, 2)
        say("at", stage)
        call.get()
    if stage == "broadcast":
        for number in itertools.count():
            workers.note.broadcast(np.zeros(400_000, np.uint8))
            if number == 20:
                say("at", stage)
    if stage == "heal":
        os.kill(workers.slice(gpus=1).pid.call_one().get(SOON), signal.SIGKILL)
        with contextlib.suppress(SupervisionError):
            workers.pid.call().get(SOON)
        threading.Timer(0.02, lambda: say("at", stage)).start()
        heal_mesh(workers)
        signal.pause()
    if stage == "stop":
        workers.hang.call(port)
        begun(receiver, 2)
        stop = procs.stop()
        say("at", stage)
        stop.get()


def killed_at_the_start(stage: str) -> None:
    """Is killed while the agent of its host starts: before its folder exists (`folder`), or milliseconds later."""
    import monarch_nb.host.launch

    class Killed(monarch_nb.host.launch.ComingAgent):
        def wait(self, timeout_s: float = 30.0) -> monarch_nb.host.launch.AgentHandle:
            if stage != "folder":
                time.sleep(int(stage) / 1000)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monarch_nb.host.launch, "ComingAgent", Killed)
        if stage == "folder":
            patch.setattr(subprocess, "Popen", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        spawn(1)


def killed_at_a_call(number: str) -> None:
    """Is killed at this function call of its start, on any thread; prints the number of calls."""
    count = itertools.count()
    last = int(number)

    def count_call(_frame: object, event: str, _arg: object) -> None:
        if event == "call" and next(count) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count_call)
    sys.setprofile(count_call)
    spawn(1)
    sys.setprofile(None)
    say("calls", next(count))


# -- to be interrupted -----------------------------------------------------------------------------------------------


class Interrupter:
    """A thread that sends this process one real SIGINT at a time, a moment after it was armed."""

    def __init__(self, seed: int) -> None:
        self.sent = 0
        self._chance = random.Random(seed)
        self._armed = threading.Semaphore(0)
        self._delay = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def arm(self, limit: float) -> None:
        """One interrupt within `limit` seconds."""
        self._delay = self._chance.random() * limit
        self._armed.release()

    def _run(self) -> None:
        while True:
            self._armed.acquire()
            time.sleep(self._delay)
            os.kill(os.getpid(), signal.SIGINT)
            self.sent += 1  # after the signal: a reader of the count need not expect it any more

    def during(self, limit: float, function: Callable[[], None]) -> bool:
        """Runs the function with one interrupt pending, and always waits for that; returns whether it cut in.

        An interrupt in a finalizer is swallowed by Python, and counts as one that did not cut in.
        """
        due = self.sent + 1
        try:
            self.arm(limit)
            function()
            while self.sent < due:
                time.sleep(0.0002)
            time.sleep(0)  # a pending interrupt has its handler called here at the latest, not after the `try`
            return False
        except KeyboardInterrupt:
            while self.sent < due:  # it is counted a moment later
                time.sleep(0.0002)
            return True


def sends(times: str) -> None:
    """Sends in all ways under interrupts; every message reported as sent has to arrive once, complete and in order."""
    quiet()
    totals = _sends(int(times))
    gc.collect()
    until(lambda: not [fd for fd in os.listdir("/proc/self/fd") if "memfd" in _target(fd)], "memory files are closed")
    say("done", *totals)


def _sends(times: int) -> tuple[int, int, int, float]:
    procs, workers = spawn()
    workers.pid.call().get(SOON)
    second = workers.slice(gpus=1)
    large = np.arange(100_000, dtype=np.int64)
    numbers = itertools.count()
    expected: list[tuple[str, int]] = []
    futures: list[Any] = []

    interrupter = Interrupter(11)

    def work() -> None:
        due = interrupter.sent + 1
        while interrupter.sent < due:
            number = next(numbers)
            way = number % 8
            if way < 3:
                workers.note.broadcast(number)
                expected.append(("all", number))
            elif way < 5:
                second.note.broadcast(number)
                expected.append(("one", number))
            elif way == 5:
                futures.append(workers.note.call(number))
                expected.append(("all", number))
            elif way == 6:
                workers.note.broadcast((number, large))
                expected.append(("all", number))
            else:
                workers.echo.call(number).get()

    cuts = sum(interrupter.during(0.002, work) for _ in range(times))
    begin = time.monotonic()
    notes = workers.noted.call().get(SOON).values()
    took = time.monotonic() - begin
    for future in futures:
        future.get(SOON)
    for rank, values in enumerate(notes):
        arrivals = []
        for value in values:
            if isinstance(value, tuple):
                assert np.array_equal(value[1], large), "a half message"
                value = value[0]
            arrivals.append(value)
        assert arrivals == sorted(set(arrivals)), "out of order, or twice"
        due = [number for way, number in expected if way == "all" or rank == 1]
        missing = set(due) - set(arrivals)
        assert not missing, f"rank {rank} lacks {sorted(missing)[:5]}"
        assert len(set(arrivals) - set(due)) <= times, "more arrived than was cut off"
    procs.stop().get(SOON)
    return interrupter.sent, cuts, len(expected), round(took, 2)


def _target(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def cycles(times: str) -> None:
    """Spawns, heals and stops under interrupts; afterwards everything works and no process remains."""
    quiet()
    chance = random.Random(5)

    def cycle() -> None:
        procs, workers = spawn()
        pids = workers.pid.call().get(SOON).values()
        os.kill(pids[1], signal.SIGKILL)
        with contextlib.suppress(SupervisionError):
            workers.pid.call().get(SOON)
        heal_mesh(workers, timeout=SOON)
        assert workers.rank.call().get(SOON).values() == [0, 1]
        procs.stop().get(SOON)

    cycle()
    begin = time.monotonic()
    cycle()
    usual = time.monotonic() - begin
    interrupter = Interrupter(12)
    cuts = sum(interrupter.during(usual * chance.random(), cycle) for _ in range(int(times)))
    for state in list(current_runtime().meshes.values()):
        if isinstance(state, ProcState) and state.spawn_spec is not None and state.stopped is None:
            ProcMesh(state, state.region).stop().get(SOON)  # also a mesh that no variable refers to
    cycle()
    addresses = [proc.address for proc in status().procs if proc.state != "exited"]
    say("done", cuts, addresses)


STATEFUL = (
    "driver.py",
    "stops.py",
    "registry.py",
    "proc_spawn.py",
    "healing.py",
    "heal.py",
    "requests.py",
    "future.py",
)


def steps(part: str, of: str) -> None:
    """Is interrupted at every step of a spawn, a heal and a stop in turn; after each interrupt, everything works.

    Takes every `of`th step in all modules; `part` 0 takes only the steps in modules with state.
    """
    quiet()
    host = in_process_host()
    timeout = 10.0

    def cycle() -> None:
        procs = host.spawn_procs(per_host={"gpus": 2}, name="procs")
        workers = procs.spawn("workers", Worker)
        assert workers.rank.call().get(timeout).values() == [0, 1]
        kill(procs.slice(gpus=1))
        with contextlib.suppress(SupervisionError):
            workers.rank.call().get(timeout)
        heal_mesh(workers, timeout=timeout)
        assert workers.rank.call().get(timeout).values() == [0, 1]
        procs.stop().get(timeout)

    cycle()
    with Steps() as all_steps:
        cycle()
    candidates = [step for step in all_steps.seen if part != "0" or os.path.basename(step.file) in STATEFUL]
    cuts = 0
    for step in candidates[int(part) % int(of) :: int(of)]:
        for visit in sorted({1, all_steps.seen[step]}):
            try:
                with Steps(step, visit):
                    cycle()
            except KeyboardInterrupt:
                cuts += 1
            try:
                for state in list(current_runtime().meshes.values()):
                    if isinstance(state, ProcState) and state.spawn_spec is not None and state.stopped is None:
                        mesh = ProcMesh(state, state.region)
                        heal_mesh(mesh, timeout=timeout)
                        mesh.stop().get(timeout)
                cycle()
            except Exception as error:
                say("done", cuts, f"after an interrupt at {step}, visit {visit}: {type(error).__name__}: {error}")
                os._exit(1)
    say("done", cuts, inline_host(current_runtime()).alive())


# -- to be starved ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(kind: int, least: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def descriptors() -> None:
    """No file descriptors are left in the controller."""
    quiet()
    _, workers = spawn()
    assert workers.rank.call().get(SOON).values() == [0, 1]
    used = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    with limited(resource.RLIMIT_NOFILE, used):
        fds = []
        with contextlib.suppress(OSError):
            while True:
                fds.append(os.open(os.devnull, os.O_RDONLY))
        assert workers.rank.call().get(SOON).values() == [0, 1]  # open connections go on working
        for way in (lambda: workers.echo.call(np.zeros(10**6)).get(SOON), lambda: spawn()[1].pid.call().get(SOON)):
            try:
                way()
            except (DescriptorLimitError, SupervisionError) as error:
                text = str(error)
                say("refused" if "no file descriptors left" in text and "ulimit -n" in text else text)
        for fd in fds:
            os.close(fd)
    assert workers.echo.call(np.zeros(10**6)).get(SOON).values()[0].shape == (10**6,)
    _, fresh = spawn()
    assert fresh.rank.call().get(SOON).values() == [0, 1]
    say("done")


@contextlib.contextmanager
def only(spare: int) -> Iterator[None]:
    """Leaves only `spare` descriptors to this process."""
    used = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    fds: list[int] = []
    with limited(resource.RLIMIT_NOFILE, used + spare):
        try:
            with contextlib.suppress(OSError):
                while True:
                    fds.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(spare):
                os.close(fds.pop())
            yield
        finally:
            for fd in fds:
                os.close(fd)


def few_descriptors(only_some: str) -> None:
    """A few descriptors are left in the controller: enough to begin something, and not to end it."""
    quiet()
    peer._STARVED_S = 0.5
    configure(heal_max_restarts=100)
    _, workers = spawn()
    procs, healed = spawn()
    assert len(healed.pid.call().get(SOON)) == 2

    def kill() -> None:
        for pid in healed.pid.call().get(SOON).values():
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(describe(procs).having("failed")) == 2, "both deaths are known")

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "large": (lambda: workers.echo.call([np.zeros(10**5) for _ in range(3)]).get(SOON), 5),
        "spawn": (lambda: spawn()[1].pid.call().get(SOON), 3),
        "heal": (lambda: heal_mesh(procs), 3),
    }
    few = {"large": [2], "spawn": [0], "heal": []} if only_some else {}
    for name, (way, limit) in ways.items():
        for spare in few.get(name, range(limit)):
            if name == "heal":
                kill()
            began = time.monotonic()
            with only(spare):
                try:
                    way()
                    outcome = "done"
                except (DescriptorLimitError, SupervisionError, HealError) as error:
                    outcome = str(error)
                    assert "no file descriptors left" in outcome, outcome
                    assert "ulimit -n" in outcome, outcome
                    outcome = type(error).__name__
            assert time.monotonic() - began < 15, (name, spare)
            say(name, spare, outcome)
            if name == "heal":
                heal_mesh(procs)
                assert len(healed.pid.call().get(SOON)) == 2
            assert workers.echo.call(np.ones(10**5)).get(SOON).values()[1].sum() == 10**5
    _, fresh = spawn()
    assert fresh.rank.call().get(SOON).values() == [0, 1]
    say("done")


def memory() -> None:
    """Memory files cannot be written any more."""
    from monarch_nb.exceptions import TransportError

    quiet()
    _, workers = spawn()
    workers.pid.call().get(SOON)
    with limited(resource.RLIMIT_FSIZE, 1 << 20):
        for adverb in (workers.echo.call, workers.note.broadcast):
            try:
                adverb(np.zeros(10**6))
                raise AssertionError("no error")
            except TransportError as error:
                say("refused", str(error))
        assert workers.echo.call(b"x" * 300_000).get(SOON).values() == [b"x" * 300_000] * 2
    assert workers.echo.call(np.ones(10**6)).get(SOON).values()[1].sum() == 10**6
    assert workers.noted.call().get(SOON).values() == [[], []]
    say("done")


def slow_receiver() -> None:
    """A receiver that takes nothing: the sender blocks, can be interrupted, and keeps a bounded amount."""
    window, size = 4 << 20, 100_000
    make: Any = LinkConfig
    engine_controller.LinkConfig = lambda **more: make(window=window, **more)  # type: ignore[misc]
    os.environ["MONARCH_LINK_CREDIT_WINDOW"] = str(window)
    quiet()
    procs, workers = spawn(1)
    port, receiver = Channel.open()
    folder = tempfile.TemporaryDirectory()
    gate = Path(folder.name) / "opened"
    workers.wait_for.broadcast(str(gate), port)
    begun(receiver, 1)
    counts = itertools.count()
    numbers: list[int] = []
    blocked = threading.Event()

    def watch() -> None:
        last = -1
        while last != len(numbers) or not numbers:
            last = len(numbers)
            time.sleep(0.5)  # no event reports the wait
        blocked.set()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch).start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        while True:
            number = next(counts)
            workers.note.broadcast((number, b"x" * size))
            numbers.append(number)
    except KeyboardInterrupt:
        pass
    assert blocked.is_set()
    backlog = len(numbers)
    assert backlog <= window // size + 2, backlog
    gate.touch()
    for _ in range(3000):  # then sending goes on, as fast as the receiver takes the messages
        number = next(counts)
        workers.note.broadcast((number, b"x" * 1000))
        numbers.append(number)
    notes = workers.noted.call_one().get(SOON)
    arrivals = [number for number, _ in notes]
    assert arrivals == sorted(set(arrivals))
    assert set(numbers) <= set(arrivals)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, grown  # KiB
    procs.stop().get(SOON)
    folder.cleanup()
    say("done", backlog)


def full_disk(path: str) -> None:
    """Processes write more than their disk takes."""
    quiet()
    procs, workers = spawn()
    lines = ["a line of sixty letters, more or less, so that it fills up" + "." * 200] * 4000
    for _ in range(2):
        assert workers.say.call("\n".join(lines)).get(SOON).values() == [len("\n".join(lines))] * 2
    assert workers.echo.call(np.ones(10**6)).get(SOON).values()[0].sum() == 10**6
    with contextlib.suppress(OSError):
        (Path(path) / "more").write_bytes(bytes(10**6))
    try:
        _, extra = spawn()
        extra.pid.call().get(SOON)
    except SupervisionError as error:
        say("refused", error)
    assert workers.rank.call().get(SOON).values() == [0, 1]
    procs.stop().get(SOON)
    say("done")


class Hog(Worker):
    """Takes memory, piece by piece, and answers once a file exists."""

    @endpoint
    def take(self, size: int, flag: str) -> None:
        self.value = []
        for _ in range(size >> 20):
            self.value.append(b"x" * (1 << 20))
            time.sleep(0.001)
        until(lambda: os.path.exists(flag))


def memory_runs_out(folder: str, many: str, room: str) -> None:
    """All ranks together take twice the free memory; each takes a part that would fit."""
    group = MemoryGroup(Path(folder))
    store = store_of(current_runtime())
    notebook_mode(lambda failure: say("shown", failure.cause.origin.oom))
    procs = this_host().spawn_procs(per_host={"gpus": int(many)}, name="procs")
    hogs = procs.spawn("hogs", Hog)
    pids = hogs.pid.call().get(SOON).values()
    parents = (os.getpid(), agent().pid)
    say("scores", *({int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in ids} for ids in (pids, parents)))
    group.limit(group.used + int(room))
    flag = Path(tempfile.mkdtemp()) / "killed"
    call = hogs.take.call(2 * int(room) // int(many), str(flag))
    until(lambda: group.kills, "somebody is killed before all have answered")
    flag.touch()
    try:
        call.get(SOON)
    except SupervisionError as error:
        say("raised", error.failure is not None and error.failure.cause.origin.oom)
    for rank in range(int(many)):  # living ranks have all their memory before they answer, so nothing is killed later
        with contextlib.suppress(SupervisionError):
            hogs.slice(gpus=rank).pid.call_one().get(SOON)
    until(lambda: group.kills and len(_open_ranks(store)) == group.kills, "every kill is told")
    group.limit(-1)
    say("kills", group.kills, "reports", [(report["oom"], len(report["ranks"])) for report in _open(store)])
    say("ended", sum(not os.path.exists(f"/proc/{pid}") for pid in pids), "agent", agent().pid == parents[1])
    heal_mesh(hogs)
    say("healed", len(hogs.pid.call().get(SOON).values()))
    procs.stop().get(SOON)
    say("done")


def _open(store: Any) -> list[dict[str, Any]]:
    return [failure for failure in store.document()["failures"].values() if failure["state"] == "open"]


def _open_ranks(store: Any) -> set[int]:
    return {rank for failure in _open(store) for rank in failure["ranks"]}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    faulthandler.dump_traceback_later(85)  # the test waits a little longer
    from tests.cluster import fault_programs  # its classes and functions have that name everywhere

    getattr(fault_programs, sys.argv[1])(*sys.argv[2:])
