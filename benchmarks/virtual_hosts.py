"""Hosts by the thousand inside one process: agents cast and fold as real ones do, processes only reply.

The controller is the real one, with all its parts; so are links, casts, folds and the agents' verbs. A virtual process
has no code of its own: it is a line in its host's table, and answers by the name of the method.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from monarch_nb._package import __version__
from monarch_nb.actor import Actor, endpoint
from monarch_nb.collectives.verbs import BROKEN, END_WAITS, RENEW, WAITS, Broken, GroupKey, Renewed, ThreadWaits
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.diagnosis.verbs import INSPECT, EndpointRun, Evidence, NewestCollective, StackLine
from monarch_nb.engine.cluster import Cluster
from monarch_nb.engine.memory_host import MemoryHost
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.mesh_leases import MeshLeases
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.logs.tailer import LogMessages, Tail
from monarch_nb.logs.verbs import PROC_LOG, TAIL, TOOK, Follow, LogBlock, LogChunks, Took
from monarch_nb.runtime import DOING, INTERRUPT, SPAWN, RunningEndpoint
from monarch_nb.transport import Keys, Parcel, UnreachableError
from monarch_nb.transport.memory.network import NetworkFaults
from monarch_nb.transport.memory.transport import MemoryTransport
from monarch_nb.wire import (
    Asker,
    Done,
    Flags,
    Header,
    Kind,
    Lane,
    Status,
    agent_of,
    encode,
    encode_body,
    encode_exception,
    encode_header,
    host_of,
    parse_address,
)
from monarch_nb.wire.header import SKIP

THINKS_S = 0.0001  # from a call to the answer, inside a host
LINE = b"step 1234 loss 0.4321 in 12.3 ms, 4096 tokens a second, all is well\n"


class Member(Actor):
    """The actor on virtual processes: `ANSWERS` has the results of its endpoints."""

    @endpoint
    def nothing(self) -> None:
        """The same result from all."""

    @endpoint
    def rank(self) -> int:
        """A different result from each."""
        raise NotImplementedError

    @endpoint
    def train(self) -> None:
        """Rank 0 raises; the others wait for it in a process group."""

    @endpoint
    def never(self) -> None:
        """No answer."""


WORLD = GroupKey.of("0", (0, 1), "m1:15000")
ENGINES: dict[str, Callable[["VirtualProc"], Any]] = {
    WAITS.name: lambda proc: ThreadWaits(proc.waits is not None, (WORLD,) if proc.waits else (), member_of=(WORLD,)),
    END_WAITS.name: lambda proc: Done(),
    BROKEN.name: lambda proc: Broken((WORLD,), port=15001),
    RENEW.name: lambda proc: Renewed(),
    INTERRUPT.name: lambda proc: RunningEndpoint(call="c", endpoint="train", ended=True),
    INSPECT.name: lambda proc: evidence(proc),
    DOING.name: lambda proc: RunningEndpoint(call="c", endpoint="train", seconds=float(proc.spec.rank)),
}
STUCK = 3  # the rank for which the others wait in a collective
IN_REDUCE = (
    StackLine("/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", 2822, "all_reduce", users=False),
    StackLine("/home/train.py", 44, "Member.never"),
)
IN_QUEUE = (
    StackLine("/usr/lib/python3/queue.py", 171, "Queue.get", users=False),
    StackLine("/home/data.py", 19, "next"),
)


def evidence(proc: "VirtualProc") -> Evidence:
    """What rank `STUCK` reports, and what a process that waits for it does."""
    rank, everybody = proc.spec.rank, GroupKey.of("0", tuple(range(VirtualProc.count)), "m1:15000")
    lines = IN_QUEUE if rank == STUCK else IN_REDUCE
    run = EndpointRun("m", rank, "members", "never", "c", 30.0, 1, lines, "S", 1.0, 0)
    number = 117 if rank == STUCK else 118
    last = tuple((sequence, "all_reduce of Float [4096]") for sequence in range(number - 15, number + 1))
    newest = NewestCollective(everybody, number, "all_reduce", "Float [4096]", rank != STUCK, 30.0, 1, last)
    return Evidence((run,), (newest,), (everybody,), rank, True)


ANSWERS: dict[str, Callable[[int], Any]] = {"rank": lambda rank: rank}
_NOTHING = encode(None)


class VirtualProc:
    """A process that answers."""

    runtime: Any = SimpleNamespace(cells={}, meshes={})
    count = 0  # of all hosts

    def __init__(self, spec: p.ProcSpec) -> None:
        self.spec = spec
        self.actors: set[str] = set()  # the meshes of those that were spawned on it
        VirtualProc.count = max(VirtualProc.count, spec.rank + 1)
        self.waits: Header | None = None  # the call in which it waits for another rank

    def start(self) -> None:
        """Takes messages from now on."""

    def stop(self, reason: str, timeout: float) -> None:
        """Ends."""

    def kill(self, reason: str) -> None:
        """Ends."""


class VirtualHost(MemoryHost):
    """Real but for its processes and their output: their tails are real, their spools are not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._leases = MeshLeases()
        self.tails: dict[str, Tail] = {}
        self._messages = LogMessages()
        self._started: set[str] = set()
        self._early: dict[str, list[Header]] = {}  # received before its process was started
        self._verbs.handle(verbs.HOLD, self._hold)
        self._verbs.handle(verbs.DETACH, self._detach)
        self._verbs.handle(verbs.ATTACH, self._attach)
        self._verbs.handle(TAIL, self._tail)
        self._verbs.handle(TOOK, self._took)

    def _worker(self, spec: p.ProcSpec) -> Any:
        self._started.add(spec.address)
        for header in self._early.pop(spec.address, ()):
            self._time.later(THINKS_S, partial(self._hand_over, header))
        return VirtualProc(spec)

    def _outlet(self) -> Any:
        return self

    def send(self, header: Header, parcel: Parcel, *, lane: Lane = Lane.DATA) -> None:
        """Sends casts: those for processes of this host need no network."""
        if host_of(header.dst) == self.host and parse_address(header.dst).is_proc:
            self._hand_over(header)
        else:
            self.node.send(header, parcel, lane=lane)

    def _take(self, header: Header, parcel: Parcel) -> None:
        if header.dst != self.address:
            self._hand_over(header)
        else:
            super()._take(header, parcel)

    def _hand_over(self, header: Header) -> None:
        if header.dst not in self._started:
            self._early.setdefault(header.dst, []).append(header)
            return
        if header.dst not in self.workers:
            raise UnreachableError(f"{header.dst} cannot be reached: it has ended")
        worker = self.workers[header.dst]
        if header.method == verbs.NEW_OWNER.name:
            actors = tuple(p.ActorThere(mesh, worker.spec.rank, 0) for mesh in worker.actors)
            self._sender.answer(header, Status.VALUE, p.Welcome(actors=actors), Lane.URGENT)
            return
        if header.method == SPAWN:
            worker.actors.add(header.mesh)
        if header.port and header.method in ENGINES:
            self._time.later(THINKS_S, partial(self._answer_engine, header))
        elif header.method == "train":
            self._train(worker, header)
        elif header.port and header.kind == Kind.CALL and header.method not in ("never", SKIP):
            self._time.later(THINKS_S, partial(self._answer, header))

    def _answer_engine(self, header: Header) -> None:
        worker = self.workers.get(header.dst)
        if worker is None:
            return
        answer = ENGINES[header.method](worker)
        if header.flags & Flags.TO_ENGINES:
            self._reply(header, [encode_body(answer)])
        else:
            self._sender.answer(header, Status.VALUE, answer, Lane.URGENT)
        if header.method == END_WAITS.name and worker.waits is not None:
            waits, worker.waits = worker.waits, None
            self._reply(waits, encode_exception(RuntimeError("Connection closed by peer")), Status.EXCEPTION)

    def _train(self, worker: Any, header: Header) -> None:
        if worker.spec.rank:
            worker.waits = header
        else:
            self._reply(header, encode_exception(ValueError("nan")), Status.EXCEPTION)

    def _answer(self, header: Header) -> None:
        worker = self.workers.get(header.dst)
        if worker is None:
            return
        self._reply(header, encode(ANSWERS[header.method](worker.spec.rank)) if header.method in ANSWERS else _NOTHING)

    def _reply(self, header: Header, frames: Sequence[Any], status: Status = Status.VALUE) -> None:
        reply = Header(
            Kind.REPLY,
            header.src,
            header.dst,
            header.mesh,
            port=header.port,
            index=header.index,
            call=header.call,
            status=status,
        )
        if header.src == self.address:
            self._caster.reply(reply, Parcel(frames))
        else:
            self.node.send(reply, Parcel(frames))

    def _stop(self, request: p.Stop, asker: Asker[p.StopReply]) -> None:
        asker.reply(p.StopReply(tuple(self.stop(request.addresses, request.reason, request.timeout_s))))

    def write(self, lines: int) -> None:
        """Every process here writes so many lines."""
        block = LogBlock(1, 0, time.time(), "", LINE * lines)
        for address in self.workers:
            tail = self.tails.get(address)
            if tail is not None:
                self._send_lines(self._messages.add(tail.add((block,), tail.total + len(block.data), ended=False)))
        self._send_lines(self._messages.take())

    def _send_lines(self, messages: Iterable[tuple[str, LogChunks]]) -> None:
        for name, message in messages:
            self._sender.post(name, PROC_LOG, message)

    def _tail(self, request: Follow, asker: Asker[Done]) -> Done:
        for address in request.addresses:
            tail = self.tails.setdefault(address, Tail(address))
            self._send_lines(self._messages.add(tail.follow(asker.src, request.offset)))
        self._send_lines(self._messages.take())
        return Done()

    def _took(self, request: Took, asker: Asker[None]) -> None:
        for address, count in request.bytes.items():
            self._send_lines(self._messages.add(self.tails[address].took(asker.src, count)))
        self._send_lines(self._messages.take())

    def _hold(self, request: p.Hold, asker: Asker[Done]) -> Done:
        self._leases.hold(request, asker.src)
        return Done()

    def _detach(self, request: p.Detach, asker: Asker[Done]) -> Done:
        self._leases.leave(request.uid, asker.src, time.monotonic(), time.time(), request.why)
        return Done()

    def _attach(self, request: p.Attach, asker: Asker[p.AttachReply]) -> p.AttachReply:
        self._leases.attach(
            request.uid, request.secret, request.holder, steal=request.steal, grant=request.grant, turn=request.turn
        )
        lease = self._leases.get(request.uid)
        assert lease is not None
        for address in self.workers:
            self._watchers.setdefault(address, set()).add(asker.src)
        procs = tuple(
            p.ProcStatus(address=address, pid=self._pids[address], state="running", owner=asker.src)
            for address in self.workers
        )
        return p.AttachReply(
            grant=lease.grant, turn=lease.turn, left_at=lease.left_at, why=lease.why, parts=lease.parts, procs=procs,
            logs=dict.fromkeys(self.workers, ""), exits=(),
        )  # fmt: skip

    def join(self, controller: str) -> None:
        """Announces itself, as an agent that has dialled does."""
        state = p.HostState(
            host=self.host, pid=1, procs=(), python=sys.version.split()[0], version=__version__, incarnation=1,
            lease_s=60.0,
        )  # fmt: skip
        self._sender.post(controller, verbs.HOST_JOINS, state)


