"""Section 1.8: processes and hosts.

Elsewhere: workers, keys, addresses, stop and reconnect (tests/cluster/test_worker_loop.py), `enable_transport`
(tests/cluster/test_api_transport.py), `shutdown_context` (test_actor_main.py), addresses (unit/test_addresses.py).
"""

import asyncio
import os
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ProcMesh,
    default_bootstrap_cmd,
    endpoint,
    get_or_spawn_controller,
    shutdown_context,
    this_host,
)
from monarch.job import ProcessJob

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Registry(Actor):
    def __init__(self, value: int) -> None:
        self.value = value

    @endpoint
    def state(self) -> tuple[int, int]:
        return self.value, os.getpid()


def test_a_controller_can_be_awaited(quad: ProcMesh) -> None:
    async def main() -> tuple[int, int]:
        registry = await get_or_spawn_controller("compat_awaited", Registry, 3)
        return await registry.state.call_one()

    assert asyncio.run(main()) == (3, os.getpid())


def test_a_mesh_of_processes_without_a_name_is_called_anon() -> None:
    procs = this_host().spawn_procs()
    assert procs.name == "anon"
    procs.stop().get(20)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_shutdown_with_an_impossible_timeout_is_refused_and_ends_nothing(quad: ProcMesh, seconds: float) -> None:
    with pytest.raises(ValueError, match="host_timeout must be"):
        shutdown_context(seconds)
    assert quad.initialized.get(20)


@pytest.mark.parametrize("env", [{"X": 5}, {"X": True}, {"X": b"a"}, {5: "x"}])
def test_an_environment_takes_text_alone_and_says_which_is_none(env: Any) -> None:
    for use in (
        default_bootstrap_cmd().with_env,
        lambda env: this_host().spawn_procs(env=env),
        lambda env: ProcessJob({"workers": 1}, env=env),
    ):
        with pytest.raises(TypeError, match="str\\(\\) makes it"):
            use(env)
