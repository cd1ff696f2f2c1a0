"""A whole cluster inside this process, for tests: actors, supervision and meshes are real, hosts and time simulated."""

import asyncio
import contextlib
import threading
import time as wall
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import count
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.engine.compose import ProcessRole, compose
from monarch_nb.engine.memory_host import MemoryHost
from monarch_nb.engine.operations import ProcessOperations
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.unhandled import exit_on_fault
from monarch_nb.lifecycle.watching import GATHER_S, ProcessWatcher
from monarch_nb.mesh.handle import Handle, region_of, state_of
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.mesh.mesh_events import HostBack, MeshEvents
from monarch_nb.runtime import (
    ActorCell,
    Future,
    ProcessTables,
    ProcState,
    Runtime,
    current,
    fault_hook,
    install,
    started,
    waiting,
)
from monarch_nb.runtime.actors.executors import AsyncExecutor
from monarch_nb.settings import settings
from monarch_nb.supervision import MeshFailure
from monarch_nb.transport import Parcel, TransportError
from monarch_nb.transport.memory.clock import MemoryTime, ProcessClock
from monarch_nb.transport.memory.network import MemoryNetwork, NetworkFaults
from monarch_nb.transport.memory.transport import MemoryTransport
from monarch_nb.wire import Header, agent_of

R = TypeVar("R")
QUIET_S = 1.0  # real seconds without a delivery after which actors are not waited for any more
SETTLES_S = 30.0  # real seconds for all events of one moment
_LOOK_S = 0.0005


class _MemoryOperations(ProcessOperations):
    """The operations of a controller whose hosts are simulated."""

    def __init__(self, runtime: Runtime, lost: Collection[str]) -> None:
        super().__init__(runtime)
        self._lost = lost

    def lost_hosts(self, hosts: Collection[str]) -> dict[str, str]:
        """Returns the hosts among `hosts` that were killed or cut off, with the reason."""
        return {host: "it was killed, or cut off" for host in hosts if host in self._lost}

    def own_host(self) -> tuple[str, str | None]:
        """Returns the id of the first host."""
        return self._runtime.host, None


