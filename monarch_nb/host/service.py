"""The requests that a host agent answers: one method for each CONTROL verb."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._package import __version__
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.casting import Caster
from monarch_nb.host.gateway import GatewayService
from monarch_nb.host.gpus import MpsDaemon, wants_mps, with_gpu
from monarch_nb.host.key_change import AgentKeys
from monarch_nb.host.mesh_leases import NOBODY, MeshLeaseService, OwnerLeases
from monarch_nb.host.packages import torch_version
from monarch_nb.host.procs.children import Child, Children, ProcStopper, Start
from monarch_nb.host.procs.environment import HELD_BACK
from monarch_nb.host.sender import AgentSender
from monarch_nb.logs.tailer import LogTailer
from monarch_nb.logs.verbs import TAIL, TOOK, Follow, Took
from monarch_nb.wire import REPLY, Asker, Done, Handlers, agent_of, host_of, parse_address, proc_address
from monarch_nb.wire.header import Header

log = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds to wait for the spawn of a process that others know already
_REMEMBERED = 1 << 16  # ranks; the least recently started are forgotten


class PendingProcs:
    """Processes that get messages before they have started. Pure.

    Incarnations of a rank start in order: once a later one has, an earlier one will not be started any more.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int], int] = {}
        self._expected: dict[tuple[str, int], set[str]] = {}

    def expect(self, address: str) -> bool:
        """Records a message to, or a watch of, a process that is not here; returns whether it may yet be started."""
        mesh, rank, incarnation = parse_address(address).place
        if incarnation < self._latest.get((mesh, rank), -1):
            return False
        self._expected.setdefault((mesh, rank), set()).add(address)
        return True

    def expire(self, address: str) -> None:
        """Stops waiting for a process."""
        mesh, rank, _ = parse_address(address).place
        expected = self._expected.get((mesh, rank), set())
        expected.discard(address)
        if not expected:
            self._expected.pop((mesh, rank), None)

    def started(self, address: str) -> list[str]:
        """Records a start; returns the awaited processes that will never start now."""
        mesh, rank, incarnation = parse_address(address).place
        self._latest.pop((mesh, rank), None)  # the latest last
        self._latest[mesh, rank] = incarnation
        if len(self._latest) > _REMEMBERED:
            del self._latest[next(iter(self._latest))]
        expected = self._expected.pop((mesh, rank), set())
        newer = {candidate for candidate in expected if parse_address(candidate).incarnation > incarnation}
        if newer:
            self._expected[mesh, rank] = newer
        return sorted(expected - newer - {address})


