"""Detecting processes that live but do not answer: held by one long C call, stopped, or swapped out."""

import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterable

from monarch_nb.host.linux import process_memory, processor_time
from monarch_nb.host.loop import Loop, Timer
from monarch_nb.host.procs.children import Child, Children
from monarch_nb.host.protocol import Responsiveness, observers
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import PROC_RESPONSIVE, PROC_UNRESPONSIVE
from monarch_nb.wire import Verb

IDLE_S = 0.002  # of processor time between two checks: the cost of answers and of keeping links
_DELAYS = 4.0  # patience beyond its least, as a multiple of the usual delay of an answer
_GAIN = 1 / 8  # of one answer in that delay


class LivenessMonitor:
    """Pings processes on their channels, and reports those without an answer after `patience_s` to their owners.

    The channel's thread in the process needs only the GIL, as any other, so it answers from the first moment on,
    however busy the process's links are. Since each wake-up costs, a process that has hardly run since its last answer
    is pinged only after about `rest_s`, and while none runs the checks become rarer, from `interval_s` to `calm_s`. A
    machine short of processors delays all answers, so patience grows with the delays of answers, as a retransmission
    timer does (RFC 6298). The results of one check go out in one message to each owner, and to controllers that watch;
    ranks are not sent them. Without processes there are no wake-ups.
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
        self._answered: dict[str, tuple[Child, float]] = {}  # processes that answer again, and since when they had not
        self._timer: Timer | None = None
        children.reaper.on_stopped = self.ask_soon

    def start(self) -> None:
        """Starts the ping timer if it is not running."""
        self._pause_s = self._interval_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._tick)

    def ask_soon(self, pids: Collection[int]) -> None:
        """Handles processes that a signal has stopped or continued."""
        for child in self._children.alive():
            if child.pid in pids:
                child.ask_by = 0.0
        if self._timer is not None and self._timer.when > time.monotonic() + self._interval_s:
            self._timer.cancel()
            self._timer = None
            self.start()

    def pong(self, child: Child) -> None:
        """Handles a process's answer."""
        now = time.monotonic()
        if child.asked_at is not None and child.unresponsive_since is None:
            self._delay_s += _GAIN * (now - child.asked_at - self._delay_s)
        child.asked_at = None
        child.ran = processor_time(child.pid)
        child.ask_by = now + self._rest_s * random.uniform(0.75, 1.25)  # to spread the pings
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
                if not idle:
                    child.memory.add(time.time(), process_memory(child.pid))
                if idle and now < child.ask_by:
                    continue
                child.asked_at = now
                child.channel.ping()
            elif child.unresponsive_since is None:
                calm = False
                if now - child.asked_at > patience_s:
                    child.channel.drain()  # a busy loop may not have read the answer yet
                if child.asked_at is not None and now - child.asked_at > patience_s:
                    child.unresponsive_since = time.time() - (now - child.asked_at)
                    silent.append((child, child.unresponsive_since))
        self._report(PROC_UNRESPONSIVE, silent)
        self._pause_s = min(2 * self._pause_s, self._calm_s) if calm else self._interval_s
        if alive:
            self._timer = self._loop.call_later(self._pause_s, self._tick)

    def _report_answers(self) -> None:
        reports, self._answered = self._answered, {}
        self._report(PROC_RESPONSIVE, reports.values())

    def _report(self, verb: Verb[Responsiveness, None], procs: Iterable[tuple[Child, float]]) -> None:
        by_receiver: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for child, since in procs:
            for observer in observers(child.watchers, child.spec.owner):
                by_receiver[observer][child.address] = since
        for receiver, since_by_address in by_receiver.items():
            self._sender.post(receiver, verb, Responsiveness(since_by_address))
