"""The template that processes are forked from dies: processes still start."""

from typing import Any

import pytest

from monarch_nb.actor import heal_mesh
from tests.cluster.fault_tools import SOON, Worker, kill, spawned, status, still_works
from tests.polling import until
from tests.processes import alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def template() -> int:
    """The pid of the template, once one lives."""
    until(lambda: (pid := status().template_pid) is not None and alive(pid), "there is a template")
    pid = status().template_pid
    assert pid is not None
    return pid


def test_killing_the_template_before_a_spawn_does_no_harm(host: Any) -> None:
    kill(template())
    still_works(host)
    still_works(host)


def test_killing_the_template_during_spawns_does_no_harm(host: Any) -> None:
    for _ in range(2):
        first = template()
        with spawned(host, 3, name="orphans") as procs:
            actors = procs.spawn("orphans", Worker)
            kill(first)
            assert actors.rank.call().get(SOON).values() == [0, 1, 2]


def test_between_a_death_and_its_heal(workers: Any) -> None:
    from monarch_nb.actor import SupervisionError

    pid = workers.slice(gpus=0).pid.call_one().get(SOON)
    kill(template())
    kill(pid)
    with pytest.raises(SupervisionError):
        workers.pid.call().get(SOON)
    heal_mesh(workers, timeout=SOON)
    assert workers.rank.call().get(SOON).values() == [0, 1]
