"""Ending processes: a request, then SIGTERM, then SIGKILL; a stopped (SIGSTOP) or unresponsive process ends too."""

import signal
from collections.abc import Callable, Iterable

from msgspec import Struct, field

from monarch_nb.host.loop import Loop, Timer
from monarch_nb.host.procs.child import Child
from monarch_nb.host.procs.children import Children
from monarch_nb.host.protocol import Exited, ProcStop
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import PROC_STOP


class _Round(Struct, eq=False):
    """One request to stop some procs."""

    waiting: dict[str, Child]
    done: Callable[[list[Exited]], None]
    exits: list[Exited] = field(default_factory=list)
    timer: Timer | None = None


class ProcStopper:
    """Executes requests to stop processes, several at once if need be."""

    def __init__(self, loop: Loop, children: Children, sender: AgentSender) -> None:
        self._loop = loop
        self._children = children
        self._sender = sender
        self._rounds: list[_Round] = []

    def stop(self, procs: Iterable[Child], *, timeout_s: float, grace_s: float, reason: str,
             done: Callable[[list[Exited]], None] = lambda _exits: None) -> None:  # fmt: skip
        """Stops processes; `done` gets their exits, after `timeout_s + grace_s` and a little at the latest.

        With `timeout_s` zero they are not asked first.
        """
        children = list(procs)
        round_ = _Round({child.address: child for child in children if child.alive}, done)
        round_.exits = [child.exit for child in children if child.exit is not None]
        for child in round_.waiting.values():
            child.stop_wanted = True
            child.stop_reason = child.stop_reason or reason
            if child.state == "running":
                child.state = "stopping"
                if timeout_s > 0:
                    self._sender.post(child.address, PROC_STOP, ProcStop(reason, timeout_s))
        self._rounds.append(round_)
        if timeout_s > 0:
            round_.timer = self._loop.call_later(timeout_s, lambda: self._terminate(round_, grace_s))
        else:
            self._terminate(round_, grace_s)
        self._check(round_)

    def child_ended(self, child: Child) -> None:
        """Handles the end of a process."""
        for round_ in list(self._rounds):
            if round_.waiting.pop(child.address, None) is not None and child.exit is not None:
                round_.exits.append(child.exit)
                self._check(round_)

    def _terminate(self, round_: _Round, grace_s: float) -> None:
        for child in list(round_.waiting.values()):
            self._children.signal(child, signal.SIGTERM)
            self._children.signal(child, signal.SIGCONT)  # a stopped process would not receive it
        round_.timer = self._loop.call_later(grace_s, lambda: self._kill(round_))

    def _kill(self, round_: _Round) -> None:
        for child in list(round_.waiting.values()):
            self._children.signal(child, signal.SIGKILL)

    def _check(self, round_: _Round) -> None:
        if not round_.waiting and round_ in self._rounds:
            self._rounds.remove(round_)
            if round_.timer is not None:
                round_.timer.cancel()
            round_.done(round_.exits)
