"""Runs a case on real processes, asks which rank is to blame, and compares the answer with the planted fault."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import monarch_nb
from monarch_nb.actor import ActorError, this_host
from monarch_nb.config import configured
from monarch_nb.diagnosis import Diagnosis, Finding, MemoryWatch, StragglerWatch, compare_replicas
from monarch_nb.diagnosis.collector import HangNotes
from monarch_nb.mesh import state_of
from monarch_nb.runtime import DeadlockError, current_runtime
from tests.planted_faults.cases import Case
from tests.planted_faults.programs import Node, Plan, Worker

BEGIN_S = 120.0  # for planted ranks to come to their place, on a machine with much else to do
VERDICT_S = 25.0  # for a verdict, from then on
AGAIN_S = 2.0  # for which a right answer has to stay right

Grade = Literal["right", "silent", "unsure", "wrong", "not run"]
GRADES: tuple[Grade, ...] = ("right", "silent", "unsure", "wrong", "not run")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case."""

    name: str
    seed: int
    planted: str  # the kind, "healthy" for none
    answer: str  # kind of the finding that counts, "" for none
    grade: Grade
    seconds: float = 0.0  # from the fault to the verdict
    asked: float = 0.0  # that the call which gave the verdict took
    looks: int = 0
    unsure: int = 0  # looks that gave suspicions only
    waiting: int = 0  # looks that only said, and rightly, that others wait for the ranks in which it is planted
    shown: int = 0  # times that a waiting cell would have shown something
    text: str = ""


@dataclass
class Looks:
    """The answers so far, and their grade."""

    case: Case
    culprits: tuple[int, ...]
    mesh: str = "planted"
    grade: Grade = "silent"
    answer: str = ""
    text: str = ""
    planted: tuple[int, ...] = ()
    count: int = 0
    unsure: int = 0
    waiting: int = 0
    shown: int = 0

    def add(self, findings: tuple[Finding, ...]) -> None:
        self.count += 1
        sure = [finding for finding in findings if finding.sure]
        facts = [f for f in findings if f.kind == "waiting_on" and {*f.ranks} <= {*self.planted}]
        self.waiting += bool(findings) and len(facts) == len(findings)
        self.unsure += len(facts) < len(findings) and not sure
        if not self.case.kind and len(facts) == len(findings):
            return
        if self.grade == "wrong":
            return
        wrong = [finding for finding in sure if not self._is_right(finding)]
        if wrong:
            self._set("wrong", wrong[0])
        elif right := [finding for finding in findings if self._is_right(finding) and finding.sure >= self.case.sure]:
            self._set("right", right[0])
        elif findings and self.grade == "silent":
            self._set("unsure", findings[0])

    def _is_right(self, finding: Finding) -> bool:
        return finding.kind == self.case.kind and set(finding.ranks) == set(self.culprits)

    def _set(self, grade: Grade, finding: Finding) -> None:
        self.grade, self.answer, self.text = grade, finding.kind, finding.line

    def outcome(self, seed: int, seconds: float = 0.0, call_seconds: float = 0.0) -> Outcome:
        case = self.case
        grade: Grade = self.grade
        if not case.kind and grade == "silent":
            grade = "right"
        kind = case.kind or "healthy"
        return Outcome(
            case.name,
            seed,
            kind,
            self.answer,
            grade,
            seconds,
            call_seconds,
            self.count,
            self.unsure,
            self.waiting,
            self.shown,
            self.text,
        )


