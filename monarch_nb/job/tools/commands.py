"""Commands run on hosts, with their output here, and an interactive shell on a host, at this terminal."""

import contextlib
import contextvars
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from monarch_nb.host.command import check_environment
from monarch_nb.mesh import HostMesh, spawn_helpers
from monarch_nb.runtime import (
    Actor,
    Channel,
    Future,
    Port,
    PortReceiver,
    cancel_with,
    current_runtime,
    endpoint,
    fail_future,
    give_up,
    pending_future,
    resolve_future,
)

Line = tuple[str, bytes]  # stream and text; an empty stream: the rank is done
Input = bytes | tuple[int, int] | None  # typed bytes; rows and columns; None: end of the input
Output = bytes | int  # shown bytes; the exit status
_CHUNK = 1 << 16
_GRACE_S = 1.0  # after the end of the input, and between one signal and the next
_LOOK_S = 0.02
# Becomes the owner of the terminal that is its input, then the shell.
_SHIM = "import fcntl,os,sys,termios; fcntl.ioctl(0,termios.TIOCSCTTY,0); os.execvp(sys.argv[1],sys.argv[1:])"
_EOT = b"\x04"


def rank_environment() -> dict[str, str]:
    """Returns variables with the rank of this process in its mesh, for commands that it starts."""
    point = current_runtime().context().actor_instance.rank
    coordinates = {f"MONARCH_RANK_{label}": str(index) for label, index in point.items()}
    sizes = zip(point.extent.labels, point.extent.sizes, strict=True)
    return {**coordinates, **{f"MONARCH_SIZE_{label}": str(size) for label, size in sizes}}


