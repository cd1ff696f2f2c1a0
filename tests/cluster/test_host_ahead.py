"""The agent of a kernel's host is started before the library is imported, and is the one that is used."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

BEGIN = """
import os
from monarch_nb.host import launch
launch.start_ahead()
pid = launch._coming[0].agent._process.pid
"""
USE = """
from monarch.actor import Actor, endpoint, this_host
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.runtime import current_runtime

class Environment(Actor):
    @endpoint
    def environ(self, name):
        return os.environ.get(name)

actor = this_host().spawn_procs(per_host={"gpus": 1}).spawn("environment", Environment)
agents = current_runtime().part(LocalAgents).running.values()
print(actor.environ.call_one("LANG").get(30), [agent.pid for agent in agents] == [pid])
"""


def output_of(program: str, **environ: str) -> list[str]:
    """Output of a new program."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environ}, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_agent_started_ahead_is_the_one_of_the_controller() -> None:
    assert output_of(BEGIN + USE, LANG="C") == ["C", "True"]


@pytest.mark.slow
def test_the_agent_started_ahead_is_replaced_when_library_environment_changes() -> None:
    assert output_of(BEGIN + "os.environ['LANG'] = 'C.UTF-8'\n" + USE, LANG="C") == ["C.UTF-8", "False"]


def test_none_is_started_where_that_is_not_wanted() -> None:
    program = "from monarch_nb.host import launch\nlaunch.start_ahead()\nprint(len(launch._coming))"
    assert output_of(program, MONARCH_NB_HOST_PRESTART="false") == ["0"]
