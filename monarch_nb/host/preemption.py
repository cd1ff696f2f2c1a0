"""Preemption of a host: its agent notifies all who use it, and everything goes on until the end."""

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from monarch_nb.host.protocol import PreemptionNotice
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import HOST_NOTICE
from monarch_nb.wire import json_decoder

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from monarch_nb.host.service import AgentService

END = signal.SIGUSR1  # ends an agent, or its worker, at once; SIGTERM is the scheduler's notice
BURST_S = 2.0  # schedulers repeat SIGTERM: Slurm sends three within a millisecond
GRACE = "MONARCH_NB_GRACE_S"  # in an agent's environment: seconds from the scheduler's SIGTERM to the end
UNKNOWN_S = 600.0  # after which a notice without a time is withdrawn
LATE_S = 30.0  # after the announced time, when any other notice is withdrawn
_LOOK_S = 0.5
_KEPT = 16  # withdrawn notices to remember
_WORKER_S = 0.3
_TERMINATED = "the host agent was terminated"


class Preemption:
    """Handles preemption notices on the agent's loop. An unused host ends at once.

    So does any host at a SIGTERM that comes `BURST_S` after the first, or later.
    `later(seconds, call)` is the loop's, `give_up(reason)` ends the agent.
    """

    def __init__(
        self, sender: AgentSender, *, service: "AgentService",
        later: Callable[[float, Callable[[], None]], object], give_up: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._sender, self._service, self._later, self._give_up, self._now = sender, service, later, give_up, now
        self._notice: PreemptionNotice | None = None
        self._ends: float | None = None  # monotonic: the announced end of the host
        self._notified: set[str] = set()
        self._terminated: float | None = None  # monotonic: the first SIGTERM
        self._over: deque[PreemptionNotice] = deque(maxlen=_KEPT)  # withdrawn

    @property
    def by(self) -> str:
        """The source of the current notice, for people; empty if there is none."""
        return "" if self._notice is None else self._notice.by

    def since(self, at: float) -> tuple[PreemptionNotice, ...]:
        """Returns the notices since a time of the host's clock; the last one may still be current."""
        known = () if self._notice is None else (self._as_it_is(self._notice),)
        return tuple(notice for notice in (*self._over, *known) if notice.at >= at)

    def terminated(self) -> None:
        """Handles SIGTERM."""
        if self._terminated is not None:
            if self._now() - self._terminated >= BURST_S:
                self._give_up(_TERMINATED)
            return
        self._terminated = self._now()
        notice = PreemptionNotice(by="SIGTERM", seconds=grace(os.environ))
        if notice.seconds is None and self._service.used:  # the worker, which has got it as well, may know more
            self._later(_WORKER_S, lambda: self.given(notice))
        else:
            self.given(notice)

    def receive(self, data: bytes) -> None:
        """Reads notices that the agent's worker has written, one per line. Ignores invalid ones."""
        for line in data.splitlines():
            try:
                notice = json_decoder(PreemptionNotice).decode(line)
            except msgspec.MsgspecError:
                log.warning("not a notice: %r", line)
                continue
            self.given(notice)

    def given(self, notice: PreemptionNotice) -> None:
        """Handles a notice. A later one from the same source knows better how long the host has."""
        if not self._service.used:
            self._give_up(f"{_TERMINATED}, and nobody used the host: {notice.by}")
            return
        known = self._notice
        if known is not None and notice.seconds is None:
            return
        at = time.time() if known is None else known.at
        self._notice = notice = msgspec.structs.replace(notice, at=at)
        self._ends = None if notice.seconds is None else self._now() + notice.seconds
        self._notified.clear()
        log.warning("this host is about to be taken away (%s), %s", notice.by, _left(notice.seconds))
        self._later(UNKNOWN_S if notice.seconds is None else notice.seconds + LATE_S, lambda: self._passed(notice))
        self._look() if known is None else self.look_around()

    def look_around(self) -> None:
        """Notifies new users of the host, and ends it when none is left."""
        notice = self._notice
        if notice is None:
            return
        if not self._service.used:
            self._notice = None
            self._give_up(f"{_TERMINATED}, and nobody uses the host any more: {notice.by}")
            return
        fresh = self._service.users() - self._notified
        self._notified |= fresh
        self._sender.post_all(fresh, HOST_NOTICE, self._as_it_is(notice))

    def _as_it_is(self, notice: PreemptionNotice) -> PreemptionNotice:
        """Returns the notice with the seconds that are left now."""
        seconds = None if self._ends is None else max(0.0, self._ends - self._now())
        return msgspec.structs.replace(notice, seconds=seconds)

    def _look(self) -> None:
        self.look_around()
        if self._notice is not None:
            self._later(_LOOK_S, self._look)

    def _passed(self, notice: PreemptionNotice) -> None:
        if self._notice is not notice:
            return
        self._notice, self._terminated = None, None
        log.warning("this host was to be taken away (%s), and is still here: it is as before", notice.by)
        over = msgspec.structs.replace(notice, over=True)
        self._over.append(over)
        self._sender.post_all(self._notified & self._service.users(), HOST_NOTICE, over)


def grace(environment: Mapping[str, str]) -> float | None:
    """Returns the seconds between the scheduler's SIGTERM and the end, from the environment, or None."""
    try:
        seconds = float(environment.get(GRACE, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _left(seconds: float | None) -> str:
    return "nobody knows when" if seconds is None else f"in {seconds:.0f} s"
