"""What a host agent does for those who ask: one method for each CONTROL verb."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._version import __version__
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.gateway import Gateway
from monarch_nb.host.leases import Leases
from monarch_nb.host.post import Post
from monarch_nb.host.procs.child import Child
from monarch_nb.host.procs.children import Children, Start
from monarch_nb.host.procs.environment import HELD_BACK
from monarch_nb.host.procs.stopping import Stopper
from monarch_nb.logs.tailer import LogTailer
from monarch_nb.logs.verbs import TAIL, TOOK, Follow, Took
from monarch_nb.wire import REPLY, Asker, Done, Handlers, agent_of, host_of, parse_address
from monarch_nb.wire.header import Header

log = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds in which what others know of already is spawned here


class Service:
    """Answers requests on the loop's thread.

    `learn(host, endpoint, via, incarnation)`, `forget(host, reason, incarnation)`, `follow(owner, pid)`,
    `later(seconds, call)` and `end(reason, timeout, done)` are the agent's.
    """

    def __init__(self, *, host: str, folder: Path, children: Children, stopper: Stopper, leases: Leases,
                 logs: LogTailer, post: Post, kept: bool, incarnation: int,
                 learn: Callable[[str, str, str, int], None], forget: Callable[[str, str, int], None],
                 follow: Callable[[str, int], None], later: Callable[[float, Callable[[], None]], object],
                 gateway: Gateway,
                 end: Callable[[str, float, Callable[[list[p.Exited]], None]], None]) -> None:  # fmt: skip
        self._host = host
        self._folder = folder
        self._children = children
        self._stopper = stopper
        self._leases = leases
        self._logs = logs
        self._post = post
        self._kept = kept
        self._learn = learn
        self._forget = forget
        self._follow = follow
        self._later = later
        self._awaited: dict[str, set[str]] = {}  # who watches procs that were not spawned yet
        self._gateway = gateway
        self._incarnation = incarnation
        self._end = end
        self._verbs = takes = Handlers("host agents", post.answer)
        takes.handle(verbs.SPAWN, self._spawn)
        takes.handle(verbs.WATCH, self._watch)
        takes.handle(verbs.STOP, self._stop)
        takes.handle(verbs.KILL, self._kill)
        takes.handle(verbs.STATUS, self._status)
        takes.handle(verbs.SHUTDOWN, self._shutdown)
        takes.handle(verbs.HOSTS, self._hosts)
        takes.handle(verbs.LOST, self._lost)
        takes.handle(verbs.LEAVE, self._leave)
        takes.handle(verbs.INTRODUCE, gateway.introduce)
        takes.handle(TAIL, self._tail)
        takes.handle(TOOK, self._took)
        takes.handle(verbs.LEASE, self._lease)
        takes.handle(verbs.BEAT, lambda _, asker: None)
        takes.handle(verbs.PROC_EXITED, self._elsewhere_exited)

    def handle(self, header: Header, body: bytes | memoryview) -> None:
        """Carry out one request and answer it. Whatever comes of a process is a sign of its life."""
        self._leases.renew(header.src, time.monotonic())
        if header.method != REPLY:
            self._verbs.take(header, body)

    def _spawn(self, wish: p.SpawnProcs, asker: Asker[p.Spawning]) -> None:
        owner = wish.owner or asker.src
        count = len(wish.ranks)
        incarnations = _spread(wish.incarnations, count, 0, "incarnations")
        environments = _spread(wish.env, count, {}, "environments")
        binds = _spread(wish.proc_bind, count, {}, "proc_binds")
        launches = _spread(wish.launch, count, None, "commands")
        starts = []
        each = zip(wish.ranks, incarnations, environments, binds, launches, strict=True)
        for rank, incarnation, env, bind, launch in each:
            address = wish.layout.address(rank, incarnation)
            if host_of(address) != self._host:
                raise ValueError(f"{address} does not live on host {self._host}")
            if self._children.find(address) is not None:
                raise ValueError(f"{address} was started before; its next start needs a new incarnation")
            name = parse_address(address).name
            spec = p.ProcSpec(
                address=address, agent=self._post.address, host=self._host, run_folder=str(self._folder),
                layout=wish.layout, rank=rank, incarnation=incarnation, owner=owner, name=wish.name,
                env={**_own_pools(), **env}, cwd=wish.cwd, sys_path=wish.sys_path, setup=wish.setup,
                log=str(self._folder / "spool" / name), runner=wish.runner, python=wish.python,
            )  # fmt: skip
            starts.append(Start(spec, wish.python, bind, wish.bootstrap_env_cold, launch))
        self._see_owner(owner)
        asker.reply(p.Spawning(tuple(start.spec.address for start in starts)))
        files = [self._logs.begin(start.spec.address, start.spec.log, start.spec.name) for start in starts]
        self._children.start(starts, {owner, asker.src}, heavy=wish.heavy)
        for start, file in zip(starts, files, strict=True):
            child = self._children.find(start.spec.address)
            if child is not None:
                child.log_file = file
                for watcher in self._awaited.pop(child.address, ()):
                    self._attend(child, watcher)

    def _see_owner(self, owner: str) -> None:
        """Make sure that this host learns of the owner's end, one way or the other."""
        child = self._children.find(owner)
        if child is not None:
            if not child.alive:
                raise ValueError(f"the owner {owner} has already ended")
        elif host_of(owner) != self._host or self._kept:
            self._leases.grant(owner, time.monotonic())
            self.ask_after(owner)

    def ask_after(self, owner: str) -> None:
        """Ask an owner for a sign of life, which renews its lease. A proc's own agent also tells of its end at once."""
        self._post.tell(owner, verbs.PROC_PING, Done(), port=1)
        if parse_address(owner).is_proc and host_of(owner) != self._host:
            self._post.tell(agent_of(host_of(owner)), verbs.WATCH, p.Addresses((owner,)))

    def owner_ended(self, owner: str, why: str) -> None:
        """The process of an owner on this machine has ended, which is no proc: its actors may be in anybody's procs."""
        self.owner_gone(owner, why)
        gone = p.Exited(address=owner, host=host_of(owner), at=time.time(), reason=why, expected=True)
        self._post.tell_all((child.address for child in self._children.alive()), verbs.PROC_EXITED, gone)

    def owner_gone(self, owner: str, why: str) -> None:
        """Stop what a dead owner had."""
        self._leases.end(owner)
        self._gateway.gone(owner, why)
        mine = [child for child in self._children.alive() if child.spec.owner == owner]
        if mine:
            self._stopper.stop(mine, timeout_s=0, grace_s=0.5, reason=f"its owner {owner} is gone: {why}")

    def _watch(self, wish: p.Addresses, asker: Asker[Done]) -> Done:
        for address in wish.addresses:
            child = self._children.find(address)
            if child is not None:
                self._attend(child, asker.src)
            else:  # who spawns it may have passed it on before its wish was read here
                self._awaited.setdefault(address, set()).add(asker.src)
                self._later(_PATIENCE, lambda address=address: self._wait_no_longer(address))  # type: ignore[misc]
        return Done()

    def _attend(self, child: Child, watcher: str) -> None:
        if child.exit is None:
            child.watchers.add(watcher)
        else:
            self._post.tell(watcher, verbs.PROC_EXITED, child.exit)

    def _wait_no_longer(self, address: str) -> None:
        why = f"not known on host {self._host}: never started here, or ended long ago"
        unknown = p.Exited(address=address, host=self._host, at=time.time(), reason=why)
        self._post.tell_all(self._awaited.pop(address, ()), verbs.PROC_EXITED, unknown)

    def _stop(self, wish: p.Stop, asker: Asker[p.Ended]) -> None:
        found = [child for address in wish.addresses if (child := self._children.find(address)) is not None]
        self._stopper.stop(found, timeout_s=wish.timeout_s, grace_s=wish.grace_s, reason=wish.reason,
                           done=lambda exits: asker.reply(p.Ended(tuple(exits))))  # fmt: skip

    def _kill(self, wish: p.Kill, asker: Asker[Done]) -> Done:
        for address in wish.addresses:
            child = self._children.find(address)
            if child is not None:
                self._children.signal(child, wish.signal)
        return Done()

    def _status(self, _: Done, asker: Asker[p.HostState]) -> p.HostState:
        forker = self._children.forker
        return msgspec.structs.replace(
            self.introduction(), template_pid=forker.pid, template_error=forker.error, template_threads=forker.threads,
            template_seconds=forker.seconds, procs=tuple(child.describe() for child in self._children.all()),
        )  # fmt: skip

    def introduction(self) -> p.HostState:
        """Who this host is, without what runs there. Any thread."""
        return p.HostState(host=self._host, pid=os.getpid(), procs=(), python=sys.version.split()[0],
                           version=__version__, incarnation=self._incarnation,
                           lease_s=self._leases.seconds)  # fmt: skip

    def _shutdown(self, wish: p.Shutdown, asker: Asker[p.Ended]) -> None:
        self._end(wish.reason, wish.timeout_s, lambda exits: asker.reply(p.Ended(tuple(exits))))

    def _hosts(self, wish: p.Hosts, asker: Asker[Done]) -> Done:
        for host in {**wish.endpoints, **wish.vias}:
            if host != self._host:
                self._learn(host, wish.endpoints.get(host, ""), wish.vias.get(host, ""), wish.incarnations.get(host, 0))
        return Done()

    def _lost(self, wish: p.Lost, asker: Asker[Done]) -> Done:
        alive = self._children.alive()
        self._post.tell_all((child.address for child in alive), verbs.HOST_LOST, wish)  # before what comes back of it
        for host, reason in wish.hosts.items():
            self._forget(host, reason, wish.incarnations.get(host, 0))
            for owner in {child.spec.owner for child in alive if host_of(child.spec.owner) == host}:
                self.owner_gone(owner, reason)
        return Done()

    def _leave(self, _: Done, asker: Asker[Done]) -> Done:
        self.owner_gone(asker.src, "it has left")
        return Done()

    def _tail(self, wish: Follow, asker: Asker[Done]) -> Done:
        for address in wish.addresses:
            child = self._children.find(address)
            if child is None or not wish.on:
                self._logs.leave(address, asker.src)
                continue
            self._logs.follow(address, asker.src, wish.offset)
        return Done()

    def _took(self, wish: Took, asker: Asker[None]) -> None:
        for address, count in wish.bytes.items():
            self._logs.took(address, asker.src, count)

    def _lease(self, wish: p.Lease, asker: Asker[Done]) -> Done:
        now = time.monotonic()
        self._leases.grant(wish.owner or asker.src, now, wish.seconds)
        if wish.pid:
            self._follow(wish.owner or asker.src, wish.pid)
        if wish.detach:
            self._leases.detached_until = now + wish.seconds
        return Done()

    def _elsewhere_exited(self, exited: p.Exited, asker: Asker[None]) -> None:
        self.owner_gone(exited.address, exited.reason)


def _own_pools() -> p.Environment:
    """What a fork must be told, for its template had its thread pools held back."""
    return {name: os.environ.get(name) for name in HELD_BACK}


def _spread(values: Sequence[Any], count: int, default: Any, what: str) -> Sequence[Any]:
    """One value for each rank: as given, one for all, or the default."""
    if len(values) not in (0, 1, count):
        raise ValueError(f"{len(values)} {what} for {count} ranks")
    return values if len(values) == count else [values[0] if values else default] * count
