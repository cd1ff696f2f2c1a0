"""Programs that the ranks of a case run: small, with named places, and the faults of planted ranks at one of these."""

import asyncio
import ctypes
import fcntl
import gc
import multiprocessing
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from monarch_nb.actor import Actor, ActorError, current_rank, endpoint


@dataclass(frozen=True)
class Plan:
    """A program, and the fault that is planted in it."""

    program: str
    fault: str  # what planted ranks do
    place: str  # where in a step
    ranks: tuple[int, ...]
    step: int  # the first in which they do it
    every: int = 0  # and again after so many steps; 0: once
    steps: int = 1_000_000
    folder: str = ""  # in which a planted rank writes a file before it does it
    seed: int = 0


class Returned(Exception):
    """A planted rank leaves its endpoint."""


class Run:
    """One run of a program on a rank."""

    def __init__(self, plan: Plan, rank: int, holder: Any) -> None:
        self.plan, self.rank, self.holder = plan, rank, holder
        self.step, self.replacement = 0, ""  # `replacement`: of the next collective
        self.random = random.Random(f"{plan.seed} {rank}")
        self.model: Any = None
        self.optimizer: Any = None

    def steps(self) -> Iterator[int]:
        for step in range(self.plan.steps):
            self.step = step
            yield step

    def at(self, place: str) -> None:
        """The place of a step, where planted ranks have their fault."""
        plan = self.plan
        if place != plan.place or self.rank not in plan.ranks or self.step < plan.step:
            return
        if self.step == plan.step or (plan.every and (self.step - plan.step) % plan.every == 0):
            if self.step == plan.step:
                Path(plan.folder, str(self.rank)).touch()
            FAULTS[plan.fault](self)

    def reduce(self, tensor: torch.Tensor, group: Any = None) -> None:
        """An all_reduce, or the replacement of a planted rank."""
        operation, self.replacement = self.replacement, ""
        if operation == "skip":
            return
        if operation == "other operation":
            dist.broadcast(tensor, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group)
        elif operation == "other shape":
            dist.all_reduce(torch.ones(2 * len(tensor)), group=group)
        elif operation == "other type":
            dist.all_reduce(tensor.double(), group=group)
        else:
            dist.all_reduce(tensor, group=group)


# -- what planted ranks do ---------------------------------------------------------------------------------------------


def _lock(_: Run) -> None:
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()


def _own_lock(_: Run) -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


class _Locks:
    """Two locks, which a thread of its own takes in the order in which it is asked to."""

    def __init__(self) -> None:
        self.data, self.queue, self.ready = threading.Lock(), threading.RLock(), threading.Event()

    def load(self) -> None:
        with self.queue:
            self.ready.set()
            time.sleep(0.2)
            with self.data:
                pass

    def step(self) -> None:
        with self.data:
            threading.Thread(target=self.load, name="loader", daemon=True).start()
            self.ready.wait()
            with self.queue:
                pass


def _held_lock(seconds: float) -> "Callable[[Run], None]":
    """Another thread works while it holds the lock."""

    def do(_: Run) -> None:
        lock, ready = threading.Lock(), threading.Event()

        def work() -> None:
            with lock:
                ready.set()
                time.sleep(seconds)

        threading.Thread(target=work, daemon=True).start()
        ready.wait()
        with lock:
            pass

    return do


def _locks_in_turn(_: Run) -> None:
    """Threads that take two locks in the same order all the time."""
    first, second = threading.Lock(), threading.Lock()

    def work() -> None:
        until = time.monotonic() + 4
        while time.monotonic() < until:
            with first, second:
                time.sleep(0.001)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _joins(_: Run) -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


def _file_lock(_: Run) -> None:
    with tempfile.NamedTemporaryFile() as first, open(first.name) as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


def _polls(_: Run) -> None:
    while not os.path.exists("/nowhere/at/all"):
        time.sleep(0.1)


def _socket(_: Run) -> None:
    pair = socket.socketpair()
    pair[0].recv(1)


