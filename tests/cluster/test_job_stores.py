"""Hosts of programs that torchrun has started: their ranks share a store."""

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, endpoint
from monarch_nb.job.tools.stores import StoreJob, end_workers, host_mesh_from_store
from tests.cluster.fault_tools import ROOT, SOON
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture
from tests.polling import until
from tests.processes import alive

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]


class Store:
    """As `torch.distributed.FileStore`: `get` waits."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def set(self, key: str, value: str | bytes) -> None:
        draft = self.folder / secrets.token_hex(4)
        draft.write_bytes(value.encode() if isinstance(value, str) else value)
        draft.replace(self._path(key))

    def get(self, key: str) -> bytes:
        until(self._path(key).exists, key)
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "-")


class Probe(Actor):
    @endpoint
    def parent(self) -> int:
        return os.getppid()


OTHER = """
import os, sys
from monarch.job.spmd import StoreJob
from tests.cluster.test_job_stores import Store
store = Store(sys.argv[1])
assert StoreJob.from_store(store, transport=sys.argv[2]) is None
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_each_machine_of_an_spmd_program_is_a_host(transport: str, tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    env = {**os.environ, "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    line = [sys.executable, "-c", OTHER, str(tmp_path), transport]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) as program:
        assert program.stdout is not None
        sizes = {"world_size": 4, "local_world_size": 2, "transport": transport}
        assert StoreJob.from_store(store, rank=1, local_rank=1, **sizes) is None
        hosts = host_mesh_from_store(store, rank=0, local_rank=0, name="spmd", **sizes)
        assert hosts is not None
        assert hosts.sizes == {"hosts": 2}
        procs = hosts.spawn_procs({"gpus": 2})
        agents = set(procs.spawn("probe", Probe).parent.call().get(SOON).values())
        assert len(agents) == 2
        assert all(map(alive, agents))
        procs.stop().get(SOON)
        assert program.stdout.readline() == "ready\n"
        hosts.shutdown().get(SOON)
        end_workers()
    until(lambda: not any(map(alive, agents)), "all have ended")


def test_jobs_are_given_on_rank_0_only_and_misfits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store(str(tmp_path))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"needs WORLD_SIZE, .* or the argument world_size="):
        StoreJob.from_store(store)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"WORLD_SIZE \(3\) must be divisible by LOCAL_WORLD_SIZE \(2\)"):
        StoreJob.from_store(store)
    for misfit in ({"rank": 3}, {"rank": -1}, {"local_rank": 2}, {"world_size": 0}, {"local_world_size": 0}):
        with pytest.raises(ValueError, match="must be below"):
            StoreJob.from_store(store, **misfit)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first' is not a whole number"):
        StoreJob.from_store(store)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="transport='ib' is none of 'ipc', 'tcp'"):
        StoreJob.from_store(store, world_size=2, transport="ib")
    assert not list(tmp_path.iterdir())
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RuntimeError, match=r"the worker w_0 did not start; it said:\n(?s:.*)in use"):
            StoreJob.from_store(store, world_size=2, transport="tcp", monarch_port=port, name="w")
    assert StoreJob.from_store(store, rank=1, local_rank=1, world_size=2) is None
