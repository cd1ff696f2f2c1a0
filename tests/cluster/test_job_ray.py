"""Jobs on a real Ray cluster of one node."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="NOT TESTED HERE: pip install 'monarch-nb[ray]'")
pytestmark = [pytest.mark.clusters, pytest.mark.timeout(180), pytest.mark.slow]

# In a separate process: Ray's client leaves threads and sockets behind in the process that uses it.
HEAD = """
import os, time
import ray
import monarch_nb.actor
from monarch_nb.actor import Actor, endpoint
from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.job import RayJob, Role, running_jobs

class Probe(Actor):
    @endpoint
    def facts(self):
        return os.environ["MARK"], os.getpid()

def alive(pid):
    return os.path.exists(f"/proc/{pid}") and " Z " not in open(f"/proc/{pid}/stat").read()
"""

PROGRAM = """
ray.init(num_cpus=3, include_dashboard=False, namespace="monarch-nb", log_to_driver=False, logging_level="ERROR")
monarch_nb.actor.unhandled_fault_hook = lambda failure: None  # a host is lost, which would end a program

if __name__ == "__main__":
    job = RayJob({"trainers": 2}, strategy="PACK", env={"MARK": "ray", "MONARCH_NB_PRELOAD": ""})
    state = job.state(cached_path=None)
    ranks = state.trainers.spawn_procs().spawn("probe", Probe).facts.call().get(90).values()
    print("marks", *[mark for mark, _ in ranks], flush=True)
    second = RayJob({"others": Role(cpus=2)}, strategy="PACK")
    second.state(cached_path=None)
    try:
        second.wait(4)
    except TimeoutError as error:
        print("waiting", "waits for a node of Ray's" in str(error), flush=True)
    second.kill()
    for meshes in ({"large": Role(hosts=1, gpus=8)}, {"far": 2}):  # never
        pending = RayJob(meshes, strategy="STRICT_SPREAD")
        pending.state(cached_path=None)
        end = time.monotonic() + 30
        while "for ever" not in str(pending.progress) and time.monotonic() < end:
            time.sleep(0.1)
        print("never", str(pending.progress).partition("Missing: ")[2], flush=True)
        pending.kill()
    print("listed", [entry.apply_id for entry in running_jobs("ray")] == [job.apply_id], flush=True)
    ray.kill(ray.get_actor(job._agents["trainers_1"].id, namespace="monarch-nb"))  # as when its node is removed
    end = time.monotonic() + 30
    while "trainers_1 is gone: " not in job._lost() and time.monotonic() < end:
        time.sleep(0.2)
    while alive(ranks[1][1]) and time.monotonic() < end:
        time.sleep(0.2)
    print("lost", job._lost().startswith("trainers_1 is gone: "), alive(ranks[1][1]), alive(ranks[0][1]), flush=True)
    short = RayJob({"short": 1}, strategy="PACK")
    short.keep_for("2s")
    short.state(cached_path=None)
    short.wait(30)
    from monarch_nb.connect import shutdown
    job.kill()
    shutdown()
    end = time.monotonic() + 40
    name = short._agents["short_0"].id
    while name in {info["name"] for info in ray.util.list_named_actors(all_namespaces=True)} and time.monotonic() < end:
        time.sleep(0.2)
    states = [row["state"] for row in ray.util.placement_group_table().values() if row["name"] == str(short.apply_id)]
    print("unused", time.monotonic() < end, states, flush=True)
    print("gone", not any(alive(pid) for _, pid in ranks), running_jobs("ray"), flush=True)
    ray.shutdown()
"""

# Three nodes, one per agent.
SPREAD = """
from ray.cluster_utils import Cluster

def groups():
    table = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    nodes = {node for group in table for node in group["bundles_to_node_id"].values()}
    return sorted(group["state"] for group in table), len(nodes)

def until(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.2)
    return condition()

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, namespace="monarch-nb", log_to_driver=False, logging_level="ERROR")
    job = RayJob({"trainers": 1}, env={"MARK": "ray", "MONARCH_NB_PRELOAD": ""})
    try:
        procs = job.state(cached_path=None).trainers.spawn_procs()
        actors = procs.spawn("probe", Probe)
        actors.facts.call().get(90)
        print("grown", procs.grow(hosts=1, timeout=60).sizes["hosts"], *groups(), flush=True)
        try:
            procs.grow(hosts=2, timeout=5)
        except NoMoreHostsError as error:
            print("waits", "wait for a node of Ray's" in str(error), *groups(), flush=True)
        procs.grow(hosts=1, timeout=60)
        replies = actors.facts.call().get(30).values()
        print("all", [mark for mark, _ in replies], *groups(), flush=True)
        procs.shrink(hosts=[1])
        print("given back", until(lambda: groups()[0] == ["CREATED"] * 2), alive(replies[1][1]), flush=True)
        print("left", len(actors.facts.call().get(30).values()), sorted(job.agents), flush=True)
    finally:
        job.kill()
        print("gone", any(alive(pid) for _, pid in replies), groups()[0], running_jobs("ray"), flush=True)
        ray.shutdown()
        cluster.shutdown()
"""


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    os.environ.pop("RAY_ADDRESS", None)


def run(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    program = folder / "program.py"
    program.write_text(HEAD + text)
    env = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=env)


def test_a_mesh_grows_onto_other_nodes_and_releases_its_placement_group(tmp_path: Path) -> None:
    done = run(tmp_path, SPREAD)
    assert done.stdout.splitlines() == [
        "grown 2 ['CREATED', 'CREATED'] 2",
        "waits True ['CREATED', 'CREATED'] 2",
        "all ['ray', 'ray', 'ray'] ['CREATED', 'CREATED', 'CREATED'] 3",
        "given back True False",
        "left 2 ['trainers_0', 'trainers_4']",
        "gone False [] []",
    ], done.stderr


def test_each_bundle_of_a_placement_group_is_a_host(tmp_path: Path) -> None:
    done = run(tmp_path, PROGRAM)
    assert done.stdout.splitlines() == [
        "marks ray ray",
        "waiting True",
        "never large_0 waits for 1 CPU, 8 GPU on one node, and of 1 node none has that (the most: 3 CPU, 0 GPU). It "
        "will wait for ever, unless Ray gets such nodes",
        "never far_0, far_1 wait for 2 nodes, and the cluster has 1 (strategy='PACK' shares them). It will wait for "
        "ever, unless Ray gets such nodes",
        "listed True",
        "lost True False True",
        "unused True ['REMOVED']",
        "gone True []",
    ], done.stderr
