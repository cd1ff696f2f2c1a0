"""A host that is simulated inside this process: its agent, and the processes that the agent starts."""

import itertools
import sys
import threading
import time as wall
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from monarch_nb._package import __version__
from monarch_nb.engine.compose import ProcessRole, compose
from monarch_nb.engine.in_process import InlineConsole
from monarch_nb.engine.worker import host_console
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.casting import Caster
from monarch_nb.host.protocol import ProcSpec
from monarch_nb.host.sender import AgentSender, SendingNode
from monarch_nb.mesh.handle import Handle, state_of
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ProcessTables, ProcState, Runtime, current, current_runtime, endpoint, waiting
from monarch_nb.transport.memory.clock import MemoryTime, ProcessClock
from monarch_nb.transport.memory.transport import MemoryTransport
from monarch_nb.wire import REPLY, Asker, Done, Flags, Handlers, Header, Kind, Lane, Status, agent_of, proc_address

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

KILLED = "it was killed: signal 9"
_PATIENCE = 2.0  # seconds in which a process that others know already is started here
_pids = itertools.count(1_000_001)  # no process of a real system has these
_MUTE = 0.0


class MemoryConsole(InlineConsole):
    """Runs the set-up and cells of a simulated process."""

    @endpoint
    def setup(
        self, sources: list[tuple[str, str]], bootstrap: Callable[[], object] | None, mesh: Handle[ProcState]
    ) -> None:
        """Runs the set-up of the process, once, before any actor is constructed."""
        try:
            current_runtime().part(MeshRegistry).belongs(state_of(mesh))
            self._prepare(sources, bootstrap, mesh)
        finally:
            current_runtime().end_setup()


class MemoryWorker:
    """One process, from its start to its end."""

    def __init__(self, time: MemoryTime, spec: ProcSpec) -> None:
        self.spec = spec
        self._time = time
        local = ProcessTables(spec.address)
        node = MemoryTransport(time, spec.address, handler=self._take, on_link_failed=self._lost)
        role = ProcessRole(spec.agent, is_worker=True, root_id=f"<{spec.name or 'proc'}>")
        self.runtime: Runtime = compose(local, node, ProcessClock(time, self._enter), role)
        self._console = host_console(self.runtime, spec, MemoryConsole(spec.rank))
        waiting.join(self.runtime.waits)

    def start(self) -> None:
        """Starts to take messages; actors are constructed once the set-up is done."""
        constructed = threading.Event()
        self._console.executor.post_control(constructed.set)
        self._console.executor.start()
        constructed.wait(10.0)
        self.runtime.begin_setup()
        self.runtime.start()

    def stop(self, reason: str, timeout: float) -> None:
        """Ends the actors with their clean-up, then the process; blocks."""
        self.runtime.stop_actors(reason, timeout)
        self._console.stop(reason)
        self._end(linger=0.1)

    def kill(self, reason: str) -> None:
        """Ends the process as SIGKILL does: its actors answer no more, and no clean-up runs."""
        self.runtime.node.close(_MUTE)
        for cell in tuple(self.runtime.cells.values()):
            cell.abandon(reason)
        self._end(linger=_MUTE)

    def _end(self, linger: float) -> None:
        for cell in tuple(self.runtime.cells.values()):
            cell.interrupt()  # waits that end with a real process would otherwise last forever
        self.runtime.end_setup()
        waiting.leave(self.runtime.waits)
        self.runtime.close(linger)

    # messages are handled as code of the simulated process, which is the current process meanwhile

    def _enter(self, function: Callable[[], object]) -> object:
        token = current.set(self.runtime.root_context)
        try:
            return function()
        finally:
            current.reset(token)

    def _take(self, header: Header, parcel: "Parcel") -> None:
        self._enter(lambda: self.runtime.handle(header, parcel))

    def _lost(self, header: Header, parcel: "Parcel", reason: str) -> None:
        self._enter(lambda: self.runtime.undelivered(header, reason))


