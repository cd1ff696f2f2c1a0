"""Actors, a controller and small helpers for the tests of faults."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, current_rank, endpoint, this_host
from monarch_nb.config import configured
from monarch_nb.connect import own_hosts
from monarch_nb.host import verbs
from monarch_nb.host.protocol import HostState
from monarch_nb.lifecycle import unhandled
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import current_runtime
from monarch_nb.supervision import MeshFailure
from monarch_nb.wire import Done

ROOT = str(Path(__file__).resolve().parents[2])
SOON = 40.0  # seconds; a wait that takes longer is a fault itself, even on a busy machine


class Worker(Actor):
    """Endpoints for the tests of faults."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value
        self.seen: list[Any] = []
        self.go = threading.Event()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def hang(self, started: Any) -> None:
        """Reports that it began, then never ends."""
        started.send(os.getpid())
        threading.Event().wait(600)

    @endpoint
    def nap(self, seconds: float, started: Any) -> str:
        started.send(os.getpid())
        time.sleep(seconds)
        return "slept"

    @endpoint
    def wait_for(self, path: str, started: Any) -> None:
        """Waits until the file exists."""
        started.send(os.getpid())
        while not os.path.exists(path):
            time.sleep(0.01)

    @endpoint
    def boom(self) -> None:
        raise ValueError("no such luck")

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def leave(self, code: Any) -> None:
        sys.exit(code)

    @endpoint
    def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    def noted(self) -> list[Any]:
        return self.seen

    @endpoint
    def say(self, text: str) -> int:
        print(text)
        return len(text)


@contextlib.contextmanager
def controlling() -> Iterator[Any]:
    """A controller in this process, as in a notebook; yields its host."""
    shown: list[MeshFailure] = []
    current_runtime()
    unhandled.notebook_mode(shown.append)
    host: Any = this_host()
    host.shown = shown
    try:
        yield host
    finally:
        own_hosts.shutdown()


@pytest.fixture(scope="module")
def host(nothing_left_by_module: None) -> Iterator[Any]:
    """The host of a warm controller."""
    with controlling() as local_host:
        warm(local_host)
        yield local_host


def warm(host: Any) -> None:
    """Spawns and stops once, so that everything that is made once exists, such as connections to the agent."""
    procs = host.spawn_procs(per_host={"gpus": 1}, name="warm")
    procs.spawn("warm", Worker).pid.call().get(60)
    procs.stop().get(SOON)
    current_runtime().later(0.0, lambda: None)


@pytest.fixture
def shown(host: Any) -> list[MeshFailure]:
    """Failures that no call waited for, as a notebook would show them."""
    host.shown.clear()
    shown: list[MeshFailure] = host.shown
    return shown


@contextlib.contextmanager
def spawned(host: Any, count: int = 2, name: str = "duo", **options: Any) -> Iterator[ProcMesh]:
    """Processes that are stopped at the end."""
    procs = host.spawn_procs(per_host={"gpus": count}, name=name, **options)
    try:
        yield procs
    finally:
        procs.stop().get(SOON)


@pytest.fixture
def duo(host: Any) -> Iterator[ProcMesh]:
    """Two processes."""
    with spawned(host) as mesh:
        yield mesh


@pytest.fixture
def workers(duo: ProcMesh) -> Any:
    """A Worker on each of two processes."""
    mesh = duo.spawn("workers", Worker)
    mesh.initialized.get(30)
    return mesh


def still_works(host: Any) -> None:
    """The controller lives, and a fresh mesh works."""
    with spawned(host, name="fresh") as procs:
        fresh = procs.spawn("fresh", Worker)
        assert fresh.rank.call().get(30).values() == [0, 1]


def status(host: str | None = None) -> HostState:
    """The state that the host agent reports."""
    runtime = current_runtime()
    return request(runtime, f"{host or runtime.host}/agent", verbs.STATUS, Done()).get(SOON)


def agent() -> own_hosts.AgentHandle:
    """The agent of this host."""
    return current_runtime().part(own_hosts.LocalAgents).running[current_runtime().host]


def begun(receiver: Any, count: int) -> list[int]:
    """Waits until `count` endpoints have begun; returns their pids."""
    return [receiver.recv().get(SOON) for _ in range(count)]


@pytest.fixture
def impatient() -> Iterator[None]:
    """Processes that do not stop by themselves are killed after half a second instead of ten."""
    with configured(mesh_terminate_timeout="0.5s", stop_actor_timeout="0.5s"):
        yield


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


class Program:
    """A controller of its own, in a process of its own: a function of tests/cluster/fault_programs.py."""

    def __init__(self, name: str, *words: object, **opts: Any) -> None:
        line = [sys.executable, "-m", "tests.cluster.fault_programs", name, *map(str, words)]
        self.process = subprocess.Popen(
            line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **opts
        )
        self.said: list[str] = []

    def line(self, begins: str, timeout: float = 90.0) -> str:
        """The rest of the next line that begins with this text."""
        assert self.process.stdout is not None
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                self.said.append(line)
                if line.startswith(begins):
                    return line[len(begins) :].strip()
        finally:
            timer.cancel()
        raise AssertionError(f"no {begins!r}; it said:\n{''.join(self.said)}")

    def end(self, timeout: float = 90.0) -> int:
        """Waits for its end; returns its exit status."""
        assert self.process.stdout is not None
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        try:
            self.said += list(self.process.stdout)
            return self.process.wait()
        finally:
            timer.cancel()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
