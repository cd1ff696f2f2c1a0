"""%mesh NAME hosts=+2 and hosts=-1 in a real kernel, and Ctrl-C while it waits for hosts."""

import time

import pytest

from tests.cluster.engine_tools import none_alive
from tests.notebook.notebook import Cell, Notebook

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

# An engine of processes, which says of those that come later that they wait, for as long as the test wants.
ENGINE = """
import os
from monarch.actor import Actor, endpoint
from monarch.job import AdapterJob, Seen, register_job
from monarch_nb.job.process import ProcessAdapter

class Late(ProcessAdapter):
    late, pids = False, set()

    def add(self, job, wanted):
        found = super().add(job, wanted)
        self.pids |= {int(agent.id.partition("@")[0]) for agent in found.values()}
        return found

    def look(self, job):
        waits = Seen("waiting", "waits for a node that is free")
        found = super().look(job)
        return {name: waits if self.late and seen.state == "running" and not name.endswith("_0") else seen
                for name, seen in found.items()}

class Where(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

engine = Late()
register_job("late", lambda: engine)
job = AdapterJob("late", {"elastic": 1}, {"MONARCH_NB_PRELOAD": ""})
elastic = job.state(None).elastic.spawn_procs({"gpus": 1}, name="elastic")
where = elastic.spawn("where", Where)
where.pid.call().get().values()
"""


@pytest.fixture
def notebook(nb: Notebook) -> Notebook:
    nb.run(ENGINE).ok()
    return nb


def count(nb: Notebook, code: str) -> int:
    return int(nb.run(code).ok().text)


def pids_of(nb: Notebook) -> set[int]:
    """The processes of all hosts that were added."""
    return {int(pid) for pid in nb.run("print(*engine.pids)").ok().stdout.split()}


def test_hosts_come_and_go_and_an_interrupt_ends_the_wait(notebook: Notebook) -> None:
    nb = notebook
    try:
        grown = nb.run("%mesh elastic hosts=+1").ok()
        assert grown.text == "<ProcMesh 'elastic' {hosts=2, gpus=1}>"
        assert "'elastic' {hosts=2, gpus=1}: 1 host more (" in grown.stdout
        assert "with where created there" in grown.stdout
        assert count(nb, "len(where.pid.call().get())") == 2

        [first] = pids_of(nb)
        nb.run("engine.late = True").ok()
        request = nb.start("%mesh elastic hosts=+2")
        cell = Cell()
        nb.until(request, cell, "0/2 hosts joined")
        nb.interrupt()
        done = nb.finish(request)
        assert done.error is not None
        assert done.error["ename"] == "KeyboardInterrupt"
        assert done.traceback.startswith("KeyboardInterrupt: stopped waiting for hosts of AdapterJob ")
        assert (
            "elastic_2, elastic_3 wait for a node that is free. What has come of it ends, and nothing" in done.traceback
        )
        begun = time.monotonic()
        assert len(nb.run("elastic, where.pid.call().get().values()").ok().text.split(",")) > 2
        assert count(nb, "len(where.pid.call().get())") == 2, "the mesh is as it was"
        while count(nb, "len(job.agents)") != 2:
            assert time.monotonic() - begun < 20
        assert none_alive(sorted(pids_of(nb) - {first})), "nothing of it is left"
        nb.run("engine.late = False").ok()
        assert nb.run("%mesh elastic hosts=+1").ok().text == "<ProcMesh 'elastic' {hosts=3, gpus=1}>"
        shrunk = nb.run("%mesh elastic hosts=-2").ok()
        assert "'elastic' {hosts=1, gpus=1}: hosts=1-2 removed" in shrunk.stdout
        assert "2 hosts returned to their job" in shrunk.stdout
        assert none_alive([first])
        assert count(nb, "len(where.pid.call().get())") == 1
        refused = nb.run("%mesh elastic hosts=-1").traceback
        assert "elastic has 1 host: at least one must stay" in refused
    finally:
        nb.run("job.kill()").ok()
