"""What a host agent does for those who ask: one method for each CONTROL verb."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._version import __version__
from monarch_nb.host import protocol as p
from monarch_nb.host.child import Child
from monarch_nb.host.children import Children, Start
from monarch_nb.host.environment import HELD_BACK
from monarch_nb.host.gateway import Gateway
from monarch_nb.host.leases import Leases, host_of, is_proc
from monarch_nb.host.post import Post
from monarch_nb.host.stopping import Stopper
from monarch_nb.logs.tailer import LogTailer
from monarch_nb.wire.header import Header

log = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds in which what others know of already is spawned here


class Service:
    """Answers requests on the loop's thread.

    `learn(host, endpoint, via, life)`, `forget(host, reason, life)`, `follow(owner, pid)`, `later(seconds, call)` and
    `end(reason, timeout, done)` are the agent's. Verbs return their answer, or None if it has been or will be given
    elsewhere.
    """

    def __init__(self, *, host: str, folder: Path, children: Children, stopper: Stopper, leases: Leases,
                 logs: LogTailer, post: Post, kept: bool, life: int,
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
        self._life = life
        self._end = end
        self._verbs: dict[str, tuple[type[msgspec.Struct], Callable[[Header, Any], msgspec.Struct | None]]] = {
            "agent.spawn": (p.SpawnProcs, self._spawn),
            "agent.watch": (p.Addresses, self._watch),
            "agent.unwatch": (p.Addresses, self._unwatch),
            "agent.stop": (p.Stop, self._stop),
            "agent.kill": (p.Kill, self._kill),
            "agent.interrupt": (p.Addresses, self._interrupt),
            "agent.status": (p.Done, self._status),
            "agent.shutdown": (p.Shutdown, self._shutdown),
            "agent.hosts": (p.Hosts, self._hosts),
            "agent.lost": (p.Lost, self._lost),
            "agent.leave": (p.Done, self._leave),
            "agent.introduce": (p.Introduce, gateway.introduce),
            "agent.tail": (p.Tail, self._tail),
            "agent.took": (p.Took, self._took),
            "agent.lease": (p.Lease, self._lease),
            "agent.prewarm": (p.Prewarm, self._prewarm),
            "proc.exited": (p.Exited, self._elsewhere_exited),
        }

    def handle(self, header: Header, body: bytes | memoryview) -> None:
        """Carry out one request and answer it."""
        self._leases.renew(header.src, time.monotonic())
        if header.method in ("reply", "proc.pong"):
            return  # a sign of life, see above
        form, verb = self._verbs.get(header.method, (None, None))
        if form is None or verb is None:
            self._post.answer(header, p.Refused(f"host agents know no {header.method!r}"))
            return
        try:
            answer = verb(header, p.decode(body, form))
        except Exception as error:  # whatever it is, who asked must hear of it
            log.exception("%s from %s", header.method, header.src)
            answer = p.Refused(f"{type(error).__name__}: {error}")
        if answer is not None:
            self._post.answer(header, answer)

    def _spawn(self, header: Header, wish: p.SpawnProcs) -> None:
        owner = wish.owner or header.src
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
                raise ValueError(f"{address} was started before; a new life needs a new incarnation")
            name = address.partition("/")[2]
            spec = p.ProcSpec(
                address=address, agent=self._post.address, host=self._host, run_folder=str(self._folder),
                layout=wish.layout, rank=rank, incarnation=incarnation, owner=owner, name=wish.name,
                env={**_own_pools(), **env}, cwd=wish.cwd, sys_path=wish.sys_path, setup=wish.setup,
                log=str(self._folder / "spool" / name), runner=wish.runner, python=wish.python,
            )  # fmt: skip
            starts.append(Start(spec, wish.python, bind, wish.bootstrap_env_cold, launch))
        self._see_owner(owner)
        self._post.answer(header, p.Spawning(tuple(start.spec.address for start in starts)))
        files = [self._logs.begin(start.spec) for start in starts]
        self._children.start(starts, {owner, header.src}, heavy=wish.heavy)
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
        self._post.tell(owner, "proc.ping", p.Done(), port=1)
        if is_proc(owner) and host_of(owner) != self._host:
            self._post.tell(f"{host_of(owner)}/agent", "agent.watch", p.Addresses((owner,)))

    def owner_ended(self, owner: str, why: str) -> None:
        """The process of an owner on this machine has ended, which is no proc: its actors may be in anybody's procs."""
        self.owner_gone(owner, why)
        gone = p.Exited(address=owner, host=host_of(owner), at=time.time(), reason=why, expected=True)
        self._post.tell_all((child.address for child in self._children.alive()), "proc.exited", gone)

    def owner_gone(self, owner: str, why: str) -> None:
        """Stop what a dead owner had."""
        self._leases.end(owner)
        self._gateway.gone(owner, why)
        mine = [child for child in self._children.alive() if child.spec.owner == owner]
        if mine:
            self._stopper.stop(mine, timeout_s=0, grace_s=0.5, reason=f"its owner {owner} is gone: {why}")

    def _watch(self, header: Header, wish: p.Addresses) -> p.Done:
        for address in wish.addresses:
            child = self._children.find(address)
            if child is not None:
                self._attend(child, header.src)
            else:  # who spawns it may have passed it on before its wish was read here
                self._awaited.setdefault(address, set()).add(header.src)
                self._later(_PATIENCE, lambda address=address: self._wait_no_longer(address))  # type: ignore[misc]
        return p.Done()

    def _attend(self, child: Child, watcher: str) -> None:
        if child.exit is None:
            child.watchers.add(watcher)
        else:
            self._post.tell(watcher, "proc.exited", child.exit)

    def _wait_no_longer(self, address: str) -> None:
        why = f"not known on host {self._host}: never started here, or ended long ago"
        unknown = p.Exited(address=address, host=self._host, at=time.time(), reason=why)
        self._post.tell_all(self._awaited.pop(address, ()), "proc.exited", unknown)

    def _unwatch(self, header: Header, wish: p.Addresses) -> p.Done:
        for address in wish.addresses:
            self._awaited.get(address, set()).discard(header.src)
            child = self._children.find(address)
            if child is not None:
                child.watchers.discard(header.src)
        return p.Done()

    def _stop(self, header: Header, wish: p.Stop) -> None:
        found = [child for address in wish.addresses if (child := self._children.find(address)) is not None]
        self._stopper.stop(found, timeout_s=wish.timeout_s, grace_s=wish.grace_s, reason=wish.reason,
                           done=lambda exits: self._post.answer(header, p.Ended(tuple(exits))))  # fmt: skip

    def _kill(self, _header: Header, wish: p.Kill) -> p.Done:
        for address in wish.addresses:
            child = self._children.find(address)
            if child is not None:
                self._children.signal(child, wish.signal)
        return p.Done()

    def _interrupt(self, header: Header, wish: p.Addresses) -> p.Done:
        return self._kill(header, p.Kill(wish.addresses, signal.SIGINT))

    def _status(self, _header: Header, _wish: p.Done) -> p.HostState:
        forker = self._children.forker
        return msgspec.structs.replace(
            self.introduction(), template_pid=forker.pid, template_error=forker.error, template_threads=forker.threads,
            template_seconds=forker.seconds, procs=tuple(child.describe() for child in self._children.all()),
        )  # fmt: skip

    def introduction(self) -> p.HostState:
        """Who this host is, without what runs there. Any thread."""
        return p.HostState(host=self._host, pid=os.getpid(), procs=(), python=sys.version.split()[0],
                           version=__version__, life=self._life, lease_s=self._leases.seconds)  # fmt: skip

    def _shutdown(self, header: Header, wish: p.Shutdown) -> None:
        self._end(wish.reason, wish.timeout_s, lambda exits: self._post.answer(header, p.Ended(tuple(exits))))

    def _hosts(self, _header: Header, wish: p.Hosts) -> p.Done:
        for host in {**wish.endpoints, **wish.vias}:
            if host != self._host:
                self._learn(host, wish.endpoints.get(host, ""), wish.vias.get(host, ""), wish.lives.get(host, 0))
        return p.Done()

    def _lost(self, _header: Header, wish: p.Lost) -> p.Done:
        alive = self._children.alive()
        self._post.tell_all((child.address for child in alive), "host.lost", wish)  # before what comes back of it
        for host, reason in wish.hosts.items():
            self._forget(host, reason, wish.lives.get(host, 0))
            for owner in {child.spec.owner for child in alive if host_of(child.spec.owner) == host}:
                self.owner_gone(owner, reason)
        return p.Done()

    def _leave(self, header: Header, _wish: p.Done) -> p.Done:
        self.owner_gone(header.src, "it has left")
        return p.Done()

    def _tail(self, header: Header, wish: p.Tail) -> p.Done:
        for address in wish.addresses:
            child = self._children.find(address)
            if child is None or not wish.on:
                self._logs.leave(address, header.src)
                continue
            self._logs.follow(address, header.src, wish.offset)
        return p.Done()

    def _took(self, header: Header, wish: p.Took) -> None:
        for address, count in wish.bytes.items():
            self._logs.took(address, header.src, count)

    def _lease(self, header: Header, wish: p.Lease) -> p.Done:
        now = time.monotonic()
        self._leases.grant(wish.owner or header.src, now, wish.seconds)
        if wish.pid:
            self._follow(wish.owner or header.src, wish.pid)
        if wish.detach:
            self._leases.detached_until = now + wish.seconds
        return p.Done()

    def _prewarm(self, _header: Header, _wish: p.Prewarm) -> p.Done:
        self._children.forker.prewarm()
        return p.Done()

    def _elsewhere_exited(self, _header: Header, exited: p.Exited) -> None:
        self.owner_gone(exited.address, exited.reason)


def _own_pools() -> p.Environment:
    """What a fork must be told, for its template had its thread pools held back."""
    return {name: os.environ.get(name) for name in HELD_BACK}


def _spread(values: Sequence[Any], count: int, default: Any, what: str) -> Sequence[Any]:
    """One value for each rank: as given, one for all, or the default."""
    if len(values) not in (0, 1, count):
        raise ValueError(f"{len(values)} {what} for {count} ranks")
    return values if len(values) == count else [values[0] if values else default] * count
