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


def spawn(count: int = 2, **more: Any) -> tuple[Any, Any]:
    procs = this_host().spawn_procs(per_host={"gpus": count}, name="procs", **more)
    return procs, procs.spawn("workers", Worker)


def quiet() -> None:
    """As in a notebook: failures end nothing."""
    current_runtime()
    notebook_mode(lambda failure: say("shown", failure.mesh_name))


# -- to be killed ----------------------------------------------------------------------------------------------------


def killed(stage: str) -> None:
    """Says `at <stage>` and stays there until it is killed."""
    quiet()
    if stage == "spawning":
        spawn(4)
        say("at", stage)
        signal.pause()
    setup = "import time\nif rank == 1: time.sleep(600)" if stage == "set-up" else None
    procs, workers = spawn(setup=setup)
    port, receiver = Channel.open()
    if stage == "set-up":
        until(lambda: [one for one in status().procs if one.state == "running"])
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
        stopped = procs.stop()
        say("at", stage)
        stopped.get()


def killed_at_the_start(stage: str) -> None:
    """Is killed while the agent of its host starts: `folder`, before there is one; else so many milliseconds after."""
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
    """Is killed at the so-manieth function call of its start, on whatever thread; says how many there were."""
    count = itertools.count()
    last = int(number)

    def look(_frame: object, event: str, _arg: object) -> None:
        if event == "call" and next(count) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)
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

    def arm(self, most: float) -> None:
        """One interrupt within `most` seconds."""
        self._delay = self._chance.random() * most
        self._armed.release()

    def _run(self) -> None:
        while True:
            self._armed.acquire()
            time.sleep(self._delay)
            os.kill(os.getpid(), signal.SIGINT)
            self.sent += 1  # after it: who sees the count need not expect it any more

    def during(self, most: float, function: Callable[[], None]) -> bool:
        """Runs it with one interrupt on the way, and waits for that one in any case; whether it cut in.

        One that falls into a finalizer is swallowed by Python: it counts as one that did not cut in.
        """
        due = self.sent + 1
        try:
            self.arm(most)
            function()
            while self.sent < due:
                time.sleep(0.0002)
            time.sleep(0)  # one that is due has its handler called here at the latest, not behind the `try`
            return False
        except KeyboardInterrupt:
            while self.sent < due:  # it is counted a moment later
                time.sleep(0.0002)
            return True


def sends(times: str) -> None:
    """Sends in all ways while it is interrupted; what was said to be sent has to arrive, once, whole and in order."""
    quiet()
    told = _sends(int(times))
    gc.collect()
    until(lambda: not [fd for fd in os.listdir("/proc/self/fd") if "memfd" in _target(fd)], "memory files are closed")
    say("done", *told)


def _sends(times: int) -> tuple[int, int, int, float]:
    procs, workers = spawn()
    workers.pid.call().get(SOON)
    one = workers.slice(gpus=1)
    large = np.arange(100_000, dtype=np.int64)
    numbers = itertools.count()
    sent: list[tuple[str, int]] = []
    futures: list[Any] = []

    interrupter = Interrupter(11)

    def work() -> None:
        due = interrupter.sent + 1
        while interrupter.sent < due:
            number = next(numbers)
            way = number % 8
            if way < 3:
                workers.note.broadcast(number)
                sent.append(("all", number))
            elif way < 5:
                one.note.broadcast(number)
                sent.append(("one", number))
            elif way == 5:
                futures.append(workers.note.call(number))
                sent.append(("all", number))
            elif way == 6:
                workers.note.broadcast((number, large))
                sent.append(("all", number))
            else:
                workers.echo.call(number).get()

    cuts = sum(interrupter.during(0.002, work) for _ in range(times))
    begin = time.monotonic()
    noted = workers.noted.call().get(SOON).values()
    took = time.monotonic() - begin
    for future in futures:
        future.get(SOON)
    for rank, seen in enumerate(noted):
        arrived = []
        for value in seen:
            if isinstance(value, tuple):
                assert np.array_equal(value[1], large), "a half message"
                value = value[0]
            arrived.append(value)
        assert arrived == sorted(set(arrived)), "out of order, or twice"
        due = [number for way, number in sent if way == "all" or rank == 1]
        missing = set(due) - set(arrived)
        assert not missing, f"rank {rank} lacks {sorted(missing)[:5]}"
        assert len(set(arrived) - set(due)) <= times, "more arrived than was cut off"
    procs.stop().get(SOON)
    return interrupter.sent, cuts, len(sent), round(took, 2)


