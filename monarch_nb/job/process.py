"""A job of processes on this machine, one for each host: what a cluster is, in small."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from monarch_nb.attach import attach_to_workers
from monarch_nb.host.bootstrap import command
from monarch_nb.host.folders import base_folder
from monarch_nb.job.later import ProcessState
from monarch_nb.job.state import JobState
from monarch_nb.job.trait import JobTrait
from monarch_nb.mesh import HostMesh, give_up

_ENDING_S = 2.0  # for a worker to end all that is on it, which it does at once; then it is killed itself
_LAST_LINES = 5


class _ProcessForm(msgspec.Struct):
    """What is saved of a job of processes."""

    _meshes: dict[str, Annotated[int, msgspec.Meta(ge=1)]]
    _env: dict[str, str]
    _workers: dict[str, tuple[Annotated[int, msgspec.Meta(gt=1)], str]]  # by host: process id, when that process began
    _folder: str


class ProcessJob(JobTrait):
    """Each host is a process of its own, as users start workers by hand: they live on when the client ends.

    `meshes` gives the number of hosts of each mesh; `env` is laid over the hosts' environment. `kill()` ends them, from
    any process that has the job's file.
    """

    _transient = frozenset({"_processes", "_given", "_host_to_pid"})
    _form = _ProcessForm

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        super().__init__()
        for name, count in meshes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"{name!r} cannot name a mesh: it must be a name as Python has them")
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}={count!r}: a mesh has a whole number of hosts, at least 1")
        self._meshes = dict(meshes)
        self._env = dict(env or {})
        self._workers: dict[str, tuple[int, str]] = {}
        self._folder = ""
        self._restored()

    def _restored(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # those that are children of this process
        self._given: list[HostMesh] = []
        # As torchmonarch has it: a subclass with a `_create` of its own puts the workers there that it has started.
        self._host_to_pid: dict[str, ProcessState] = {}

    def _adopt(self) -> None:
        for host, started in self._host_to_pid.items():
            self._workers.setdefault(host, (started.pid, born(started.pid)))

    def _address(self, host: str) -> str:
        started = self._host_to_pid.get(host)
        return started.channel if started is not None else f"ipc://{self._folder}/{host}"

    def _hosts(self) -> list[str]:
        return [f"{name}_{number}" for name, count in self._meshes.items() for number in range(count)]

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("a ProcessJob cannot run a client script: run it yourself, beside the job")
        self._folder = tempfile.mkdtemp(prefix="mnb-job-", dir=base_folder())
        try:
            for host in self._hosts():
                with open(f"{self._folder}/{host}.log", "wb") as log:
                    process = subprocess.Popen(
                        command("monarch_nb.job.worker", f"ipc://{self._folder}/{host}"),
                        env={**os.environ, **self._env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )  # fmt: skip
                self._processes[process.pid] = process
                self._host_to_pid[host] = ProcessState(process.pid, f"ipc://{self._folder}/{host}")
                self._adopt()
        except BaseException:  # an interrupt too: nothing of a half-made job may stay
            self._kill()
            raise

    def _state(self) -> JobState:
        self._adopt()
        lost = self._lost()
        if lost:
            raise RuntimeError(f"the job is gone: {self._described()}: {lost}")
        meshes = {}
        for name, count in self._meshes.items():
            workers = [self._address(f"{name}_{number}") for number in range(count)]
            meshes[name] = attach_to_workers(name=name, ca="trust_all_connections", workers=workers)
        self._given += meshes.values()
        return JobState(meshes)

    def _wishes(self) -> str:
        return ", ".join(f"{name}={count}" for name, count in self._meshes.items())

    def _alive(self, host: str) -> bool:
        pid, birth = self._workers[host]
        process = self._processes.get(pid)
        if process is not None:
            return process.poll() is None
        return bool(birth) and born(pid) == birth

    def _lost(self) -> str:
        dead = [host for host in self._workers if not self._alive(host)]
        if not dead and self._workers:
            return ""
        reasons = [f"{host} (process {self._workers[host][0]}) has ended{self._last_words(host)}" for host in dead]
        return "; ".join(reasons) or "it has no processes"

    def _last_words(self, host: str) -> str:
        try:
            lines = Path(f"{self._folder}/{host}.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return "".join(f"\n  | {line}" for line in lines[-_LAST_LINES:])

    def can_run(self, spec: JobTrait) -> bool:
        """A job with the same meshes and environment, whose processes all live."""
        same = isinstance(spec, ProcessJob) and (spec._meshes, spec._env) == (self._meshes, self._env)
        return same and not self._lost()

    def _kill(self) -> None:
        self._adopt()
        for mesh in self._given:
            give_up(mesh, "its job was killed")
        deadline = time.monotonic() + _ENDING_S
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for host in self._workers:
                if self._alive(host):
                    os.kill(self._workers[host][0], signum)
            if self._await_end(deadline):
                break
            deadline = time.monotonic() + _ENDING_S
        for process in self._processes.values():
            process.wait(_ENDING_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._workers, self._folder = {}, ""
        self._restored()

    def _await_end(self, deadline: float) -> bool:
        """Blocks until the workers and their agents are gone."""
        while True:
            sockets = (f"{self._folder}/{host}" for host in self._workers)
            if not any(map(self._alive, self._workers)) and not any(map(os.path.exists, sockets)):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def born(pid: int) -> str:
    """When a process began, in a form that no other process with its id will have; empty if there is none."""
    try:
        if os.path.exists(
            "/proc/self/stat"
        ):  # clock ticks since the boot: unlike a time, they stay when clocks are set
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        return ""
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return ""
