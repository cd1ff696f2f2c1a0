"""What a host agent does when its engine is about to end the host: all who use it are told, and everything goes on."""

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from monarch_nb.host.protocol import Notice
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import HOST_NOTICE
from monarch_nb.wire import json_decoder

log = logging.getLogger(__name__)

END = signal.SIGUSR1  # ends an agent, or the worker that keeps it, at once; SIGTERM is the word of its engine
BURST_S = 2.0  # engines send one SIGTERM several times: Slurm, thrice within a millisecond
GRACE = "MONARCH_NB_GRACE_S"  # in an agent's environment: seconds that its engine leaves it after SIGTERM
UNKNOWN_S = 600.0  # after so long a notice without a time has passed
LATE_S = 30.0  # and any other so long after its time
_LOOK_S = 0.5
_KEPT = 16  # notices that came to nothing
_WORKER_S = 0.3
_TERMINATED = "the host agent was terminated"


class Used(Protocol):
    """Who uses a host."""

    @property
    def used(self) -> bool:
        """Whether there is anything to lose."""

    def users(self) -> set[str]:
        """The addresses of all who are to know."""


class Preemption:
    """On the agent's loop. A host that nobody uses ends at once.

    So does any host at a SIGTERM that comes `BURST_S` after the first, or later.
    `later(seconds, call)` is the loop's, `give_up(reason)` ends the agent.
    """

    def __init__(
        self, sender: AgentSender, *, service: Used,
        later: Callable[[float, Callable[[], None]], object], give_up: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._sender, self._service, self._later, self._give_up, self._now = sender, service, later, give_up, now
        self._notice: Notice | None = None
        self._ends: float | None = None  # monotonic: when the engine is to end the host
        self._told: set[str] = set()
        self._terminated: float | None = None  # monotonic: when SIGTERM came first
        self._over: deque[Notice] = deque(maxlen=_KEPT)  # that have passed

    @property
    def by(self) -> str:
        """Who is about to end the host, in words; empty while nobody is."""
        return "" if self._notice is None else self._notice.by

    def since(self, at: float) -> tuple[Notice, ...]:
        """What was noticed from a time on, by the host's clock; the last may still come true."""
        known = () if self._notice is None else (self._as_it_is(self._notice),)
        return tuple(notice for notice in (*self._over, *known) if notice.at >= at)

    def terminated(self) -> None:
        """SIGTERM."""
        if self._terminated is not None:
            if self._now() - self._terminated >= BURST_S:
                self._give_up(_TERMINATED)
            return
        self._terminated = self._now()
        notice = Notice(by="SIGTERM", seconds=grace(os.environ))
        if notice.seconds is None and self._service.used:  # the worker, which has got it as well, may know more
            self._later(_WORKER_S, lambda: self.given(notice))
        else:
            self.given(notice)

    def said(self, data: bytes) -> None:
        """What the worker that keeps this agent has written: one notice a line. Garbage is nobody's notice."""
        for line in data.splitlines():
            try:
                notice = json_decoder(Notice).decode(line)
            except msgspec.MsgspecError:
                log.warning("not a notice: %r", line)
                continue
            self.given(notice)

    def given(self, notice: Notice) -> None:
        """The host is about to be ended. A later word of the same tells better how long it has."""
        if not self._service.used:
            self._give_up(f"{_TERMINATED}, and nobody used the host: {notice.by}")
            return
        known = self._notice
        if known is not None and notice.seconds is None:
            return
        at = time.time() if known is None else known.at
        self._notice = notice = msgspec.structs.replace(notice, at=at)
        self._ends = None if notice.seconds is None else self._now() + notice.seconds
        self._told.clear()
        log.warning("this host is about to be taken away (%s), %s", notice.by, _left(notice.seconds))
        self._later(UNKNOWN_S if notice.seconds is None else notice.seconds + LATE_S, lambda: self._passed(notice))
        self._look() if known is None else self.look_around()

    def look_around(self) -> None:
        """Somebody may have come, or gone: who comes is told as well, and nothing stays when nobody is left."""
        notice = self._notice
        if notice is None:
            return
        if not self._service.used:
            self._notice = None
            self._give_up(f"{_TERMINATED}, and nobody uses the host any more: {notice.by}")
            return
        fresh = self._service.users() - self._told
        self._told |= fresh
        self._sender.post_all(fresh, HOST_NOTICE, self._as_it_is(notice))

    def _as_it_is(self, notice: Notice) -> Notice:
        """With the seconds that are left now."""
        seconds = None if self._ends is None else max(0.0, self._ends - self._now())
        return msgspec.structs.replace(notice, seconds=seconds)

    def _look(self) -> None:
        self.look_around()
        if self._notice is not None:
            self._later(_LOOK_S, self._look)

    def _passed(self, notice: Notice) -> None:
        if self._notice is not notice:
            return
        self._notice, self._terminated = None, None
        log.warning("this host was to be taken away (%s), and is still here: it is as before", notice.by)
        over = msgspec.structs.replace(notice, over=True)
        self._over.append(over)
        self._sender.post_all(self._told & self._service.users(), HOST_NOTICE, over)


def grace(environment: Mapping[str, str]) -> float | None:
    """The seconds that an engine leaves a host, as its environment says; None where it does not."""
    try:
        seconds = float(environment.get(GRACE, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _left(seconds: float | None) -> str:
    return "nobody knows when" if seconds is None else f"in {seconds:.0f} s"
