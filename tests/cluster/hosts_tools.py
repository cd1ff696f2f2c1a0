"""Hosts started as users start them, a proxy that can be cut, and actors for the tests of several hosts."""

import contextlib
import json
import logging
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from zmq.utils.garbage import gc

import monarch_nb.actor
from monarch_nb import connect
from monarch_nb.actor import Actor, MeshFailure, SupervisionError, context, current_rank, endpoint
from monarch_nb.host.launch import command
from monarch_nb.host.preemption import END
from monarch_nb.transport import Keys
from tests.cluster.leftovers import Before
from tests.polling import until

SOON = 40.0


@pytest.fixture(scope="module", autouse=True)
def nothing_left(own_place: Path) -> Iterator[None]:
    """A module that imports this leaves no process, socket, folder, descriptor or thread."""
    before = Before(own_place)
    yield
    connect.shutdown()
    gc.stop()  # pyzmq's own thread, which frees borrowed buffers, and lives as long as a process
    before.check()


@pytest.fixture(scope="module")
def faults(nothing_left: None) -> Iterator[list[MeshFailure]]:
    """The failures of a module's meshes, which do not end the program; the last ones may arrive after their test."""
    failures: list[MeshFailure] = []
    before = monarch_nb.actor.unhandled_fault_hook
    monarch_nb.actor.unhandled_fault_hook = failures.append
    yield failures
    connect.shutdown()
    monarch_nb.actor.unhandled_fault_hook = before


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the key of a job."""
    path = tmp_path_factory.mktemp("keys") / "job.key"
    Keys.load_or_create(path)
    return path


@pytest.fixture
def apart() -> Iterator[Path]:
    """A run folder as on another machine, where an agent may have the name of one on this machine."""
    path = Path(f"/tmp/ma{os.getpid()}-{time.monotonic_ns() % 10**6}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Member(Actor):
    """Remembers the numbers of each sender, in order."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}
        self.data: Any = None

    @endpoint
    def where(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    def note(self, number: int, sender: str = "root") -> None:
        self.seen.setdefault(sender, []).append(number)

    @endpoint
    def noted(self, sender: str = "root") -> list[int]:
        return self.seen.get(sender, [])

    @endpoint
    def count(self, sender: str) -> int:
        return len(self.seen.get(sender, []))

    @endpoint
    def in_order(self, sender: str, numbers: list[int]) -> bool:
        return self.seen.get(sender, []) == numbers

    @endpoint
    def length(self, data: bytes) -> int:
        return len(data)

    @endpoint
    def keep(self, data: Any) -> list[int]:
        """Keeps the data; returns the inodes of the memory files that this process has mapped."""
        self.data = data
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sorted({int(line.split()[4]) for line in lines if "memfd:monarch-nb" in line})

    @endpoint
    def nap(self, seconds: float, rank: int) -> int:
        """The actor with this rank sleeps."""
        own_rank = context().actor_instance.rank.rank
        if own_rank == rank:
            time.sleep(seconds)
        return own_rank

    @endpoint
    def held(self, path: Path, rank: int) -> int:
        """The actor with this rank waits until the file exists."""
        own_rank = context().actor_instance.rank.rank
        while own_rank == rank and not path.exists():
            time.sleep(0.01)
        return own_rank

    @endpoint
    def die(self, rank: int) -> int:
        own_rank = context().actor_instance.rank.rank
        if own_rank == rank:
            time.sleep(0.3)  # the others have answered by then, as a rule
            os._exit(3)
        return own_rank


class Caller(Actor):
    """Calls other actors from its own process."""

    @endpoint
    def call(self, members: Any) -> list[tuple[int, int]]:
        return list(members.where.call().get(SOON).values())

    @endpoint
    def nested(self, members: Any, rank: int, asks: Path, wraps: bool) -> int:
        answer = members.nap.call_one(300, rank)
        asks.touch()
        try:
            return int(answer.get(SOON))
        except SupervisionError as error:
            logging.getLogger("user").error("seen: %s", error)
            raise RuntimeError(f"no answer: {error}") if wraps else error from None

    @endpoint
    def tell(self, members: Any, count: int, sender: str) -> int:
        for number in range(count):
            members.note.broadcast(number, sender)
        return count


class HostProcess:
    """`python -m monarch_nb.host`, as a user starts it."""

    def __init__(self, folder: Path, *options: str, tcp: str = "tcp://127.0.0.1:0", key: Path | None = None,
                 env: dict[str, str] | None = None, before: tuple[str, ...] = ()) -> None:  # fmt: skip
        words = ["--tcp", tcp, "--keep", *options, *(["--key", str(key)] if key is not None else [])]
        self.errors = folder / f"agent-{random.randrange(1 << 30):x}.log"
        with open(self.errors, "ab") as errors:
            self.process = subprocess.Popen(
                [*before, *command("monarch_nb.host.agent", *words)], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **(env or {})},
            )  # fmt: skip
        assert self.process.stdout is not None
        with self.process.stdout as out:
            line = out.readline()
        assert line, self.errors.read_text()
        ready = json.loads(line)
        self.host: str = ready["host"]
        self.pid: int = ready["pid"]
        self.endpoint: str = ready["endpoint"]
        self.run_folder = Path(ready["run_folder"])

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def kill(self) -> None:
        """Removes its run folder, too, as the next agent on this machine would half a minute later."""
        self.process.kill()
        self.process.wait()

        def removed() -> bool:
            shutil.rmtree(self.run_folder, ignore_errors=True)
            return not self.run_folder.exists()

        until(removed)  # its procs, which end a moment later, may yet write there

    def close(self) -> None:
        self.process.send_signal(END)
        try:
            self.process.wait(SOON)
        finally:
            self.kill()


@contextlib.contextmanager
def user_hosts(
    folder: Path, count: int, *options: str, key: Path | None = None, shutdown: bool = True
) -> Iterator[list[HostProcess]]:
    """Hosts that end after this process's own runtime."""
    hosts: list[HostProcess] = []
    try:
        for _ in range(count):
            hosts.append(HostProcess(folder, *options, key=key))
        yield hosts
    finally:
        if shutdown:
            connect.shutdown()
        for host in hosts:
            host.close()
