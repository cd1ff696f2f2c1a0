"""Preemption notices: announcements of host agents that their host is about to be withdrawn."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.lifecycle import extents
from monarch_nb.mesh.mesh_events import Event, HostMessage, HostNoticed, HostNoticeWithdrawn
from monarch_nb.runtime import ProcState, Runtime, current_runtime
from monarch_nb.shape import first_places_of
from monarch_nb.supervision import Cause, Driver, hosts_text, notice_text
from monarch_nb.wire import Asker, agent_of, host_of

logger = logging.getLogger(__name__)
GATHER_S = 0.5  # notices of hosts within this time are reported together
GATHERED = 0.05  # of a host's remaining time, at most: saving there must not wait

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
