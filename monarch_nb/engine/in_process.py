"""A host inside this process: meshes on it start no process, and behave like any others. For unit tests of actors."""

import secrets
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.mesh.console import Console, run_source
from monarch_nb.mesh.handle import Handle, region_of, state_of
from monarch_nb.mesh.host import HostMesh
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.runtime import ROOT, ActorCell, ActorState, ProcState, Runtime, SpawnActor, current_runtime, endpoint
from monarch_nb.shape import RegionForm
from monarch_nb.transport import UnreachableError, held_back
from monarch_nb.wire import (
    REPLY,
    Asker,
    Done,
    Handlers,
    Header,
    Kind,
    Lane,
    Status,
    agent_of,
    encode_body,
    proc_address,
)

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

KILLED = "the process this actor was running on failed: Killed(sig=9)"


class InlineConsole(Console):
    """The console of a simulated process: its own namespace, and no main thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.namespace: dict[str, object] = ModuleType("__main__").__dict__

    @endpoint
    def setup(
        self, sources: list[tuple[str, str]], bootstrap: Callable[[], object] | None, mesh: Handle[ProcState]
    ) -> None:
        """Runs the set-up of the simulated process."""
        self._prepare(sources, bootstrap, mesh)

    def _prepare(
        self, sources: list[tuple[str, str]], bootstrap: Callable[[], object] | None, mesh: Handle[ProcState]
    ) -> None:
        self._place(mesh)
        for source, filename in sources:
            run_source(source, filename, self.namespace)
        if bootstrap is not None:
            self.run(bootstrap, (), {})


class InlineHost:
    """Simulates the host agent, and the processes, of one host id."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.host = "i" + secrets.token_hex(3)
        self.address = agent_of(self.host)
        self._alive: dict[str, ActorCell] = {}  # process address -> its console
        self._reasons: dict[str, str] = {}
        self._verbs = Handlers("hosts inside a process", self._answer)
        self._verbs.handle(verbs.SPAWN, self._spawn)
        self._verbs.handle(verbs.STOP, self._stop)
        self._verbs.handle(verbs.KILL, self._kill)
        self._verbs.handle(verbs.STATUS, lambda _, asker: p.HostState(host=self.host, pid=0, procs=()))

    def take(self, header: Header, parcel: "Parcel") -> None:
        """Handles a message for this host: executes one for the agent, passes one for a process to this process."""
        if header.dst == self.address:
            if header.kind == Kind.CONTROL:
                self._serve(header, parcel)
            return
        if header.dst not in self._alive:
            reason = self._reasons.get(header.dst, "it was never started")
            raise UnreachableError(f"{header.dst} cannot be reached: {reason}")
        if header.kind == Kind.CONTROL:
            header.rank = self._alive[header.dst].rank  # the rank of the simulated process
        header.dst = self.runtime.address
        self.runtime.node.send(header, parcel)

    def _serve(self, header: Header, parcel: "Parcel") -> None:
        if header.method in self._verbs:
            self._verbs.take(header, parcel.frames[0])
        else:
            self._answer(header, Status.VALUE, Done(), Lane.URGENT)  # requests about leases, logs, and more

    def _answer(self, header: Header, status: Status, body: msgspec.Struct, lane: Lane) -> None:
        if header.port:
            reply = Header(
                Kind.CONTROL, self.runtime.address, self.address, method=REPLY, port=header.port, status=status
            )
            self.runtime.node.send(reply, self.runtime.node.snapshot([encode_body(body)]), lane=lane)

    def _kill(self, request: p.Kill, asker: Asker[Done]) -> Done:
        for address in request.addresses:
            self.kill(address)
        return Done()

    def _spawn(self, request: p.SpawnProcs, asker: Asker[p.SpawnReply]) -> p.SpawnReply:
        started = []
        for index, rank in enumerate(request.ranks):
            incarnation = request.incarnations[index] if request.incarnations else 0
            address = proc_address(self.host, request.mesh, rank, incarnation)
            spec = SpawnActor(
                name=request.name, class_name="Console", kind="sync", region=RegionForm(offset=rank),
                owner="", owner_process=self.runtime.address, creators=(ROOT,),
            )  # fmt: skip
            console = self.runtime.host_actor(spec, request.mesh, rank, incarnation, InlineConsole(rank))
            self._alive[address] = console
            console.executor.start()
            started.append(address)
        return p.SpawnReply(tuple(started))

    def alive(self) -> list[str]:
        """Returns the addresses of the simulated processes that live."""
        return sorted(self._alive)

    def _cells(self, address: str) -> list[ActorCell]:
        """Returns the actors of a simulated process, its console last."""
        console = self._alive[address]
        cells = []
        for cell in tuple(self.runtime.cells.values()):
            state = self.runtime.meshes.get(cell.mesh)
            procs_uid = state.procs.uid if isinstance(state, ActorState) else ""
            if cell is not console and cell.rank == console.rank and procs_uid == console.mesh:
                cells.append(cell)
        return [*cells, console]

    def _stop(self, request: p.Stop, asker: Asker[p.StopReply]) -> None:
        self.runtime.later(0.0, lambda: asker.reply(self._stopped(request)))

    def _stopped(self, request: p.Stop) -> p.StopReply:
        exits = []
        for address in request.addresses:
            if address in self._alive:
                for cell in self._cells(address):
                    cell.stop(request.reason)
                self._forget(address, "it was stopped")
            exits.append(p.Exited(address=address, host=self.host, reason="it was stopped", expected=True))
        return p.StopReply(tuple(exits))

    def kill(self, address: str) -> None:
        """Ends a simulated process as SIGKILL would: no actor of it answers any more, no clean-up is run."""
        if address not in self._alive:
            return
        for cell in self._cells(address):
            cell.abandon(KILLED)
        exited = p.Exited(address=address, host=self.host, reason=KILLED, pid=-1, signal=9, at=time.time())
        header = Header(Kind.CONTROL, self.runtime.address, self.address, method=verbs.PROC_EXITED.name)
        self.runtime.handle(
            header, self.runtime.node.snapshot([encode_body(exited)])
        )  # before any call fails because of it
        self._forget(address, KILLED)

    def _forget(self, address: str, reason: str) -> None:
        del self._alive[address]
        self._reasons[address] = reason


def in_process_host() -> HostMesh:
    """Returns a host without dimensions inside this process: meshes spawned on it start no process.

    Messages, ordering, pickling, supervision and heal are the real ones; `os.getpid()` is the same everywhere, and one
    actor that holds the interpreter holds all.
    """
    return HostMesh.of_host(inline_host(current_runtime()).host)


def inline_host(runtime: Runtime) -> InlineHost:
    """Returns the inline host of this process."""
    inner = _inline_host(runtime)
    if inner is None:
        inner = runtime.add_part(InlineHost, InlineHost(runtime))
        runtime.attach_inner_host(inner.host, inner.take)
        runtime.local_hosts.add(inner.host)
    return inner


def _inline_host(runtime: Runtime) -> InlineHost | None:
    try:
        return runtime.part(InlineHost)
    except LookupError:
        return None


def kill(procs: ProcMesh) -> None:
    """Ends the processes of a mesh (or slice) spawned on `in_process_host()` as SIGKILL would.

    Raises ValueError for processes that are real: use os.kill for those.
    """
    runtime = current_runtime()
    state = state_of(procs)
    inner = _inline_host(runtime)
    if inner is None or set(state.layout.hosts) != {inner.host}:
        raise ValueError(f"{state.name} consists of real processes: os.kill(pid, signal.SIGKILL) ends one")
    for rank in region_of(procs).ranks():
        held_back(inner.kill, state.address(rank))
