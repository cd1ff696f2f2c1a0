"""The agent's side of the template process: starts it, waits until it is ready, requests forks, notices its death."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from monarch_nb.host.bootstrap import command
from monarch_nb.host.loop import READ, Loop, Timer
from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.procs.environment import held_back
from monarch_nb.host.procs.reaper import Reaper
from monarch_nb.host.procs.template import BATCH

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 10.0
DIED = "the template process died"

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