class AgentService:
    """Answers requests on the loop's thread.

    `keeper(grant)` makes the service for meshes that outlive their owners.
    `caster` spreads casts. `learn(host, endpoint, via, incarnation)`, `forget(host, reason, incarnation)`,
    `follow(owner, pid)`, `call_later(seconds, call)`, `replaced(address)`, `end(reason, timeout, done)`: the agent's.
    """

    def __init__(self, *, host: str, folder: Path, children: Children, stopper: ProcStopper, leases: OwnerLeases,
                 logs: LogTailer, sender: AgentSender, standalone: bool, incarnation: int,
                 learn: Callable[[str, str, str, int], None], forget: Callable[[str, str, int], None],
                 follow: Callable[[str, int], None], call_later: Callable[[float, Callable[[], None]], object],
                 pending: PendingProcs, replaced: Callable[[str], None], gateway: GatewayService,
                 keys: AgentKeys, keeper: Callable[[Callable[[str], None]], MeshLeaseService], caster: Caster,
                 mps: MpsDaemon,
                 end: Callable[[str, float, Callable[[list[p.Exited]], None]], None]) -> None:  # fmt: skip
        self._host = host
        self._folder = folder
        self._children = children
        self._stopper = stopper
        self._leases = leases
        self._logs = logs
        self._sender = sender
        self._standalone = standalone
        self._learn = learn
        self._forget = forget
        self._vias: dict[str, str] = {}  # the processes that pass messages on to other hosts
        self._follow = follow
        self._call_later = call_later
        self._awaited: dict[str, set[str]] = {}  # watchers of processes that have not been spawned yet
        self._pending, self._replaced = pending, replaced
        self._gateway, self._caster, self._mps = gateway, caster, mps
        self._incarnation = incarnation
        self._end = end
        self._verbs = takes = Handlers("host agents", sender.answer)
        takes.handle(verbs.SPAWN, self._spawn)
        takes.handle(verbs.SPARES, lambda request, asker: children.spares.keep(request))
        takes.handle(verbs.WATCH, self._watch)
        takes.handle(verbs.STOP, self._stop)
        takes.handle(verbs.KILL, self._kill)
        takes.handle(verbs.STATUS, self._status)
        takes.handle(verbs.SAMPLES, self._samples)
        takes.handle(verbs.SHUTDOWN, self._shutdown)
        takes.handle(verbs.HOSTS, self._hosts)
        takes.handle(verbs.LOST, self._lost)
        takes.handle(verbs.LEAVE, self._leave)
        takes.handle(verbs.CASTS, caster.states)
        takes.handle(verbs.INTRODUCE, gateway.introduce)
        takes.handle(TAIL, self._tail)
        takes.handle(TOOK, self._took)
        takes.handle(verbs.LEASE, self._lease)
        takes.handle(verbs.BEAT, lambda _, asker: None)
        takes.handle(verbs.KEY, keys.change)
        takes.handle(verbs.PROC_EXITED, self._elsewhere_exited)
        self.keeper = keeper(self._see_owner)
        self.keeper.serve(takes)

    def handle(self, header: Header, body: bytes | memoryview) -> None:
        """Executes one request and answers it. Any message of a process is a sign of its life."""
        self._leases.renew(header.src, time.monotonic())
        if header.method != REPLY:
            self._verbs.take(header, body)

    @property
    def used(self) -> bool:
        """True if any owner has processes here, or a detached mesh."""
        return bool(self._leases or self.keeper.waits or self.keeper.holders or self._children.alive())

    def users(self) -> set[str]:
        """Returns the addresses of processes here, and of their owners and watchers."""
        alive = self._children.alive()
        watching = (watcher for child in alive for watcher in child.watchers)
        living = (address for child in alive for address in (child.address, child.spec.owner))
        return {*self._leases.owners, *self.keeper.holders, *watching, *living} - {NOBODY}

    def _spawn(self, request: p.SpawnProcs, asker: Asker[p.SpawnReply]) -> None:
        def begin() -> None:
            try:
                self._begin(request, asker)
            except ValueError as error:
                asker.refuse(str(error))

        if wants_mps(request.env):
            self._mps.when_ready(begin)
        else:
            self._begin(request, asker)

    def _begin(self, request: p.SpawnProcs, asker: Asker[p.SpawnReply]) -> None:
        owner = request.owner or asker.src
        count = len(request.ranks)
        incarnations = _spread(request.incarnations, count, 0, "incarnations")
        environments = _spread(request.env, count, {}, "environments")
        binds = _spread(request.proc_bind, count, {}, "proc_binds")
        launches = _spread(request.launch, count, None, "commands")
        starts = []
        started = zip(request.ranks, incarnations, environments, binds, launches, strict=True)
        for rank, incarnation, env, bind, launch in started:
            address = proc_address(self._host, request.mesh, rank, incarnation)
            if self._children.find(address) is not None:
                raise ValueError(f"{address} was started before; its next start needs a new incarnation")
            name, env = parse_address(address).name, with_gpu(env, self._host, self._mps)
            spec = p.ProcSpec(
                address=address, agent=self._sender.address, host=self._host, run_folder=str(self._folder),
                mesh=request.mesh, rank=rank, incarnation=incarnation, owner=owner, name=request.name,
                env={**_own_pools(), **env}, cwd=request.cwd, sys_path=request.sys_path, setup=request.setup,
                log=str(self._folder / "spool" / name), runner=request.runner, python=request.python,
            )  # fmt: skip
            starts.append(Start(spec, request.python, bind, request.bootstrap_env_cold, launch))
        self._see_owner(owner)
        asker.reply(p.SpawnReply(tuple(start.spec.address for start in starts)))
        files = [self._logs.begin(start.spec.address, start.spec.log, start.spec.name) for start in starts]
        self._children.start(starts, {owner, asker.src}, heavy=request.heavy)
        for start, file in zip(starts, files, strict=True):
            for never in self._pending.started(start.spec.address):
                self._report_unknown(never)
                self._replaced(never)
            child = self._children.find(start.spec.address)
            if child is not None:
                child.log_file = file
                for watcher in self._awaited.pop(child.address, ()):
                    self._attend(child, watcher)

    def _see_owner(self, owner: str) -> None:
        """Makes sure that this host notices the owner's end."""
        child = self._children.find(owner)
        if child is not None:
            if not child.alive:
                raise ValueError(f"the owner {owner} has already ended")
        elif host_of(owner) != self._host or self._standalone:
            self._leases.grant(owner, time.monotonic())
            self.ask_after(owner)

    def ask_after(self, owner: str) -> None:
        """Asks an owner for a sign of life, which renews its lease; its own agent also reports its end."""
        self._sender.post(owner, verbs.PROC_PING, Done(), port=1)
        if parse_address(owner).is_proc and host_of(owner) != self._host:
            self._sender.post(agent_of(host_of(owner)), verbs.WATCH, p.Addresses((owner,)))

    def owner_ended(self, owner: str, reason: str) -> None:
        """Handles the end of an owner on this machine that is not a process of a mesh."""
        self.owner_gone(owner, reason)
        report = p.Exited(address=owner, host=host_of(owner), at=time.time(), reason=reason, expected=True)
        concerned = [child.address for child in self._children.alive() if child.spec.owner != NOBODY]
        self._sender.post_all(concerned, verbs.PROC_EXITED, report)

    def owner_gone(self, owner: str, reason: str) -> None:
        """Stops the processes of a dead owner, except those of meshes that outlive it."""
        self._leases.end(owner)
        self.keeper.owner_gone(owner, reason)
        self._children.spares.owner_gone(owner)
        self._gateway.controller_ended(owner, reason)
        owned = [child for child in self._children.alive() if child.spec.owner == owner]
        if owned:
            self._stopper.stop(owned, timeout_s=0, grace_s=0.5, reason=f"its owner {owner} is gone: {reason}")

    def _watch(self, request: p.Addresses, asker: Asker[Done]) -> Done:
        for address in request.addresses:
            child = self._children.find(address)
            if child is not None:
                self._attend(child, asker.src)
            else:  # its spawner may have passed the address on before this agent read the spawn request
                self._awaited.setdefault(address, set()).add(asker.src)
                wait = _PATIENCE if self._pending.expect(address) else 0.0
                self._call_later(wait, partial(self._report_unknown, address))
        return Done()

    def _attend(self, child: Child, watcher: str) -> None:
        if child.exit is None:
            child.watchers.add(watcher)
        else:
            self._sender.post(watcher, verbs.PROC_EXITED, child.exit)

    def _report_unknown(self, address: str) -> None:
        reason = f"not known on host {self._host}: never started here, or ended long ago"
        unknown = p.Exited(address=address, host=self._host, at=time.time(), reason=reason)
        self._sender.post_all(self._awaited.pop(address, ()), verbs.PROC_EXITED, unknown)

    def _stop(self, request: p.Stop, asker: Asker[p.StopReply]) -> None:
        for address in request.addresses:
            self.keeper.check(address, asker.src)
        children = [child for address in request.addresses if (child := self._children.find(address)) is not None]
        self._stopper.stop(children, timeout_s=request.timeout_s, grace_s=request.grace_s, reason=request.reason,
                           done=lambda exits: asker.reply(p.StopReply(tuple(exits))))  # fmt: skip

    def _kill(self, request: p.Kill, asker: Asker[Done]) -> Done:
        for address in request.addresses:
            child = self._children.find(address)
            if child is not None:
                self._children.signal(child, request.signal)
        return Done()

    def _status(self, _: Done, asker: Asker[p.HostState]) -> p.HostState:
        forker = self._children.forker
        return msgspec.structs.replace(
            self.introduction(), template_pid=forker.pid, template_error=forker.error, template_threads=forker.threads,
            template_seconds=forker.seconds, procs=tuple(child.describe() for child in self._children.all()),
        )  # fmt: skip

    def _samples(self, request: p.AskSamples, asker: Asker[p.ProcSamples]) -> p.ProcSamples:
        children = {address: self._children.find(address) for address in request.addresses}
        samples = {address: child.sample() for address, child in children.items() if child is not None and child.alive}
        return p.ProcSamples(samples)

    def introduction(self) -> p.HostState:
        """Returns this host's identity, without its processes. Any thread."""
        return p.HostState(host=self._host, pid=os.getpid(), procs=(), python=sys.version.split()[0],
                           version=__version__, torch=torch_version(), incarnation=self._incarnation,
                           lease_s=self._leases.seconds)  # fmt: skip

    def _shutdown(self, request: p.Shutdown, asker: Asker[p.StopReply]) -> None:
        self._end(request.reason, request.timeout_s, lambda exits: asker.reply(p.StopReply(tuple(exits))))

    def _hosts(self, request: p.Hosts, asker: Asker[Done]) -> Done:
        vias = {host: via for host, via in request.vias.items() if via != self._sender.address}  # its own address
        former = {before for host, via in vias.items() if (before := self._vias.get(host)) and before != via}
        self._vias.update(vias)
        for host in {**request.endpoints, **vias}:
            if host != self._host:
                self._learn(
                    host, request.endpoints.get(host, ""), vias.get(host, ""), request.incarnations.get(host, 0)
                )
        for relay in former:
            alive = [child.address for child in self._children.alive()]
            self._sender.post_all(alive, verbs.RELAY_CHANGED, p.RelayChanged(relay))
            self._caster.relay_changed(relay)
        return Done()

    def _lost(self, request: p.HostsLost, asker: Asker[Done]) -> Done:
        alive = self._children.alive()
        # Before any of them can send anything.
        self._sender.post_all((child.address for child in alive), verbs.HOST_LOST, request)
        for host, reason in request.hosts.items():
            self._forget(host, reason, request.incarnations.get(host, 0))
            for owner in {child.spec.owner for child in alive if host_of(child.spec.owner) == host}:
                self.owner_gone(owner, reason)
        return Done()

    def _leave(self, _: Done, asker: Asker[Done]) -> Done:
        self.owner_gone(asker.src, "it has left")
        return Done()

    def _tail(self, request: Follow, asker: Asker[Done]) -> Done:
        for address in request.addresses:
            child = self._children.find(address)
            if child is None or not request.on:
                self._logs.leave(address, asker.src)
                continue
            self._logs.follow(address, asker.src, request.offset)
        return Done()

    def _took(self, request: Took, asker: Asker[None]) -> None:
        for address, count in request.bytes.items():
            self._logs.took(address, asker.src, count)

    def _lease(self, request: p.OwnerLease, asker: Asker[Done]) -> Done:
        now = time.monotonic()
        self._leases.grant(request.owner or asker.src, now, request.seconds)
        if request.pid:
            self._follow(request.owner or asker.src, request.pid)
        return Done()

    def _elsewhere_exited(self, exited: p.Exited, asker: Asker[None]) -> None:
        self.owner_gone(exited.address, exited.reason)


def _own_pools() -> p.Environment:
    """Returns the thread counts for a fork, whose template had its thread pools held back."""
    return {name: os.environ.get(name) for name in HELD_BACK}


def _spread(values: Sequence[Any], count: int, default: Any, name: str) -> Sequence[Any]:
    """Returns one value for each rank, from one value each, one for all, or the default."""
    if len(values) not in (0, 1, count):
        raise ValueError(f"{len(values)} {name} for {count} ranks")
    return values if len(values) == count else [values[0] if values else default] * count