def run(case: Case, seed: int) -> Outcome:
    """Spawns the processes of a case, runs it, and stops them."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        patient = {"mesh_terminate_timeout": "0.5s", "stop_actor_timeout": "0.5s", "call_error_window": "60s"}
        stack.enter_context(configured(**patient))
        stack.enter_context(_hogs(case.hogs))
        plan = Plan(
            case.program,
            case.fault,
            case.place,
            case.ranks(seed),
            case.step(seed),
            case.every,
            case.steps,
            folder,
            seed,
        )
        looks = Looks(case, case.culprits(seed), planted=case.ranks(seed))
        return TOOLS[case.tool](stack, looks, plan, seed)


@contextlib.contextmanager
def _hogs(count: int) -> Iterator[None]:
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _spawn(stack: contextlib.ExitStack, count: int, name: str = "planted") -> Any:
    procs = this_host().spawn_procs(per_host={"gpus": count}, name=name)
    stack.callback(_stop, procs)
    procs.initialized.get(BEGIN_S)
    return procs


def _stop(procs: Any) -> None:
    with contextlib.suppress(Exception):
        procs.stop().get(30)


def _end(call: Any) -> None:
    """Nobody waits for a call that hangs."""
    call.cancel()
    with contextlib.suppress(Exception):
        call.get(1)


def _workers(stack: contextlib.ExitStack, looks: Looks) -> tuple[Any, list[int]]:
    workers = _spawn(stack, looks.case.procs).spawn("workers", Worker)
    pids = list(workers.join.call(looks.case.program != "no collectives").get(BEGIN_S).values())
    return workers, pids


def _await_fault(plan: Plan, call: Any) -> bool:
    """Waits until all planted ranks have reached their place."""
    until = time.monotonic() + BEGIN_S
    while len(os.listdir(plan.folder)) < len(plan.ranks):
        if call.done() or time.monotonic() > until:
            return len(os.listdir(plan.folder)) == len(plan.ranks)
        time.sleep(0.01)
    return True


def _verdict(looks: Looks, plan: Plan, seed: int, ask: Callable[[], Diagnosis]) -> Outcome:
    """Asks until the answer is right, and a little longer."""
    begun = (
        max(path.stat().st_mtime for path in Path(plan.folder).iterdir()) if os.listdir(plan.folder) else time.time()
    )
    seconds = took = 0.0
    until = time.monotonic() + VERDICT_S
    while time.monotonic() < until and looks.grade != "wrong":
        started = time.monotonic()
        looks.add(ask().findings)
        if looks.grade in ("right", "wrong") and not seconds:
            seconds, took = time.time() - begun, time.monotonic() - started
            until = min(until, time.monotonic() + AGAIN_S)
        time.sleep(0.1)
    return looks.outcome(seed, seconds, took)


def _diagnose(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    case = looks.case
    workers, pids = _workers(stack, looks)
    call = workers.run.call(plan)
    stack.callback(_end, call)
    if not case.kind:
        state = state_of(workers)
        cell = HangNotes(current_runtime())
        pending = next(record for record in current_runtime().calls.values() if record.mesh == state.uid)
        while not call.done():
            looks.add(monarch_nb.diagnose(workers).findings)
            looks.shown += bool(cell.findings(state, pending.missing_ranks()))
            time.sleep(0.05)
        call.get(1)
        return looks.outcome(seed)
    if not _await_fault(plan, call):
        return Outcome(case.name, seed, case.kind, "", "not run", text="the planted ranks did not come to their place")
    if case.fault == "gdb":
        gdb = subprocess.Popen(
            ["gdb", "-q", "-nx", "-p", str(pids[plan.ranks[0]])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(gdb.wait)
        stack.callback(gdb.kill)
        while _state(pids[plan.ranks[0]]) != "t":
            time.sleep(0.01)
    return _verdict(looks, plan, seed, lambda: monarch_nb.diagnose(workers))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _graph(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    """Actors that call each other, each on a process of its own: a chain, whose last one has the fault."""
    procs = _spawn(stack, looks.case.procs)
    nodes = [procs.slice(gpus=index).spawn(f"node{index}", Node, plan) for index in range(looks.case.procs)]
    if not looks.case.kind:
        for _ in range(plan.steps + plan.step):
            call = nodes[0].ask.call_one(nodes[1:])
            while not call.done():
                looks.add(monarch_nb.diagnose().findings)
            call.get(1)
        return looks.outcome(seed)
    for _ in range(plan.step):
        nodes[0].ask.call_one(nodes[1:]).get(BEGIN_S)
    call = nodes[0].ask.call_one(nodes[1:])
    stack.callback(_end, call)
    _await_fault(plan, call)
    return _verdict(looks, plan, seed, monarch_nb.diagnose)


def _circle(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    """Actors that wait for each other: the call says so by itself."""
    case = looks.case
    procs = _spawn(stack, case.procs)
    nodes = [procs.slice(gpus=index).spawn(f"node{index}", Node, plan) for index in range(case.procs)]
    begun = time.time()
    calls = [node.circle.call_one(nodes, index) for index, node in enumerate(nodes)]
    texts = []
    for call in calls:
        try:
            call.get(BEGIN_S)
        except (ActorError, DeadlockError) as error:
            texts.append(str(error))
    text = next((message for message in texts if "deadlock" in message), "")
    complete = all(f"node{index}" in text for index in range(case.procs))
    finding = Finding("deadlock", "planted", looks.culprits if complete else (), text.partition("\n")[0])
    looks.add((finding,) if text else ())
    return looks.outcome(seed, time.time() - begun)


def _tensors(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    import torch

    from monarch_nb.distributed import Mesh, distribute

    case = looks.case
    procs = _spawn(stack, case.procs)
    pids = procs.run(os.getpid).get(BEGIN_S).values() if case.kind else []
    mesh = Mesh.of(procs)
    matrix = distribute(torch.ones(8, 8), mesh)
    for _ in range(plan.step):
        matrix = matrix @ matrix.T / 8
    matrix.sum().item()
    if not case.kind:
        for _ in range(plan.steps):
            matrix = matrix @ matrix.T / 8
            if _ % 30 == 0:
                looks.add(monarch_nb.diagnose(mesh).findings)
        matrix.sum().item()
        return looks.outcome(seed)
    number = signal.SIGSTOP if case.fault == "SIGSTOP" else signal.SIGKILL
    for rank in plan.ranks:
        os.kill(list(pids)[rank], number)
    (matrix @ matrix.T).sum()
    return _verdict(looks, plan, seed, lambda: monarch_nb.diagnose(procs))


def _far(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    """Hosts over TCP, of which the connection to some is cut."""
    from monarch_nb.connect import attach_hosts
    from monarch_nb.transport import Keys
    from tests.cluster.hosts_tools import user_hosts
    from tests.proxy import Proxy

    case = looks.case
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    key = folder / "key"
    Keys.load_or_create(key)
    agents = stack.enter_context(user_hosts(folder, case.procs, key=key))
    proxies = [Proxy(agent.endpoint) for agent in agents]
    for proxy in proxies:
        stack.callback(proxy.close)
    procs = attach_hosts([proxy.endpoint for proxy in proxies], key=key, lease=60.0).spawn_procs(name="planted")
    procs.initialized.get(BEGIN_S)
    for rank in plan.ranks:
        proxies[rank].cut()
    outcome = _verdict(looks, plan, seed, lambda: monarch_nb.diagnose(procs, timeout=2))
    for proxy in proxies:
        proxy.mend()
    _stop(procs)
    return outcome


def _slow(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    workers, _ = _workers(stack, looks)
    with StragglerWatch(workers) as watch:
        workers.run.call(plan).get(BEGIN_S)
    looks.add(watch.diagnosis.findings)
    return looks.outcome(seed)


def _slow_calls(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    workers, _ = _workers(stack, looks)
    with StragglerWatch(workers) as watch:
        for number in range(plan.steps):
            workers.steps.call(plan, number).get(BEGIN_S)
    looks.add(watch.diagnosis.findings)
    return looks.outcome(seed)


def _values(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    workers, _ = _workers(stack, looks)
    with monarch_nb.watch(workers) as watch:
        workers.run.call(plan).get(BEGIN_S)
    looks.add(watch.findings)
    return looks.outcome(seed)


def _replicas(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    workers, _ = _workers(stack, looks)
    workers.run.call(plan).get(BEGIN_S)
    looks.add(compare_replicas(workers).findings)
    return looks.outcome(seed)


def _memory(stack: contextlib.ExitStack, looks: Looks, plan: Plan, seed: int) -> Outcome:
    workers, _ = _workers(stack, looks)
    workers.run.call(replace(plan, fault="nothing", steps=2)).get(BEGIN_S)  # what the program imports is no growth
    with MemoryWatch(workers) as watch:
        workers.run.call(plan).get(BEGIN_S)
    looks.add(watch.diagnosis.findings)
    return looks.outcome(seed)


TOOLS: dict[str, Callable[[contextlib.ExitStack, Looks, Plan, int], Outcome]] = {
    "diagnose": _diagnose,
    "graph": _graph,
    "circle": _circle,
    "tensors": _tensors,
    "far": _far,
    "slow": _slow,
    "slow calls": _slow_calls,
    "values": _values,
    "replicas": _replicas,
    "memory": _memory,
}
