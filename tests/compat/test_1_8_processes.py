"""Section 1.8: processes and hosts.

Elsewhere: workers, keys, addresses, stop and reconnect (tests/cluster/test_worker_loop.py), `enable_transport`
(tests/cluster/test_api_transport.py), `shutdown_context` (test_actor_main.py), addresses (unit/test_addresses.py).
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ProcMesh,
    attach_to_workers,
    current_rank,
    default_bootstrap_cmd,
    endpoint,
    get_or_spawn_controller,
    run_worker_loop_forever,
    shutdown_context,
    start_worker_loop_forever,
    this_host,
)
from monarch.config import configured
from monarch.job import ProcessJob
from tests.cluster.worker_tools import short_folder, workers_at

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Registry(Actor):
    def __init__(self, value: int) -> None:
        self.value = value

    @endpoint
    def told(self) -> tuple[int, int]:
        return self.value, os.getpid()


class User(Actor):
    @endpoint
    async def rank(self) -> int:
        return current_rank().rank


def test_a_controller_can_be_awaited(quad: ProcMesh) -> None:
    async def main() -> tuple[int, int]:
        registry = await get_or_spawn_controller("compat_awaited", Registry, 3)
        return await registry.told.call_one()

    assert asyncio.run(main()) == (3, os.getpid())


@pytest.mark.slow
def test_leaving_a_host_mesh_context_shuts_the_hosts_down() -> None:
    async def main(address: str) -> Any:
        async with attach_to_workers(ca="trust_all_connections", workers=[address]) as hosts:
            procs = hosts.spawn_procs(per_host={"gpus": 1})
            await procs.spawn("users", User).rank.call()
            await procs.stop()
        return hosts

    with short_folder() as folder:
        address = f"ipc://{folder}/w"
        with workers_at(address) as workers:
            hosts = asyncio.run(main(address))
            assert workers[0].wait(20) is not None
    with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
        hosts.spawn_procs()


def test_a_worker_takes_its_arguments_by_name_only() -> None:
    with pytest.raises(TypeError):
        run_worker_loop_forever("ipc:///nowhere", "trust_all_connections")  # type: ignore[misc]
    with pytest.raises(Exception, match="trust_all_connections"):
        run_worker_loop_forever(address="ipc:///nowhere", ca="somebody")
    with pytest.raises(NotImplementedError, match="under which name"):
        run_worker_loop_forever(address="tcp://*", ca="trust_all_connections")


ENABLE = """
import os
from monarch.actor import *
def enables(word):
    enable_transport(word)
    enable_transport(word)
    context()
    enable_transport(word)
    try:
        enable_transport(ChannelTransport.Local)
    except RuntimeError:
        return 0
    finally:
        shutdown_context().get()
    return 1
for word in ("tcp", "ipc", "tls", "metatls", "metatls-hostname", "tcp://127.0.0.1:4444"):
    pid = os.fork()  # each in a program of its own
    if pid == 0:
        os._exit(enables(word))
    print(word, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_every_transport_name_is_accepted_once_and_before_all_else() -> None:
    done = subprocess.run([sys.executable, "-c", ENABLE], capture_output=True, text=True, check=True)
    words = [line.rpartition(" ") for line in done.stdout.splitlines()]
    assert len(words) == 6, done.stderr
    assert {status for *_, status in words} == {"0"}, done.stdout + done.stderr


def test_a_mesh_of_processes_without_a_name_is_called_anon() -> None:
    procs = this_host().spawn_procs()
    assert procs.name == "anon"
    procs.stop().get(20)


@pytest.mark.slow
def test_a_program_can_be_worker_and_client_at_once(tmp_path: Path) -> None:
    with short_folder() as folder:
        address = f"ipc://{folder}/self"
        script = tmp_path / "both.py"
        script.write_text(
            "from monarch.actor import *\n"
            "class A(Actor):\n"
            "    @endpoint\n"
            "    async def one(self): return 1\n"
            "if __name__ == '__main__':\n"
            f"    ready = start_worker_loop_forever(address={address!r}, ca='trust_all_connections')\n"
            f"    hosts = attach_to_workers(ca='trust_all_connections', workers=[{address!r}])\n"
            "    procs = hosts.spawn_procs(per_host={'gpus': 1})\n"
            "    print('got', procs.spawn('a', A).one.call_one().get(30))\n"
            "    hosts.shutdown().get(30)\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    assert "got 1" in done.stdout, done.stderr
    assert callable(start_worker_loop_forever)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_shutdown_with_an_impossible_timeout_is_refused_and_ends_nothing(quad: ProcMesh, seconds: float) -> None:
    with pytest.raises(ValueError, match="host_timeout must be"):
        shutdown_context(seconds)
    assert quad.initialized.get(20)


def test_a_worker_that_never_listened_is_named_to_who_attaches() -> None:
    with short_folder() as folder, configured(mesh_attach_config_timeout="200ms"):
        hosts = attach_to_workers(ca="trust_all_connections", workers=[f"ipc://{folder}/nobody"])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"attach failed: .*{folder}/nobody"):
                hosts.initialized.get(20)


@pytest.mark.parametrize("env", [{"X": 5}, {"X": True}, {"X": b"a"}, {5: "x"}])
def test_an_environment_takes_text_alone_and_says_which_is_none(env: Any) -> None:
    for use in (
        default_bootstrap_cmd().with_env,
        lambda env: this_host().spawn_procs(env=env),
        lambda env: ProcessJob({"workers": 1}, env=env),
    ):
        with pytest.raises(TypeError, match="str\\(\\) makes it"):
            use(env)
