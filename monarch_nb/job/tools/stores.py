"""Workers started by ranks of torchrun, which find each other by the store that these ranks share."""

import contextlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Protocol

import msgspec

from monarch_nb._package import on_exit
from monarch_nb.connect.workers import attach_to_workers
from monarch_nb.host.folders import make_run_folder, new_host_id, remove_run_folder, run_folder_for
from monarch_nb.host.launch import command
from monarch_nb.host.linux import boot_id
from monarch_nb.host.preemption import END
from monarch_nb.job.report import read_report
from monarch_nb.job.trait import JobState, JobTrait
from monarch_nb.mesh import HostMesh
from monarch_nb.transport import Keys, knock
from monarch_nb.wire import json_decoder

_READY_S = 60.0
_LOOK_S = 0.02
_KNOCK_S = 1.0
_LINES = 10
_END_S = 5.0
_ENCRYPTED = ("tcp", "metatls", "metatls-hostname")
_PREFIX = "monarch/spmd/"
_KEY = f"{_PREFIX}key"
_workers: "list[tuple[subprocess.Popen[bytes], Path]]" = []  # of this process, with their folders; they end with it


class StoreLike(Protocol):
    """The used part of a `torch.distributed.Store`; `get` waits until there is a value."""

    def set(self, key: str, value: "str | bytes", /) -> object:
        """Stores a value."""

    def get(self, key: str, /) -> bytes:
        """Returns a value."""


class _Joins(msgspec.Struct, frozen=True):
    """The addresses of a worker."""

    joins: tuple[str, ...]
    boot: str


