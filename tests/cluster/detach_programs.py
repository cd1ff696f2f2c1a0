"""Programs for the tests of detach: each is a controller that does one thing and prints what it saw.

`python detach_programs.py NAME [ARGUMENT]`.
"""

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import monarch_nb as monarch
from monarch_nb.actor import Actor, ActorError, current_rank, endpoint, this_host
from monarch_nb.connect import (
    AttachError,
    Detacher,
    ResultLostError,
    accept_hosts,
    attach,
    attach_hosts,
    attach_to_workers,
    local_hosts,
)
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.host import verbs
from monarch_nb.job import job_load
from monarch_nb.mesh import state_of
from monarch_nb.runtime import current_runtime
from monarch_nb.store import store_of
from tests.processes import say


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.n = start

    @endpoint
    def add(self, step: int = 1) -> int:
        self.n += step
        print(f"now {self.n}", flush=True)
        return self.n

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, peer: Any) -> int:
        count: int = peer.add.call_one(0).get()
        return count

    @endpoint
    def fail_at(self, path: str, rank: str) -> None:
        self.wait(path)
        if current_rank().rank == int(rank):
            raise ValueError("not this one")

    @endpoint
    def wait_for(self, path: str) -> str:
        return self.wait(path)

    @endpoint
    def last_waits(self, path: str) -> str:
        """All but the last rank answer at once; the last one creates a second file before it answers."""
        if current_rank().rank == 1:
            self.wait(path)
            Path(f"{path}.answered").touch()
        return path

    def wait(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.02)
        return path


class Deadly(Actor):
    """Kills the controller that creates it again."""

    def __init__(self, controller: int, armed: str) -> None:
        if os.path.exists(armed):
            os.unlink(armed)
            os.kill(controller, signal.SIGKILL)


class Keeper(Actor):
    """Keeps a reference that it gets only once."""

    def __init__(self, counter: Any) -> None:
        self.counter = counter

    @endpoint
    def ask(self) -> list[int]:
        return list(self.counter.add.call(0).get(20).values())


def spawn(procs: Any = None) -> tuple[Any, Any]:
    """Two procs with a counter each, which has counted once."""
    procs = procs or this_host().spawn_procs(per_host={"gpus": 2}, name="trainers")
    counter: Any = procs.spawn("counter", Counter, 10)
    say("pids", *counter.pid.call().get().values())
    say("counts", *counter.add.call(5).get().values())
    return procs, counter


def leave(lease: str = "60s") -> None:
    """Spawns, and detaches with a running call, which ends when the test creates a file."""
    procs, counter = spawn()
    pending = counter.wait_for.call(os.environ["GATE"])
    procs.detach(lease=lease)
    for call in (pending.get, counter.add.call(1).get):
        try:
            call()
        except RuntimeError as error:
            say("error", str(error).splitlines()[0])


class Hanger(Actor):
    @endpoint
    def hang(self) -> None:
        """The last rank waits forever."""
        if current_rank().rank == 2:
            threading.Event().wait()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def leave_hanging(lease: str = "60s") -> None:
    """Detaches a mesh with a rank that hangs and another that can be killed."""
    procs = this_host().spawn_procs(per_host={"gpus": 3}, name="trainers")
    hanger: Any = procs.spawn("hanger", Hanger)
    say("pids", *hanger.pid.call().get().values())
    hanger.hang.call()
    procs.detach(lease=lease)


class Reducer(Actor):
    @endpoint
    def pid(self) -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return os.getpid()

    @endpoint
    def hang(self) -> None:
        """The last rank never joins."""
        import torch
        import torch.distributed as dist

        if dist.get_rank() == dist.get_world_size() - 1:
            threading.Event().wait()
        dist.all_reduce(torch.ones(1))


def leave_hanging_hosts(key: str, *endpoints: str) -> None:
    """Detaches ranks on several hosts that wait for a rank of the last host."""
    procs = attach_hosts(endpoints, key=key).spawn_procs(per_host={"gpus": 2}, name="trainers")
    reducer: Any = procs.spawn("reducer", Reducer)
    say("pids", *reducer.pid.call().get().values())
    reducer.hang.call()
    procs.detach("120s")


def find(_: str = "") -> None:
    """Attaches a mesh, which reports what has happened, and stops it."""
    procs: Any = monarch.attach("trainers")
    procs.stop().get()


def leave_while_recording(_: str = "") -> None:
    """Detaches an attached mesh while its record is rewritten, between the two messages to its host."""
    spawn()[0].detach("60s")
    procs: Any = monarch.attach("trainers")
    detacher = current_runtime().part(Detacher)
    ask = detacher._ask

    def record_first(state: Any, hosts: Any, bodies: Any, verb: Any) -> None:
        if verb is verbs.DETACH:
            recording = threading.Thread(target=detacher.refresh)
            recording.start()
            recording.join(1.0)
        ask(state, hosts, bodies, verb)

    detacher._ask = record_first  # type: ignore[method-assign]
    procs.detach("60s")