def _target(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def cycles(times: str) -> None:
    """Spawns, heals and stops while it is interrupted; then all of it works, and nothing is left over."""
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
            ProcMesh(state, state.region).stop().get(SOON)  # also one that was there before it had a name
    cycle()
    left = [one.address for one in status().procs if one.state != "exited"]
    say("done", cuts, left)


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
    """Is interrupted at one step after the other of a spawn, a heal and a stop; after each, all of it works at once.

    Of the steps in all modules it takes one in `of`; `part` 0 takes only those in modules that keep what happens.
    """
    quiet()
    host = in_process_host()
    soon = 10.0

    def cycle() -> None:
        procs = host.spawn_procs(per_host={"gpus": 2}, name="procs")
        workers = procs.spawn("workers", Worker)
        assert workers.rank.call().get(soon).values() == [0, 1]
        kill(procs.slice(gpus=1))
        with contextlib.suppress(SupervisionError):
            workers.rank.call().get(soon)
        heal_mesh(workers, timeout=soon)
        assert workers.rank.call().get(soon).values() == [0, 1]
        procs.stop().get(soon)

    cycle()
    with Steps() as all_steps:
        cycle()
    wanted = [step for step in all_steps.seen if part != "0" or os.path.basename(step.file) in STATEFUL]
    cuts = 0
    for step in wanted[int(part) % int(of) :: int(of)]:
        for visit in sorted({1, all_steps.seen[step]}):
            try:
                with Steps(step, visit):
                    cycle()
            except KeyboardInterrupt:
                cuts += 1
            try:
                for state in list(current_runtime().meshes.values()):
                    if isinstance(state, ProcState) and state.spawn_spec is not None and state.stopped is None:
                        left = ProcMesh(state, state.region)
                        heal_mesh(left, timeout=soon)
                        left.stop().get(soon)
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
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        assert workers.rank.call().get(SOON).values() == [0, 1]  # what is open goes on working
        for way in (lambda: workers.echo.call(np.zeros(10**6)).get(SOON), lambda: spawn()[1].pid.call().get(SOON)):
            try:
                way()
            except (DescriptorLimitError, SupervisionError) as error:
                text = str(error)
                say("refused" if "no file descriptors left" in text and "ulimit -n" in text else text)
        for fd in held:
            os.close(fd)
    assert workers.echo.call(np.zeros(10**6)).get(SOON).values()[0].shape == (10**6,)
    _, fresh = spawn()
    assert fresh.rank.call().get(SOON).values() == [0, 1]
    say("done")


@contextlib.contextmanager
def only(spare: int) -> Iterator[None]:
    """Only so many descriptors are left to this process."""
    used = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    held: list[int] = []
    with limited(resource.RLIMIT_NOFILE, used + spare):
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(spare):
                os.close(held.pop())
            yield
        finally:
            for fd in held:
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
    for name, (way, most) in ways.items():
        for spare in few.get(name, range(most)):
            if name == "heal":
                kill()
            began = time.monotonic()
            with only(spare):
                try:
                    way()
                    told = "done"
                except (DescriptorLimitError, SupervisionError, HealError) as error:
                    told = str(error)
                    assert "no file descriptors left" in told, told
                    assert "ulimit -n" in told, told
                    told = type(error).__name__
            assert time.monotonic() - began < 15, (name, spare)
            say(name, spare, told)
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
    opened = Path(folder.name) / "opened"
    workers.wait_for.broadcast(str(opened), port)
    begun(receiver, 1)
    counts = itertools.count()
    sent: list[int] = []
    blocked = threading.Event()

    def watch() -> None:
        last = -1
        while last != len(sent) or not sent:
            last = len(sent)
            time.sleep(0.5)  # nobody reports that it waits
        blocked.set()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch).start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        while True:
            number = next(counts)
            workers.note.broadcast((number, b"x" * size))
            sent.append(number)
    except KeyboardInterrupt:
        pass
    assert blocked.is_set()
    held = len(sent)
    assert held <= window // size + 2, held
    opened.touch()
    for _ in range(3000):  # and then it goes on, as fast as they are taken
        number = next(counts)
        workers.note.broadcast((number, b"x" * 1000))
        sent.append(number)
    noted = workers.noted.call_one().get(SOON)
    arrived = [number for number, _ in noted]
    assert arrived == sorted(set(arrived))
    assert set(sent) <= set(arrived)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, grown  # KiB
    procs.stop().get(SOON)
    folder.cleanup()
    say("done", held)


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
        _, late = spawn()
        late.pid.call().get(SOON)
    except SupervisionError as error:
        say("refused", error)
    assert workers.rank.call().get(SOON).values() == [0, 1]
    procs.stop().get(SOON)
    say("done")


