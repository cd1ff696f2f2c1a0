"""A mesh that has grown and shrunk is detached or loses its controller; another one attaches and resizes it."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from monarch_nb.job import AdapterJob, ProcessJob, job_load
from tests.cluster.fault_tools import ROOT
from tests.polling import until

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

FIRST = """
import os, signal, sys
import monarch_nb as monarch
from monarch_nb.connect import Detacher
from monarch_nb.job import ProcessJob
from monarch_nb.runtime import current_runtime
from tests.cluster.detach_programs import Counter
from tests.processes import say

if __name__ == "__main__":
    job = ProcessJob({"trainers": 1}, env={"MONARCH_NB_PRELOAD": ""})
    procs = job.state("job.json").trainers.spawn_procs({"gpus": 1}, name="trainers")
    counter = procs.spawn("counter", Counter, 10)
    counter.add.call(5).get()
    if "early" in sys.argv:
        current_runtime().part(Detacher).flush_holds()
    procs.grow(hosts=2)
    counter.add.call(1).get()
    procs.shrink(hosts=[1])
    values = counter.add.call(1).get().values()
    say(dict(counter.extent), list(values), *counter.pid.call().get().values())
    if "leave" in sys.argv:
        procs.detach("60s")
    else:
        current_runtime().part(Detacher).flush_holds()
        os.kill(os.getpid(), signal.SIGKILL)
"""

SECOND = """
import sys
import monarch_nb as monarch
from monarch_nb.actor import heal_mesh
from monarch_nb.job import job_load, job_of
from tests.cluster.test_elastic_detach import kill_host
from tests.processes import say

if __name__ == "__main__":
    monarch.actor.unhandled_fault_hook = lambda failure: say("[trainers failed]", failure.next_step)
    procs, counter = monarch.attach("trainers"), monarch.attach("counter")
    say("attached")
    if "lost" in sys.argv:
        heal_mesh(counter)
        say(dict(procs.extent), list(counter.add.call(0).get().values()))
    else:
        values = counter.add.call(0).get().values()
        say(dict(procs.extent), list(values), *counter.pid.call().get().values())
    if "load" in sys.argv:
        hosts = job_load("job.json").state(None).trainers
        say(dict(hosts.extent), procs.grow(hosts=1).sizes["hosts"], dict(hosts.extent))
    else:
        say(procs.grow(hosts=1).sizes["hosts"])
    say(list(counter.add.call(1).get().values()))
    procs.shrink(hosts=[0])
    job = job_of(procs)
    say(list(counter.add.call(1).get().values()), sorted(job.agents), job.progress)
    kill_host(job, sorted(job.agents)[0])
    try:
        while True:
            counter.pid.call().get()
    except monarch.exceptions.SupervisionError:
        pass
    heal_mesh(counter)
    say(list(counter.add.call(1).get().values()), job.progress.missing)
    job_of(counter).kill()
"""


def kill_host(job: AdapterJob, name: str) -> None:
    """Kills the host's agent, which outlives its worker while it keeps a mesh, and all its processes."""
    worker = psutil.Process(int(job.agents[name].id.partition("@")[0]))
    for process in (worker, *worker.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("how", ["leave", "killed", "early", "lost", "load"])
def test_another_controller_attaches_with_the_same_positions_and_the_job_resizes(tmp_path: Path, how: str) -> None:
    env = {**os.environ, "PYTHONPATH": ROOT, "XDG_STATE_HOME": str(tmp_path / "state"), "MONARCH_NB_MESH_KEEP": "60s"}

    def run(code: str, *words: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=env,
                              cwd=tmp_path)  # fmt: skip
        assert done.returncode in (0, -9), done.stderr
        assert how == "lost" or "heal_mesh" not in done.stdout.partition("attached")[0], "what was let go is no loss"
        lines = done.stdout.rpartition("attached\n")[2].splitlines()
        return [line for line in lines if re.match(r"\{'hosts'|3$|\[\d", line)]  # without output of ranks

    try:
        [state] = run(FIRST, "leave" if how in ("lost", "load") else how)
        assert state.startswith("{'hosts': 2, 'gpus': 1} [17, 12] ")
        if how == "lost":
            job = job_load(str(tmp_path / "job.json"))
            assert isinstance(job, ProcessJob)
            kill_host(job, "trainers_2")
        first, grown, counts, shrunk, healed = run(SECOND, how)
        lost = how == "lost"
        assert first == ("{'hosts': 2, 'gpus': 1} [17, 10]" if lost else state)
        assert grown == ("{'hosts': 2} 3 {'hosts': 3}" if how == "load" else "3")
        assert counts == ("[18, 11, 11]" if lost else "[18, 13, 11]")
        low, high = ("trainers_3", "trainers_4") if lost else ("trainers_2", "trainers_3")
        assert shrunk == f"{'[12, 12]' if lost else '[14, 12]'} ['{low}', '{high}'] 2/2 hosts joined"
        assert healed == "[11, 13] {}"
        until(lambda: not (tmp_path / "job.json").exists(), "it was killed")
    finally:
        if (tmp_path / "job.json").exists():
            job_load(str(tmp_path / "job.json")).kill()
