"""Noticing procs that live but do not answer: held by one long C call, stopped, or swapped out."""

import time

from monarch_nb.host.linux import processor_time
from monarch_nb.host.loop import Loop, Timer
from monarch_nb.host.procs.child import Child
from monarch_nb.host.procs.children import Children
from monarch_nb.host.protocol import Pressed
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import PROC_RESPONSIVE, PROC_UNRESPONSIVE
from monarch_nb.wire import Verb

IDLE_S = 0.002  # of processor time: no more than that between two looks is what answering and keeping links takes


class LivenessMonitor:
    """Pings procs on their channels, and tells their watchers after `patience_s` without an answer.

    The channel's thread in the proc needs the GIL as any other and nothing else, so it answers from the first moment on
    and does not care how busy the proc's links are. Whatever wakes, costs: a proc that has hardly run since it last
    answered is asked again only after `rest_s`, and while none runs the looks become rarer, from `interval_s` to
    `calm_s`. `stir` says that something has happened to some proc. No procs, no wake-ups.
    """

    def __init__(self, loop: Loop, children: Children, sender: AgentSender, *, interval_s: float = 1.0,
                 patience_s: float = 2.0, calm_s: float = 4.0, rest_s: float = 12.0) -> None:  # fmt: skip
        self._loop = loop
        self._children = children
        self._sender = sender
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._calm_s = calm_s
        self._rest_s = rest_s
        self._pause_s = interval_s
        self._timer: Timer | None = None
        children.reaper.on_signal = self.stir

    def start(self) -> None:
        """There are procs now."""
        self._pause_s = self._interval_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._tick)

    def stir(self) -> None:
        """A child has ended, was stopped or goes on: all are asked soon."""
        for child in self._children.alive():
            child.ask_by = 0.0
        if self._timer is not None and self._timer.when > time.monotonic() + self._interval_s:
            self._timer.cancel()
            self._timer = None
            self.start()

    def pong(self, child: Child) -> None:
        """A proc answered."""
        child.asked_at = None
        child.ran = processor_time(child.pid)
        child.ask_by = time.monotonic() + self._rest_s
        since, child.unresponsive_since = child.unresponsive_since, None
        if since is not None:
            self._tell(child, PROC_RESPONSIVE, since)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        calm = True
        self._children.look()
        for child in self._children.alive():
            if child.state not in ("running", "stopping") or child.channel is None:
                continue
            if child.asked_at is None:
                ran = processor_time(child.pid)
                idle = ran is not None and child.ran is not None and ran - child.ran < IDLE_S
                calm = calm and idle
                if idle and now < child.ask_by:
                    continue
                child.asked_at = now
                child.channel.ping()
            elif child.unresponsive_since is None:
                calm = False
                if now - child.asked_at > self._patience_s - self._interval_s / 2:
                    child.unresponsive_since = time.time() - (now - child.asked_at)
                    self._tell(child, PROC_UNRESPONSIVE, child.unresponsive_since)
        self._pause_s = min(2 * self._pause_s, self._calm_s) if calm else self._interval_s
        if self._children.alive():
            self._timer = self._loop.call_later(self._pause_s, self._tick)

    def _tell(self, child: Child, verb: Verb[Pressed, None], since: float) -> None:
        self._sender.tell_all(child.watchers, verb, Pressed(address=child.address, pid=child.pid, since=since))