def leave_hosts(key: str, *endpoints: str) -> None:
    """Spawns on hosts that another program has started, and detaches everything."""
    hosts = attach_hosts(endpoints, key=key)
    spawn(hosts.spawn_procs(name="trainers"))
    hosts.detach("60s")


def leave_local(lost: str) -> None:
    """Spawns on two hosts of this machine, loses one, heals nothing, and detaches the rest."""
    hosts = local_hosts(2)
    monarch.actor.unhandled_fault_hook = lambda failure: None
    procs, counter = spawn(hosts.spawn_procs(name="trainers"))
    handles = current_runtime().part(LocalAgents).running
    victim = counter.slice(hosts=int(lost))
    os.kill(handles[hosts.host_ids[int(lost)]].pid, signal.SIGKILL)
    while answers(victim):
        time.sleep(0.01)
    say("host", hosts.host_ids[int(lost)])
    procs.detach("60s")


def look(_: str = "") -> None:
    """Attaches, prints which ranks answer, and detaches again."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    began = time.monotonic()
    try:
        procs: Any = monarch.attach("trainers")
    except AttachError as error:
        say("refused", " ".join(str(error).split()))
        return
    counter: Any = monarch.attach("counter")
    say("attached", round(time.monotonic() - began))
    label = counter.extent.labels[0]
    say("lives", *(rank for rank in range(2) if answers(counter.slice(**{label: rank}))))
    procs.detach("60s")


def leave_busy(key: str, *endpoints: str) -> None:
    """The same, with running calls, which end when the test creates a file."""
    hosts = attach_hosts(endpoints, key=key)
    _, counter = spawn(hosts.spawn_procs(name="trainers"))
    pending = [counter.fail_at.call(os.environ["GATE"], "1"), counter.wait_for.call(os.environ["GATE"])]
    hosts.detach("60s")
    say("left", *(call.exception() is not None for call in pending))


def leave_behind(key: str, gateway: str, *endpoints: str) -> None:
    """Spawns on hosts that are reached through one of them, and detaches everything."""
    attach(gateway, private_key=Path(key))
    spawn(attach_to_workers(ca=Path(key), workers=endpoints).spawn_procs(name="trainers"))[0].detach("60s")


def leave_callers(key: str, address: str) -> None:
    """Spawns on two hosts that dial in, and detaches everything."""
    hosts = accept_hosts(2, at=address, key=key)
    spawn(hosts.spawn_procs(name="trainers"))[0].detach("60s")


def leave_job(file: str) -> None:
    """Spawns on the hosts of a job in a file, and detaches everything."""
    hosts: Any = job_load(file).state(None).trainers
    spawn(hosts.spawn_procs(name="trainers"))[0].detach("60s")


def nap(key: str, *endpoints: str) -> None:
    """Spawns, receives nothing while its machine sleeps, and goes on."""
    _, counter = spawn(attach_hosts(endpoints, key=key, lease=2).spawn_procs(name="trainers"))
    monarch.actor.unhandled_fault_hook = lambda failure: None  # as in a notebook, it ends no program
    say("sleeps")
    signal.sigtimedwait({signal.SIGUSR1}, 90)
    try:
        counter.add.call(1).get(20)
    except RuntimeError as error:
        say("error", " ".join(str(error).split()))
    monarch.heal_mesh(counter)
    say("counts", *counter.add.call(1).get(20).values())


def hold(key: str = "", *endpoints: str) -> None:
    """Spawns on this machine or on given hosts, and waits to be killed."""
    spawn(attach_hosts(endpoints, key=key).spawn_procs(name="trainers") if endpoints else None)
    current_runtime().part(Detacher).flush_holds()  # as at the end of a cell
    say("holds")
    signal.pause()


def hold_unread(key: str, *endpoints: str) -> None:
    """Reads one of three results; the second is complete by then, the third half complete."""
    _, counter = spawn(attach_hosts(endpoints, key=key).spawn_procs(name="trainers"))
    current_runtime().part(Detacher).flush_holds()
    counter.add.call(0).get()
    full, half = counter.add.call(0), counter.last_waits.call(os.environ["GATE"])
    until = time.monotonic() + 20
    while not (full.done() and half.progress_text().startswith("1 of 2 ranks")) and time.monotonic() < until:
        time.sleep(0.01)
    say("holds", full.done(), *half.progress_text().split()[:3])
    signal.pause()


def leave_pair(_: str = "") -> None:
    """Spawns two meshes on a host each; the second refers to the first. Detaches the first, then both."""
    hosts = local_hosts(2)
    procs, counter = spawn(hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2}, name="trainers"))
    second = hosts.slice(hosts=1).spawn_procs(name="others")
    keeper = second.spawn("keeper", Keeper, counter)
    keeper.ask.call_one().get()
    procs.detach("60s")
    say("alone", *keeper.ask.call_one().get(20))
    monarch.attach("trainers")
    say("again", *keeper.ask.call_one().get(20))
    procs.detach("60s")
    second.detach("60s")


def take_pair(_: str = "") -> None:
    """Attaches both in reverse order, and heals the first."""
    second: Any = monarch.attach("others")
    procs: Any = monarch.attach("trainers")
    keeper: Any = monarch.attach("keeper")
    monarch.heal_mesh(procs.slice(gpus=1), kill=True)
    say("asked", *keeper.ask.call_one().get(20))
    for mesh in (second, procs):
        mesh.stop().get()


def take(how: str = "") -> None:
    """Attaches, counts on, and stops."""
    began = time.monotonic()
    try:
        procs: Any = monarch.attach("trainers", steal=how == "steal")
    except AttachError as error:
        say("refused", error)
        return
    say("attached", round(time.monotonic() - began, 3))
    counter: Any = monarch.attach("counter")
    say("pids", *counter.pid.call().get().values())
    for result in monarch.results(counter):
        try:
            say("result", result.endpoint, *result.ranks, *result.get().values())
        except ActorError as error:
            say("result", result.endpoint, *result.ranks, " ".join(str(error).split()))
        except ResultLostError:  # some ranks had answered before it was left
            say("result", result.endpoint, *result.ranks, "in part")
    say("counts", *counter.add.call(1).get().values())
    first, last = (counter.slice(**{counter.extent.labels[0]: rank}) for rank in (0, 1))
    say("across", first.ask.call_one(last).get())
    say("slice", counter.slice(**{counter.extent.labels[0]: 1}).add.call_one(1).get())
    if how == "hold":
        say("holds")
        signal.sigtimedwait({signal.SIGUSR1}, 30)
        try:
            counter.add.call(1).get()
        except RuntimeError as error:
            say("error", str(error).splitlines()[0])
        return
    procs.stop().get()
    say("stopped")


def hold_busy(_: str = "") -> None:
    """Spawns, has a running call, and waits until another program takes the mesh over."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    _, counter = spawn()
    current_runtime().part(Detacher).flush_holds()
    pending = counter.wait_for.call(os.environ["GATE"])
    say("holds")
    try:
        pending.get(30)
    except RuntimeError as error:
        say("error", str(error).splitlines()[0])


