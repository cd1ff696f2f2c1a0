"""Preemption of a host: its agent notifies all its users, and everything continues until the end."""

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
_CHECK_S = 0.5
_WITHDRAWN = 16  # withdrawn notices to remember
_WORKER_S = 0.3
_TERMINATED = "the host agent was terminated"


class Preemption:
    """Handles preemption notices on the agent's loop.

    An unused host ends at once, as does any host at a SIGTERM that comes `BURST_S` or more after the first.
    `call_later(seconds, call)` is the loop's, `give_up(reason)` ends the agent.
    """

    def __init__(
        self, sender: AgentSender, *, service: "AgentService",
        call_later: Callable[[float, Callable[[], None]], object], give_up: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._sender, self._service = sender, service
        self._call_later, self._give_up, self._now = call_later, give_up, now
        self._notice: PreemptionNotice | None = None
        self._ends: float | None = None  # monotonic: the announced end of the host
        self._notified: set[str] = set()
        self._terminated: float | None = None  # monotonic: the first SIGTERM
        self._withdrawn: deque[PreemptionNotice] = deque(maxlen=_WITHDRAWN)

    @property
    def by(self) -> str:
        """The source of the current notice, for people; empty if there is none."""
        return "" if self._notice is None else self._notice.by

    def since(self, start: float) -> tuple[PreemptionNotice, ...]:
        """Returns the notices since a time of the host's clock; the last one may still be current."""
        current = () if self._notice is None else (self._with_time_left(self._notice),)
        return tuple(notice for notice in (*self._withdrawn, *current) if notice.at >= start)

    def terminated(self) -> None:
        """Handles SIGTERM."""
        if self._terminated is not None:
            if self._now() - self._terminated >= BURST_S:
                self._give_up(_TERMINATED)
            return
        self._terminated = self._now()
        notice = PreemptionNotice(by="SIGTERM", seconds=grace(os.environ))
        if notice.seconds is None and self._service.used:  # the worker, which has received it as well, may know more
            self._call_later(_WORKER_S, lambda: self.handle(notice))
        else:
            self.handle(notice)

    def receive(self, data: bytes) -> None:
        """Reads notices that the agent's worker has written, one per line. Ignores invalid ones."""
        for line in data.splitlines():
            try:
                notice = json_decoder(PreemptionNotice).decode(line)
            except msgspec.MsgspecError:
                log.warning("not a notice: %r", line)
                continue
            self.handle(notice)

    def handle(self, notice: PreemptionNotice) -> None:
        """Handles a notice. A later one from the same source replaces the time that the host has."""
        if not self._service.used:
            self._give_up(f"{_TERMINATED}, and nobody used the host: {notice.by}")
            return
        current = self._notice
        if current is not None and notice.seconds is None:
            return
        noticed_at = time.time() if current is None else current.at
        self._notice = notice = msgspec.structs.replace(notice, at=noticed_at)
        self._ends = None if notice.seconds is None else self._now() + notice.seconds
        self._notified.clear()
        log.warning("this host is about to be taken away (%s), %s", notice.by, _time_text(notice.seconds))
        wait = UNKNOWN_S if notice.seconds is None else notice.seconds + LATE_S
        self._call_later(wait, lambda: self._withdraw(notice))
        self._check_users() if current is None else self.notify_users()

    def notify_users(self) -> None:
        """Notifies new users of the host, and ends it when none is left."""
        notice = self._notice
        if notice is None:
            return
        if not self._service.used:
            self._notice = None
            self._give_up(f"{_TERMINATED}, and nobody uses the host any more: {notice.by}")
            return
        new_users = self._service.users() - self._notified
        self._notified |= new_users
        self._sender.post_all(new_users, HOST_NOTICE, self._with_time_left(notice))

    def _with_time_left(self, notice: PreemptionNotice) -> PreemptionNotice:
        """Returns the notice with the seconds that remain now."""
        seconds = None if self._ends is None else max(0.0, self._ends - self._now())
        return msgspec.structs.replace(notice, seconds=seconds)

    def _check_users(self) -> None:
        self.notify_users()
        if self._notice is not None:
            self._call_later(_CHECK_S, self._check_users)

    def _withdraw(self, notice: PreemptionNotice) -> None:
        if self._notice is not notice:
            return
        self._notice, self._terminated = None, None
        log.warning("this host was to be taken away (%s), and is still here: it is as before", notice.by)
        withdrawn = msgspec.structs.replace(notice, over=True)
        self._withdrawn.append(withdrawn)
        self._sender.post_all(self._notified & self._service.users(), HOST_NOTICE, withdrawn)


def grace(environment: Mapping[str, str]) -> float | None:
    """Returns the seconds between the scheduler's SIGTERM and the end, from the environment, or None."""
    try:
        seconds = float(environment.get(GRACE, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _time_text(seconds: float | None) -> str:
    return "nobody knows when" if seconds is None else f"in {seconds:.0f} s"