class MemoryHost:
    """Executes the requests that real agents execute; leases, logs and routes are not needed here."""

    def __init__(self, time: MemoryTime, host: str) -> None:
        self.host = host
        self.address = agent_of(host)
        self.workers: dict[str, MemoryWorker] = {}  # living ones, by address
        self._time = time
        self._exits: dict[str, p.Exited] = {}
        self._watchers: dict[str, set[str]] = {}
        self._pids: dict[str, int] = {}
        self.node = MemoryTransport(time, self.address, handler=self._take, on_link_failed=self._lost)
        self._sender = AgentSender(self.node, self.address)
        self._caster = Caster(self._outlet(), self._sender, time.later, time.monotonic)
        self._verbs = Handlers("hosts in memory", self._sender.answer)
        self._verbs.handle(verbs.SPAWN, self._spawn)
        self._verbs.handle(verbs.WATCH, self._watch)
        self._verbs.handle(verbs.STOP, self._stop)
        self._verbs.handle(verbs.KILL, self._kill)
        self._verbs.handle(verbs.STATUS, self._status)
        self._verbs.handle(verbs.SHUTDOWN, self._shutdown)
        self._verbs.handle(verbs.LOST, self._host_lost)
        self._verbs.handle(verbs.CASTS, self._caster.states)
        self._verbs.handle(verbs.RELAY_CHANGED, self._relay_changed)
        self.node.start()

    # -- incoming messages (the time's thread) ----------------------------------------------------------------------

    def _take(self, header: Header, parcel: "Parcel") -> None:
        if header.kind == Kind.CAST:
            self._caster.cast(header, parcel)
        elif header.kind in (Kind.REPLY, Kind.FOLDED, Kind.RETURNED):
            self._caster.reply(header, parcel)
        elif header.method == REPLY:
            self._sender.replied(header, parcel.frames[0] if parcel.frames else b"")
        elif header.method in self._verbs:
            self._verbs.take(header, parcel.frames[0] if parcel.frames else b"")
        else:
            self._sender.answer(header, Status.VALUE, Done(), Lane.URGENT)

    def _lost(self, header: Header, parcel: "Parcel", reason: str) -> None:
        if header.src == self.address and (header.kind in (Kind.CALL, Kind.CAST) or header.flags & Flags.TO_ENGINES):
            self._caster.lost(header, reason)

    def _outlet(self) -> SendingNode:
        """Returns the node that casts are sent through."""
        return self.node

    def _worker(self, spec: p.ProcSpec) -> MemoryWorker:
        """Makes a process, not started yet."""
        return MemoryWorker(self._time, spec)

    def _spawn(self, request: p.SpawnProcs, asker: Asker[p.SpawnReply]) -> p.SpawnReply:
        addresses = []
        for index, rank in enumerate(request.ranks):
            incarnation = request.incarnations[index] if request.incarnations else 0
            address = proc_address(self.host, request.mesh, rank, incarnation)
            spec = p.ProcSpec(
                address=address,
                agent=self.address,
                host=self.host,
                run_folder="",
                mesh=request.mesh,
                rank=rank,
                incarnation=incarnation,
                owner=request.owner or asker.src,
                name=request.name,
            )
            worker = self.workers[address] = self._worker(spec)
            self._watchers.setdefault(address, set()).update({spec.owner, asker.src})
            pid = self._pids[address] = next(_pids)
            worker.start()
            started = p.StartedProc(address=address, pid=pid, how="memory")
            self._sender.post_all(p.observers(self._watchers[address], spec.owner), verbs.PROC_STARTED, started)
            addresses.append(address)
        return p.SpawnReply(tuple(addresses))

    def _watch(self, request: p.Addresses, asker: Asker[Done]) -> Done:
        for address in request.addresses:
            exited = self._exits.get(address)
            if exited is not None:
                self._sender.post(asker.src, verbs.PROC_EXITED, exited)
                continue
            self._watchers.setdefault(address, set()).add(asker.src)
            if address not in self.workers:
                self._time.later(_PATIENCE, partial(self._report_unknown, address))
        return Done()

    def _report_unknown(self, address: str) -> None:
        if address not in self.workers and address not in self._exits:
            reason = f"not known on host {self.host}: never started here, or ended long ago"
            unknown = p.Exited(address=address, host=self.host, reason=reason, at=wall.time())
            self._sender.post_all(self._watchers.pop(address, set()), verbs.PROC_EXITED, unknown)

    def _status(self, _: Done, asker: Asker[p.HostState]) -> p.HostState:
        return p.HostState(host=self.host, pid=0, procs=(), python=sys.version.split()[0], version=__version__)

    def _kill(self, request: p.Kill, asker: Asker[Done]) -> Done:
        for address in request.addresses:
            self.kill(address)
        return Done()

    def _stop(self, request: p.Stop, asker: Asker[p.StopReply]) -> None:
        def stop() -> None:
            asker.reply(p.StopReply(tuple(self.stop(request.addresses, request.reason, request.timeout_s))))

        threading.Thread(target=stop, name="monarch-memory-stop", daemon=True).start()

    def _shutdown(self, request: p.Shutdown, asker: Asker[p.StopReply]) -> None:
        def stop() -> None:
            asker.reply(p.StopReply(tuple(self.stop(tuple(self.workers), request.reason, request.timeout_s))))
            self.node.close()

        threading.Thread(target=stop, name="monarch-memory-stop", daemon=True).start()

    def _relay_changed(self, request: p.RelayChanged, asker: Asker[None]) -> None:
        """Handles a changed relay, which a real agent notices by itself."""
        for address in tuple(self.workers):
            self._sender.post(address, verbs.RELAY_CHANGED, request)
        self._caster.relay_changed(request.relay)

    def _host_lost(self, request: p.HostsLost, asker: Asker[Done]) -> Done:
        for address in tuple(self.workers):
            self._sender.post(address, verbs.HOST_LOST, request)
        for host, reason in request.hosts.items():
            self.node.forget(host, reason)
            self._caster.host_lost(host, reason)
            self.end_owned(partial(_is_on, host), reason)
        return Done()

    # -- ends -------------------------------------------------------------------------------------------------------

    def stop(self, addresses: Iterable[str], reason: str, timeout: float) -> list[p.Exited]:
        """Ends processes with the clean-up of their actors; blocks. Returns how each has ended."""
        exits = []
        for address in addresses:
            worker = self.workers.get(address)
            if worker is not None:
                worker.kill(reason) if timeout <= 0 else worker.stop(reason, timeout)
            exits.append(self._record_exit(address, reason or "it was stopped", expected=True))
        return exits

    def end_owned(self, owned: Callable[[str], bool], reason: str) -> None:
        """Ends processes whose owners have ended."""
        for address, worker in tuple(self.workers.items()):
            if owned(worker.spec.owner):
                worker.kill(reason)
                self._record_exit(address, f"its owner {worker.spec.owner} is gone: {reason}", expected=True)

    def kill(self, address: str) -> None:
        """Ends a process as SIGKILL does."""
        worker = self.workers.get(address)
        if worker is not None:
            worker.kill(KILLED)
            self._record_exit(address, KILLED, signal=9)

    def warn(self, notice: p.PreemptionNotice, controller: str) -> None:
        """Notifies the controller and all users that the host's scheduler is about to end it."""
        watching = set().union(*self._watchers.values()) - self._exits.keys()
        self._sender.post_all({controller, *watching, *self.workers}, verbs.HOST_NOTICE, notice)

    def die(self) -> None:
        """Ends the machine with all on it, without any report."""
        for address, worker in tuple(self.workers.items()):
            worker.kill("its host is gone")
            del self.workers[address]
        self.node.close(0)

    def _record_exit(self, address: str, reason: str, *, signal: int | None = None, expected: bool = False) -> p.Exited:
        earlier = self._exits.get(address)
        if earlier is not None:
            return earlier
        self.workers.pop(address, None)
        exited = self._exits[address] = p.Exited(
            address=address,
            host=self.host,
            reason=reason,
            pid=self._pids.get(address, 0),
            signal=signal,
            expected=expected,
            at=wall.time(),
        )
        self._caster.proc_gone(address, reason)
        watchers = self._watchers.pop(address, set()) - self._exits.keys()
        self.node.forget(address, reason)
        self._sender.post_all(watchers, verbs.PROC_EXITED, exited)
        for owned, worker in tuple(self.workers.items()):
            if worker.spec.owner == address:
                worker.kill(reason)
                self._record_exit(owned, f"its owner {address} is gone: {reason}", expected=True)
        return exited


def _is_on(host: str, address: str) -> bool:
    return address.startswith(f"{host}/")
