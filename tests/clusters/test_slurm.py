"""Jobs on a real Slurm with ten seconds of grace, partitions that preempt, and one that is down."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.engine_tools import PYTHON, SlurmCluster, needs, none_alive
from tests.clusters.actors import SPAWN, grow_with_another_key
from tests.clusters.console import Console
from tests.polling import until
from tests.ports import free_port

needs("slurmctld", "slurmd", "munged", "sbatch", package="slurmctld slurmd slurm-client munge")
pytestmark = [
    pytest.mark.clusters, pytest.mark.slow, pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: a Slurm of one's own needs root"),
]  # fmt: skip
GRACE_S = 10
AT_ONCE_S = 20.0  # for a machine under load; the tested steps took a minute or more
START = """
import os, signal, time
from monarch_nb.actor import Actor, MeshFailure, SupervisionError, endpoint, this_proc
from monarch_nb.job import SlurmJob
import monarch_nb.actor

def exists(pid):
    return os.path.exists(f"/proc/{pid}") and " Z " not in open(f"/proc/{pid}/stat").read()

class Rank(Actor):
    @endpoint
    def pid(self): return os.getpid()

    @endpoint
    def save(self): return os.getpid()

class Owner(Actor):
    def __init__(self, hosts):
        self.ranks = hosts.spawn_procs(name="ranks").spawn("ranks", Rank)
        self.saved, self.left, self.failures, self.alive, self.lost = [], [], [], [], set()

    @endpoint
    def pids(self): return self.ranks.pid.call().get(60).values()

    @endpoint
    def seen(self): return self.saved, self.left, self.failures, self.alive

    def __supervise__(self, failure):
        if failure.preempted:
            self.left.append((failure.seconds_left, failure.cause.text))
            self.saved += self.ranks.save.call().get(30).values()
        else:
            self.failures.append(str(failure))
            self.alive += [rank for rank in failure.crashed_ranks if exists(self.saved[rank])]
            self.lost |= {*failure.crashed_ranks}
        return True

    @endpoint
    def lost_ranks(self): return sorted(self.lost)
"""
QUEUED = f"""
from monarch_nb.job import SlurmJob
job = SlurmJob({{"trainers": 2}}, {PYTHON!r}, slurm_args=["--hold"], job_start_timeout=PATIENCE)
job.state(None)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), GRACE_S)
    yield cluster
    cluster.close()


@pytest.fixture
def console(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Console]:
    user = Console(tmp_path, SLURM_CONF=str(slurm.conf), XDG_STATE_HOME=str(tmp_path / "state"), MONARCH_NB_PRELOAD="")
    yield user
    if user.process.returncode is None:
        user.kill()
    slurm.ask("scancel", "--user=root")
    until(lambda: slurm.ask("squeue", "-h") == "", "Slurm has tidied up", 60)


def queue(slurm: SlurmCluster) -> str:
    return slurm.ask("squeue", "-h", "-o", "%T")


@pytest.mark.parametrize("way", ["kill", "interrupt", "two interrupts", "patience"])
def test_a_job_that_waits_goes_out_of_the_queue_at_once(slurm: SlurmCluster, console: Console, way: str) -> None:
    console.ask(QUEUED.replace("PATIENCE", "2" if way == "patience" else "None"))
    if way == "kill":
        assert queue(slurm) == "PENDING"
        console.ask("job.kill()", AT_ONCE_S)
    elif way == "patience":
        with pytest.raises(RuntimeError, match=r"not been started within 2 s: .*JobHeldUser.*not asked for any more"):
            console.ask("job.wait()", AT_ONCE_S)
    else:
        console.tell("job.wait(tell=lambda progress: print('waits', flush=True))")
        until(lambda: "waits" in console.said(), "it waits")
        console.process.send_signal(signal.SIGINT)
        if way == "two interrupts":
            time.sleep(0.05)  # while scancel runs, or just before or after: all is well in any case
            console.process.send_signal(signal.SIGINT)
        with pytest.raises((RuntimeError, EOFError), match=r"KeyboardInterrupt|has ended"):
            console.answer(AT_ONCE_S)
    until(lambda: queue(slurm) == "", "nothing is in the queue", AT_ONCE_S)


