"""The ways in which an agent starts processes: forks of the template, spares that are forked ahead, and by exec.

The agent starts the template, waits until it is ready and notices its death. The cold path, a fresh interpreter by
exec, works everywhere, and for any interpreter and environment. A spare takes the position of a rank that has ended.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from monarch_nb.host.launch import command
from monarch_nb.host.loop import READ, Loop, Timer
from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.procs.environment import held_back, overlaid
from monarch_nb.host.procs.proc_main import DESCRIPTORS
from monarch_nb.host.procs.reaper import Reaper, kill_group
from monarch_nb.host.procs.template import BATCH
from monarch_nb.host.protocol import KeepSpares, Launch
from monarch_nb.logs.spool import ERR, OUT

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 10.0
DIED = "the template process died"
_REPLACE_S = 2.0  # until a spare is replaced, so that it does not slow down a heal
_ATTEMPTS = 3  # starts of spares that end by themselves
_NUMACTL = frozenset({"cpunodebind", "membind", "physcpubind"})
_NODES = Path("/sys/devices/system/node")

Refuse = Callable[[ProcChannel, str], None]


class Forker:
    """Requests forks from a template. Calls `refuse(channel, reason)` for each process that must start another way.

    A channel that was handed over and ends without a message means that the template, or its middle process, was
    killed.
    """

    def __init__(self, loop: Loop, folder: Path, environment: Mapping[str, str], cord: int, refuse: Refuse,
                 reaper: Reaper, on_decided: Callable[[], None] = lambda: None, *, restarts: bool = True,
                 ready_timeout_s: float = 60.0) -> None:  # fmt: skip
        self._loop = loop
        self._folder = folder
        self._environment = environment
        self._cord = cord
        self._refuse = refuse
        self._reaper = reaper
        self._ready_timeout_s = ready_timeout_s
        self._on_decided = on_decided
        self._restarts = restarts
        self._process: subprocess.Popen[bytes] | None = None  # None also where it was not started here
        self._pid: int | None = None
        self._socket: socket.socket | None = None
        self._hello = b""
        self._ready = False
        self._waiting: list[ProcChannel] = []
        self._timer: Timer | None = None  # for being ready, later for answering
        self._unanswered = 0
        self._started_at = 0.0
        self.threads: int | None = None
        self.seconds: float | None = None
        self.error = ""

    @property
    def pid(self) -> int | None:
        """The template's process id, if there is a template."""
        return self._pid

    @property
    def ready(self) -> bool:
        """True while the template is ready."""
        return self._ready

    @property
    def coming(self) -> bool:
        """True while a template still imports."""
        return self._socket is not None and not self._ready

    def prewarm(self) -> None:
        """Starts the template unless it is there."""
        if self._socket is None and self._restarts and not self._unusable:
            self._start()

    def adopt(self, control: socket.socket, pid: int | None) -> None:
        """Takes over a running template; without `pid`, its first message contains it."""
        self._started_at = time.monotonic()
        self._listen(control)
        if pid is not None:
            self._watch(pid)

    def fork(self, channels: Sequence[ProcChannel]) -> None:
        """Requests one fork for each channel; queued until the template is ready. Never blocks."""
        self.prewarm()
        self._waiting += channels
        if self._socket is None:
            self._refuse_waiting(self.error or DIED)
        elif self._ready:
            self._hand_over()
        else:
            self._hurry()

    def _hurry(self) -> None:
        """Makes a template that delays its imports begin them."""
        with contextlib.suppress(OSError):  # its end is about to be read
            if self._socket is not None:
                self._socket.send(bytes(4))

    def close(self) -> None:
        """Kills the template; it has no state."""
        if self._socket is not None:
            self._loop.unregister(self._socket.fileno())
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # Popen.kill would take the status that the reaper waits for

    @property
    def _unusable(self) -> bool:
        return self.threads is not None and self.threads != 1

    def _start(self) -> None:
        own, far = socket.socketpair()
        self._started_at = time.monotonic()
        try:
            with far, open(self._folder / "logs" / "template.log", "ab") as out:
                self._process = subprocess.Popen(
                    command("monarch_nb.host.procs.template", far.fileno(), self._cord),
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(far.fileno(), self._cord),
                    env=held_back(self._environment), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            own.close()
            self.error = f"the template process could not be started: {error.strerror}"
            return
        self._listen(own)
        self._watch(self._process.pid)

    def _listen(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._socket, self._hello, self._ready, self.error = control, b"", False, ""
        self._loop.register(control.fileno(), READ, self._read)
        self._unanswered = 0
        self._be_patient(self._ready_timeout_s)

    def _watch(self, pid: int) -> None:
        self._pid = pid
        self._reaper.watch(pid, self._died)

    def _read(self, _events: int) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()  # it has ended, or is to; _died() is called next
            if self._pid is None:
                self._on_death()
        elif self._ready:
            self._unanswered -= len(data)
            self._be_patient(_ANSWER_TIMEOUT_S if self._unanswered else None)
        else:
            self._hello += data
            self._read_hello()

    def _read_hello(self) -> None:
        *lines, self._hello = self._hello.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if self._pid is None:
                self._watch(message["pid"])
            if "threads" in message:
                self._imported(message["threads"])

    def _imported(self, threads: int) -> None:
        self.threads = threads
        self.seconds = time.monotonic() - self._started_at
        self._be_patient(None)
        if self._unusable:
            self.error = f"the template process has {self.threads} threads after its imports"
            self.close()
        else:
            self._ready = True
            self._hand_over()
        self._on_decided()

    def _hand_over(self) -> None:
        assert self._socket is not None
        while self._waiting:
            batch = self._waiting[:BATCH]
            try:
                socket.send_fds(self._socket, [len(batch).to_bytes(4, "big")], [channel.far_fd for channel in batch])
            except BlockingIOError:
                self.error = "the template process does not answer"
                self.close()
                return
            except OSError:
                return  # its end is about to be read
            del self._waiting[: len(batch)]
            for channel in batch:
                channel.handed_over()
            self._unanswered += 1
            self._be_patient(_ANSWER_TIMEOUT_S)

    def forked(self) -> None:
        """Extends the time-out: on a machine short of processors the remaining forks may take long."""
        if self._ready and self._unanswered:
            self._be_patient(_ANSWER_TIMEOUT_S)

    def _be_patient(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self.error = "the template process did not answer in time"
        self.close()

    def _died(self, status: int) -> None:
        if self._process is not None:
            self._process.returncode = os.waitstatus_to_exitcode(status)
        self._on_death()

    def _on_death(self) -> None:
        """Handles the template's death: one that has served gets a successor, else the next request starts one."""
        self._be_patient(None)
        if self._socket is not None:
            self._loop.unregister(self._socket.fileno())
            self._socket.close()
        served, self._ready = self._ready and not self.error, False
        self._process, self._pid, self._socket = None, None, None
        self._refuse_waiting(self.error or DIED)
        if served:
            self.prewarm()

    def _refuse_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, []
        for channel in waiting:
            self._refuse(channel, reason)


class SpareProc:
    """A process without a rank, of a mesh ("" once it is to end). `died` is called with its wait status."""

    def __init__(self, mesh: str, channel: ProcChannel, died: Callable[[int], None]) -> None:
        self.mesh, self.channel, self.died = mesh, channel, died
        self.pid = 0  # until it has been forked
        self.is_ready = False  # whether it has made its calls, which take longer than a fork


class SpareProcs:
    """The spares of the meshes of a host. Their environment, folder and devices are those of the rank they become.

    A spare that ends by itself is replaced, a few times, and nothing else happens. Everything happens on the loop's
    thread.
    """

    def __init__(self, loop: Loop, forker: Forker, reaper: Reaper) -> None:
        self._loop, self._forker, self._reaper = loop, forker, reaper
        self._requests: dict[str, KeepSpares] = {}  # by mesh
        self._spares: dict[ProcChannel, SpareProc] = {}
        self._attempts: Counter[str] = Counter()

    def keep(self, request: KeepSpares) -> None:
        """Starts the spares of a mesh, and replaces them from now on."""
        if request.count < 1:
            self.end(request.mesh)
            return
        is_new = self._requests.get(request.mesh) != request
        self._requests[request.mesh] = request
        del self._attempts[request.mesh]
        self._loop.call_later(0.0 if is_new else _REPLACE_S, lambda: self._fill(request.mesh))

    def take(self, mesh: str) -> SpareProc | None:
        """Returns and removes a spare of a mesh."""
        spare = next((spare for spare in self._spares.values() if spare.mesh == mesh and spare.is_ready), None)
        if spare is not None:
            del self._spares[spare.channel]
            del self._attempts[mesh]
            self._loop.call_later(_REPLACE_S, lambda: self._fill(mesh))
        return spare

    def refused(self, channel: ProcChannel, reason: str) -> bool:
        """Handles a refused fork; False if the channel belongs to no spare."""
        spare = self._spares.get(channel)
        if spare is None:
            return False
        channel.close()
        self._ended(spare, reason)
        return True

    def end(self, mesh: str) -> None:
        """Ends the spares of a mesh."""
        self._requests.pop(mesh, None)
        for spare in [spare for spare in self._spares.values() if spare.mesh == mesh]:
            spare.mesh = ""
            if spare.pid:  # else when it has been forked: the template has the channel
                self._drop(spare)

    def _drop(self, spare: SpareProc) -> None:
        del self._spares[spare.channel]
        spare.channel.close()
        with contextlib.suppress(ProcessLookupError):
            kill_group(spare.pid)
            os.kill(spare.pid, signal.SIGKILL)

    def owner_gone(self, owner: str) -> None:
        """Ends the spares of an owner's meshes."""
        for mesh in [mesh for mesh, request in self._requests.items() if request.owner == owner]:
            self.end(mesh)

    def _fill(self, mesh: str) -> None:
        request = self._requests.get(mesh)
        if request is None:
            return
        missing = request.count - sum(spare.mesh == mesh for spare in self._spares.values())
        channels: list[ProcChannel] = []
        for _ in range(missing):
            try:
                channel = ProcChannel(self._loop, None, lambda words: None, lambda: None)
            except OSError as error:
                log.warning("a spare process of %s could not be started: %s", mesh, error)
                break
            spare = self._spares[channel] = SpareProc(mesh, channel, lambda status: None)
            channel.attach(partial(self._on_words, spare), partial(self._channel_ended, spare))
            channel.prepare(request.prepare)
            channels.append(channel)
        if channels:
            self._forker.fork(channels)

    def _on_words(self, spare: SpareProc, words: list[str]) -> None:
        match words:
            case ["pid", number] if not spare.pid:
                spare.pid = int(number)
                self._forker.forked()
                spare.died = lambda status: self._ended(spare, f"it ended with status {status}")
                self._reaper.watch(spare.pid, lambda status: spare.died(status))
                if not spare.mesh:
                    self._drop(spare)
            case ["ready"]:
                spare.is_ready = True
            case ["error", *text]:
                spare.channel.close()
                self._ended(spare, " ".join(text))

    def _channel_ended(self, spare: SpareProc) -> None:
        if not spare.pid:  # else its death is about to be seen
            self._ended(spare, "its start failed")

    def _ended(self, spare: SpareProc, reason: str) -> None:
        if self._spares.pop(spare.channel, None) is None:
            return
        spare.channel.close()
        self._attempts[spare.mesh] += 1
        log.warning("a spare process of %s is gone: %s", spare.mesh, reason)
        if self._attempts[spare.mesh] < _ATTEMPTS:
            self._loop.call_later(_REPLACE_S, lambda: self._fill(spare.mesh))


def start_cold(channel: ProcChannel, cord: int, environment: Mapping[str, str], *, python: str | None = None,
          bind: Mapping[str, str] | None = None, log: str = "",
          launch: Launch | None = None) -> "subprocess.Popen[bytes]":  # fmt: skip
    """Starts a proc in a session of its own, by a command of the user's if there is one.

    Blocks for the exec (milliseconds). Raises OSError, and ValueError for an invalid binding.
    """
    prefix = binding_prefix(bind or {})
    executable = None
    if launch is None:
        argv = prefix + command("monarch_nb.host.procs.proc_main", channel.far_fd, cord, python=python)
    else:
        argv = [*prefix, launch.program, *launch.args]
        if launch.arg0 is not None and not prefix:
            argv[0], executable = launch.arg0, launch.program
        environment = {**overlaid(environment, launch.env), DESCRIPTORS: f"{channel.far_fd} {cord}"}
    with contextlib.ExitStack() as files:
        out: int | BinaryIO = subprocess.DEVNULL
        err: int | BinaryIO = subprocess.DEVNULL
        if log:
            with contextlib.suppress(OSError):  # a full disk must not keep a proc from starting
                out = files.enter_context(open(log + OUT, "ab", buffering=0))
                err = files.enter_context(open(log + ERR, "ab", buffering=0))
        process = subprocess.Popen(argv, executable=executable, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   start_new_session=True, pass_fds=(channel.far_fd, cord),
                                   env=dict(environment))  # fmt: skip
    channel.handed_over()
    return process


def binding_prefix(bind: Mapping[str, str]) -> list[str]:
    """Returns a command prefix that binds a command to processors and memory; nothing off Linux.

    Keys are numactl's (`cpunodebind`, `membind`, `physcpubind`), and `cpus`, which taskset takes where numactl lacks.
    """
    unknown = set(bind) - _NUMACTL - {"cpus"}
    if unknown:
        raise ValueError(f"unknown proc_bind keys {sorted(unknown)}; known are cpunodebind, membind, physcpubind, cpus")
    if not bind or sys.platform != "linux":
        return []
    search = os.environ.get("PATH")
    if shutil.which("numactl", path=search):
        options = {key: value for key, value in bind.items() if key in _NUMACTL} or {"physcpubind": bind["cpus"]}
        return ["numactl", *(f"--{key}={value}" for key, value in options.items())]
    cpus = bind.get("cpus") or bind.get("physcpubind") or _cpus_of_nodes(bind.get("cpunodebind", ""))
    ignored = [key for key in ("membind", "cpunodebind") if key in bind and (key == "membind" or not cpus)]
    if cpus and not shutil.which("taskset", path=search):
        ignored.append("cpus")
        cpus = ""
    if ignored:
        log.warning("proc_bind: %s is ignored: numactl is not installed on this host", ", ".join(ignored))
    return ["taskset", "-c", cpus] if cpus else []


def _cpus_of_nodes(nodes: str) -> str:
    """Returns the processors of memory nodes such as "0,1", as a list for taskset; empty for anything but numbers."""
    try:
        return ",".join((_NODES / f"node{int(node)}" / "cpulist").read_text().strip() for node in nodes.split(","))
    except (OSError, ValueError):
        return ""
