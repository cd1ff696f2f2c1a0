"""A mesh that has grown and shrunk is left, or loses its controller: another one has it as it was, and changes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_nb.job import job_load
from tests.cluster.fault_tools import ROOT, until

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

FIRST = """
import os, signal, sys
import monarch_nb as monarch
from monarch_nb.connect import Leaving
from monarch_nb.job import ProcessJob
from monarch_nb.runtime import runtime
from tests.cluster.detach_programs import Counter

if __name__ == "__main__":
    job = ProcessJob({"trainers": 1}, env={"MONARCH_NB_PRELOAD": ""})
    procs = job.state("job.json").trainers.spawn_procs({"gpus": 1}, name="trainers")
    counter = procs.spawn("counter", Counter, 10)
    counter.add.call(5).get()
    if "early" in sys.argv:
        runtime().part(Leaving).keep_up()
    procs.grow(hosts=2)
    counter.add.call(1).get()
    procs.shrink(hosts=[1])
    found = counter.add.call(1).get().values()
    print(dict(counter.extent), list(found), *counter.pid.call().get().values(), flush=True)
    if "leave" in sys.argv:
        procs.detach("60s")
    else:
        runtime().part(Leaving).keep_up()
        os.kill(os.getpid(), signal.SIGKILL)
"""

SECOND = """
import monarch_nb as monarch
from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.job import job_load

if __name__ == "__main__":
    procs, counter = monarch.attach("trainers"), monarch.attach("counter")
    print("attached")
    print(dict(procs.extent), list(counter.add.call(0).get().values()), *counter.pid.call().get().values(), flush=True)
    try:
        procs.grow(hosts=1)
    except NoMoreHostsError as error:
        print("load the job" in str(error).lower())
    job = job_load("job.json")
    hosts = job.state(None).trainers
    print(dict(hosts.extent), procs.grow(hosts=1).sizes["hosts"], dict(hosts.extent), flush=True)
    print(list(counter.add.call(1).get().values()), flush=True)
    procs.shrink(hosts=[0])
    print(list(counter.add.call(1).get().values()), sorted(job.agents), flush=True)
    procs.stop().get()
    job.kill()
"""


@pytest.mark.parametrize("how", ["leave", "killed", "early"])
def test_another_controller_has_it_with_the_same_places_and_goes_on_growing(tmp_path: Path, how: str) -> None:
    env = {**os.environ, "PYTHONPATH": ROOT, "XDG_STATE_HOME": str(tmp_path / "state"), "MONARCH_NB_MESH_KEEP": "60s"}

    def run(code: str, *words: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=env,
                              cwd=tmp_path, timeout=100)  # fmt: skip
        assert done.returncode in (0, -9), done.stderr
        assert "heal_mesh" not in done.stdout, "what was let go is no loss"
        return [line for line in done.stdout.rpartition("attached\n")[2].splitlines() if not line.startswith("now ")]

    try:
        [left] = run(FIRST, how)
        assert left.startswith("{'hosts': 2, 'gpus': 1} [17, 12] ")
        first, refused, grown, counts, shrunk = run(SECOND)
        assert first == left
        assert refused == "True"
        assert grown == "{'hosts': 2} 3 {'hosts': 3}"
        assert counts == "[18, 13, 11]"
        assert shrunk == "[14, 12] ['trainers_2', 'trainers_3']"
        until(lambda: not (tmp_path / "job.json").exists(), "it was killed")
    finally:
        if (tmp_path / "job.json").exists():
            job_load(str(tmp_path / "job.json")).kill()