class MemoryPace(waiting.WaitObserver):
    """Lets time pass while code outside actors waits: at once where all others wait too, else as real time does.

    `begin` is called for each wait of this process, with the time-out of `Future.get`, which is real time: simulated
    time runs ahead of it by no more.
    """

    def __init__(self, time: MemoryTime, runtimes: Callable[[], Iterable[Runtime]]) -> None:
        self._time, self._runtimes = time, runtimes
        self._changed = threading.Condition()
        self._inside: defaultdict[ActorCell, list[Future[object]]] = defaultdict(list)  # awaited futures by actor
        self._outside: dict[
            int, tuple[Future[object], float]
        ] = {}  # waits of other code: how far time may pass for them
        self._numbers = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="monarch-memory-pace", daemon=True)
        self._thread.start()

    def begin(self, future: Future[object], timeout: float | None) -> Callable[[], None]:
        """Begins a wait; the returned function ends it."""
        context = current.get()
        cell = context.actor_instance.cell if context is not None else None
        if isinstance(cell, ActorCell):
            return self._wait_inside(cell, future)
        number = next(self._numbers)
        with self._changed:
            limit = self._time.monotonic() + (float("inf") if timeout is None else timeout)
            self._outside[number] = future, limit
            if len(self._outside) == 1:
                self._changed.notify()
        return lambda: self._leave_outside(number)

    def settle(self) -> None:
        """Blocks until messages have arrived and actors do nothing but wait.

        Returns after `QUIET_S` without arrivals, and after `SETTLES_S` in any case.
        """
        start = wall.monotonic()
        until, last_count = start + QUIET_S, -1
        total = -1
        while (remaining := until - wall.monotonic()) > 0:
            self._time.settle(remaining)
            if last_count != self._time.deliveries:
                last_count, until = self._time.deliveries, min(wall.monotonic() + QUIET_S, start + SETTLES_S)
            total, previous = self._deliveries_at_rest(), total
            if total >= 0 and total == previous:
                return
            wall.sleep(_LOOK_S)

    def close(self) -> None:
        """Stops the passing of time; blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5.0)

    # -- implementation -------------------------------------------------------------------------------------------

    def _wait_inside(self, cell: ActorCell, future: Future[object]) -> Callable[[], None]:
        def leave() -> None:
            with self._changed:
                self._inside[cell].remove(future)

        with self._changed:
            self._inside[cell].append(future)
        return leave

    def _leave_outside(self, number: int) -> None:
        with self._changed:
            del self._outside[number]

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._outside or self._closed)
            self._follow_waits()

    def _follow_waits(self) -> None:
        total, real_now = -1, wall.monotonic()
        while not self._closed:
            wall.sleep(_LOOK_S)
            with self._changed:
                if not self._outside:
                    return
                limit = max((limit for future, limit in self._outside.values() if not future.done()), default=0.0)
            total, previous = self._deliveries_at_rest(), total
            real_now, earlier = wall.monotonic(), real_now
            now, due = self._time.monotonic(), self._time.next_due
            at_rest = total >= 0 and total == previous
            if at_rest and due is not None and due <= limit:
                now = max(now, due)  # and no further: the consequences take their own time
            else:
                now += real_now - earlier
            self._time.pass_to(now)

    def _deliveries_at_rest(self) -> int:
        """Returns the number of deliveries so far; -1 while an actor or a link is busy."""
        deliveries = self._time.deliveries
        return deliveries if self._time.settle(0) and self._resting() else -1

    def _resting(self) -> bool:
        return all(self._rests(cell) for runtime in self._runtimes() for cell in tuple(runtime.cells.values()))

    def _rests(self, cell: ActorCell) -> bool:
        if cell.ended:
            return True
        executor = cell.executor
        if _loop_rests(executor.loop) if isinstance(executor, AsyncExecutor) else executor.resting:
            return True
        with self._changed:  # a thread whose future is done has something to do, though it may not have woken up yet
            waits = sum(not future.done() for future in self._inside[cell])
        return waits >= max(1, len(cell.running_now()))


def _loop_rests(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Returns whether a loop runs nothing, and waits for no point in time and no thread of its own; False where asyncio
    does not show that."""
    if loop is None or asyncio.current_task(loop) is not None:
        return False
    return not any(getattr(loop, name, True) for name in ("_ready", "_scheduled", "_default_executor"))