class StoreJob(JobTrait):
    """One host for each machine of an SPMD program: `StoreJob.from_store(store)`, called on all of its ranks.

    The workers belong to the ranks that have started them, and end with these; `kill()` leaves them.
    """

    _transient = frozenset({"_key"})

    def __init__(self, worker_addrs: list[str], name: str) -> None:
        super().__init__()
        self._worker_addrs, self._name = list(worker_addrs), name
        self._key: bytes | None = None

    def _restored(self) -> None:
        self._key = None

    @classmethod
    def from_store(
        cls, store: StoreLike, *, monarch_port: int = 0, name: str = "monarch_worker", transport: str = "ipc",
        rank: int | None = None, local_rank: int | None = None, world_size: int | None = None,
        local_world_size: int | None = None,
    ) -> "StoreJob | None":  # fmt: skip
        """Returns the job on global rank 0, None on the other ranks. Each local rank 0 starts a worker on its machine.

        With `transport="ipc"` all ranks are on one machine; "tcp" is encrypted with a key that the store carries, at
        `monarch_port` or any free port. RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are the defaults of the ranks
        and sizes. Blocks until the workers listen. Raises RuntimeError for a missing variable or a worker that does not
        start, ValueError for sizes that do not fit and another transport.
        """
        world, size = _number("WORLD_SIZE", world_size), _number("LOCAL_WORLD_SIZE", local_world_size)
        mine, local = _number("RANK", rank), _number("LOCAL_RANK", local_rank)
        if not (0 <= mine < world and 0 <= local < size):
            raise ValueError(
                f"RANK ({mine}) must be below WORLD_SIZE ({world}), and LOCAL_RANK ({local}) below LOCAL_WORLD_SIZE "
                f"({size}); none is negative"
            )
        if world % size:
            raise ValueError(f"WORLD_SIZE ({world}) must be divisible by LOCAL_WORLD_SIZE ({size})")
        if transport != "ipc" and transport not in _ENCRYPTED:
            raise ValueError(f"transport={transport!r} is none of 'ipc', {', '.join(map(repr, _ENCRYPTED))}")
        key = _key(store, first=mine == 0) if transport != "ipc" and (local == 0 or mine == 0) else None
        if local == 0:
            host = mine // size
            worker = _start(f"{name}_{host}", monarch_port, key)
            store.set(f"{_PREFIX}workers/{host}", msgspec.json.encode(worker))
        if mine != 0:
            return None
        workers = [json_decoder(_Joins).decode(store.get(f"{_PREFIX}workers/{host}")) for host in range(world // size)]
        job = cls([_reachable_address(worker, f"{name}_{host}") for host, worker in enumerate(workers)], name)
        job._key = key
        return job

    def state(self, cached_path: str | None = None) -> JobState:
        """Returns its hosts, under its name; nothing is saved unless a path is given."""
        return super().state(cached_path)

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("StoreJob runs inside of a program: it cannot run a client script")

    def _state(self) -> JobState:
        if self._key is None and any(address.startswith("tcp://") for address in self._worker_addrs):
            raise RuntimeError("a StoreJob over tcp is used by the program that has made it: only that has the key")
        hosts = attach_to_workers(
            private_key=self._key, ca="trust_all_connections", workers=list(self._worker_addrs), name=self._name
        )
        return JobState({self._name: hosts})

    def can_run(self, spec: JobTrait) -> bool:
        """Returns False: the ranks that called `from_store` have these workers."""
        return False

    def _lost(self) -> str:
        return ""  # calls on its hosts fail if they are lost

    def _kill(self) -> None:
        pass


def host_mesh_from_store(
    store: StoreLike, *, monarch_port: int = 0, name: str = "monarch_worker", transport: str = "ipc",
    rank: int | None = None, local_rank: int | None = None, world_size: int | None = None,
    local_world_size: int | None = None,
) -> HostMesh | None:  # fmt: skip
    """Returns the hosts of `StoreJob.from_store`, with its arguments and errors: on global rank 0, None elsewhere."""
    job = StoreJob.from_store(
        store, monarch_port=monarch_port, name=name, transport=transport, rank=rank, local_rank=local_rank,
        world_size=world_size, local_world_size=local_world_size,
    )  # fmt: skip
    return None if job is None else job.state()._hosts[name]


def _number(name: str, value: int | None) -> int:
    text = str(value) if value is not None else os.environ.get(name)
    if text is None:
        raise RuntimeError(
            f"StoreJob.from_store needs {name}, which torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE), "
            f"or the argument {name.lower()}="
        )
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None


def _key(store: StoreLike, *, first: bool) -> bytes:
    if not first:
        return store.get(_KEY)
    with tempfile.TemporaryDirectory() as folder:
        key = Keys.load_or_create(Path(folder, "key")).to_text()
    store.set(_KEY, key)
    return key


def _start(name: str, port: int, key: bytes | None) -> _Joins:
    """Starts a worker that ends with this process; blocks until it listens. Raises RuntimeError."""
    folder = run_folder_for(new_host_id())  # a later program removes it if this one is killed
    make_run_folder(folder)
    address = f"ipc://{folder}/{name}" if key is None else f"tcp://0.0.0.0:{port}"
    report_file, log = folder / "report.json", folder / "worker.log"
    line = command(
        "monarch_nb.job.worker", address, "--report", report_file, "--bound", *([] if key is None else ["--key", "-"])
    )
    with log.open("wb") as out:
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
    if not _workers:
        on_exit(end_workers)
    _workers.append((process, folder))
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(key or b"")
    deadline = time.monotonic() + _READY_S
    while (report := read_report(report_file)) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if report is None or report.ended:
        if report is not None:  # it ends by itself, and is about to report why
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        process.kill()
        process.wait()
        _workers.remove((process, folder))
        output = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
        remove_run_folder(folder)
        raise RuntimeError(f"the worker {name} did not start; it said:\n{output or '(nothing)'}")
    return _Joins(report.joins, boot_id())


def end_workers() -> None:
    """Ends the workers of this process, with all processes on them; blocks."""
    ending = [_workers.pop() for _ in tuple(_workers)]
    for process, _ in ending:
        process.send_signal(END)
    for process, folder in ending:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        remove_run_folder(folder)


def _reachable_address(worker: _Joins, name: str) -> str:
    """Returns the address at which a worker answers from here. Raises RuntimeError."""
    first = worker.joins[0]
    if not first.startswith("tcp://"):
        if worker.boot != boot_id():
            raise RuntimeError(f"{name} is on another machine, where transport='ipc' does not lead: use 'tcp'")
        return first
    for address in worker.joins:
        if knock(address, _KNOCK_S):
            return address
    raise RuntimeError(f"nobody answers for {name} at {', '.join(worker.joins)}: look whether a firewall is between")