class Hog(Worker):
    """Takes memory, piece by piece, and answers once a file is there."""

    @endpoint
    def take(self, size: int, flag: str) -> None:
        self.value = []
        for _ in range(size >> 20):
            self.value.append(b"x" * (1 << 20))
            time.sleep(0.001)
        until(lambda: os.path.exists(flag))


def memory_runs_out(folder: str, many: str, room: str) -> None:
    """All ranks together take twice of the memory that is left, each a part of it that would fit."""
    group = MemoryGroup(Path(folder))
    store = store_of(current_runtime())
    notebook_mode(lambda failure: say("shown", failure.cause.origin.oom))
    procs = this_host().spawn_procs(per_host={"gpus": int(many)}, name="procs")
    hogs = procs.spawn("hogs", Hog)
    pids = hogs.pid.call().get(SOON).values()
    others = (os.getpid(), agent().pid)
    say("scores", *({int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in some} for some in (pids, others)))
    group.limit(group.used + int(room))
    flag = Path(tempfile.mkdtemp()) / "killed"
    taken = hogs.take.call(2 * int(room) // int(many), str(flag))
    until(lambda: group.kills, "somebody is killed before all have answered")
    flag.touch()
    try:
        taken.get(SOON)
    except SupervisionError as error:
        say("raised", error.failure is not None and error.failure.cause.origin.oom)
    for rank in range(int(many)):  # those that live have taken theirs before they answer, and nothing is killed later
        with contextlib.suppress(SupervisionError):
            hogs.slice(gpus=rank).pid.call_one().get(SOON)
    until(lambda: group.kills and len(_open_ranks(store)) == group.kills, "every kill is told")
    group.limit(-1)
    say("kills", group.kills, "reports", [(one["oom"], len(one["ranks"])) for one in _open(store)])
    say("ended", sum(not os.path.exists(f"/proc/{pid}") for pid in pids), "agent", agent().pid == others[1])
    heal_mesh(hogs)
    say("healed", len(hogs.pid.call().get(SOON).values()))
    procs.stop().get(SOON)
    say("done")


def _open(store: Any) -> list[dict[str, Any]]:
    return [one for one in store.document()["failures"].values() if one["state"] == "open"]


def _open_ranks(store: Any) -> set[int]:
    return {rank for one in _open(store) for rank in one["ranks"]}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    faulthandler.dump_traceback_later(85)  # whoever waits for this program gives up a little later
    from tests.cluster import fault_programs  # its classes and functions have that name everywhere

    getattr(fault_programs, sys.argv[1])(*sys.argv[2:])