def rob(_: str = "") -> None:
    """Takes the mesh over, with the results of its calls."""
    procs: Any = monarch.attach("trainers", steal=True)
    Path(os.environ["GATE"]).touch()
    until = time.monotonic() + 20
    while not any(result.ok for result in monarch.results("counter")) and time.monotonic() < until:
        time.sleep(0.05)
    monarch.attach("counter").add.call(0).get()  # type: ignore[union-attr]
    say("result", *monarch.results("counter")[0].get().values())
    say("calls", len(monarch.results("counter")))
    procs.stop().get()


def mend(lost: str = "1") -> None:
    """Attaches a mesh that has lost a process, and heals it."""
    procs: Any = monarch.attach("trainers")
    counter: Any = monarch.attach("counter")
    try:
        counter.slice(**{counter.extent.labels[0]: int(lost)}).pid.call().get()
    except RuntimeError as error:
        say("error", str(error).splitlines()[0])
    monarch.heal_mesh(procs)
    say("counts", *counter.add.call(1).get().values())
    procs.stop().get()


def wait_and_mend(_: str = "") -> None:
    """Attaches a mesh with an unreachable host, and heals it when that host is back."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    began = time.monotonic()
    procs: Any = monarch.attach("trainers")
    counter: Any = monarch.attach("counter")
    say("attached", round(time.monotonic() - began))
    say("lost", *(rank for rank in range(2) if not answers(counter.slice(hosts=rank))))
    try:
        monarch.heal_mesh(procs, timeout=5)
    except RuntimeError as error:
        say("error", " ".join(str(error).split()))
    say("waits")
    signal.sigtimedwait({signal.SIGUSR1}, 60)
    until = time.monotonic() + 60
    while True:
        try:
            monarch.heal_mesh(procs, timeout=5)
            break
        except (RuntimeError, TimeoutError):
            assert time.monotonic() < until
            time.sleep(0.2)
    say("counts", *counter.add.call(1).get().values())
    first, last = counter.slice(hosts=0), counter.slice(hosts=1)
    say("across", first.ask.call_one(last).get(10), last.ask.call_one(first).get(10))
    procs.detach("60s")


def answers(part: Any) -> bool:
    """Whether a rank answers within five seconds."""
    try:
        part.pid.call().get(5)
    except RuntimeError:
        return False
    return True


def fall(_: str = "") -> None:
    """Spawns, and is killed in the middle of a heal, with some actors back and others not."""
    procs, counter = spawn()
    monarch.actor.unhandled_fault_hook = lambda failure: None
    keeper: Any = procs.slice(gpus=0).spawn("keeper", Keeper, counter)
    armed = os.environ["GATE"]
    procs.spawn("deadly", Deadly, os.getpid(), armed).initialized.get()
    late: Any = procs.spawn("late", Counter, 100)
    late.add.call(0).get()
    keeper.ask.call_one().get()
    current_runtime().part(Detacher).flush_holds()
    Path(armed).touch()
    say("heals")
    monarch.heal_mesh(procs.slice(gpus=1), kill=True)


def fall_on_hosts(key: str, *endpoints: str) -> None:
    """Spawns on given hosts, and is killed by the first actor that a heal creates again on one of them."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    procs, _ = spawn(attach_hosts(endpoints, key=key).spawn_procs(name="trainers"))
    procs.spawn("deadly", Deadly, os.getpid(), os.environ["GATE"]).initialized.get()
    current_runtime().part(Detacher).flush_holds()
    say("holds")
    signal.sigtimedwait({signal.SIGUSR1}, 90)
    Path(os.environ["GATE"]).touch()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            monarch.heal_mesh(procs, timeout=5)
        except (RuntimeError, TimeoutError):  # the host is not back yet
            time.sleep(0.05)


