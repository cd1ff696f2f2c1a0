"""Hosts of a job that get notice of their end, and spare hosts that replace lost ones."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_nb import configured
from monarch_nb.actor import Actor, HostMesh, MeshFailure, SupervisionError, endpoint, heal_mesh
from monarch_nb.connect import Detacher, attach_hosts, shutdown
from monarch_nb.host.preemption import GRACE
from monarch_nb.job import ProcessJob, Role, job_load
from monarch_nb.job.report import read_report
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.runtime import current_runtime, started
from monarch_nb.supervision import HealError
from monarch_nb.transport import Keys
from monarch_nb.wire import host_name
from tests.cluster.fault_tools import SOON
from tests.cluster.hosts_tools import user_hosts
from tests.cluster.worker_tools import light_host, where  # noqa: F401 - a fixture
from tests.polling import until
from tests.processes import alive

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("host")]


def pid_of(job: ProcessJob, name: str) -> int:
    return int(job._agents[name].id.partition("@")[0])


class Keeper(Actor):
    """Owns trainers on hosts of a job."""

    def __init__(self, hosts: HostMesh) -> None:
        self.trainers = where(hosts.spawn_procs(name="trained"))
        self.failures: list[tuple[bool, list[int], float | None]] = []

    @endpoint
    def pid(self) -> int:
        return int(self.trainers.pid.call_one().get(SOON))

    @endpoint
    def reports(self) -> list[tuple[bool, list[int], float | None]]:
        return self.failures

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append((failure.preempted, failure.crashed_ranks, failure.seconds_left))
        return True


@pytest.fixture
def notices() -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    if (runtime := started()) is not None:
        runtime.part(HostNotices).present(None)


def test_the_first_sigterm_gives_notice_and_the_second_ends_the_host(host: Any, notices: list[str]) -> None:
    job = ProcessJob({"trainers": 1}, env={GRACE: "40"})
    try:
        hosts = job.state(cached_path=None).trainers
        current_runtime().part(HostNotices).present(lambda event: notices.append(event.text))
        procs = host.spawn_procs(name="beside")
        keeper = procs.spawn("keeper", Keeper, hosts)
        pid, worker = keeper.pid.call_one().get(SOON), pid_of(job, "trainers_0")
        os.kill(worker, signal.SIGTERM)
        until(lambda: keeper.reports.call_one().get(SOON), "the notice")
        [(preempted, ranks, seconds)] = keeper.reports.call_one().get(SOON)
        assert (preempted, ranks) == (True, [])
        assert 35 < seconds <= 40
        assert keeper.pid.call_one().get(SOON) == pid, "all goes on"
        until(lambda: notices, "the controller's")
        assert "is about to be taken away (SIGTERM), in 40 s" in notices[0]
        assert alive(worker)

        def ended() -> bool:
            if alive(worker):
                os.kill(worker, signal.SIGTERM)  # signals right after the first count as the same notice
            return not alive(worker) and not alive(pid)

        until(ended, "its end")
        until(lambda: len(keeper.reports.call_one().get(SOON)) == 2, "the failure")
        assert keeper.reports.call_one().get(SOON)[1][:2] == (False, [0])
        procs.stop().get(SOON)
    finally:
        job.kill()


def test_an_unused_host_of_a_job_ends_at_the_first_sigterm() -> None:
    job = ProcessJob({"trainers": 1})
    job.apply()
    try:
        worker = pid_of(job, "trainers_0")
        until(lambda: job._adapter.look(job._job)["trainers_0"].host, "it listens")
        os.kill(worker, signal.SIGTERM)
        until(lambda: not alive(worker), "its end")
    finally:
        job.kill()


def agents_of(worker: int) -> list[int]:
    """The agent processes of a worker once they have started; none if the worker has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(worker).children() if child.name() == "mnb-agent"]
    return []


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[int, str, str]]:
    """The process, address and key of a worker that listens on TCP, as schedulers start it."""
    key, report = tmp_path / "key", tmp_path / "report.json"
    Keys.load_or_create(key)
    words = [sys.executable, "-m", "monarch_nb.job.worker", "tcp://127.0.0.1:0", "--key", str(key)]
    with subprocess.Popen([*words, "--report", str(report)], stderr=subprocess.DEVNULL) as process:
        until(lambda: read_report(report) is not None, "it listens")
        content = read_report(report)
        assert content is not None
        try:
            yield process.pid, f"tcp://127.0.0.1:{content.joins[0].rpartition(':')[2]}", str(key)
        finally:
            process.kill()