class Cluster:
    """Hosts in memory, and this process as their controller. Use it with `with`, or end it by `close`.

    Actors run for real, each on its own thread or loop; time-outs, lost links, killed processes, delays and partitions
    are simulated. Time passes by `advance`, by the delays of messages, and while code outside actors waits for a
    result: to the next event where all others wait too, else as real time does. The same `seed` gives the same
    delays.
    """

    def __init__(self, *, hosts: int = 1, seed: int = 0, faults: NetworkFaults | None = None) -> None:
        if started() is not None:
            raise RuntimeError("this process is part of a cluster already: call shutdown_context() first")
        self.failures: list[MeshFailure] = []  # unhandled ones
        self._network = MemoryNetwork(seed=seed, faults=faults, redial=0.0)
        self._time = MemoryTime(self._network)
        self._hosts = {f"m{number}": self._host(f"m{number}") for number in range(hosts)}
        self._lost: set[str] = set()  # hosts
        self._notices: dict[int, p.PreemptionNotice] = {}  # the last one of each host
        self._closed = False
        local = ProcessTables("m0/c0.0.0")
        self._node = self._transport(local.address, lambda header, _, reason: runtime.undelivered(header, reason))
        role = ProcessRole(agent_of("m0"), fatal=self._unhandled)
        clock = ProcessClock(self._time, self._enter)
        operations = partial(_MemoryOperations, lost=self._lost)
        runtime = self._runtime = compose(local, self._node, clock, role, operations=operations)
        runtime.add_part(LocalAgents, LocalAgents(runtime, None))
        install(runtime, several=True)
        self._pace = MemoryPace(self._time, self._runtimes)
        waiting.join(self._pace)
        runtime.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts and actors of the cluster; blocks. Afterwards this process is part of no cluster."""
        if self._closed:
            return
        self._closed = True
        if not self._runtime.closed:  # by shutdown_context()
            self._runtime.part(MeshStopper).leave("the cluster is closed", 0.2)
        for cell in tuple(self._runtime.cells.values()):
            cell.stop("its process ends")
        for host in self._hosts.values():
            host.die()
        self._runtime.close(0)
        self._pace.close()
        self._time.close()
        if started() is self._runtime:
            install(None)

    # -- hosts ------------------------------------------------------------------------------------------------------

    def this_host(self) -> HostMesh:
        """Returns the controller's host, without dimensions."""
        return HostMesh.of_host(self._runtime.host)

    def hosts(self) -> HostMesh:
        """Returns all hosts, with dimension `hosts`. The controller runs on the first."""
        names = tuple(self._hosts)
        return HostMesh("hosts", names, host_labels(names), owned=True)

    def kill(self, procs: Handle[ProcState]) -> None:
        """Ends the processes of a mesh, or of a slice, as SIGKILL does. Returns while the reports are on their way."""
        state = state_of(procs)
        for rank in region_of(procs).ranks():
            host = self._hosts.get(state.layout.host_of(rank))
            if host is None:
                raise ValueError(f"{state.name} is not part of this cluster")
            # As a delivery, like all actions of a host agent: its locks are taken before that of the time, never after.
            self._time.call_soon(partial(host.kill, state.address(rank)))
        self.settle()

    def kill_host(self, number: int) -> None:
        """Ends a host with its processes; the others learn of it at once. Raises ValueError for the first."""
        name = self._name(number)
        if number == 0:
            raise ValueError("the controller runs on host 0: it cannot be killed")
        self._hosts[name].die()
        self._lose(name, "its machine is gone")
        self.settle()

    def preempt_host(self, number: int, seconds: float | None = None, by: str = "SIGTERM") -> None:
        """Makes a host give notice that it will be ended in so many seconds; call `kill_host` to end it then.

        Owners of meshes there are notified by `__supervise__`.
        """
        self._notices[number] = p.PreemptionNotice(by=by, seconds=seconds, at=self.now)
        self._warn(number, self._notices[number])

    def keep_host(self, number: int) -> None:
        """Withdraws such a notice: its time has passed, and the host stays."""
        self._warn(number, msgspec.structs.replace(self._notices[number], over=True))

    def _warn(self, number: int, notice: p.PreemptionNotice) -> None:
        self._time.call_soon(partial(self._hosts[self._name(number)].warn, notice, self._runtime.address))
        self.advance(2 * GATHER_S)

    def partition(self, *numbers: int) -> None:
        """Cuts the network between these hosts and all others, until `mend`.

        A host that the controller has not reached for `mesh_orphan_timeout` seconds counts as lost.
        """
        isolated = {self._name(number) for number in numbers}
        with self._time.lock:
            for near in isolated:
                for far in set(self._hosts) - isolated:
                    self._network.part_hosts(near, far)
            self._time.changed()
        for name in self._away(isolated):
            self._time.later(settings.mesh_orphan_timeout, partial(self._expire, name))
        self.settle()

    def mend(self) -> None:
        """Ends partitions of the network; hosts that were lost, but live, can be used again."""
        with self._time.lock:
            names = tuple(self._hosts)
            for index, first in enumerate(names):
                for second in names[index + 1 :]:
                    self._network.join_hosts(first, second)
            self._time.changed()
        for name in tuple(self._lost):
            if self._network.reachable(self._runtime.address, agent_of(name)):
                self._lost.discard(name)
                for node in (self._node, *(host.node for host in self._hosts.values())):
                    node.learn(name)
                self._runtime.part(MeshEvents).publish(HostBack(name))
        self.settle()

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Simulated seconds since the cluster's start."""
        return self._time.monotonic()

    def advance(self, seconds: float) -> None:
        """Lets time pass. Events happen at their times, and actors react to each before time goes on."""
        end = self._time.monotonic() + seconds
        self.settle()
        while (due := self._time.next_due) is not None and due <= end:
            self._pass_to(due)
        self._time.pass_to(end)
        self.settle()

    def settle(self) -> None:
        """Blocks until messages have arrived and actors do nothing but wait; an actor that is busy is not waited for
        for long."""
        self._pace.settle()

    def result(self, future: Future[R], within: float = 60.0) -> R:
        """Returns a future's result, letting time pass for it, `within` seconds at most. Raises like `Future.get`."""
        end = self._time.monotonic() + within
        future.wait(0)  # starts a future that begins when it is observed
        self.settle()
        while not future.wait(0):
            due = self._time.next_due
            if due is None or due > end:
                self._time.pass_to(end)
                break
            self._pass_to(due)
        return future.get(QUIET_S)

    # -- implementation -------------------------------------------------------------------------------------------

    def _pass_to(self, when: float) -> None:
        before = self._time.deliveries
        self._time.pass_to(when)
        if self._time.deliveries != before:  # else it concerned links only
            self.settle()

    def _name(self, number: int) -> str:
        name = f"m{number}"
        if name not in self._hosts:
            raise ValueError(f"there is no host {number}: this cluster has {len(self._hosts)}")
        return name

    def _host(self, name: str) -> MemoryHost:
        """Makes a host, at the start of the cluster."""
        return MemoryHost(self._time, name)

    def _transport(self, address: str, failed: Callable[[Header, Parcel, str], None]) -> MemoryTransport:
        """Returns the controller's transport."""
        return MemoryTransport(self._time, address, handler=self._take, on_link_failed=failed)

    def _enter(self, function: Callable[[], object]) -> object:
        """Runs a function of the controller's, on the time's thread."""
        return function()

    def _take(self, header: Header, parcel: Parcel) -> None:
        self._enter(lambda: self._runtime.handle(header, parcel))

    def _unhandled(self, failure: MeshFailure) -> None:
        self.failures.append(failure)
        hook = fault_hook(exit_on_fault)
        if hook is not exit_on_fault:  # the program's own
            hook(failure)

    def _away(self, isolated: set[str]) -> set[str]:
        """Returns the hosts on the far side of a partition, as the controller sees it."""
        return set(self._hosts) - isolated if self._runtime.host in isolated else isolated

    def _expire(self, name: str) -> None:
        if name in self._lost or self._network.reachable(self._runtime.address, agent_of(name)):
            return
        lease = settings.mesh_orphan_timeout
        self._hosts[name].end_owned(lambda owner: not owner.startswith(f"{name}/"), "it was silent for its lease")
        self._lose(name, f"no connection to its agent for {lease:g} s")

    def _lose(self, name: str, reason: str) -> None:
        self._lost.add(name)
        loss = self._runtime.part(ProcessWatcher).hosts_lost({name: 0}, reason)
        for host in self._hosts:
            if host != name and host not in self._lost:
                with contextlib.suppress(TransportError):
                    self._runtime.post(agent_of(host), verbs.LOST, p.HostsLost({name: reason}, losses={name: loss}))

    def _runtimes(self) -> list[Runtime]:
        workers = [worker.runtime for host in self._hosts.values() for worker in tuple(host.workers.values())]
        return [self._runtime, *workers]


def cluster(*, hosts: int = 1, seed: int = 0, faults: NetworkFaults | None = None) -> Cluster:
    """Returns a cluster inside this process: `hosts` simulated hosts, and this process as their controller.

    Does not block. Raises RuntimeError where this process is part of a cluster already.
    """
    return Cluster(hosts=hosts, seed=seed, faults=faults)
