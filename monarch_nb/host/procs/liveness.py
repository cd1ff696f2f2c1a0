"""Noticing procs that live but do not answer: held by one long C call, stopped, or swapped out."""

import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterable

from monarch_nb.host.linux import processor_time
from monarch_nb.host.loop import Loop, Timer
from monarch_nb.host.procs.child import Child
from monarch_nb.host.procs.children import Children
from monarch_nb.host.protocol import Silent, observers
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import PROC_RESPONSIVE, PROC_UNRESPONSIVE
from monarch_nb.wire import Verb

IDLE_S = 0.002  # of processor time: no more than that between two looks is what answering and keeping links takes
_DELAYS = 4.0  # patience beyond its least, as a multiple of the usual delay of an answer
_GAIN = 1 / 8  # of one answer in that delay


class LivenessMonitor:
    """Pings procs on their channels, and reports those without an answer after `patience_s` to who owns them.

    The channel's thread in the proc needs the GIL as any other and nothing else, so it answers from the first moment on
    and does not care how busy the proc's links are. Whatever wakes, costs: a proc that has hardly run since it last
    answered is asked again only after about `rest_s`, and while none runs the looks become rarer, from `interval_s` to
    `calm_s`. A machine that is short of processors delays all answers: patience grows with the delays of those that
    come, as a retransmission timer does (RFC 6298). What one look finds goes out in one message to each owner, and to
    controllers that watch; ranks hear nothing of each other. No procs, no wake-ups.
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
        self._delay_s = 0.0  # of answers, smoothed
        self._answered: dict[str, tuple[Child, float]] = {}  # procs that answer again, and had not since then
        self._timer: Timer | None = None
        children.reaper.on_stopped = self.ask_soon

    def start(self) -> None:
        """There are procs now."""
        self._pause_s = self._interval_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._tick)

    def ask_soon(self, pids: Collection[int]) -> None:
        """A signal has stopped these processes, or they go on."""
        for child in self._children.alive():
            if child.pid in pids:
                child.ask_by = 0.0
        if self._timer is not None and self._timer.when > time.monotonic() + self._interval_s:
            self._timer.cancel()
            self._timer = None
            self.start()

    def pong(self, child: Child) -> None:
        """A proc answered."""
        now = time.monotonic()
        if child.asked_at is not None and child.unresponsive_since is None:
            self._delay_s += _GAIN * (now - child.asked_at - self._delay_s)
        child.asked_at = None
        child.ran = processor_time(child.pid)
        child.ask_by = now + self._rest_s * random.uniform(0.75, 1.25)  # not all at once
        since, child.unresponsive_since = child.unresponsive_since, None
        if since is not None:
            if not self._answered:
                self._loop.call_later(0.0, self._report_answers)
            self._answered[child.address] = (child, since)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        calm = True
        self._children.look()
        silent: list[tuple[Child, float]] = []
        patience_s = self._patience_s + _DELAYS * self._delay_s - self._interval_s / 2
        alive = self._children.alive()
        for child in alive:
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
                if now - child.asked_at > patience_s:
                    child.channel.drain()  # a loop that was busy for so long may not have read the answer yet
                if child.asked_at is not None and now - child.asked_at > patience_s:
                    child.unresponsive_since = time.time() - (now - child.asked_at)
                    silent.append((child, child.unresponsive_since))
        self._report(PROC_UNRESPONSIVE, silent)
        self._pause_s = min(2 * self._pause_s, self._calm_s) if calm else self._interval_s
        if alive:
            self._timer = self._loop.call_later(self._pause_s, self._tick)

    def _report_answers(self) -> None:
        answered, self._answered = self._answered, {}
        self._report(PROC_RESPONSIVE, answered.values())

    def _report(self, verb: Verb[Silent, None], procs: Iterable[tuple[Child, float]]) -> None:
        by_receiver: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for child, since in procs:
            for observer in observers(child.watchers, child.spec.owner):
                by_receiver[observer][child.address] = since
        for receiver, since_by_address in by_receiver.items():
            self._sender.post(receiver, verb, Silent(since_by_address))