def _variables(env: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the environment of a command on this rank; None in `env` removes a variable."""
    variables = {**os.environ, **rank_environment(), **env}
    return {name: value for name, value in variables.items() if value is not None}


def usable_folder(workdir: str | None, client_folder: str) -> str | None:
    """Returns the requested folder, or else the client's, if this machine has it."""
    return workdir or (client_folder if os.path.isdir(client_folder) else None)


class CommandActor(Actor):
    """Runs commands on the host of its process."""

    @endpoint
    def run(
        self,
        command: list[str],
        env: dict[str, str | None],
        workdir: str | None,
        client_folder: str,
        output_dir: str | None,
        port: "Port[Line]",
    ) -> int:
        """Returns the exit status, 128 + n for signal n. Sends lines of output to the port, or to `output_dir`."""
        variables = _variables(env)
        folder = usable_folder(workdir, client_folder)
        try:
            if output_dir is None:
                status = self._stream(command, variables, folder, port)
            else:
                status = self._to_files(command, variables, folder, self._expanded(output_dir))
        except OSError as error:
            port.send(("stderr", f"{command[0]}: {error.strerror}: {error.filename}\n".encode()))
            status = 127 if isinstance(error, FileNotFoundError) else 126
        finally:
            port.send(("", b""))
        return status if status >= 0 else 128 - status

    @staticmethod
    def _expanded(output_dir: str) -> str:
        point = current_runtime().context().actor_instance.rank
        return output_dir.replace("$SUBDIR", "_".join(f"{label}_{index}" for label, index in point.items()))

    @staticmethod
    def _stream(command: list[str], env: Mapping[str, str], folder: str | None, port: "Port[Line]") -> int:
        with subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:

            def pump(name: str, pipe: Any) -> None:
                for line in pipe:
                    port.send((name, line))

            pumps = [
                threading.Thread(target=pump, args=(name, getattr(process, name)), daemon=True)
                for name in ("stdout", "stderr")
            ]
            for thread in pumps:
                thread.start()
            for thread in pumps:
                thread.join()
        return process.returncode

    @staticmethod
    def _to_files(command: list[str], env: Mapping[str, str], folder: str | None, output_dir: str) -> int:
        os.makedirs(output_dir, exist_ok=True)
        with open(f"{output_dir}/stdout.txt", "wb") as out, open(f"{output_dir}/stderr.txt", "wb") as err:
            return subprocess.run(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False
            ).returncode


def exec_command(
    host_mesh: HostMesh,
    cmd: "Sequence[str | os.PathLike[str]]",
    env: Mapping[str, str | None] | None = None,
    workdir: str | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
) -> Future[int]:
    """Runs a command on each host (or at one `rank` or `point`); the future gives the largest exit status.

    It begins at once, whether or not the future is awaited, on processes of its own, which are stopped when it has
    ended; `cancel()` of the future ends it. `x.py` and `-m` run in this program's interpreter there. Output is written
    here line by line, or to `stdout.txt` and `stderr.txt` in `output_dir`, where $SUBDIR stands for the place in the
    mesh. The status of an unknown program is 127. None in `env` removes a variable. Raises ValueError for no command,
    and for both `rank` and `point`; TypeError for words, or an environment, that are not text.
    """
    if isinstance(cmd, str) or not cmd:
        raise ValueError("exec_command takes a command as a list, such as ['nvidia-smi', '-L']")
    command = [os.fsdecode(word) for word in cmd]
    check_environment(env or {}, "exec_command(env=...)")
    if rank is not None and point is not None:
        raise ValueError("exec_command takes rank or point, not both")
    hosts: Any = host_mesh
    if point is not None:
        hosts = hosts.slice(**point)
    elif rank is not None:
        hosts = hosts.flatten("rank").slice(rank=rank)
    future: Future[int] = pending_future(describe=lambda: f"{' '.join(command)} runs")
    calls: list[Future[Any]] = []

    def cancel(future: Future[Any]) -> bool:
        if not give_up(future):
            return False
        for call in tuple(calls):
            call.cancel()
        return True

    def begun(call: Future[Any]) -> None:
        calls.append(call)
        if future.done():  # cancelled meanwhile
            call.cancel()

    cancel_with(future, cancel)

    def work() -> None:
        try:
            resolve_future(future, _run(hosts, command, dict(env or {}), workdir, output_dir, per_host, begun))
        except BaseException as error:
            fail_future(future, error)

    context = contextvars.copy_context()
    # Not a daemon: the program's exit waits for a command that has begun.
    threading.Thread(target=context.run, args=(work,), name="monarch-exec", daemon=False).start()
    return future


def _run(
    hosts: HostMesh,
    command: list[str],
    env: dict[str, str | None],
    workdir: str | None,
    output_dir: str | None,
    per_host: Mapping[str, int] | None,
    begun: Callable[[Future[Any]], None],
) -> int:
    if command[0] == "-m" or command[0].endswith(".py"):
        command = [hosts.python or sys.executable, *command]
    port, receiver = Channel[Line].open()
    procs = spawn_helpers(hosts, "exec", per_host)
    try:
        actors: Any = procs.spawn("command", CommandActor)
        call = actors.run.call(command, env, workdir, os.getcwd(), output_dir, port)
        writer = threading.Thread(target=_write, args=(receiver, len(procs)), name="monarch-exec-output", daemon=True)
        writer.start()
        begun(call)
        statuses: list[int] = call.get().values()
        writer.join()
        return max(statuses)
    except BaseException:
        for _ in range(len(procs)):  # ends the writer, for ranks that do not
            port.send(("", b""))
        raise
    finally:
        procs.stop().get()


def _write(receiver: "PortReceiver[Line]", ranks: int) -> None:
    while ranks:
        name, line = receiver.recv().get()
        if not name:
            ranks -= 1
            continue
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(line.decode(errors="replace"))
        stream.flush()


class ShellActor(Actor):
    """Runs one shell in a terminal of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @endpoint
    def start(
        self,
        output: "Port[Output]",
        env: dict[str, str | None],
        workdir: str | None,
        client_folder: str,
        terminal: str,
        size: tuple[int, int],
    ) -> "Port[Input]":
        """Starts the shell; returns the port for its input."""
        port, receiver = Channel[Input].open()
        master, slave = os.openpty()
        _resize(master, size)
        variables = {**_variables(env), "TERM": terminal}
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


def shell(
    host_mesh_singleton: HostMesh, *, env: Mapping[str, str | None] | None = None, workdir: str | None = None
) -> int:
    """Runs an interactive shell ($SHELL over there) on one host, at this process's terminal; returns its exit status.

    Without `workdir` it begins in this process's folder, if it exists there. Blocks until the shell ends. At the end of
    the input, typed commands get a second to finish before the foreground program is hung up.
    Raises ValueError for a mesh of several hosts, TypeError for an environment that is not text.
    """
    check_environment(env or {}, "shell(env=...)")
    if len(host_mesh_singleton) != 1:
        raise ValueError(f"shell takes a singleton HostMesh, not one of {len(host_mesh_singleton)} hosts: slice it")
    stdin, stdout = sys.stdin.fileno(), sys.stdout.fileno()
    procs = spawn_helpers(host_mesh_singleton, "shell")
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