class _Outlet(MemoryTransport):
    """The controller's: counts what passes, and reaches the processes of a host by way of its agent, as TCP does."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.counts: Counter[str] = Counter()

    def listen(self, bind: str, keys: Keys | None, insecure_loopback: bool = False) -> str:
        """Hosts that join know the route already."""
        return bind

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        super().send(header, parcel, lane=lane)
        if header.dst != self.address:
            self.counts["sent"] += 1
            self.counts[header.method] += 1
            self.counts["bytes"] += parcel.nbytes + len(encode_header(header))

    def _way_to(self, address: str) -> str:
        return agent_of(host_of(address)) if parse_address(address).is_proc else address


class VirtualCluster(Cluster):
    """A controller and so many hosts; its cost to the controller is counted."""

    def __init__(self, hosts: int, faults: NetworkFaults) -> None:
        self._spent = 0.0  # on the time's thread, by what the controller does there
        super().__init__(hosts=hosts, faults=faults)
        self._waiting: threading.Event | None = None

    @property
    def controller(self) -> str:
        """Its address."""
        return self._runtime.address

    @property
    def runtime(self) -> Any:
        """The controller's runtime."""
        return self._runtime

    @property
    def names(self) -> list[str]:
        """The hosts' names."""
        return list(self._hosts)

    def join_all(self) -> None:
        """Every host but the controller's announces itself at once."""
        with self._time.lock:
            for name, host in self._hosts.items():
                if name != self._runtime.host:
                    host.join(self.controller)  # type: ignore[attr-defined]

    def can_be_dialled(self) -> None:
        """Gives hosts endpoints, so that another controller can reach them: only such hosts can be detached from."""
        for host in self._runtime.part(HostRoutes).attached.values():
            host.endpoint = f"tcp://{host.host}:1"  # type: ignore[attr-defined]

    def write(self, lines: int) -> None:
        """Every process on every host writes so many lines."""
        with self._time.lock:
            for host in self._hosts.values():
                host.write(lines)  # type: ignore[attr-defined]

    @property
    def written(self) -> int:
        """Lines that processes have written so far."""
        return sum(tail.total for host in self._hosts.values() for tail in host.tails.values()) // len(LINE)  # type: ignore[attr-defined]

    def die(self, numbers: range) -> None:
        """Ends these hosts; the controller learns of all of them at once."""
        for number in numbers:
            self._hosts[f"m{number}"].die()
        for number in numbers:
            name, reason = f"m{number}", "its rack has no power"
            self._runtime.part(HostRoutes).attached[name].lost = reason
            loss = self._runtime.part(ProcessWatcher).hosts_lost({name: 1}, reason)
            self._runtime.part(HostRoutes).announce_lost(name, reason, 1, loss)
        self.advance(0.1)

    def kill_rank(self, address: str) -> None:
        """Ends a process; the report of it is on its way then."""
        with self._time.lock:
            self._hosts[host_of(address)].kill(address)

    @property
    def messages(self) -> Counter[str]:
        """So far: sent, received, and bytes sent; and how many were sent of each method."""
        assert isinstance(self._node, _Outlet)
        return Counter(self._node.counts)

    @property
    def processor_s(self) -> float:
        """Seconds of a core that the controller has used so far: all but what the virtual hosts and the network do."""
        clock = time.pthread_getcpuclockid(self._time.thread_ident)
        return time.process_time() - time.clock_gettime(clock) + self._spent

    def _host(self, name: str) -> MemoryHost:
        return VirtualHost(self._time, name)

    def _transport(self, address: str, failed: Callable[[Any, Any, str], None]) -> MemoryTransport:
        return _Outlet(self._time, address, handler=self._take, on_link_failed=failed)

    def _enter(self, function: Callable[[], object]) -> object:
        began = time.thread_time()
        try:
            return function()
        finally:
            self._spent += time.thread_time() - began

    def _take(self, header: Any, parcel: Any) -> None:
        self._node.counts["received"] += 1  # type: ignore[attr-defined]
        super()._take(header, parcel)

    def _runtimes(self) -> list[Any]:
        return [self._runtime]
