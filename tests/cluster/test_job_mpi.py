"""Jobs on the hosts of a real mpirun."""

import os
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, endpoint
from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.job import HostsMissingError, MPIJob, running_jobs
from tests.cluster.engine_tools import PYTHON, needs, none_alive
from tests.cluster.fault_tools import SOON
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture
from tests.polling import until

needs("mpirun", package="openmpi-bin")
pytestmark = [pytest.mark.clusters, pytest.mark.timeout(100), pytest.mark.usefixtures("host")]
ARGS = "--allow-run-as-root --oversubscribe" if os.geteuid() == 0 else "--oversubscribe"
LIGHT = {"MONARCH_NB_PRELOAD": "", "MARK": "7"}


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Probe(Actor):
    @endpoint
    def facts(self) -> tuple[str, str, int]:
        return os.environ["OMPI_COMM_WORLD_RANK"], os.environ["MARK"], os.getpid()


def test_each_rank_is_a_host_and_all_end_with_mpirun() -> None:
    job = MPIJob({"trainers": 2, "loaders": 1}, PYTHON, ARGS, env=LIGHT)
    try:
        state = job.state(cached_path=None)
        procs = state.trainers.spawn_procs()
        replies = procs.spawn("probe", Probe).facts.call().get(SOON).values()
        with pytest.raises(NoMoreHostsError, match=r"an mpirun that was started takes no more ranks.*hosts=MPIJob"):
            procs.grow(hosts=1)
        assert [(rank, mark) for rank, mark, _ in replies] == [("0", "7"), ("1", "7")]
        assert job.wait(SOON).missing == {}
        [entry] = running_jobs("mpi")
        entry.kill()
        assert none_alive([pid for _, _, pid in replies])
        assert running_jobs("mpi") == []
    finally:
        job.kill()


@pytest.mark.slow
def test_a_mesh_shrinks_under_its_mpirun_and_grows_onto_another() -> None:
    job, second = MPIJob({"trainers": 2}, PYTHON, ARGS, env=LIGHT), MPIJob({"more": 1}, PYTHON, ARGS, env=LIGHT)
    try:
        procs = job.state(cached_path=None).trainers.spawn_procs()
        actors = procs.spawn("probe", Probe)
        pids = [pid for _, _, pid in actors.facts.call().get(SOON).values()]
        procs.shrink(hosts=[0])
        assert none_alive(pids[:1])
        assert [pid for _, _, pid in actors.facts.call().get(SOON).values()] == pids[1:]
        procs.grow(hosts=second.state(cached_path=None).more)
        assert len(actors.facts.call().get(SOON).values()) == 2
    finally:
        job.kill()
        second.kill()


@pytest.mark.slow
def test_nothing_outlives_an_mpirun_whose_end_is_one_report(shown: list[Any]) -> None:
    job = MPIJob({"trainers": 3}, PYTHON, ARGS, env=LIGHT)
    try:
        actors = job.state(cached_path=None).trainers.spawn_procs().spawn("probe", Probe)
        pids = [pid for _, _, pid in actors.facts.call().get(SOON).values()]
        os.kill(int(next(iter(job._agents.values())).id.partition("@")[0]), 9)
        assert none_alive(pids)
        with pytest.raises(RuntimeError, match=r"trainers_0 is gone: its mpirun \(process \d+\) has ended"):
            job.state(None)
        until(lambda: len(str(job.progress).split("trainers_0, trainers_1, trainers_2 are gone: its mpirun")) == 2,
              "the loss is known")  # fmt: skip
        until(lambda: shown, "the report")
        [failure] = shown
        assert failure.crashed_ranks == [0, 1, 2]
        assert failure.report().count("its mpirun") == 1
    finally:
        job.kill()


def test_the_cause_that_mpirun_gives_first_is_told_once() -> None:
    job = MPIJob({"trainers": 2}, PYTHON, f"{ARGS} --hostfile /no/such/hosts")
    try:
        with pytest.raises(HostsMissingError) as caught:
            job.state(cached_path=None).trainers.initialized.get(SOON)
    finally:
        job.kill()
    text = str(caught.value)
    assert "trainers_1 is gone" in text
    assert text.count("unable to open the hostfile") == 1
    assert text.count("/no/such/hosts") == 1
