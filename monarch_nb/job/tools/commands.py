"""Commands run on hosts, with their output here."""

import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_nb.mesh import HostMesh
from monarch_nb.runtime import (
    Actor,
    Channel,
    Future,
    Port,
    PortReceiver,
    current_runtime,
    endpoint,
    fail_future,
    pending_future,
    resolve_future,
)

Line = tuple[str, bytes]  # stream and text; an empty stream: the rank is done


def rank_environment() -> dict[str, str]:
    """Returns variables with the rank of this process in its mesh, for commands that it starts."""
    point = current_runtime().context().actor_instance.rank
    coordinates = {f"MONARCH_RANK_{label}": str(index) for label, index in point.items()}
    sizes = zip(point.extent.labels, point.extent.sizes, strict=True)
    return {**coordinates, **{f"MONARCH_SIZE_{label}": str(size) for label, size in sizes}}


def usable_folder(workdir: str | None, client_folder: str) -> str | None:
    """Returns the requested folder, or else the client's, if this machine has it."""
    return workdir or (client_folder if os.path.isdir(client_folder) else None)


class CommandActor(Actor):
    """Runs commands on the host of its process."""

    @endpoint
    def run(
        self,
        command: list[str],
        env: dict[str, str],
        workdir: str | None,
        client_folder: str,
        output_dir: str | None,
        port: "Port[Line]",
    ) -> int:
        """Returns the exit status, 128 + n for signal n. Sends lines of output to the port, or to `output_dir`."""
        rank_variables = rank_environment()
        variables = {**os.environ, **rank_variables, **env}
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
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
) -> Future[int]:
    """Runs a command on each host (or at one `rank` or `point`); the future gives the largest exit status.

    It begins at once, whether or not the future is awaited, on processes of its own, which are stopped when it has
    ended. `x.py` and `-m` run in this program's interpreter there. Output is written here line by line, or to
    `stdout.txt` and `stderr.txt` in `output_dir`, where $SUBDIR stands for the place in the mesh. The status of an
    unknown program is 127. Raises ValueError for no command, and for both `rank` and `point`.
    """
    if isinstance(cmd, str) or not cmd:
        raise ValueError("exec_command takes a command as a list, such as ['nvidia-smi', '-L']")
    if rank is not None and point is not None:
        raise ValueError("exec_command takes rank or point, not both")
    hosts: Any = host_mesh
    if point is not None:
        hosts = hosts.slice(**point)
    elif rank is not None:
        hosts = hosts.flatten("rank").slice(rank=rank)
    future: Future[int] = pending_future(describe=lambda: f"{' '.join(cmd)} runs")

    def work() -> None:
        try:
            resolve_future(future, _run(hosts, list(cmd), dict(env or {}), workdir, output_dir, per_host))
        except BaseException as error:
            fail_future(future, error)

    context = contextvars.copy_context()
    # Not a daemon: the program's exit waits for a command that has begun.
    threading.Thread(target=context.run, args=(work,), name="monarch-exec", daemon=False).start()
    return future


def _run(
    hosts: HostMesh,
    command: list[str],
    env: dict[str, str],
    workdir: str | None,
    output_dir: str | None,
    per_host: Mapping[str, int] | None,
) -> int:
    if command[0] == "-m" or command[0].endswith(".py"):
        command = [hosts.python or sys.executable, *command]
    procs = hosts.spawn_procs(per_host=per_host, name="exec")
    try:
        port, receiver = Channel[Line].open()
        actors: Any = procs.spawn("command", CommandActor)
        call = actors.run.call(command, env, workdir, os.getcwd(), output_dir, port)
        writer = threading.Thread(target=_write, args=(receiver, len(procs)), name="monarch-exec-output", daemon=True)
        writer.start()
        statuses: list[int] = call.get().values()
        writer.join()
        return max(statuses)
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
