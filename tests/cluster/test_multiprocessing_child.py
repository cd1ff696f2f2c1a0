"""Meshes passed to a child of `multiprocessing`, as by frameworks that run an engine in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_nb.connect.local_host import connect_named_hosts
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import UnreachableError
from tests.cluster.fault_tools import ROOT

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("host")]

PROGRAM = """
import multiprocessing, os, pickle, sys, time
from pathlib import Path
from monarch.actor import Actor, endpoint, this_host
from monarch.job import ProcessJob

class Where(Actor):
    @endpoint
    def pid(self): return os.getpid()
    @endpoint
    def take(self, target): self.target = target
    @endpoint
    def ask(self): return self.target.pid.call().get(20).values()
    @endpoint
    def note(self, folder): self.folder = folder
    def __cleanup__(self, exc):
        if hasattr(self, "folder"):
            (Path(self.folder) / str(os.getpid())).touch()

def pids(actors): return sorted(actors.pid.call().get(40).values())

def child(pickled, folder, pipe):
    procs, actors, hosts = pickle.loads(pickled)
    assert pids(actors) == pids(procs.spawn("mine_on_theirs", Where))
    noting = procs.spawn("noting", Where)
    noting.note.call(folder).get(20)
    own = this_host().spawn_procs(name="own").spawn("own", Where)
    remote = hosts.spawn_procs(name="there").spawn("there", Where)
    actors.take.call(own).get(20)
    assert all(answer == pids(own) for answer in actors.ask.call().get(20).values())
    pipe.send(pids(own) + pids(remote))
    time.sleep(1000)

def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

if __name__ == "__main__":
    job = ProcessJob({"hosts": 1}) if sys.argv[1] == "workers" else None
    hosts = this_host() if job is None else job.state(cached_path=None).hosts
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    actors = procs.spawn("actors", Where)
    actor_pids = pids(actors)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=child, args=(pickle.dumps((procs, actors, hosts)), sys.argv[2], theirs))
    process.start()
    assert ours.poll(60)
    spawned = ours.recv()
    process.kill()
    process.join()
    until(lambda: not any(alive(pid) for pid in spawned))
    until(lambda: sorted(int(path.name) for path in Path(sys.argv[2]).iterdir()) == actor_pids)
    assert pids(actors) == actor_pids
    procs.stop().get(20)
    if job is not None:
        job.kill()
    print("all of it")
"""


@pytest.mark.parametrize("kind", ["here", pytest.param("workers", marks=pytest.mark.slow)])
def test_a_killed_child_process_ends_only_the_meshes_it_spawned(kind: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "program.py", tmp_path / "cleaned"
    script.write_text(PROGRAM)
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernel_ext"}
    command = [sys.executable, str(script), kind, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all of it\n", "")


def test_a_reference_to_a_host_that_is_nowhere_near_says_so() -> None:
    with pytest.raises(UnreachableError, match=r"far has a part on host h0nowhere.* attach it here first"):
        connect_named_hosts(current_runtime(), ["h0nowhere"], "far")