def fall_unrecorded(_: str = "") -> None:
    """Heals a rank that calls the other one, and is killed with that rank before the heal is recorded."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    procs, counter = spawn()
    current_runtime().part(Detacher).flush_holds()
    current_runtime().part(Detacher).refresh = lambda *_: None  # type: ignore[method-assign]
    first, last = counter.slice(gpus=0), counter.slice(gpus=1)
    os.kill(last.pid.call_one().get(), signal.SIGKILL)
    while answers(last):
        time.sleep(0.01)
    monarch.heal_mesh(procs)
    say("across", last.ask.call_one(first).get(10))
    os.kill(last.pid.call_one().get(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def mend_unrecorded(_: str = "") -> None:
    """Attaches what `fall_unrecorded` left, heals it, and has the healed rank call the other one."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    procs: Any = monarch.attach("trainers")
    counter: Any = monarch.attach("counter")
    monarch.heal_mesh(procs)
    say("across", counter.slice(gpus=1).ask.call_one(counter.slice(gpus=0)).get(10))
    say("incarnation", state_of(counter).incarnation(1))
    procs.stop().get()


def pick_up(_: str = "") -> None:
    """Attaches a mesh whose controller was killed in the middle of a heal."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    procs: Any = monarch.attach("trainers")
    counter, late, keeper = (monarch.attach(name) for name in ("counter", "late", "keeper"))
    say("counts", *counter.add.call(1).get(10).values())
    began = time.monotonic()
    try:
        late.add.call(1).get(10)
    except RuntimeError as error:
        say("error", round(time.monotonic() - began), " ".join(str(error).split()))
    say("kept", *keeper.ask.call_one().get(20))
    monarch.heal_mesh(procs)
    say("late", *late.add.call(1).get(10).values())
    monarch.heal_mesh(procs.slice(gpus=1), kill=True)
    say("kept", *keeper.ask.call_one().get(20))
    procs.stop().get()


def again(_: str = "") -> None:
    """Detaches and attaches in one program: old handles work again, and meanwhile stop nothing."""
    store_of(current_runtime())
    procs, counter = spawn()
    procs.detach(lease="60s")
    for use in (procs.stop, counter.stop, partial(monarch.heal_mesh, procs), procs.detach):
        try:
            use()
        except RuntimeError as error:
            say("error", "runs without this program (detached for 1m)" in str(error))
    attached = monarch.attach("trainers")
    say("counts", *counter.add.call(1).get().values())
    say("same", attached == procs)
    say("view", store_of(current_runtime()).mesh_view(state_of(procs).uid, state_of(procs).region).counts)
    monarch.heal_mesh(procs, kill=True)
    say("counts", *counter.add.call(1).get().values())
    procs.stop().get()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    programs = (
        leave, leave_hanging, find, leave_while_recording, leave_hosts, leave_local, look, leave_busy, leave_behind,
        leave_callers, leave_job, nap, hold, hold_busy, hold_unread, leave_pair, take_pair, rob, take, mend,
        wait_and_mend, fall, fall_on_hosts, fall_unrecorded, mend_unrecorded, pick_up, again, leave_hanging_hosts,
    )  # fmt: skip
    {program.__name__: program for program in programs}[sys.argv[1]](*sys.argv[2:])