def test_requests_that_slurm_can_never_grant_are_refused_with_its_reason(slurm: SlurmCluster, console: Console) -> None:
    many = r"many_0, .* wait in Slurm's queue \(job \d+: PartitionConfig\), and will for ever: partition all does not"
    shut = r"shut_0 waits in Slurm's queue \(job \d+: PartitionDown\), and will for ever: partition closed starts no"
    requests = {"{'many': 9}": many, "{'shut': 1}, partition='closed'": shut}
    for request, words in requests.items():
        meshes, _, options = request.partition(", ")
        console.ask(
            f"from monarch_nb.job import SlurmJob\njob = SlurmJob({meshes}, {PYTHON!r}, {options})\njob.state(None)"
        )
        find = re.compile(words).search
        until(lambda find=find: find(console.ask("str(job.progress)")), "the progress says so", AT_ONCE_S)
        until(lambda find=find: find(console.said()), "it is logged, though nobody asks", AT_ONCE_S)
        console.ask("job.kill()", AT_ONCE_S)
    assert console.said().count("for ever") == len(requests), "once each"
    with pytest.raises(RuntimeError, match=r"sbatch: .*gres"):
        console.ask(f"SlurmJob({{'gpus': 1}}, {PYTHON!r}, gpus_per_node=1).state(None)")
    assert queue(slurm) == ""


@pytest.mark.parametrize("end", ["scancel", "preemption", "time limit"])
def test_hosts_that_slurm_ends_have_notice_and_their_grace(slurm: SlurmCluster, console: Console, end: str) -> None:
    limit = "time_limit='0:01:00'" if end == "time limit" else ""
    console.ask(f"{START}\njob = SlurmJob({{'trainers': 2}}, {PYTHON!r}, {limit})")
    console.ask("owner = this_proc().spawn('owner', Owner, job.state(None).trainers)")
    pids = console.ask("owner.pids.call_one().get(60)")
    number = slurm.ask("squeue", "-h", "-o", "%i")
    if end == "scancel":
        slurm.ask("scancel", number)
    elif end == "preemption":
        slurm.ask("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    def report() -> tuple[list[int], list[tuple[float, str]], list[str], list[int]]:
        answer: tuple[list[int], list[tuple[float, str]], list[str], list[int]] = console.ask(
            "owner.seen.call_one().get(60)"
        )
        return answer

    answers = [report()]
    until(lambda: answers.append(report()) or len(answers[-1][0]) == 2, "the hook has saved", 200)
    saved, [[seconds_left, by]], failures, _ = answers[-1]  # asked again, it might have failed by now
    assert sorted(saved) == sorted(pids)
    assert failures == []
    assert 0 < seconds_left <= GRACE_S
    assert f"Slurm job {number}" in by
    assert {"scancel": "is being ended", "preemption": "is preempted", "time limit": "its time limit"}[end] in by
    until(lambda: console.ask("owner.lost_ranks.call_one().get(60)") == [0, 1], "the failures", 90)
    assert none_alive(pids)
    _, notices, failures, alive = report()
    assert alive == [], "declared dead while it lived"
    assert len(notices) == 1, "one notice"
    assert all("its owner" not in text for text in failures), "their owner lives"
    until(lambda: console.ask("len(job.progress.missing)") == 2, "the progress has none any more")
    console.ask("job.kill()", 60)


def test_hosts_of_slurm_get_another_key_while_they_work(slurm: SlurmCluster, console: Console) -> None:
    console.ask(f"from monarch_nb.job import SlurmJob\njob = SlurmJob({{'trainers': 2}}, {PYTHON!r})")
    grow_with_another_key(console)
    console.ask("job.kill()", 60)


def test_nodes_behind_the_first_one_are_reached_until_their_job_ends(slurm: SlurmCluster, console: Console) -> None:
    for options in ("out_of_cluster=True", ""):  # the names of nodes, which are tried first, lead nowhere here
        console.ask(f"from monarch_nb.job import SlurmJob\njob = SlurmJob({{'trainers': 2}}, {PYTHON!r}, {options})")
        assert console.ask(SPAWN, 90) != []
        console.ask("job.kill()", 60)


def test_agents_that_cannot_listen_are_reported_with_the_reason(slurm: SlurmCluster, console: Console) -> None:
    port = free_port()  # for two agents, since all nodes are this machine
    console.ask(f"from monarch_nb.job import SlurmJob\njob = SlurmJob({{'two': 2}}, {PYTHON!r}, monarch_port={port})")
    with pytest.raises(RuntimeError, match=rf"(?s)two_[01] is gone, on .*:{port}.*[Aa]ddress already in use"):
        console.ask("job.state(None)\njob.wait(60)", 90)
    console.ask("job.kill()", 60)
