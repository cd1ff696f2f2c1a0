"""The processes of one host: each as its agent sees it, how it starts, and how it ends.

To stop it takes a request, then SIGTERM, then SIGKILL; a stopped (SIGSTOP) or unresponsive process ends too.
"""

import errno
import math
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from monarch_nb.host.linux import portable, processor_time, state_letter
from monarch_nb.host.loop import Loop, Timer
from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.procs.environment import overlaid, reason_for_cold_start
from monarch_nb.host.procs.forker import DIED, Forker, SpareProcs, start_cold
from monarch_nb.host.procs.reaper import OomCounter, Reaper, exit_outcome, exit_reason, kill_group, last_words
from monarch_nb.host.procs.template import EarlyTemplates
from monarch_nb.host.protocol import Exited, Launch, ProcSample, ProcSpec, ProcStatus, ProcStop
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import PROC_STOP
from monarch_nb.logs.spool import spool_size
from monarch_nb.settings import settings
from monarch_nb.wire import size_text

if TYPE_CHECKING:
    from monarch_nb.host.agent import HostAgent

_REMEMBERED = 1024  # ended processes, for late requests
_LOOK_S = 1.0  # between checks whether the light template can be ended


class MemoryReadings:
    """The memory of a process in the last minutes: few readings, the older the farther apart."""

    MOST = 12
    APART = 3.0  # times as old as the one before is a reading that is shown

    def __init__(self) -> None:
        self._readings: list[tuple[float, int]] = []  # wall clock, and bytes

    def add(self, timestamp: float, size: int) -> None:
        """Adds a reading, unless it is 0 bytes."""
        if size:
            self._readings.append((timestamp, size))
        if len(self._readings) > self.MOST:
            del self._readings[1 : self.MOST // 2 : 2]

    def text(self, now: float) -> str:
        """Returns the readings, the newest first: "9.81 GB 1 s before, 4.10 GB 8 s before"; "" without readings."""
        parts, shown_age = list[str](), 0.0
        for timestamp, size in reversed(self._readings):
            if (age := now - timestamp) >= self.APART * shown_age:
                parts.append(f"{size_text(size)} {age:.0f} s before")
                shown_age = max(age, 1.0)
        return ", ".join(parts)


class Child(Struct, eq=False):
    """A process from the request for it to its end. States: starting, running, stopping, exited."""

    spec: ProcSpec
    watchers: set[str]
    state: str = "starting"
    pid: int = 0
    how: str = ""
    light: bool = False  # forked from the light template
    why: str = ""
    channel: ProcChannel | None = None
    requested_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0  # wall clock
    asked_at: float | None = None  # monotonic, while a ping is unanswered
    ran: float | None = None  # processor seconds at its last answer
    memory: MemoryReadings = field(default_factory=MemoryReadings)
    ask_by: float = 0.0  # monotonic: the next ping at the latest
    unresponsive_since: float | None = None  # wall clock
    stop_wanted: bool = False
    stop_reason: str = ""
    evicted: bool = False  # stopped without its owner's request
    log_file: str = ""
    exit: Exited | None = None

    @property
    def address(self) -> str:
        """The proc's address."""
        return self.spec.address

    @property
    def alive(self) -> bool:
        """True until it has ended, also while it is being started."""
        return self.exit is None

    def own(self, owner: str) -> None:
        """Changes its owner."""
        self.spec = replace(self.spec, owner=owner)

    def discard(self) -> None:
        """Drops everything but the report for late requests, once its end has been reported."""
        self.channel = None
        self.watchers.clear()
        self.spec = replace(self.spec, env={}, sys_path=(), cwd=None)

    def sample(self) -> ProcSample:
        """Returns its state and processor time as the system has them, whether it answers or not."""
        used = processor_time(self.pid) if self.pid else None
        return ProcSample(state_letter(self.pid) if self.pid else "", math.nan if used is None else used)

    def describe(self) -> ProcStatus:
        """Returns its part of agent.status."""
        return ProcStatus(
            address=self.address, pid=self.pid, state=self.state, owner=self.spec.owner, name=self.spec.name,
            how=self.how, why=self.why, started_at=self.started_at, unresponsive_since=self.unresponsive_since,
            exit=self.exit,
        )  # fmt: skip


class Start(Struct, frozen=True):
    """A request to start one process."""

    spec: ProcSpec
    python: str | None = None
    bind: Mapping[str, str] | None = None
    cold: bool = False
    launch: Launch | None = None


class Children:
    """Starts and watches processes. Everything happens on the loop's thread."""

    def __init__(self, loop: Loop, folder: Path, environment: Mapping[str, str], cord: int, listener: "HostAgent",
                 early: EarlyTemplates | None = None) -> None:  # fmt: skip
        self._loop = loop
        self._environment = environment
        self._cord = cord
        self._listener = listener
        self._starts: dict[ProcChannel, tuple[Child, Start]] = {}
        self._children: dict[str, Child] = {}
        self._alive: dict[str, Child] = {}  # a subset: many more may have ended
        self._popen: dict[int, subprocess.Popen[bytes]] = {}
        self._oom = OomCounter()
        self.reaper = Reaper(loop, self._drain)
        self.forker = Forker(loop, folder, environment, cord, self._refused, self.reaper, self._retire_light)
        self._light = Forker(loop, folder, environment, cord, self._refused, self.reaper, restarts=False)
        self.spares = SpareProcs(loop, self.forker, self.reaper)
        if early is not None:
            if early.light is not None:
                self._light.adopt(early.light, early.pid)
            self.forker.adopt(early.full, early.pid if early.light is None else None)

    def alive(self) -> list[Child]:
        """Returns processes that have not ended."""
        return list(self._alive.values())

    def find(self, address: str) -> Child | None:
        """Returns a process by address, ended ones too for a while."""
        return self._children.get(address)

    def reportable(self, addresses: Iterable[str]) -> list[str]:
        """Returns the addresses that need a report: not processes of this host that have ended or are to end."""
        children = [(address, self._children.get(address)) for address in addresses]
        return [address for address, child in children if child is None or (child.alive and not child.stop_wanted)]

    def all(self) -> list[Child]:
        """Returns every remembered process."""
        return list(self._children.values())

    def start(self, starts: Sequence[Start], watchers: Iterable[str], *, heavy: bool = True) -> None:
        """Starts processes. Returns at once; the listener gets the outcomes.

        They wait for the template if they are `heavy`, or many: see `_forker_for`.
        """
        forks = []
        for start in starts:
            child = Child(start.spec, set(watchers))
            self._children[child.address] = self._alive[child.address] = child
            child.why = self._cold_reason(start)
            if not child.why and self._take_spare(child, start):
                continue
            try:
                channel = child.channel = self._channel(child)
            except OSError as error:
                self._failed(child, explain(error))
                continue
            self._starts[channel] = (child, start)
            if child.why:
                self._start_cold(channel)
            else:
                forks.append(channel)
        if forks:
            forker = self._forker_for(len(forks), heavy)
            for channel in forks:
                self._starts[channel][0].light = forker is self._light
            forker.fork(forks)
        self._forget_old()

    def _take_spare(self, child: Child, start: Start) -> bool:
        """Turns a spare of the mesh into this process; False if there is none."""
        spare = self.spares.take(start.spec.mesh)
        if spare is None:
            return False
        channel = child.channel = spare.channel
        child.pid, child.how = spare.pid, "spare"
        self._starts[channel] = (child, start)
        channel.attach(lambda words: self._on_words(channel, child, words), lambda: None)
        spare.died = lambda status: self._spare_died(child, channel, status)
        channel.give(start.spec)
        return True

    def _spare_died(self, child: Child, channel: ProcChannel, status: int) -> None:
        """Replaces a spare that has ended before it began as this process."""
        if child.state != "starting":
            self._died(child, status)
            return
        child.pid, child.how = 0, ""
        if (replacement := self._new_channel(channel)) is not None:
            self.forker.fork([replacement])

    def _forker_for(self, count: int, heavy: bool) -> Forker:
        """Returns the template or, while that still imports, the light one for a few processes without heavy modules.

        More of them, or processes that import torch anyway, start sooner if they share the template's imports.
        """
        light = self._light.coming or self._light.ready
        if heavy or not light or not self.forker.coming:
            return self.forker
        running = sum(child.light for child in self._alive.values())  # each may be replaced by this process
        return self._light if running + count <= settings.host_light_procs else self.forker

    def _retire_light(self) -> None:
        """Ends the light template, once the real one is ready and its requests are under way."""
        if any(child.state == "starting" for child in self._alive.values()):
            self._loop.call_later(_LOOK_S, self._retire_light)
        else:
            self._light.close()

    def signal(self, child: Child, signum: int) -> None:
        """Sends a signal to a living proc; SIGKILL goes to everything in its session's group."""
        if not child.alive or not child.pid:
            child.stop_wanted = child.stop_wanted or signum in (signal.SIGKILL, signal.SIGTERM)
        elif signum == signal.SIGKILL:
            kill_group(child.pid)
            os.kill(child.pid, signum)
        else:
            os.kill(child.pid, signum)

    def close(self) -> None:
        """Kills the templates."""
        self._light.close()
        self.forker.close()

    def look(self) -> None:
        """Checks periodically, while there are processes."""
        self._oom.look(time.monotonic())

    def _cold_reason(self, start: Start) -> str:
        if portable():
            return "no fork on this system"
        if start.python:
            return "another interpreter"
        if start.bind:
            return "proc_bind"
        if start.launch is not None:
            return "a bootstrap command"
        return "asked for" if start.cold else reason_for_cold_start(start.spec.env, self._environment)

    def _channel(self, child: Child) -> ProcChannel:
        channel: ProcChannel

        def line(words: list[str]) -> None:
            self._on_words(channel, child, words)

        def end() -> None:
            self._channel_ended(channel, child)

        channel = ProcChannel(self._loop, child.spec, line, end)
        return channel

    def _on_words(self, channel: ProcChannel, child: Child, words: list[str]) -> None:
        match words:
            case ["pong"]:
                self._listener.pong(child)
            case ["pid", number] if child.state == "starting":
                self._starts.pop(channel, None)
                if not child.pid:
                    child.pid, child.how = int(number), "fork"
                    (self._light if child.light else self.forker).forked()
                    self.reaper.watch(child.pid, lambda status: self._died(child, status))
                child.state, child.started_at = "running", time.time()
                if child.stop_wanted:
                    self.signal(child, signal.SIGKILL)
                self._listener.started(child)
            case ["error", *text] if child.state == "starting":
                self._starts.pop(channel, None)
                self._failed(child, " ".join(text))

    def _channel_ended(self, channel: ProcChannel, child: Child) -> None:
        if channel in self._starts and not child.pid:  # no process has its other end: it has failed
            self._refused(channel, DIED)

    def _refused(self, channel: ProcChannel, reason: str) -> None:
        """Starts a process that the template refused by the cold path, with a new channel."""
        if self.spares.refused(channel, reason):
            return
        child, _ = self._starts[channel]
        if not child.stop_wanted:
            child.why = reason
        if (replacement := self._new_channel(channel)) is not None:
            self._start_cold(replacement)

    def _new_channel(self, channel: ProcChannel) -> ProcChannel | None:
        """Replaces the channel of a process that has not started; None if the process fails instead."""
        child, start = self._starts.pop(channel)
        channel.close()
        if child.stop_wanted:
            self._failed(child, "it was stopped before it started")
            return None
        try:
            replacement = child.channel = self._channel(child)
        except OSError as error:
            self._failed(child, explain(error))
            return None
        self._starts[replacement] = (child, start)
        return replacement

    def _start_cold(self, channel: ProcChannel) -> None:
        child, start = self._starts[channel]
        try:
            base = self._environment if start.launch is None or start.launch.inherit_env else {}
            process = start_cold(channel, self._cord, overlaid(base, start.spec.env), python=start.python,
                                 bind=start.bind, log=start.spec.log, launch=start.launch)  # fmt: skip
        except (OSError, ValueError) as error:
            self._starts.pop(channel)
            self._failed(child, explain(error))
            return
        child.pid, child.how = process.pid, "cold"
        self._popen[process.pid] = process  # held until reaped, or subprocess would reap it first
        self.reaper.watch(process.pid, lambda status: self._died(child, status))

    def _drain(self) -> None:
        for channel in list(self._starts):
            channel.drain()

    def _died(self, child: Child, status: int) -> None:
        code, signum = exit_outcome(status)
        process = self._popen.pop(child.pid, None)
        if process is not None:
            process.returncode = -signum if signum is not None else code
        if child.channel is not None:
            self._starts.pop(child.channel, None)
        oom = signum == signal.SIGKILL and not child.stop_wanted and self._oom.struck()
        reason = child.stop_reason if child.stop_wanted and child.stop_reason else exit_reason(code, signum, oom=oom)
        lines, dump = last_words(child.spec.log)
        self._end(child, Exited(address=child.address, host=child.spec.host, reason=reason, pid=child.pid,
                                exitcode=code, signal=signum, last_lines=lines, dump=dump, oom=oom,
                                memory=child.memory.text(time.time()) if oom else "",
                                expected=child.stop_wanted and not child.evicted, evicted=child.evicted, at=time.time(),
                                log_bytes=spool_size(child.spec.log)))  # fmt: skip

    def _failed(self, child: Child, cause: str) -> None:
        reason = f"the process could not be started on host {child.spec.host}: {cause}"
        self._end(child, Exited(address=child.address, host=child.spec.host, expected=child.stop_wanted,
                                at=time.time(), reason=reason))  # fmt: skip

    def _end(self, child: Child, exit: Exited) -> None:
        child.exit, child.state = exit, "exited"
        del self._alive[child.address]
        if child.channel is not None:
            child.channel.close()
        self._listener.exited(child)
        if exit.expected and not any(process.spec.mesh == child.spec.mesh for process in self._alive.values()):
            self.spares.end(child.spec.mesh)
        child.discard()

    def _forget_old(self) -> None:
        for address in [child.address for child in self._children.values() if not child.alive][:-_REMEMBERED]:
            del self._children[address]


def explain(error: Exception) -> str:
    """Returns why a process could not be started, with what to do about it."""
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"no file descriptors left (limit {limit}); raise it with `ulimit -n` before the host agent starts"
    if number == errno.EAGAIN:
        return "no more processes allowed; see `ulimit -u` and the control group's pids.max"
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {error.filename}"
    return (getattr(error, "strerror", None) or str(error)) if isinstance(error, OSError) else str(error)


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
