"""Reports of host agents: processes that start, end or do not respond; lost hosts, ended owners, preemption notices."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.lifecycle import extents
from monarch_nb.mesh.host_record import giver_of
from monarch_nb.mesh.mesh_events import (
    Event,
    HostLost,
    HostMessage,
    HostNoticed,
    HostNoticeWithdrawn,
    ProcExited,
    ProcResponsive,
    ProcStarted,
    ProcUnresponsive,
)
from monarch_nb.mesh.requests import fail_requests, request
from monarch_nb.routing.routes import new_incarnation
from monarch_nb.runtime import Future, ProcState, RunsOn, Runtime, current_runtime, when_done
from monarch_nb.settings import settings
from monarch_nb.shape import first_places_of
from monarch_nb.supervision import Cause, Driver, hosts_text, notice_text
from monarch_nb.supervision.actions import RootFault
from monarch_nb.wire import Asker, Done, agent_of, host_of, parse_address

logger = logging.getLogger(__name__)

GATHER_S = 0.5  # notices of hosts within this time are reported together
GATHERED = 0.05  # of a host's remaining time, at most: saving there must not wait
_RETRY_S = 0.2  # until an agent that could not be reached is asked again; grows to
_RETRY_MAX_S = 30.0
_HOST_ENDS_S = 5.0  # after which a process's exit counts on its own, though its host should have ended with it

Show = Callable[[HostNoticed | HostNoticeWithdrawn | HostMessage], None]


class HostNotices:
    """Handles notices on the reading thread; notices of several hosts, as of a whole job, are reported as one."""

    def __init__(self, runtime: Runtime, driver: Driver, publish: Callable[[Event], None], show: Show) -> None:
        """`publish` takes events for displays; `show` shows them to the user at once."""
        self._runtime, self._driver, self._publish, self._show = runtime, driver, publish, show
        # By host, with the time of arrival by the monotonic clock.
        self._received: dict[str, tuple[p.PreemptionNotice, float]] = {}
        self._published: dict[str, HostNoticed] = {}
        # By source and whether it is withdrawn, then by host.
        self._due: dict[tuple[str, bool], dict[str, p.PreemptionNotice]] = {}
        self._given_up: set[str] = set()  # hosts
        self._lock = threading.Lock()
        runtime.verbs.handle(verbs.HOST_NOTICE, self._receive)

    def present(self, show: Show | None) -> None:
        """Replaces the function that shows notices to the user; None restores the log."""
        self._show = show or log_notice

    def of(self, hosts: Collection[str]) -> list[HostNoticed]:
        """Returns the current notices of these hosts."""
        return [noticed for host in dict.fromkeys(hosts) if (noticed := self._published.get(host)) is not None]

    def lost(self, hosts: Iterable[str], reason: str) -> str:
        """Ends the notices of hosts that are lost; returns the reason with the first earlier notice."""
        first: tuple[p.PreemptionNotice, float] | None = None
        for host in hosts:
            entry = self._received.pop(host, None)
            self._published.pop(host, None)
            first = first or entry
        if first is None:
            return reason
        notice, since = first
        line, newline, log = reason.partition("\n")
        return f"{line}, {time.monotonic() - since:.0f} s after the notice of that ({notice.by}){newline}{log}"

    def give_up(self, hosts: Iterable[str]) -> None:
        """Ignores notices of hosts that this program is about to end."""
        self._given_up.update(hosts)

    def attached(self, host: str) -> None:
        """Accepts notices of a host that this program may have given up before."""
        self._given_up.discard(host)

    def say(self, event: HostNoticed | HostNoticeWithdrawn | HostMessage) -> None:
        """Publishes an event to displays and, in a controller, shows it to the user."""
        self._publish(event)
        self._show_user(event)

    def _show_user(self, event: HostNoticed | HostNoticeWithdrawn | HostMessage) -> None:
        if not self._runtime.is_worker:  # whose output the user may not see
            self._show(event)

    def _receive(self, notice: p.PreemptionNotice, asker: Asker[None]) -> None:
        host = host_of(asker.src)
        if asker.src != agent_of(host) or host in self._given_up:
            return
        with self._lock:
            first = not self._due
            self._due.setdefault((notice.by, notice.over), {})[host] = notice
        if first:
            remaining = math.inf if notice.seconds is None else max(0.0, notice.seconds)
            self._runtime.later(min(GATHER_S, GATHERED * remaining), self._flush)

    def _flush(self) -> None:
        with self._lock:
            due, self._due = self._due, {}
        for (by, over), group in due.items():
            notices = dict(sorted(group.items()))
            if over:
                self._on_withdrawn(by, [host for host in notices if self._received.pop(host, None) is not None])
            else:
                self._on_notices(by, notices)

    def _on_withdrawn(self, by: str, hosts: Sequence[str]) -> None:
        for host in hosts:
            self._published.pop(host, None)
            self._publish(HostNoticeWithdrawn(host, ""))
        if hosts:
            verb = "was" if len(hosts) == 1 else "were"
            predicate = "is still there: it is" if len(hosts) == 1 else "are still there: they are"
            text = f"{hosts_text(hosts)} {verb} to be taken away ({by}), and {predicate} as before"
            self._show_user(HostNoticeWithdrawn(", ".join(hosts), text))

    def _on_notices(self, by: str, notices: Mapping[str, p.PreemptionNotice]) -> None:
        now, wall = time.monotonic(), time.time()
        earlier = {host: self._received.get(host) for host in notices}
        fresh = [host for host, before in earlier.items() if before is None or before[0].at != notices[host].at]
        hosts = [host for host, notice in notices.items() if host in fresh or notice.seconds is not None]
        for host, notice in notices.items():
            before = earlier[host]
            self._received[host] = notice, now if before is None or host in fresh else before[1]
        remaining = [notices[host].seconds for host in hosts]
        seconds = None if None in remaining else min((value for value in remaining if value is not None), default=None)
        if fresh:
            cause = Cause(kind="preemption", text=by, host=", ".join(fresh), at=wall, seconds=seconds)
            self._driver.feed(lambda machine: machine.preemption_announced(fresh, cause))
        if not hosts:
            return
        until = None if seconds is None else wall + seconds
        text = self._text(by, hosts, seconds)
        for host in hosts:
            host_seconds = notices[host].seconds
            self._published[host] = HostNoticed(host, by, None if host_seconds is None else wall + host_seconds, text)
            self._publish(self._published[host])
        self._show_user(HostNoticed(", ".join(hosts), by, until, text))

    def _text(self, by: str, hosts: Sequence[str], seconds: float | None) -> str:
        notice = notice_text(hosts, by, seconds)
        states = [
            state for state in tuple(self._runtime.meshes.values())
            if isinstance(state, ProcState) and state.spawn_spec is not None and state.stopped is None
            and state.owner_process == self._runtime.address and not set(hosts).isdisjoint(state.hosts)
        ]  # fmt: skip
        if not states:
            return f"{notice}. No mesh of this program is there"
        return "\n".join([f"{notice}:", *(f"  {line}" for state in states for line in _advice(state, hosts))])


def _advice(state: ProcState, hosts: Collection[str]) -> list[str]:
    """Returns the parts of a mesh on these hosts, and possible measures."""
    ranks = [rank for rank in state.ranks if state.layout.host_of(rank) in hosts]
    actors = [actor.name for actor in tuple(state.actors.values()) if actor.stopped is None and not actor.inner]
    location = first_places_of(state.region, ranks) if state.region.labels else ""
    with_actors = f" with {', '.join(actors)}" if actors else ""
    indices = [index for index, host in enumerate(state.hosts) if host in hosts]
    steps = ["save what is there"]
    if len(indices) < len(state.hosts):
        with contextlib.suppress(ValueError):  # a mesh with other dimensions cannot shrink
            steps.append(f"{state.name}.shrink({extents.dimension_of_hosts(state)}={indices}) goes on without it")
    replacement = "another host" if len(indices) == 1 else "other hosts"
    steps.append(f"once it is lost, heal_mesh({state.name}, replace=True) takes {replacement}")
    return [f"{state.name}{f', {location}' if location else ''}{with_actors}", f"next: {'; '.join(steps)}"]


def log_notice(event: HostNoticed | HostNoticeWithdrawn | HostMessage) -> None:
    """Logs a notice, the default."""
    logger.warning("%s", event.text)


def show_host_message(text: str) -> None:
    """Shows a line about hosts in the notebook, or logs it."""
    current_runtime().part(HostNotices).say(HostMessage(text))


def forget(runtime: Runtime, end: p.Exited) -> None:
    """Ends all exchange with a process that has ended, once its last messages are read."""
    runtime.node.settled(runtime.node.forget, end.address, end.reason)


class ProcessWatcher:
    """Handles reports of host agents on processes; on the reading thread."""

    def __init__(
        self, runtime: Runtime, driver: Driver, publish: Callable[[Event], None], notices: HostNotices
    ) -> None:  # fmt: skip
        """`publish` takes events for displays."""
        self._runtime, self._driver, self._publish, self._notices = runtime, driver, publish, notices
        self.pids: dict[str, int] = {}
        self.unresponsive: dict[str, float] = {}  # address -> beginning (wall clock)
        self._losses: dict[str, int] = {}  # number of each host's last loss
        self._over: dict[str, int] = {}  # number of each host's last loss that is over: new processes run there
        self._owners: set[str] = set()  # processes elsewhere that own actors here
        self._ending: dict[str, str] = {}  # hosts whose agents end, and the reasons
        self._runtime.verbs.handle(verbs.PROC_STARTED, self._started)
        self._runtime.verbs.handle(verbs.PROC_EXITED, self._exited)
        self._runtime.verbs.handle(verbs.PROC_UNRESPONSIVE, self._unresponsive)
        self._runtime.verbs.handle(verbs.PROC_RESPONSIVE, self._responsive)
        self._runtime.verbs.handle(verbs.PROC_PING, self._ping)
        self._runtime.verbs.handle(verbs.HOST_LOST, self._hosts_lost)

    def on_first_message(self, address: str) -> None:
        """Called for the first message to a process: if it never replies, its agent is asked about it."""

        def check() -> None:
            if not self._runtime.closed and self._runtime.node.never_replied(address):
                self.watch(address)

        if parse_address(address).is_proc:
            self._runtime.later(settings.message_delivery_timeout, check)

    def watch(self, *addresses: str) -> None:
        """Has agents report the ends of these processes, at once if they have ended already."""
        by_host: dict[str, list[str]] = {}
        for address in addresses:
            # A controller has no parent: agents end with it, or when its lease does.
            if address != self._runtime.address and parse_address(address).is_proc:
                by_host.setdefault(host_of(address), []).append(address)
        for host, group in by_host.items():
            self._watch_on(host, tuple(group), _RETRY_S)

    def _watch_on(self, host: str, addresses: tuple[str, ...], pause: float) -> None:
        """Repeats the request until the agent agrees or it is no longer needed: a lost host may return."""

        def on_reply(reply: Future[Done]) -> None:
            if reply.exception(0) is None or self._runtime.closed:
                return
            if any(proc in self._owners or parse_address(proc).mesh in self._runtime.meshes for proc in addresses):
                next_pause = min(2 * pause, _RETRY_MAX_S)
                self._runtime.later(pause, lambda: self._watch_on(host, addresses, next_pause))

        when_done(request(self._runtime, agent_of(host), verbs.WATCH, p.Addresses(addresses)), on_reply)

    def forget(self, mesh: str) -> None:
        """Forgets the processes of a mesh that ended long ago."""
        for address in [address for address in tuple(self.pids) if parse_address(address).mesh == mesh]:
            self.pids.pop(address, None)

    def watch_owner(self, process: str) -> None:
        """Watches a remote owner of an actor here, which ends when its owner's process does."""
        if process not in self._owners:
            self._owners.add(process)
            self.watch(process)

    def host_back(self, host: str, loss: int) -> None:
        """Marks a loss of a host as over, as processes have been started there since."""
        self._over[host] = max(loss, self._over.get(host, 0))
        self._ending.pop(host, None)

    def hosts_lost(self, agents: Mapping[str, int], reason: str, loss: int = 0, *, reported: bool = False) -> int:
        """Reports host agents that ended for one reason, with all processes of their hosts, as one failure.

        `agents` has the incarnation of each by its host, 0 if it is unknown. `loss` is the number of this loss in all
        processes, if another process has detected it; else a new number is assigned and returned. With `reported`
        the loss ends no script: the caller reports it.
        """
        outdated = {host for host in agents if 0 < loss <= self._over.get(host, 0)}  # later processes are known there
        loss = loss or max(new_incarnation(), *(self._losses.get(host, 0) + 1 for host in agents))
        for host in agents:
            self._losses[host] = max(loss, self._losses.get(host, 0))
        reason = self._notices.lost(agents, reason)
        giver = next(filter(None, map(giver_of, agents)), "")
        cause = Cause(kind="host", text=reason, host=", ".join(agents), at=time.time(), giver=giver)
        procs = [state for state in tuple(self._runtime.meshes.values()) if isinstance(state, ProcState)]
        ranks = {rank for state in procs for host in agents for rank in state.layout.ranks_on(host)}
        driver = self._driver
        awaited, called = driver.called(*ranks)
        quiet = reported and driver.machine.root_policy == "script"
        driver.feed(
            lambda machine: [
                action
                for action in machine.host_lost(tuple(agents), cause, awaited, called, loss)
                if not (quiet and isinstance(action, RootFault))
            ]
        )
        for host, incarnation in agents.items():
            if host not in outdated:
                self._forget_host(host, reason, incarnation, procs)
        return loss

    def _forget_host(self, host: str, reason: str, incarnation: int, procs: Sequence[ProcState]) -> None:
        processes = [(state, state.address(rank)) for state in procs for rank in state.layout.ranks_on(host)]
        owned = self._runtime.address  # some of the processes it has spawned may not have started
        addresses = {
            agent_of(host),
            *(address for state, address in processes if state.owner_process != owned or address in self.pids),
        }
        self._runtime.host_lost(host, reason)
        homes = {state.owner_process for state in tuple(self._runtime.meshes.values())}
        for process in [home for home in homes | self._owners if home and host_of(home) == host]:
            self._owner_gone(process, reason)
        fail_requests(self._runtime, addresses, reason)
        for address in addresses:
            self._runtime.node.forget(address, reason, incarnation)
        self._ending.pop(host, None)
        for address in [address for address in tuple(self.unresponsive) if host_of(address) == host]:
            self.unresponsive.pop(address, None)  # its agent, which would say that it answers, is gone
        self._publish(HostLost(host))

    def end_of(self, host: str) -> str:
        """Returns why the agent of a host ends, by its own report; "" without one."""
        return self._ending.get(host, "")

    def found(self, started: p.StartedProc) -> None:
        """Registers a process of a mesh that this one has attached."""
        self.pids[started.address] = started.pid
        self._publish(ProcStarted(started.address, started.pid, started.log))

    def ended_while_detached(self, end: p.Exited) -> None:
        """Handles the end of a process of a detached mesh, which does not end a script: the attach reports it."""
        if end.expected:
            return
        identity, cause = parse_address(end.address).place, _cause(end)
        if self._driver.machine.root_policy == "notebook":
            self._driver.proc_exited(*identity, cause)
        else:
            self._driver.killed(*identity, cause)
        forget(self._runtime, end)

    def _started(self, started: p.StartedProc, asker: Asker[None]) -> None:
        self.pids[started.address] = started.pid
        if started.why:
            logger.info("%s was started cold: %s", started.address, started.why)
        self._publish(ProcStarted(started.address, started.pid, started.log))

    def _exited(self, end: p.Exited, asker: Asker[None]) -> None:
        if end.host_ends:  # one report for the host, not one for each process
            self._ending[end.host] = end.reason
            self._runtime.later(_HOST_ENDS_S, lambda: self._take_exit(end))
        else:
            self._take_exit(end)

    def _take_exit(self, end: p.Exited) -> None:
        self.unresponsive.pop(end.address, None)
        if end.log_bytes:
            self._runtime.log_positions.ended(end.address)
        if not end.expected:
            self._driver.proc_exited(*parse_address(end.address).place, _cause(end))
        self._owner_gone(end.address, end.reason)
        fail_requests(self._runtime, (end.address,), end.reason)
        forget(self._runtime, end)  # last: waiting calls have failed with a better reason
        self._publish(ProcExited(end.address, end.reason))

    def _hosts_lost(self, lost: p.HostsLost, asker: Asker[None]) -> None:
        events: dict[tuple[str, int], dict[str, int]] = {}
        for host, reason in lost.hosts.items():
            loss = lost.losses.get(host, 0)
            events.setdefault((reason, loss), {})[host] = lost.incarnations.get(host, 0)
        for (reason, loss), agents in events.items():
            self.hosts_lost(agents, reason, loss)

    def _owner_gone(self, process: str, reason: str) -> None:
        if process in self._runtime.local.away:
            return  # it has detached its meshes, which host agents hold
        self._driver.feed(lambda machine: machine.owner_gone(process, reason))
        if process not in self._owners:
            return
        self._owners.discard(process)
        for cell in tuple(self._runtime.cells.values()):
            if cell.spec.owner_process == process and cell.spec.runs_on is not RunsOn.MAIN_THREAD:
                cause = Cause(kind="owner", text=f"its owner {process} is gone: {reason}", actor=str(cell.instance))
                cell.stop("its owner is gone", cause=cause)

    def _unresponsive(self, silent: p.Responsiveness, asker: Asker[None]) -> None:
        for address, since in silent.since.items():
            self.unresponsive[address] = since
            self._publish(ProcUnresponsive(address, since))

    def _responsive(self, silent: p.Responsiveness, asker: Asker[None]) -> None:
        for address, since in silent.since.items():
            self.unresponsive.pop(address, None)
            self._publish(ProcResponsive(address, since))

    def _ping(self, _: Done, asker: Asker[Done]) -> Done:
        return Done()


def _cause(end: p.Exited) -> Cause:
    lines = settings.tail_log_lines
    return Cause(
        kind="signal" if end.signal else ("exit" if end.pid else "spawn"),
        text=end.reason,
        evicted=end.evicted,
        host=end.host,
        pid=end.pid,
        exitcode=end.exitcode,
        signal=end.signal,
        oom=end.oom,
        memory=end.memory,
        last_lines=end.last_lines[-lines:] if lines else (),
        dump=end.dump,
        at=end.at,
    )
