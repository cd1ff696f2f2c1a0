"""Hosts that are about to be taken away, as their agents say: owners here are told, and whoever shows it to people."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.lifecycle import extents
from monarch_nb.mesh.mesh_events import Event, HostKept, HostNoticed, HostStory
from monarch_nb.runtime import ProcState, Runtime
from monarch_nb.supervision import Cause, Driver, notice_text, warned
from monarch_nb.wire import Asker, agent_of, host_of

logger = logging.getLogger(__name__)

Show = Callable[[HostNoticed | HostKept | HostStory], None]


class HostNotices:
    """Takes notices, on the reading thread."""

    def __init__(self, engine: Runtime, driver: Driver, tell: Callable[[Event], None], show: Show) -> None:
        """`tell` is given what displays follow; `show` tells people at once."""
        self._engine, self._driver, self._tell, self._show = engine, driver, tell, show
        self._known: dict[str, tuple[p.Notice, float]] = {}  # by host; when each came, by the monotonic clock
        self._told: dict[str, HostNoticed] = {}
        engine.verbs.handle(verbs.HOST_NOTICE, self._noticed)

    def present(self, show: Show | None) -> None:
        """From now on people are told by this one; None: in the log."""
        self._show = show or log_notice

    def of(self, hosts: Collection[str]) -> list[HostNoticed]:
        """What is known of these hosts."""
        return [noticed for host in dict.fromkeys(hosts) if (noticed := self._told.get(host)) is not None]

    def lost(self, host: str, reason: str) -> str:
        """A host is gone: why, with the notice that came before, which is over by that."""
        known = self._known.pop(host, None)
        self._told.pop(host, None)
        if known is None:
            return reason
        notice, since = known
        return f"{reason}, {time.monotonic() - since:.0f} s after the notice of that ({notice.by})"

    def _noticed(self, notice: p.Notice, asker: Asker[None]) -> None:
        host = host_of(asker.src)
        if asker.src != agent_of(host):
            return
        known = self._known.get(host)
        if notice.over:
            self._told.pop(host, None)
            if self._known.pop(host, None) is not None:
                text = f"Host {host} was to be taken away ({notice.by}), and is still there: it is as before"
                self.say(HostKept(host, text))
            return
        fresh = known is None or known[0].at != notice.at
        self._known[host] = notice, time.monotonic() if known is None or fresh else known[1]
        cause = Cause(kind="preemption", text=notice.by, host=host, at=time.time(), seconds=notice.seconds)
        if fresh:
            self._driver.feed(lambda machine: warned(machine, host, cause))
        if fresh or notice.seconds is not None:
            until = None if notice.seconds is None else cause.at + notice.seconds
            self._told[host] = HostNoticed(host, notice.by, until, self._text(notice, host))
            self.say(self._told[host])

    def say(self, event: HostNoticed | HostKept | HostStory) -> None:
        """Tells something to displays and, in a controller, to people."""
        self._tell(event)
        if not self._engine.is_worker:  # where a person may read it
            self._show(event)

    def _text(self, notice: p.Notice, host: str) -> str:
        told = notice_text(host, notice.by, notice.seconds)
        mine = [
            state for state in tuple(self._engine.meshes.values())
            if isinstance(state, ProcState) and state.born is not None and state.stopped is None
            and state.home == self._engine.address and host in state.hosts
        ]  # fmt: skip
        if not mine:
            return f"{told}. No mesh of this program is on it"
        return "\n".join([f"{told}:", *(f"  {line}" for state in mine for line in _advice(state, host))])


def _advice(state: ProcState, host: str) -> list[str]:
    """What of a mesh is there, and what can be done."""
    ranks = [rank for rank in state.ranks if state.layout.host_of(rank) == host]
    actors = [each.name for each in tuple(state.actors.values()) if each.stopped is None]
    where = extents.shown(state.region, ranks) if state.region.labels else ""
    on_it = f" with {', '.join(actors)}" if actors else ""
    steps = ["save what is there"]
    if len(set(state.hosts)) > 1:
        with contextlib.suppress(ValueError):  # the mesh of another dimension cannot shrink
            label = extents.dimension_of_hosts(state)
            steps.append(f"{state.name}.shrink({label}=[{state.hosts.index(host)}]) goes on without it")
    steps.append(f"once it is lost, heal_mesh({state.name}, replace=True) takes another host")
    return [f"{state.name}{f', {where}' if where else ''}{on_it}", f"next: {'; '.join(steps)}"]


def log_notice(event: HostNoticed | HostKept | HostStory) -> None:
    """Tells it where nobody has said anything else."""
    logger.warning("%s", event.text)
