"""The cost of each additional host to a controller: `python -m benchmarks.scale 10 100 1000 10000`.

The controller's code is real, the hosts are virtual (`virtual_hosts`), links take half a millisecond and carry ten
gigabits per second. Modelled seconds are those of the virtual clock: latency and bandwidth, no work. The controller's
work is measured apart: seconds of a core, messages, and bytes of what it keeps per rank.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import monarch_nb.actor
from benchmarks.virtual_hosts import STUCK, Member, VirtualCluster, VirtualHost
from monarch_nb.actor import SupervisionError, heal_mesh
from monarch_nb.connect import mesh_attach, mesh_detach
from monarch_nb.connect.hosts import accept_hosts
from monarch_nb.connect.mesh_detach import Detacher
from monarch_nb.diagnosis.collector import diagnosing
from monarch_nb.logs import MeshLogs
from monarch_nb.logs.lines import Written
from monarch_nb.store.hub import store_of
from monarch_nb.transport.memory.clock import MemoryTime
from monarch_nb.transport.memory.network import MemoryNetwork, NetworkFaults

PER_HOST = 8
RACK = 32  # hosts that lose their power together
LINK_S = 0.0005
BANDWIDTH = 1.25e9  # bytes per second
SOON = 1800.0
LINES_PER_S = 1_000_000
TICKS = 4  # how often in a second processes write


@dataclass
class Cost:
    """Of one operation: modelled seconds, and what it took of the controller."""

    what: str
    modelled_s: float = 0.0
    core_s: float = 0.0
    sent: int = 0
    received: int = 0
    megabytes: float = 0.0


@dataclass
class Run:
    """All costs with one number of hosts."""

    hosts: int
    costs: list[Cost] = field(default_factory=list)
    bytes_per_rank: float = 0.0
    lines: int = 0  # written in a second

    @contextlib.contextmanager
    def cost(self, cluster: VirtualCluster, operation: str) -> Iterator[None]:
        """Measures the body of `with`, and what follows of it until all is at rest."""
        cluster.settle()
        gc.freeze()  # else collections would traverse ten thousand hosts at the cost of the controller
        began, busy, before = cluster.now, cluster.processor_s, cluster.messages
        wall = time.perf_counter()
        yield
        modelled = cluster.now - began
        cluster.settle()
        after = cluster.messages
        self.costs.append(
            Cost(
                operation,
                round(modelled, 4),
                round(cluster.processor_s - busy, 4),
                after["sent"] - before["sent"],
                after["received"] - before["received"],
                round((after["bytes"] - before["bytes"]) / 1e6, 3),
            )
        )
        print(f"  {self.hosts} hosts: {operation} ({time.perf_counter() - wall:.1f} s)", file=sys.stderr, flush=True)


_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, threading.Thread,
           MemoryTime, MemoryNetwork, VirtualHost, VirtualCluster)  # fmt: skip


def retained(*roots: Any) -> int:
    """Bytes of all objects reachable from these, but for code, threads and the virtual world."""
    visited: set[int] = set()
    stack, size = list(roots), 0
    while stack:
        item = stack.pop()
        if id(item) in visited or isinstance(item, _SHARED):
            continue
        visited.add(id(item))
        size += sys.getsizeof(item)
        stack.extend(gc.get_referents(item))
    return size


def measure(hosts: int) -> Run:
    """The costs with so many hosts besides the controller's."""
    run = Run(hosts)
    faults = NetworkFaults(delay=(LINK_S, LINK_S), bandwidth=BANDWIDTH)
    with VirtualCluster(hosts + 1, faults) as cluster:
        store = store_of(cluster.runtime)
        empty = retained(cluster.runtime, store)
        with run.cost(cluster, "join storm"):
            joined = beside(lambda: accept_hosts(hosts, at="tcp://10.0.0.1:22222", timeout=SOON))
            cluster.join_all()
            mesh = joined()
        with run.cost(cluster, "a second of peace"):
            cluster.advance(1.0)
        with run.cost(cluster, "spawn processes"):
            procs = mesh.spawn_procs(per_host={"gpus": PER_HOST}, name="procs")
            procs.initialized.get(SOON)
        with run.cost(cluster, "spawn actors"):
            actors = procs.spawn("members", Member)
            actors.initialized.get(SOON)
        with run.cost(cluster, "call, same answers"):
            actors.nothing.call().get(SOON)
        with run.cost(cluster, "call, other answers"):
            assert actors.rank.call().get(SOON).get(hosts * PER_HOST - 1) == hosts * PER_HOST - 1
        _diagnose(run, cluster, procs)
        with run.cost(cluster, "broadcast"):
            actors.nothing.broadcast()
            cluster.settle()
        store.document()
        gc.collect()
        run.bytes_per_rank = round((retained(cluster.runtime, store) - empty) / (hosts * PER_HOST), 1)
        _log(run, cluster)
        _leave_and_come_back(run, cluster, procs)
        actors.nothing.call().get(SOON)
        state = procs._state
        with run.cost(cluster, "a death told"):
            waiting = actors.never.call()
            cluster.settle()
            cluster.kill_rank(state.address(hosts * PER_HOST // 2))
            _fails(waiting)
        with run.cost(cluster, "a death healed"):
            heal_mesh(actors, timeout=SOON)
            cluster.runtime.part(Detacher).flush_holds()
        rack = range(1, 1 + min(RACK, max(1, hosts // 4)))
        with run.cost(cluster, "a rack dies"):
            waiting = actors.never.call()
            cluster.settle()
            cluster.die(rack)
            _fails(waiting)
        with run.cost(cluster, "call the others"):
            actors.slice(hosts=slice(rack.stop, None)).nothing.call().get(SOON)
        with run.cost(cluster, "stop"):
            procs.stop("the benchmark is over").get(SOON)
    return run


def measure_diagnosis(hosts: int) -> Cost:
    """The cost of finding the one rank that is missing from a collective, with so many hosts."""
    run = Run(hosts)
    with VirtualCluster(hosts + 1, NetworkFaults(delay=(LINK_S, LINK_S), bandwidth=BANDWIDTH)) as cluster:
        joined = beside(lambda: accept_hosts(hosts, at="tcp://10.0.0.1:22222", timeout=SOON))
        cluster.join_all()
        procs = joined().spawn_procs(per_host={"gpus": PER_HOST}, name="procs")
        procs.initialized.get(SOON)
        _diagnose(run, cluster, procs)
    return run.costs[-1]


def _diagnose(run: Run, cluster: VirtualCluster, procs: Any) -> None:
    """All ranks but one wait in a collective."""
    with run.cost(cluster, "diagnosed"):
        reply = beside(lambda: diagnosing(cluster.runtime, procs._state).get(SOON))
        cluster.advance(1.0)
        diagnosis = reply()
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks) == ("missing_from_collective", (STUCK,)), diagnosis


def _log(run: Run, cluster: VirtualCluster) -> None:
    """A million lines in a second, or as many as 1,000 hosts of those would write; none may be lost unreported."""
    cluster.runtime.part(MeshLogs).present(None)  # a script would print them
    receiver = cluster.runtime.part(MeshLogs).receiver
    received = 0

    def take(_: str, written: Sequence[Written]) -> None:
        nonlocal received
        received += sum(lines.line_count for lines in written)

    lines = min(LINES_PER_S // (1000 * PER_HOST), LINES_PER_S // (run.hosts * PER_HOST)) // TICKS or 1
    before = cluster.written
    end = receiver.listen(take)
    with run.cost(cluster, "a second of lines"):
        for _ in range(TICKS):
            cluster.write(lines)
            cluster.advance(1 / TICKS)
        cluster.settle()
    end()
    run.lines = cluster.written - before
    assert received + sum(receiver.skipped().values()) == run.lines, "lines are missing, and no report counts them"


def _leave_and_come_back(run: Run, cluster: VirtualCluster, procs: Any) -> None:
    """The same controller attaches again, and so dials nothing."""
    cluster.can_be_dialled()
    with tempfile.TemporaryDirectory() as folder, _environment("XDG_STATE_HOME", folder):
        with run.cost(cluster, "detach"):
            cluster.runtime.part(Detacher).detach(procs._state, SOON)
        with run.cost(cluster, "re-attach"):
            mesh_attach.attach_mesh(procs.name)
            cluster.runtime.part(Detacher).flush_holds()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _fails(future: Any) -> None:
    try:
        future.get(SOON)
    except SupervisionError:
        return
    raise AssertionError("nobody noticed")


def beside(function: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a function on its own thread; calling the result waits for it, and raises its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return result


def table(runs: list[Run]) -> str:
    """The costs as text: a row for each operation, a column for each size."""
    rows = [["", *(f"{run.hosts:,} hosts" for run in runs)]]
    for number, cost in enumerate(runs[0].costs):
        costs = [run.costs[number] for run in runs]
        rows.append([cost.what, *(f"{1e3 * c.modelled_s:,.1f} ms, {1e3 * c.core_s:,.0f} ms of a core, "
                                  f"{c.sent:,} out, {c.received:,} in" for c in costs)])  # fmt: skip
    rows.append(["kept per rank", *(f"{run.bytes_per_rank:,.0f} bytes" for run in runs)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("hosts", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    logging.getLogger("monarch_nb").setLevel(logging.ERROR)
    monarch_nb.actor.unhandled_fault_hook = lambda failure: None
    mesh_detach._AGREE_S = mesh_attach._ANSWER_S = SOON  # of the wall clock, which virtual hosts share
    runs = []
    for hosts in options.hosts:
        runs.append(measure(hosts))
        if options.out is not None:  # the largest may be more than memory holds
            options.out.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    print(table(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
