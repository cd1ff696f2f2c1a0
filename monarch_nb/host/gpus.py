"""The GPUs of this host, their assignment to processes, and how processes share one. Never touches CUDA."""

import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SLOT = "MONARCH_NB_GPU_SLOT"  # number of a process to be started, and the number of processes, as "1/4"
SHARED, MPS, MPS_EQUAL = "shared", "mps", "mps-equal"  # appended to the slot: how processes may share a GPU
NO_GPU = "MONARCH_NB_NO_GPU"  # why a process that needs a GPU ends without one
VISIBLE = "CUDA_VISIBLE_DEVICES"
PIPES, LOGS, THREADS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = ("/proc/driver/nvidia/gpus", "/dev")  # containers may lack the first
_DEVICE = "nvidia"
_START_S, _QUIT_S = 10.0, 2.0
_USUAL_PIPES = Path("/tmp/nvidia-mps")  # where a daemon listens that was started without a folder
# Starts the daemon, prints its status, waits for the end of the agent, whatever ends that, and ends the daemon: by its
# number where the folder, through which it takes commands, has been removed with what was the agent's.
_GUARD = """
"$1" -d </dev/null >"$2" 2>&1
code=$?
echo $code
[ $code = 0 ] || exit
daemon=$(cat "$3")
cat >/dev/null
echo quit | "$1" || kill "$daemon"
"""
_ANSWERS = 'echo get_server_list | "$1" >/dev/null 2>&1 && echo 0'
Environment = dict[str, str | None]