def _accepts(_: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()


def _semaphore(_: Run) -> None:
    semaphore = threading.Semaphore(0)
    semaphore.acquire()


def _condition(_: Run) -> None:
    condition = threading.Condition()
    with condition:
        condition.wait()


def _loop(_: Run) -> None:
    asyncio.run(asyncio.Event().wait())  # type: ignore[arg-type]


def _computes(_: Run) -> None:
    while True:
        sum(range(10_000))


def _computes_in_c(_: Run) -> None:
    matrix = torch.ones(300, 300)
    while True:
        matrix @ matrix


def _writes(_: Run) -> None:
    with tempfile.TemporaryFile() as file:
        while True:
            file.seek(0)
            file.write(bytes(1 << 16))
            file.flush()
            time.sleep(0.01)


def _raises(_: Run) -> None:
    raise ValueError("no such batch")


def _returns(_: Run) -> None:
    raise Returned


def _replaces(operation: str) -> "Callable[[Run], None]":
    def do(run: Run) -> None:
        run.replacement = operation

    return do


def _sleeps(seconds: float) -> "Callable[[Run], None]":
    return lambda _: time.sleep(seconds)


def _burns(seconds: float) -> "Callable[[Run], None]":
    def do(_: Run) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            sum(range(1000))

    return do


def _saves(_: Run) -> None:
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(20):
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())


def _collects(run: Run) -> None:
    if not hasattr(run, "objects"):
        run.objects = [{1: [number]} for number in range(40_000)]  # type: ignore[attr-defined]
    gc.collect()


def _downloads(_: Run) -> None:
    """Slowly, from another thread."""
    client, server = socket.socketpair()

    def send() -> None:
        for _ in range(100):
            server.send(b"part")
            time.sleep(0.03)
        server.close()

    threading.Thread(target=send, daemon=True).start()
    while client.recv(4096):
        pass


def _feeds(work: "Callable[[Run], None]") -> "Callable[[Run], None]":
    """The next batch comes from another thread, which has to do something before."""

    def do(run: Run) -> None:
        batches: queue.Queue[int] = queue.Queue()

        def prepare() -> None:
            work(run)
            batches.put(1)

        threading.Thread(target=prepare, daemon=True).start()
        batches.get()

    return do


def _child(seconds: float, work: str) -> "Callable[[Run], None]":
    code = f"import time\nuntil = time.time() + {seconds}\nwhile time.time() < until: {work}"
    return lambda _: subprocess.run([sys.executable, "-c", code], check=True) and None


