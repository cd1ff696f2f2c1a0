"""Workers started as users do: a process of its own with one line of Python."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from monarch_nb.actor import Actor, endpoint
from monarch_nb.runtime import current_runtime
from tests.cluster.fault_tools import ROOT, SOON, controlling

TRUST_ALL = "trust_all_connections"
LINE = "from monarch_nb.actor import run_worker_loop_forever as run; run(address={!r}, ca={!r}, private_key={!r})"


class Where(Actor):
    """Tells where it runs."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def mark(self) -> tuple[str, int]:
        """What the arguments of its job have put into its environment, and its process."""
        return os.environ["MARK"], os.getpid()


def start_worker(address: str, key: "bytes | None" = None, pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    line = LINE.format(address, TRUST_ALL, key)
    env = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", line]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=pass_fds)


@contextlib.contextmanager
def workers_at(*addresses: str, key: "bytes | None" = None) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Workers, which are gone at the end whatever happened."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [start_worker(address, key) for address in addresses]
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(SOON)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Socket paths are at most some hundred bytes long."""
    folder = Path(tempfile.mkdtemp(prefix="mw", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def where(procs: Any) -> Any:
    return procs.spawn("where", Where)


@pytest.fixture(scope="module", name="host")
def light_host(nothing_left_by_module: None) -> Iterator[Any]:
    """The host of a controller that has spoken with its agent, whose template nobody has waited for."""
    with controlling() as here:
        procs = here.spawn_procs(name="warm")
        where(procs).pid.call().get(60)
        procs.stop().get(SOON)
        # Its threads come with the first socket, which is for the first word to another host, and stay: not of a test
        current_runtime().node._links.context().socket(zmq.PAIR).close(0)
        yield here
