"""Faults of all kinds, each with what it strikes, and how it is mended."""

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.program import LEASE, SLOTS

if TYPE_CHECKING:
    from tests.chaos.team import Team

Undo = Callable[[], None]
SHORT = (0.1, 0.8)  # seconds that a fault lasts, where that is no matter of leases
LONG = (LEASE + 1.0, LEASE + 2.0)


@dataclass(frozen=True)
class Fault:
    """One kind. `strike` takes the team and what it is drawn for, and gives what mends it."""

    kind: str
    target: str  # "rank", "host" or "controller"
    weight: int
    strike: "Callable[[Team, int, random.Random], Undo]"
    lasts: tuple[float, float] = SHORT


def _nothing() -> None:
    pass


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_rank(team: "Team", rank: int, dice: random.Random) -> Undo:
    _signal(team.pids[rank], signal.SIGKILL)
    return _nothing


def _end_rank(team: "Team", rank: int, dice: random.Random) -> Undo:
    _signal(team.pids[rank], signal.SIGTERM)
    return _nothing


def _stop_rank(team: "Team", rank: int, dice: random.Random) -> Undo:
    pid = team.pids[rank]
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _kill_host(team: "Team", host: int, dice: random.Random) -> Undo:
    for rank in range(host * SLOTS, (host + 1) * SLOTS):
        _signal(team.pids[rank], signal.SIGKILL)
    return _nothing


def _restart_agent(team: "Team", host: int, dice: random.Random) -> Undo:
    team.kill_agent(host)
    if dice.random() < 0.5:  # before anybody has missed it
        team.start_agent(host)
        return _nothing
    return lambda: team.start_agent(host)


def _stop_agent(team: "Team", host: int, dice: random.Random) -> Undo:
    pid = team.agents[host].pid
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _pull(team: "Team", host: int, dice: random.Random) -> Undo:
    team.network.pull(host + 1)
    return lambda: team.network.plug(host + 1)


def _deafen(team: "Team", host: int, dice: random.Random) -> Undo:
    """One direction of one pair: what a host sends to another, or to the controller, or what that sends to it."""
    other = dice.choice([end for end in range(len(team.network.names)) if end != host + 1])
    sender, receiver = (host + 1, other) if dice.random() < 0.5 else (other, host + 1)
    team.network.deafen(sender, receiver)
    return lambda: team.network.hear(sender, receiver)


def _delay(team: "Team", host: int, dice: random.Random) -> Undo:
    team.network.slow(host + 1, dice.choice([1000, 4000]), 200_000)
    return lambda: team.network.free(host + 1)


def _lose(team: "Team", host: int, dice: random.Random) -> Undo:
    team.network.lossy(host + 1, dice.choice([2, 10]), dice.choice([1, 20]))
    return lambda: team.network.free(host + 1)


def _kill_controller(team: "Team", _: int, dice: random.Random) -> Undo:
    team.kill_controller()
    return team.start_controller


def _stop_controller(team: "Team", _: int, dice: random.Random) -> Undo:
    pid = team.controller.pid
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _move_controller(team: "Team", _: int, dice: random.Random) -> Undo:
    team.network.move(0)
    return _nothing


FAULTS = (
    Fault("process killed", "rank", 20, _kill_rank),
    Fault("process terminated", "rank", 6, _end_rank),
    Fault("process stopped", "rank", 20, _stop_rank),
    Fault("all processes of a host killed", "host", 5, _kill_host),
    Fault("agent restarted", "host", 8, _restart_agent),
    Fault("agent stopped", "host", 8, _stop_agent),
    Fault("agent stopped beyond the lease", "host", 1, _stop_agent, LONG),
    Fault("cable pulled", "host", 8, _pull),
    Fault("cable pulled beyond the lease", "host", 2, _pull, LONG),
    Fault("cut one way", "host", 8, _deafen),
    Fault("cut one way beyond the lease", "host", 2, _deafen, LONG),
    Fault("slow cable", "host", 6, _delay),
    Fault("packets lost", "host", 6, _lose),
    Fault("controller killed, another attaches", "controller", 4, _kill_controller),
    Fault("controller stopped", "controller", 4, _stop_controller),
    Fault("controller moved", "controller", 1, _move_controller),
)