def devices() -> list[str]:
    """Returns the GPUs that this user may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        names = [part.strip() for part in chosen.split(",")]
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    for folder in _FOLDERS:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        gpus = [name for name in names if folder != "/dev" or name.removeprefix(_DEVICE).isdigit()]
        if gpus:
            return [str(index) for index in range(len(gpus))]
    return []


def slot_of(number: int, count: int, sharing: bool | str) -> str:
    """Returns the slot of a process, as `with_gpu` reads it; `sharing` is the setting `share_gpus`."""
    mode = SHARED if sharing is True else sharing or ""
    return f"{number}/{count} {mode}".rstrip()


def wants_mps(environments: Iterable[Mapping[str, str | None]]) -> bool:
    """Returns whether a process to be started shares a GPU by MPS, on a host that has any."""
    slots = [slot for env in environments if (slot := env.get(SLOT)) is not None]
    return any(slot.endswith((MPS, MPS_EQUAL)) for slot in slots) and bool(devices())


def with_gpu(env: Mapping[str, str | None], host: str, mps: "MpsDaemon | None" = None) -> Environment:
    """Returns the environment of a process, with its GPU in place of its slot.

    If there are GPUs, but fewer than slots, and they cannot be shared as required, `NO_GPU` has the reason: the process
    ends with that text, which its failure shows.
    """
    environment = dict(env)
    slot = environment.pop(SLOT, None)
    offered = devices()
    if slot is None or not offered:
        return environment
    numbers, _, mode = slot.partition(" ")
    number, _, count = numbers.partition("/")
    if int(count) > len(offered) and not mode:
        return {**environment, NO_GPU: too_few(host, len(offered), int(count))}
    environment[VISIBLE] = offered[int(number) % len(offered)]
    if mode in (MPS, MPS_EQUAL) and mps is not None:
        if mps.error:
            return {**environment, NO_GPU: mps.error}
        environment.update(mps.environment)
        if mode == MPS_EQUAL:
            processes = int(environment.get("LOCAL_WORLD_SIZE") or count)
            environment[THREADS] = str(max(1, 100 // -(-processes // len(offered))))
    return environment


def too_few(host: str, available: int, requested: int) -> str:
    """Returns the error for a host with fewer GPUs than its processes need."""
    return (
        f"gpus={requested} on host {host}, which has {available}: spawn gpus={available}, or let processes share a GPU "
        "with monarch.config.configure(share_gpus=True)"
    )


def without_mps(host: str, reason: str = f"{CONTROL} is not on PATH") -> str:
    """Returns the error for processes that cannot share a GPU by MPS as required."""
    return (
        f"GPUs of host {host} cannot be shared by MPS: {reason}. The program comes with NVIDIA's driver; without it, "
        "monarch.config.configure(share_gpus=True) lets processes share a GPU, one kernel of theirs after the other"
    )


class MpsDaemon:
    """The control daemon of MPS, by which processes of a host run kernels on one GPU at the same time.

    A daemon that listens already, at the address in the environment or the default one, is used as it is. Else this
    agent starts one, with folders of its own in the agent's, when the first process needs it, and ends it.
    Source: NVIDIA's "Multi-Process Service", sections "nvidia-cuda-mps-control" and "Environment Variables".
    """

    def __init__(self, host: str, folder: Path, cord: int, post: Callable[[Callable[[], None]], None]) -> None:
        self._host, self._folder, self._cord, self._post = host, folder / "mps", cord, post
        self._waiting: list[Callable[[], None]] = []
        self._guard: subprocess.Popen[bytes] | None = None  # lives as long as a daemon started by this agent
        self.environment: dict[str, str] = {}  # of its clients, once it runs
        self.error = ""  # why it does not run

    def when_ready(self, call: Callable[[], None]) -> None:
        """Calls back on the loop's thread once the daemon runs, or could not be started. Does not block."""
        if self.environment:
            call()
            return
        self._waiting.append(call)
        if len(self._waiting) == 1:
            threading.Thread(target=self._find_or_start, name="monarch-mps", daemon=True).start()

    def close(self) -> None:
        """Ends a daemon that this agent has started. Blocks for a moment."""
        if self._guard is not None and self.environment:
            try:
                client = subprocess.Popen(
                    [CONTROL], env=self._own_environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
                client.communicate(b"quit\n", _QUIT_S)
            except (OSError, subprocess.SubprocessError):
                pass  # its guard ends it, or it is killed with the rest of this host

    @property
    def _own_environment(self) -> dict[str, str]:
        """The daemon's environment, with all GPUs: it would renumber a selection of them."""
        return {**{name: value for name, value in os.environ.items() if name != VISIBLE}, **self._folders()}

    def _folders(self) -> dict[str, str]:
        return {PIPES: str(self._folder / "pipe"), LOGS: str(self._folder / "log")}

    def _find_or_start(self) -> None:
        """Runs on a separate thread."""
        program, environment, error = shutil.which(CONTROL), dict[str, str](), ""
        try:
            if program is None:
                error = without_mps(self._host)
            elif not (environment := self._running(program)):
                error = self._start(program)
                environment = {} if error else self._folders()
        except OSError as failed:
            error = without_mps(self._host, str(failed))

        def ready() -> None:
            self.environment, self.error = environment, error
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

        self._post(ready)

    def _running(self, program: str) -> dict[str, str]:
        """Returns the folders of a daemon that this user or root has started; empty if none answers. Raises OSError."""
        folder = Path(os.environ.get(PIPES) or _USUAL_PIPES)
        try:
            if (folder / "control").stat().st_uid not in (0, os.geteuid()):
                return {}
        except OSError:
            return {}
        env = {**os.environ, PIPES: str(folder)}
        probe = subprocess.Popen(["/bin/sh", "-c", _ANSWERS, "sh", program], env=env, stdout=subprocess.PIPE)
        logs = {LOGS: os.environ[LOGS]} if LOGS in os.environ else {}
        return {PIPES: str(folder), **logs} if _line(probe) == "0" else {}

    def _start(self, program: str) -> str:
        """Starts a daemon; returns why it could not be started, "" if it could. Raises OSError."""
        log = self._folder / "start.log"
        for folder in self._folders().values():
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        number = self._folder / "pipe" / f"{CONTROL}.pid"
        command = ["/bin/sh", "-c", _GUARD, "sh", program, str(log), str(number)]
        self._guard = subprocess.Popen(
            command, env=self._own_environment, stdin=self._cord, stdout=subprocess.PIPE, start_new_session=True
        )
        status = _line(self._guard)
        if status == "0":
            return ""
        output = log.read_text(errors="replace").strip()[-300:] if log.exists() else ""
        outcome = f"{CONTROL} -d ended with {status}" if status else f"{CONTROL} -d did not end within {_START_S:g} s"
        return without_mps(self._host, f"{outcome}{f': {output}' if output else ''}")


def _line(process: subprocess.Popen[bytes]) -> str:
    """Returns the first line that a process writes; "" without one in time. The agent's loop takes its exit status."""
    assert process.stdout is not None
    with process.stdout as output:
        ready, _, _ = select.select([output], [], [], _START_S)
        return os.read(output.fileno(), 100).decode().strip() if ready else ""
