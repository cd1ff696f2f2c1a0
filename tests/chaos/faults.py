"""Faults of all kinds, each with its target, and its repair."""

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tests.chaos.program import LEASE, SLOTS

if TYPE_CHECKING:
    from tests.chaos.team import Team

Undo = Callable[[], None]
Duration = tuple[float, float, float]  # the shortest, the longest, and the exponent that makes short ones frequent
SHORT = (0.1, 0.8, 1.0)  # seconds that a fault lasts, where that is no matter of leases
LONG = (LEASE + 1.0, LEASE + 2.0, 1.0)
CUT = (1.0, 50.0, 5.0)  # within the lease of a job's hosts, which is 60 s
PAUSE = (0.5, 10.0, 2.0)
AGENTS, SSH, SLURM = frozenset({"agents"}), frozenset({"ssh", "ssh-direct"}), frozenset({"slurm"})


@dataclass(frozen=True)
class Fault:
    """One kind. `strike` takes the team and the target, and returns the repair.

    `ends` are the processes that may end of it: none, of the "rank", of the "host", or "all".
    """

    kind: str
    target: str  # "rank", "host" or "controller"
    weight: int
    strike: "Callable[[Team, int, random.Random], Undo]"
    lasts: Duration = SHORT
    ends: str = ""
    sites: frozenset[str] = AGENTS | SSH | SLURM

    def seconds(self, dice: random.Random) -> float:
        """Draws how long it lasts."""
        shortest, longest, exponent = self.lasts
        return shortest + (longest - shortest) * float(dice.random() ** exponent)


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
        team.hosts.start_agent(host)
        return _nothing
    return lambda: team.hosts.start_agent(host)


def _stop_agent(team: "Team", host: int, dice: random.Random) -> Undo:
    pid = team.agent(host)
    if not pid:
        return _nothing
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _cut_tunnel(team: "Team", host: int, dice: random.Random) -> Undo:
    """SSH's server ends, and all its connections, as when that machine's network is reset."""
    server = team.hosts.machines.servers[host]  # type: ignore[attr-defined]
    server.cut()
    return cast(Undo, server.start)


def _cancel_job(team: "Team", _: int, dice: random.Random) -> Undo:
    hosts = team.hosts
    hosts.cancel()  # type: ignore[attr-defined]
    return cast(Undo, hosts.await_end)  # type: ignore[attr-defined]


def _stop_scheduler(team: "Team", _: int, dice: random.Random) -> Undo:
    slurm = team.hosts.slurm  # type: ignore[attr-defined]
    slurm.answers(False)
    return lambda: slurm.answers(True)


def _pull(team: "Team", host: int, dice: random.Random) -> Undo:
    team.network.pull(host + 1)
    return lambda: team.network.plug(host + 1)


def _deafen(team: "Team", host: int, dice: random.Random) -> Undo:
    """One direction of one pair: messages of a host to another or to the controller, or of that to the host."""
    peer = dice.choice([end for end in range(len(team.network.names)) if end != host + 1])
    sender, receiver = (host + 1, peer) if dice.random() < 0.5 else (peer, host + 1)
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


def _detach_controller(team: "Team", _: int, dice: random.Random) -> Undo:
    def leave_and_come_back() -> None:  # once all works again: it first waits for its calls
        team.detach_controller()
        team.start_controller()

    return leave_and_come_back


def _stop_controller(team: "Team", _: int, dice: random.Random) -> Undo:
    pid = team.controller.pid
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _move_controller(team: "Team", _: int, dice: random.Random) -> Undo:
    team.network.move(0)
    return _nothing


FAULTS = (
    Fault("process killed", "rank", 20, _kill_rank, ends="rank"),
    Fault("process terminated", "rank", 6, _end_rank, ends="rank"),
    Fault("process stopped", "rank", 20, _stop_rank),
    Fault("all processes of a host killed", "host", 5, _kill_host, ends="host"),
    Fault("agent restarted", "host", 8, _restart_agent, ends="host", sites=AGENTS),
    Fault("agent killed", "host", 8, _restart_agent, ends="host", sites=SSH | SLURM),
    Fault("agent stopped", "host", 8, _stop_agent),
    Fault("agent stopped for seconds", "host", 3, _stop_agent, PAUSE, sites=SSH | SLURM),
    Fault("agent stopped beyond the lease", "host", 1, _stop_agent, LONG, ends="host", sites=AGENTS),
    Fault("cable pulled", "host", 8, _pull, sites=AGENTS),
    Fault("cable pulled beyond the lease", "host", 2, _pull, LONG, ends="host", sites=AGENTS),
    Fault("cut one way", "host", 8, _deafen, sites=AGENTS),
    Fault("cut one way beyond the lease", "host", 2, _deafen, LONG, ends="host", sites=AGENTS),
    Fault("cable pulled for 1 to 50 s", "host", 8, _pull, CUT, sites=SSH),
    Fault("cut one way for 1 to 50 s", "host", 6, _deafen, CUT, sites=SSH),
    Fault("SSH server and its connections cut", "host", 10, _cut_tunnel, CUT, sites=SSH),
    Fault("slow cable", "host", 6, _delay, sites=AGENTS | SSH),
    Fault("packets lost", "host", 6, _lose, sites=AGENTS | SSH),
    Fault("job cancelled", "controller", 6, _cancel_job, ends="all", sites=SLURM),
    Fault("scheduler stopped", "controller", 6, _stop_scheduler, PAUSE, sites=SLURM),
    Fault("controller killed, another attaches", "controller", 4, _kill_controller),
    Fault("mesh detached, another attaches", "controller", 4, _detach_controller, sites=SSH | SLURM),
    Fault("controller stopped", "controller", 4, _stop_controller),
    Fault("controller moved", "controller", 1, _move_controller, sites=AGENTS | SSH),
)
