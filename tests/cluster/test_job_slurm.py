"""Jobs on Slurm: a real one, of four virtual nodes on this machine."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, SupervisionError, endpoint, heal_mesh
from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.host.preemption import END
from monarch_nb.job import EngineError, HostsMissingError, Role, SlurmJob, job_load, running_jobs
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.runtime import current_runtime
from tests.cluster.engine_tools import PYTHON, SlurmCluster, needs, none_alive
from tests.cluster.fault_tools import SOON
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture
from tests.polling import until

needs("slurmctld", "slurmd", "munged", "sbatch", package="slurmctld slurmd slurm-client munge")
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.timeout(150),
    pytest.mark.usefixtures("host"),
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: a Slurm of one's own needs root"),
]
LIGHT = {"MONARCH_NB_PRELOAD": "", "MARK": "a secret of the user"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def state_home(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Probe(Actor):
    @endpoint
    def facts(self) -> tuple[str, str, int]:
        return os.environ["SLURMD_NODENAME"], os.environ["MARK"], os.getpid()


def slurm_id(job: SlurmJob) -> str:
    return next(iter(job._agents.values())).id.partition("/")[0]


def test_each_node_is_a_host_and_another_process_ends_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    start = time.monotonic()
    job = SlurmJob({"trainers": 2, "loaders": 1}, PYTHON, partition="all", time_limit="0:10:00", env=LIGHT)
    try:
        state = job.state(cached_path=str(tmp_path / "job.json"))
        actors = state.trainers.spawn_procs(per_host={"gpus": 2}).spawn("probe", Probe)
        replies = actors.facts.call().get(SOON).values()
        print(f"first reply of 2 nodes after {time.monotonic() - start:.1f} s")
        assert len({node for node, _, _ in replies}) == 2, "a node each"
        assert {mark for _, mark, _ in replies} == {LIGHT["MARK"]}
        job.wait(SOON)
        shown = slurm.ask("scontrol", "show", "job", "-d", slurm_id(job)) + slurm.ask("ps", "axww", "-o", "args")
        secret = Path(job._folder, "key").read_text().splitlines()[-1].strip()
        assert secret not in shown
        assert LIGHT["MARK"] not in shown
        assert oct(os.stat(Path(job._folder, "key")).st_mode & 0o777) == "0o600"
        assert [entry.apply_id for entry in running_jobs("slurm")] == [job.apply_id]
        copy = job_load(str(tmp_path / "job.json"))
        assert copy.can_run(job)
        assert "--overlap" in job._adapter.shell(job._job, "trainers_1")
        copy.kill()
        assert none_alive([pid for _, _, pid in replies])
        until(lambda: slurm.ask("squeue", "-h") == "", "Slurm has tidied up")
        assert running_jobs("slurm") == []
    finally:
        job.kill()


@pytest.mark.slow
def test_a_mesh_grows_by_another_batch_job_and_gives_nodes_back(
    slurm: SlurmCluster, tmp_path: Path, shown: list[Any]
) -> None:
    def used() -> str:
        return slurm.ask("squeue", "-h", "-S", "i", "-o", "%N")

    job = SlurmJob({"trainers": 2}, PYTHON, env=LIGHT)
    try:
        procs = job.state(cached_path=str(tmp_path / "job.json")).trainers.spawn_procs()
        actors = procs.spawn("probe", Probe)
        assert [node for node, _, _ in actors.facts.call().get(SOON).values()] == ["n1", "n2"]
        procs.grow(hosts=["n4"], timeout=SOON)
        replies = actors.facts.call().get(SOON).values()
        assert [(node, mark) for node, mark, _ in replies] == [(node, LIGHT["MARK"]) for node in ("n1", "n2", "n4")]
        assert used().split() == ["n[1-2]", "n4"]
        with pytest.raises(
            NoMoreHostsError, match=r"no 2 more hosts within 4 s: .*wait in Slurm's queue \(job \d+: Res"
        ):
            procs.grow(hosts=2, timeout=4)
        assert used().split() == ["n[1-2]", "n4"], "nothing of it waits any longer"
        procs.grow(hosts=1, timeout=SOON)
        assert used().split() == ["n[1-2]", "n4", "n3"]
        replies = actors.facts.call().get(SOON).values()
        procs.shrink(hosts=[1, 3])
        until(lambda: used().split() == ["n1", "n4"], "a node of a batch job, and the whole of another, are given back")
        assert none_alive([replies[1][2], replies[3][2]])
        assert [node for node, _, _ in actors.facts.call().get(SOON).values()] == ["n1", "n4"]
        assert "--nodelist=n4" in job.adapter.shell(job._job, "trainers_2")
        slurm.ask("scancel", f"--signal={END.name[3:]}", slurm_id(job))  # its agents end at once
        with pytest.raises(SupervisionError):
            until(lambda: actors.facts.call().get(SOON) is None, "its end")
        slurm.answers(False)
        with pytest.raises(NoMoreHostsError, match=r"engine of SlurmJob \w+ has not answered within 4 s"):
            heal_mesh(actors)
        slurm.answers(True)
        heal_mesh(actors, timeout=SOON)  # Slurm reports its end
        replies = actors.facts.call().get(SOON).values()
        assert len({node for node, _, _ in replies}) == 2
        copy = job_load(str(tmp_path / "job.json"))
        assert sorted(agent.id for agent in copy._agents.values()) == sorted(agent.id for agent in job.agents.values())
        copy.kill()
        assert none_alive([pid for _, _, pid in replies])
        until(lambda: used() == "", "Slurm has tidied up")
    finally:
        job.kill()


@pytest.mark.slow
def test_hosts_that_wait_in_the_queue_are_told_with_slurms_reason(slurm: SlurmCluster) -> None:
    job = SlurmJob({"trainers": 3}, PYTHON, env=LIGHT)
    job.state(cached_path=None)
    second = SlurmJob({"loaders": Role(hosts=2), "others": Role(hosts=1, cpus=1)}, PYTHON, env=LIGHT)
    try:
        state = second.state(cached_path=None)
        assert state.others.initialized.get(SOON) is True  # on other nodes: its own batch job
        until(lambda: re.search(r"1/3 hosts joined.*waits? in Slurm's queue \(job \d+: \w+\)", str(second.progress)),
              "Slurm's reason")  # fmt: skip
        job.kill()
        second.wait(SOON)
        assert str(second.progress) == "3/3 hosts joined"
    finally:
        job.kill()
        second.kill()


@pytest.mark.slow
def test_a_job_that_slurm_ends_is_one_report_in_its_words(slurm: SlurmCluster, shown: list[Any]) -> None:
    job = SlurmJob({"trainers": 3}, PYTHON, env=LIGHT)
    try:
        actors = job.state(cached_path=None).trainers.spawn_procs().spawn("probe", Probe)
        pids = [pid for _, _, pid in actors.facts.call().get(SOON).values()]
        notices: list[str] = []
        current_runtime().part(HostNotices).present(lambda event: notices.append(event.text))
        slurm.ask("scancel", slurm_id(job))
        until(lambda: notices, "the notice")
        pattern = rf"\(Slurm job {slurm_id(job)} (is being ended|was cancelled)\), in 2 s"
        assert re.search(pattern, notices[0]), "for KillWait"
        assert [pid for _, _, pid in actors.facts.call().get(SOON).values()] == pids, "it goes on for that time"
        until(lambda: shown, "its end is shown, though no call waits for it")
        assert shown[0].crashed_ranks == [0, 1, 2]
        assert shown[0].report().count(f"trainers_0, trainers_1, trainers_2 are gone: Slurm job {slurm_id(job)}") == 1
        with pytest.raises(SupervisionError, match=r"3 hosts .* were lost: trainers_0"):
            actors.facts.call().get(SOON)
        until(lambda: "cancel" in job._lost(), "Slurm says so")
        with pytest.raises(RuntimeError, match=rf"is gone: Slurm job {slurm_id(job)} was cancelled"):
            job.state(None)
        assert none_alive(pids)
        assert len(shown) == 1
    finally:
        current_runtime().part(HostNotices).present(None)
        job.kill()


def test_refused_or_unstartable_slurm_jobs_are_reported_in_slurms_words(slurm: SlurmCluster) -> None:
    with pytest.raises(EngineError, match=r"sbatch: .*[Ii]nvalid partition"):
        SlurmJob({"trainers": 1}, PYTHON, partition="nowhere").apply()
    job = SlurmJob({"trainers": 1}, "/no/such/python")
    try:
        state = job.state(cached_path=None)
        with pytest.raises(
            HostsMissingError, match=r"(?s)trainers_0 is gone: Slurm job \d+ has failed.*no/such/python"
        ):
            state.trainers.initialized.get(SOON)
    finally:
        job.kill()
    assert running_jobs("slurm") == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(EngineError, match="there is no command sbatch here"):
            SlurmJob({"trainers": 1}).apply()


CLIENT = """
import json, sys
from monarch_nb.job import SlurmJob
state = SlurmJob({"any": 1}).state()
procs = state.trainers.spawn_procs()
procs.grow(hosts=1)  # by another batch job, which ends with this one
import os
nodes = procs.run(lambda: os.environ["SLURMD_NODENAME"]).get(60).values()
with open(os.environ["RESULT"], "w") as out:
    json.dump(sorted(nodes), out)
"""


@pytest.mark.slow
def test_a_client_script_runs_inside_the_allocation_which_ends_with_it(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    result = tmp_path / "result.json"
    monkeypatch.setenv("RESULT", str(result))
    job = SlurmJob({"trainers": 2}, PYTHON, env=LIGHT)
    try:
        job.apply(str(tmp_path / "client.py"))
        until(result.exists, "the script has run", 60)
        until(result.read_text, "its result", 60)
        assert len(set(json.loads(result.read_text()))) == 3, "nodes of its own"
        until(lambda: slurm.ask("squeue", "-h") == "", "the end of both allocations")
    finally:
        print(*job._adapter.lines(job._job, "trainers_0", 20), sep="\n")
        job.kill()
