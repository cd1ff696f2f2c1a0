"""Starting Monarch's own processes: command lines that find the package, and a host agent, held by a pipe.

A notebook kernel starts its agent ahead, while it still imports the library.
"""

import contextlib
import os
import select
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from monarch_nb.host import folders
from monarch_nb.host.loop import LONGEST_WAIT_S
from monarch_nb.host.procs.environment import PRELOAD, read_at_load
from monarch_nb.host.protocol import AgentReady, PreemptionNotice
from monarch_nb.settings import TRAVELS_IN, settings
from monarch_nb.transport import descriptors_for, is_descriptor_limit
from monarch_nb.wire import json_decoder

ROOT = str(Path(__file__).resolve().parents[2])

# The package decides where its submodules are; nothing else must come from its folder before the standard library.
_OWN_PATH = f"sys.path.insert(0, {ROOT!r}); import monarch_nb; sys.path.append(sys.path.pop(0))"
_OTHER_PATH = f"sys.path.append({ROOT!r})"

_LINES = 20  # of an agent's log in the error of a failed start
LAST_WORDS_S = 2.0  # for an agent that ends to write why

BegunWith = tuple[str, dict[str, str]]


def command(module: str, *arguments: object, python: str | None = None) -> list[str]:
    """Returns the command line that runs `main(argv)` of a module, without the current folder on the path.

    This interpreter runs the same package as this process; another one prefers its own.
    """
    find = _OWN_PATH if python in (None, sys.executable) else _OTHER_PATH
    code = f"import sys; {find}; from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [python or sys.executable, "-P", "-c", code, *map(str, arguments)]


def untraced(command: list[str]) -> list[str]:
    """Returns a command line for the same program that a debugger of this process does not take over.

    pydevd, the base of debugpy, JupyterLab's debugger and PyCharm, replaces the arguments of each Python that a traced
    process starts: it then waits for a front end to attach to it, and JupyterLab never does. It recognizes a Python by
    the name of the program, and `env` has another one.
    """
    env = shutil.which("env") if "pydevd" in sys.modules else None
    return command if env is None else [env, *command]


class AgentStartError(RuntimeError):
    """A host agent did not start; the message has its output."""


class AgentHandle:
    """A host agent that this process owns: it and its procs end with this process, or with `close()`."""

    def __init__(self, process: "subprocess.Popen[bytes]", ready: AgentReady, run_folder: Path) -> None:
        self.host = ready.host
        self.address = ready.address
        self.endpoint = ready.endpoint
        self.pid = ready.pid
        self.incarnation = ready.incarnation
        self.run_folder = run_folder
        self._process = process

    @property
    def alive(self) -> bool:
        """True while the agent runs."""
        return self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until the agent has ended; returns its exit status. Raises TimeoutError."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the agent of host {self.host} still runs after {timeout_s:g} s") from None
        if self._process.stdin is not None:
            self._process.stdin.close()
        return status

    def kill(self) -> None:
        """Ends it, and all on it, at once; blocks until it has ended. The run folder stays."""
        self._process.kill()
        self._process.wait()

    def warn(self, notice: PreemptionNotice) -> None:
        """Makes the agent notify all users of the host that it is about to be ended; does nothing if it has ended."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), msgspec.json.encode(notice) + b"\n")

    def disown(self) -> None:
        """Lets it outlive this process: it ends, and removes its folder, once no owner has processes there."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.returncode = self._process.poll() or 0  # no caller waits for it

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops the procs (SIGTERM, then SIGKILL) and the agent; blocks until they end. Removes the run folder."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the procs go with it
            self._process.wait()
        folders.remove_run_folder(self.run_folder)

    def __enter__(self) -> "AgentHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin_agent(
    host: str | None = None,
    run_folder: Path | str | None = None,
    *,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    tcp: str | None = None,
    tcp_fd: int | None = None,
    key: Path | None = None,
    insecure_loopback: bool = False,
    lease_s: float = 60.0,
    prewarm: bool = True,
    keep_folder: bool = False,
    unused_s: float | None = None,
    bound: bool = False,
) -> "ComingAgent":
    """Starts a host agent that this process owns, without waiting for it (`wait()` takes about 0.2 s).

    It outlives this process while controllers have detached or kept meshes there, unless it is `bound`.
    Raises AgentStartError, DescriptorLimitError.
    """
    host = host or folders.new_host_id()
    folder = Path(run_folder) if run_folder is not None else folders.run_folder_for(host)
    options: list[object] = ["--host", host, "--run-folder", folder, "--lease-s", lease_s]
    options += ["--tcp", tcp] if tcp is not None else []
    options += ["--tcp-fd", tcp_fd] if tcp_fd is not None else []
    options += ["--key", key] if key is not None else []
    options += ["--insecure-loopback"] * insecure_loopback
    options += ["--unused-s", unused_s] if unused_s is not None else []
    options += ["--prewarm"] * prewarm + ["--bound"] * bound + ["--keep-folder"] * keep_folder
    with descriptors_for(f"starting the agent of host {host}"):
        folders.sweep()
        folders.make_run_folder(folder)
        try:
            with open(folder / "logs" / "agent.log", "ab") as errors:
                process = subprocess.Popen(
                    untraced(command("monarch_nb.host.agent", *options, python=python or sys.executable)),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                    env=None if env is None else dict(env), pass_fds=() if tcp_fd is None else (tcp_fd,),
                )  # fmt: skip
        except OSError as error:
            folders.remove_run_folder(folder)
            if is_descriptor_limit(error):
                raise
            raise AgentStartError(f"the agent of host {host} could not be started: {error}") from error
    assert process.stdin is not None
    only_ours(process.stdin)
    return ComingAgent(process, host, folder)


