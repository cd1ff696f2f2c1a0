"""An interactive shell on a host, at this terminal."""

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Mapping
from typing import Any

from monarch_nb.job.tools.commands import rank_environment, usable_folder
from monarch_nb.mesh import HostMesh
from monarch_nb.runtime import Actor, Channel, Port, PortReceiver, endpoint

_CHUNK = 1 << 16
_GRACE_S = 1.0  # after the end of the input, and between one signal and the next
_LOOK_S = 0.02
# Becomes the owner of the terminal that is its input, then the shell.
_SHIM = "import fcntl,os,sys,termios; fcntl.ioctl(0,termios.TIOCSCTTY,0); os.execvp(sys.argv[1],sys.argv[1:])"
_EOT = b"\x04"

Input = bytes | tuple[int, int] | None  # typed bytes; rows and columns; None: end of the input
Output = bytes | int  # shown bytes; the exit status


class ShellActor(Actor):
    """Runs one shell in a terminal of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @endpoint
    def start(
        self,
        output: "Port[Output]",
        env: dict[str, str],
        workdir: str | None,
        client_folder: str,
        terminal: str,
        size: tuple[int, int],
    ) -> "Port[Input]":
        """Starts the shell; returns the port for its input."""
        port, receiver = Channel[Input].open()
        master, slave = os.openpty()
        _resize(master, size)
        variables = {**os.environ, **rank_environment(), **env, "TERM": terminal}
        program = variables.get("SHELL", "") or "/bin/sh"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _SHIM, program, "-i"],
                cwd=usable_folder(workdir, client_folder), env=variables, start_new_session=True,
                stdin=slave, stdout=slave, stderr=slave,
            )  # fmt: skip
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)
        threading.Thread(target=self._show, args=(master, output), name="shell-output", daemon=True).start()
        threading.Thread(target=self._type, args=(master, receiver), name="shell-input", daemon=True).start()
        return port

    def _show(self, terminal: int, output: "Port[Output]") -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(terminal, _CHUNK):
                output.send(data)
        status = self._process.wait()
        output.send(status if status >= 0 else 128 - status)

    def _type(self, terminal: int, receiver: "PortReceiver[Input]") -> None:
        with contextlib.suppress(OSError):
            while (message := receiver.recv().get()) is not None:
                if isinstance(message, bytes):
                    while message:
                        message = message[os.write(terminal, message) :]
                else:
                    _resize(terminal, message)
            os.write(terminal, _EOT)
            self._hang_up(terminal)

    def _hang_up(self, terminal: int) -> None:
        """Handles the end of the input: after a moment, ends the foreground program and the shell."""
        assert self._process is not None
        shell = self._process.pid
        groups = {shell}  # the foreground group, if the shell runs nothing
        for number, signum in enumerate((signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL)):
            if self._await_end(groups, _GRACE_S):
                return
            with contextlib.suppress(OSError):
                if (group := os.tcgetpgrp(terminal)) > 1:  # 0: the terminal has no foreground group any more
                    groups.add(group)
            for group in groups if number else groups - {shell}:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signum)
                    os.killpg(group, signal.SIGCONT)

    def _await_end(self, groups: set[int], timeout: float) -> bool:
        """Waits for the end of process groups; returns whether all have ended."""
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while True:
            self._process.poll()
            for group in tuple(groups):
                try:
                    os.killpg(group, 0)
                except ProcessLookupError:
                    groups.discard(group)
            if not groups or time.monotonic() >= deadline:
                return not groups
            time.sleep(_LOOK_S)

    def __cleanup__(self, exc: Exception | None) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGHUP)
                os.killpg(self._process.pid, signal.SIGCONT)
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _resize(fd: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _size(fd: int) -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return rows, columns


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Passes every key to the remote shell, also Ctrl-C; for a terminal only."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizes(fd: int, port: "Port[Input]") -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not os.isatty(fd):
        yield
        return
    before = signal.signal(signal.SIGWINCH, lambda *_: port.send(_size(fd)))
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def shell(host_mesh_singleton: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Runs an interactive shell ($SHELL over there) on one host, at this process's terminal; returns its exit status.

    Without `workdir` it begins in this process's folder, if it exists there. Blocks until the shell ends. At the end of
    the input, typed commands get a second to finish before the foreground program is hung up.
    Raises ValueError for a mesh of several hosts.
    """
    if len(host_mesh_singleton) != 1:
        raise ValueError(f"shell takes a mesh of one host, not of {len(host_mesh_singleton)}: slice it")
    stdin, stdout = sys.stdin.fileno(), sys.stdout.fileno()
    procs = host_mesh_singleton.spawn_procs(name="shell")
    stopped, stop = os.pipe()
    typist: threading.Thread | None = None
    try:
        port, receiver = Channel[Output].open()
        actor: Any = procs.spawn("shell", ShellActor)
        terminal = os.environ.get("TERM", "xterm-256color")
        started = actor.start.call(port, dict(env or {}), workdir, os.getcwd(), terminal, _size(stdin))
        [keys] = started.get().values()
        with _raw(stdin), _resizes(stdin, keys):
            typist = threading.Thread(target=_forward, args=(stdin, stopped, keys), name="monarch-shell", daemon=True)
            typist.start()
            sys.stdout.flush()
            while not isinstance(output := receiver.recv().get(), int):
                while output:
                    output = output[os.write(stdout, output) :]
            return output
    finally:
        os.close(stop)
        if typist is not None:
            typist.join()
        os.close(stopped)
        procs.stop().get()


def _forward(stdin: int, stopped: int, port: "Port[Input]") -> None:
    while True:
        ready, _, _ = select.select([stdin, stopped], [], [])
        if stopped in ready:
            return
        try:
            data = os.read(stdin, _CHUNK)
        except OSError:  # the terminal is gone
            data = b""
        port.send(data or None)
        if not data:
            return