def test_a_killed_agent_is_started_again_and_healed_in_place(worker: tuple[int, str, str], shown: list[Any]) -> None:
    pid, address, key = worker
    hosts = attach_hosts([address], key=key)
    trainers = where(hosts.spawn_procs(name="trained"))
    before, first, agent = trainers.pid.call_one().get(SOON), hosts.host_ids, agents_of(pid)
    os.kill(*agent, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        until(lambda: trainers.pid.call_one().get(SOON) is None, "the loss of its rank")
    until(lambda: agents_of(pid) not in ([], agent), "another agent")

    def healed() -> bool:
        with contextlib.suppress(HealError):  # until its agent is back
            return heal_mesh(trainers, timeout=SOON) is trainers
        return False

    until(healed, "its rank is back")
    assert trainers.pid.call_one().get(SOON) != before
    assert hosts.host_ids == first
    hosts.shutdown().get(SOON)


def test_an_agent_that_fails_again_and_again_ends_its_worker(worker: tuple[int, str, str], tmp_path: Path) -> None:
    killed: set[int] = set()
    while alive(worker[0]):
        for pid in set(agents_of(worker[0])) - killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert len(killed) > 5
    content = read_report(tmp_path / "report.json")
    assert content is not None
    assert content.ended.endswith("ended with status -9")


def test_a_killed_worker_takes_meshes_along_that_were_to_be_kept(shown: list[Any]) -> None:
    job = ProcessJob({"trainers": 1})
    try:
        with configured(mesh_keep="10m"):
            trainers = where(job.state(None).trainers.spawn_procs(name="trained"))
            pids = list(trainers.pid.call().get(SOON).values())
            current_runtime().part(Detacher).flush_holds()
        worker = pid_of(job, "trainers_0")
        pids += [worker, *agents_of(worker)]
        os.kill(worker, signal.SIGKILL)
        until(lambda: not any(map(alive, pids)), "they have ended")
    finally:
        job.kill()


@pytest.mark.slow
def test_a_spare_replaces_a_dead_host_and_another_spare_comes(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, shown: list[Any]
) -> None:
    job = ProcessJob({"trainers": Role(hosts=2, spares=1)})
    assert repr(job) == "<ProcessJob trainers=2 and 1 spare>"
    path = str(tmp_path / "job.json")
    try:
        with caplog.at_level(logging.WARNING, "monarch_nb.job"):
            state = job.state(cached_path=path)
            trainers = where(state.trainers.spawn_procs(name="trained"))
            pids = list(trainers.pid.call().get(SOON).values())
            assert len(pids) == 2
            until(lambda: state.trainers.spares, "the spare")
            assert str(job.progress) == "2/2 hosts joined, 1/1 spare"
            assert repr(state) == "JobState(trainers=2 hosts and 1 spare)"
            [spare] = state.trainers.spares
            os.kill(pid_of(job, "trainers_0"), signal.SIGKILL)
            with pytest.raises(SupervisionError):
                until(lambda: trainers.pid.call().get(SOON) is None, "its end")
            until(lambda: "Missing: trainers_0 is lost: " in str(job.progress), "progress shows it")
            assert str(job.progress).startswith("1/2 hosts joined, 1/1 spare. Missing: trainers_0 is lost")
            start = time.monotonic()
            assert heal_mesh(trainers, timeout=SOON) is trainers
            print(f"healed onto the spare after {time.monotonic() - start:.2f} s")
            assert len(trainers.pid.call().get(SOON)) == 2
            assert f"the spare host trainers_2 ({host_name(spare)}) took the place of trainers_0" in caplog.text
            assert state.trainers.host_ids == job.state(None).trainers.host_ids
            assert state.trainers.host_ids[0] == spare
            assert next(iter(trainers.pid.call().get(SOON).values())) not in pids, "the rank is where it was"
            assert str(job.progress).startswith("2/2 hosts joined")
            until(lambda: job.progress.spares == ("trainers_3",), "another spare")
            assert {*job._agents} == {"trainers_1", "trainers_2", "trainers_3"}
            assert job_load(path)._names("trainers") == ["trainers_2", "trainers_1"]
            os.kill(pid_of(job, "trainers_3"), signal.SIGKILL)
            until(lambda: "the spare host trainers_3" in caplog.text, "it is told")
            until(lambda: job.progress.spares == ("trainers_4",), "another spare")
            assert len(trainers.pid.call().get(SOON)) == 2
            workers = [pid_of(job, name) for name in job._agents]
    finally:
        job.kill()
    assert not any(map(alive, workers))


@pytest.mark.slow
def test_hosts_keep_their_places_when_others_are_replaced_or_come(tmp_path: Any, shown: list[Any]) -> None:
    job, path = ProcessJob({"trainers": 3}), str(tmp_path / "job.json")
    try:
        hosts = job.state(cached_path=path).trainers
        procs = hosts.spawn_procs(name="trained")
        trainers = where(procs)
        before, first = list(trainers.pid.call().get(SOON).values()), hosts.host_ids
        procs.grow(hosts=1)
        assert str(job.progress) == "4/4 hosts joined"
        for name in ("trainers_1", "trainers_3"):
            os.kill(pid_of(job, name), signal.SIGKILL)
        until(lambda: len(job.progress.missing) == 2, "both are lost")
        assert heal_mesh(trainers, timeout=SOON) is trainers  # their engine reports them as ended
        after = list(trainers.pid.call().get(SOON).values())
        assert (after[0], after[2]) == (before[0], before[2])
        assert (hosts.host_ids[0], hosts.host_ids[2]) == (first[0], first[2])
        until(lambda: len(job.agents) == 4, "the lost ones were let go")
        names = ["trainers_0", "trainers_4", "trainers_2", "trainers_5"]
        for copy in (job, job_load(path)):
            assert copy._names("trainers") == names
            assert copy.state(None).trainers.host_ids == hosts.host_ids
            assert copy.progress == (4, tuple(names), {}, (), 0)
    finally:
        job.kill()
    assert str(job.progress) == "0/3 hosts joined"


@pytest.mark.slow
def test_agents_started_by_hand_give_notice_and_end_with_their_users(
    tmp_path: Any, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GRACE, "20")
    with user_hosts(tmp_path, 1, "--insecure-loopback") as [agent]:
        hosts = attach_hosts([agent.endpoint], insecure_loopback=True)
        current_runtime().part(HostNotices).present(lambda event: notices.append(event.text))
        procs = hosts.spawn_procs(name="trained")
        assert len(where(procs).pid.call().get(SOON).values()) == 1
        agent.process.send_signal(signal.SIGTERM)
        until(lambda: notices, "the notice")
        assert f"Host {host_name(agent.host)} is about to be taken away (SIGTERM), in 20 s:\n  trained" in notices[0]
        assert len(where(procs).pid.call().get(SOON).values()) == 1, "it can be used for that time"
        procs.stop().get(SOON)
        shutdown()  # its last user leaves
        assert agent.process.wait(SOON) == 0