class ComingAgent:
    """A host agent that has been started and may not listen yet."""

    def __init__(self, process: "subprocess.Popen[bytes]", host: str, run_folder: Path) -> None:
        self.host = host
        self.run_folder = run_folder
        self._process = process

    def wait(self, timeout_s: float = 30.0) -> AgentHandle:
        """Blocks until it listens.

        Raises AgentStartError, with the agent's own words, if it ends or is not ready within `timeout_s` seconds.
        """
        process, folder = self._process, self.run_folder
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdout as out:
                ready = json_decoder(AgentReady).decode(_first_line(out.fileno(), timeout_s))
        except (TimeoutError, EOFError) as error:
            if isinstance(error, EOFError):  # it ends by itself, and is about to write the reason
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S)
            process.kill()
            process.stdin.close()
            status = process.wait()
            output = _tail(folder / "logs" / "agent.log") or "(nothing)"
            folders.remove_run_folder(folder)
            text = f"the agent of host {self.host} did not start: {error} (status {status}). It said:\n{output}"
            raise AgentStartError(text) from None
        return AgentHandle(process, ready, folder)

    def kill(self) -> None:
        """Ends an agent that is no longer needed; blocks until it has ended. The run folder stays."""
        self._process.kill()
        self._process.communicate()


def _tail(log: Path) -> str:
    """Returns the last lines of an agent's own log."""
    try:
        return "\n".join(log.read_text("utf-8", "replace").splitlines()[-_LINES:])
    except OSError:
        return ""


def _first_line(fd: int, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    line = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not line.endswith(b"\n"):
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError(f"not ready within {timeout_s:g} s")
        if not poller.poll(min(seconds, LONGEST_WAIT_S) * 1000):
            continue
        data = os.read(fd, 4096)
        if not data:
            raise EOFError("it ended at once")
        line += data
    return line


_pipes: "weakref.WeakSet[IO[Any]]" = weakref.WeakSet()


def only_ours(pipe: IO[Any]) -> None:
    """Keeps the owner pipe out of processes that this one forks without exec: they would hold the host alive."""
    _pipes.add(pipe)


def _close_in_fork() -> None:
    _coming.clear()
    for pipe in list(_pipes):  # the raw file: it has no lock, and none closes the number again, which others may get
        buffer: Any = getattr(pipe, "buffer", pipe)
        buffer.raw.close()


os.register_at_fork(after_in_child=_close_in_fork)


class Ahead(Struct, frozen=True):
    """An agent that has not been requested yet, and the environment it was started in."""

    agent: ComingAgent
    environ: dict[str, str]
    begun_with: BegunWith


_coming: list[Ahead] = []


def begun_with() -> BegunWith:
    """Returns what a host agent keeps from its start: settings, and variables that are read when libraries load."""
    environ = {name: value for name, value in os.environ.items() if name == PRELOAD or read_at_load(name)}
    return settings.to_send(), environ


def agent_environment() -> dict[str, str]:
    """Returns the environment of an agent started now."""
    return {**os.environ, TRAVELS_IN: settings.to_send()}


def start_ahead() -> None:
    """Starts the agent of the controller that this process is about to become, unless `host_prestart` is off.

    Does not block, and raises nothing: the first request for an agent reports errors.
    """
    if _coming or not settings.host_prestart:
        return
    try:
        agent = begin_agent(env=agent_environment(), lease_s=settings.mesh_orphan_timeout)
    except (AgentStartError, OSError):
        return
    _coming.append(Ahead(agent, dict(os.environ), begun_with()))


def take_ahead() -> Ahead | None:
    """Returns the agent that is starting, for the new controller; once."""
    return _coming.pop() if _coming else None