class _Batches(IterableDataset[int]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[int]:
        time.sleep(self.seconds)
        yield 1


def _loads(_: Run) -> None:
    next(iter(DataLoader(_Batches(3.0), num_workers=1, multiprocessing_context="fork")))


def _drifts(run: Run) -> None:
    with torch.no_grad():
        next(run.model.parameters()).add_(1e-5)


def _drifts_in_state(run: Run) -> None:
    next(iter(run.optimizer.state.values()))["exp_avg"].add_(1e-5)


def _other_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 1.01


def _other_weights(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(0.001 * (1 + run.rank))


_KEPT: list[object] = []


def _keeps_tensors(_: Run) -> None:
    _KEPT.append(torch.ones(64 << 10))


def _keeps_objects(_: Run) -> None:
    _KEPT.append([object() for _ in range(2000)])


def _compiles(_: Run) -> None:
    torch.compile(lambda x: torch.sin(x) + x * 2, backend="aot_eager")(torch.ones(4))
    _burns(2.0)(_)


FAULTS: dict[str, Callable[[Run], None]] = {
    # never end
    "queue": lambda _: queue.Queue().get(),
    "lock": _lock,
    "lock of its own": _own_lock,
    "locks of two threads": lambda _: _Locks().step(),
    "event": lambda _: threading.Event().wait() and None,
    "condition": _condition,
    "semaphore": _semaphore,
    "sleep": _sleeps(3600),
    "socket": _socket,
    "accept": _accepts,
    "pipe": lambda _: os.read(os.pipe()[0], 1) and None,
    "select": lambda _: select.select([os.pipe()[0]], [], []) and None,
    "thread": _joins,
    "file lock": _file_lock,
    "poll": _polls,
    "future": lambda _: Future[None]().result(),
    "event loop": _loop,
    "queue of processes": lambda _: multiprocessing.Queue().get(),
    "signal": lambda _: signal.sigwait({signal.SIGUSR2}) and None,
    "C": lambda _: ctypes.CDLL(None).sleep(3600),
    "C with the GIL": lambda _: ctypes.PyDLL(None).sleep(3600),
    "computes": _computes,
    "computes in C": _computes_in_c,
    "writes": _writes,
    "child process": lambda _: subprocess.run(["sleep", "3600"], check=True) and None,
    "raises": _raises,
    "returns": _returns,
    "breakpoint": lambda _: breakpoint(),
    "SIGSTOP": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "gdb": lambda _: time.sleep(3600),  # the runner attaches it
    # end the process
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda _: os._exit(3),
    "segmentation fault": lambda _: ctypes.string_at(0) and None,
    "abort": lambda _: os.abort(),
    # another collective
    "skip": _replaces("skip"),
    "other operation": _replaces("other operation"),
    "other shape": _replaces("other shape"),
    "other type": _replaces("other type"),
    # end by themselves
    "naps": _sleeps(0.03),
    "burns": _burns(0.03),
    "uneven": lambda run: time.sleep(run.random.uniform(0, 0.02)),
    "at times": lambda run: time.sleep(0.3 if run.random.random() < 0.02 else 0),
    "sleeps": _sleeps(1.5),
    "sleeps for long": _sleeps(6.0),
    "saves": _saves,
    "evaluates": _burns(2.0),
    "evaluates for long": _burns(14.0),
    "lock of another thread": _held_lock(4.0),
    "locks in turn": _locks_in_turn,
    "compiles": _compiles,
    "collects": _collects,
    "downloads": _downloads,
    "fed by a computing thread": _feeds(_burns(3.0)),
    "fed by a downloading thread": _feeds(_downloads),
    "child that computes": _child(3.0, "pass"),
    "child that sleeps": _child(5.0, "time.sleep(0.1)"),
    "loader's worker": _loads,
    "holds the GIL": lambda _: ctypes.PyDLL(None).sleep(4),
    "in C": lambda _: ctypes.CDLL(None).sleep(4),
    # keep memory
    "keeps tensors": _keeps_tensors,
    "keeps objects": _keeps_objects,
    # change values
    "drifts": _drifts,
    "drifts in its optimizer": _drifts_in_state,
    "other rate": _other_rate,
    "other weights": _other_weights,
    "nothing": lambda _: None,
}  # fmt: skip


# -- programs ----------------------------------------------------------------------------------------------------------


def _all_reduce(run: Run) -> None:
    for _ in run.steps():
        run.at("data")
        run.reduce(torch.ones(4))


def _mixed(run: Run) -> None:
    size = dist.get_world_size()
    for _ in run.steps():
        run.at("data")
        run.reduce(torch.ones(4))
        run.at("gather")
        dist.all_gather([torch.ones(2) for _ in range(size)], torch.ones(2))
        run.at("broadcast")
        dist.broadcast(torch.ones(3), 0)
        run.at("barrier")
        dist.barrier()


def _grid(run: Run) -> None:
    """Rows of two ranks, and columns."""
    size = dist.get_world_size()
    groups = {
        "row": [[rank, rank + 1] for rank in range(0, size, 2)],
        "column": [list(range(side, size, 2)) for side in range(2)],
    }
    all_groups = {kind: [(ranks, dist.new_group(ranks)) for ranks in entries] for kind, entries in groups.items()}
    own = {kind: next(group for ranks, group in entries if run.rank in ranks) for kind, entries in all_groups.items()}
    for _ in run.steps():
        run.at("data")
        for kind, group in own.items():
            run.at(kind)
            run.reduce(torch.ones(4), group)


def _two_groups(run: Run) -> None:
    """All ranks are in both."""
    groups = [dist.new_group(), dist.new_group()]
    for _ in run.steps():
        run.at("data")
        if run.replacement == "skip":
            groups.reverse()
            run.replacement = ""
        for group in groups:
            run.reduce(torch.ones(4), group)


def _half(run: Run) -> None:
    """Only half of the ranks are in a group of their own; all meet at times."""
    ranks = list(range(dist.get_world_size() // 2))
    group = dist.new_group(ranks)
    for step in run.steps():
        run.at("data")
        if run.rank in ranks:
            run.reduce(torch.ones(4), group)
        else:
            time.sleep(0.002)
        if step % 50 == 49:
            dist.all_reduce(torch.ones(1))


def _pipeline(run: Run) -> None:
    size = dist.get_world_size()
    for _ in run.steps():
        run.at("data")
        if run.rank:
            dist.recv(torch.ones(4), run.rank - 1)
        run.at("forward")
        if run.rank < size - 1:
            dist.send(torch.ones(4), run.rank + 1)


def _asynchronous(run: Run) -> None:
    """Collectives that are waited for later."""
    for _ in run.steps():
        works = [dist.all_reduce(torch.ones(4), async_op=True)]
        run.at("data")
        extra = dist.broadcast(torch.ones(8), 0, async_op=True) if run.replacement else None
        works.append(extra or dist.all_reduce(torch.ones(8), async_op=True))
        for work in works:
            work.wait()


class Net(torch.nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.run.at("forward")
        x = self.layers[0](x)
        bad = self.run.plan.fault.startswith("NaN") and self.run.rank in self.run.plan.ranks
        if bad and self.run.step == self.run.plan.step:
            x = NANS[self.run.plan.fault](x)
        return torch.as_tensor(self.layers[2](self.layers[1](x)))


NANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN of a logarithm": lambda x: torch.log(x * 0 - 1),
    "NaN of a quotient": lambda x: (x * 0) / (x * 0),
    "NaN of infinities": lambda x: x + (torch.exp(x * 0 + 80) * torch.exp(x * 0 + 80) * 0),
    "NaN of a root's gradient": lambda x: torch.sqrt(x.relu() * 0) * 0,
    "NaN of a norm": lambda x: x / (x * 0).norm(),
    "NaN of the data": lambda x: x,
}
FAULTS.update(dict.fromkeys(NANS, lambda _: None))


def _train(wrap: Callable[[Any], Any]) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        torch.manual_seed(0)
        net = Net(run)
        run.model = run.holder.model = wrap(net)
        run.optimizer = run.holder.optimizer = torch.optim.AdamW(run.model.parameters())
        run.optimizer.register_step_pre_hook(lambda *_: run.at("optimizer"))
        for _ in run.steps():
            run.at("data")
            batch = torch.randn(4, 8)
            if run.plan.fault == "NaN of the data" and run.rank in run.plan.ranks and run.step == run.plan.step:
                batch[1, 1] = float("nan")
            loss = run.model(batch)
            if loss.requires_grad and run.plan.place == "backward":
                loss.register_hook(lambda _: run.at("backward"))
            loss.square().mean().backward()
            if wrap is _by_hand:
                for parameter in run.model.parameters():
                    run.reduce(parameter.grad)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.at("end")

    return program


def _by_hand(net: Any) -> Any:
    return net


def _sharded(net: Any) -> Any:
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def _alone(run: Run) -> None:
    """No collectives."""
    for _ in run.steps():
        run.at("data")
        time.sleep(0.001)


def _masks(run: Run) -> None:
    """Infinities that belong there."""
    for _ in run.steps():
        scores = torch.randn(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        scores.softmax(-1).sum()
        torch.full((3,), float("inf")).min()
        run.at("data")
        run.reduce(torch.ones(4))


def _experts(run: Run) -> None:
    """Every rank holds another part of the model."""
    torch.manual_seed(run.rank)
    run.holder.model = torch.nn.Linear(8, 8)
    run.holder.optimizer = torch.optim.SGD(run.holder.model.parameters())
    for _ in run.steps():
        run.at("data")
        run.reduce(torch.ones(4))


PROGRAMS: dict[str, Callable[[Run], None]] = {
    "all_reduce": _all_reduce,
    "mixed collectives": _mixed,
    "rows and columns": _grid,
    "two groups": _two_groups,
    "half": _half,
    "pipeline": _pipeline,
    "asynchronous": _asynchronous,
    "DDP": _train(DistributedDataParallel),
    "FSDP": _train(_sharded),
    "reduced by hand": _train(_by_hand),
    "no collectives": _alone,
    "masks": _masks,
    "experts": _experts,
}


class Worker(Actor):
    """Runs programs."""

    model: Any = None
    optimizer: Any = None

    @endpoint
    def join(self, connects: bool) -> int:
        torch.set_num_threads(1)
        if connects and not dist.is_initialized():
            dist.init_process_group("gloo")
        return os.getpid()

    @endpoint
    def run(self, plan: Plan) -> int:
        """Returns the number of steps."""
        run = Run(plan, current_rank().rank, self)
        try:
            PROGRAMS[plan.program](run)
        except Returned:
            return run.step
        if dist.is_initialized():
            dist.barrier()
        return run.step + 1

    @endpoint
    def steps(self, plan: Plan, number: int) -> None:
        """One step of a program without collectives: the controller counts."""
        run = Run(plan, current_rank().rank, self)
        run.step = number
        run.at("data")
        time.sleep(0.002)


class Node(Actor):
    """An actor of a graph: calls the next one, the last one has the fault."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.numbers = count()

    @endpoint
    def ask(self, nodes: list[Any]) -> int:
        run = Run(self.plan, self.plan.ranks[0], self)
        run.step = next(self.numbers)
        if nodes:
            return int(nodes[0].ask.call_one(nodes[1:]).get())
        run.at("data")
        return 1

    @endpoint
    def circle(self, nodes: list[Any], own: int) -> int:
        """Every actor calls the next one while it is busy."""
        Path(self.plan.folder, f"{own}").touch()
        while len(os.listdir(self.plan.folder)) < len(nodes):
            time.sleep(0.01)
        return int(nodes[(own + 1) % len(nodes)].ask.call_one([]).get())


__all__ = ["FAULTS", "PROGRAMS", "ActorError", "Node", "Plan", "Worker"]
