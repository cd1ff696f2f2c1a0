"""A new kind of jobs is one adapter and one line of registration, also from outside the package."""

import json
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import SupervisionError
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.job import (
    AdapterJob,
    Agent,
    AgentsWanted,
    HostsMissingError,
    JobAdapter,
    JobFileError,
    Progress,
    Role,
    Running,
    Seen,
    adapter_job,
    job_loads,
    kinds,
    register_job,
    running_jobs,
    unregister_job,
)
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import TrustError
from tests.cluster.fault_tools import SOON
from tests.cluster.worker_tools import Where, light_host  # noqa: F401 - a fixture
from tests.polling import until
from tests.processes import alive

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("host")]


class Racks(JobAdapter):
    """An engine that records what it runs, as schedulers do; its machines listen on TCP, with the key."""

    watch_s = 0.1

    def __init__(self) -> None:
        self.full = self.revoked = False
        self.looks = 0
        self.jobs: dict[str, Running] = {}
        self.machines: dict[str, subprocess.Popen[bytes]] = {}
        self.lines: list[list[str]] = []

    def start(self, wanted: AgentsWanted) -> Mapping[str, Agent]:
        agents = {}
        for name in wanted.names:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                join = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            line = wanted.command(join, wanted.secret)
            self.lines.append(line)
            machine = subprocess.Popen(line, env={**os.environ, **wanted.environment}, start_new_session=True)
            number = f"rack-{len(self.machines)}"
            self.machines[number] = machine
            agents[name] = Agent(number, join)
        self.jobs[wanted.job] = Running(wanted.job, str(wanted.folder), agents)
        return agents

    def look(self, job: Running) -> Mapping[str, Seen]:
        self.looks += 1
        states = {}
        for name, agent in job.agents.items():
            status = self.machines[agent.id].poll()
            if self.revoked:
                states[name] = Seen("ended", "was taken back for the night")
            elif status is not None:
                states[name] = Seen("ended", f"was taken back with status {status}")
            elif self.full and agent.id != "rack-0":
                states[name] = Seen("waiting", "all racks are taken")
            else:
                states[name] = Seen("running", f"in {agent.id}", (agent.join,), gpus=2)
        return states

    def kill(self, job: Running) -> None:
        for agent in job.agents.values():
            self.machines[agent.id].kill()
            self.machines[agent.id].wait(SOON)
        self.jobs.pop(job.job, None)

    def running(self) -> Mapping[str, Running]:
        return self.jobs


@pytest.fixture
def racks() -> Iterator[Racks]:
    racks = Racks()
    register_job("racks", lambda: racks)
    yield racks
    unregister_job("racks")
    for machine in racks.machines.values():
        machine.kill()
        machine.wait()


@pytest.mark.slow
def test_an_external_job_kind_gives_hosts_is_listed_and_reports_deaths(racks: Racks) -> None:
    assert {"local", "process", "racks"} < set(kinds())
    job = AdapterJob("racks", {"trainers": 1, "loaders": 1}, env={"MONARCH_JOB_MARK": "r"})
    trainers = job.state(cached_path=None).trainers
    assert trainers.spawn_procs().spawn("where", Where).environment.call_one("MONARCH_JOB_MARK").get(SOON) == "r"
    folder = Path(racks.jobs[str(job.apply_id)].folder)
    secret = folder.joinpath("key").read_text().splitlines()[-1]
    assert len(secret) == 40
    assert not any(secret in word for line in racks.lines for word in line)

    copy = job_loads(job.dumps())  # as another process loads it
    assert (copy.apply_id, copy.can_run(job)) == (job.apply_id, True)
    [entry] = running_jobs("racks")  # if the file is lost
    assert (entry.apply_id, list(entry.state().loaders.extent.items())) == (job.apply_id, [("hosts", 1)])

    racks.machines["rack-1"].kill()
    racks.machines["rack-1"].wait()
    with pytest.raises(RuntimeError, match=r"the job is gone: .*: loaders_0 was taken back with status -9"):
        job.state()
    pid = racks.machines["rack-0"].pid
    entry.kill()
    until(lambda: not alive(pid), "the end of the job")
    assert (running_jobs("racks"), folder.exists()) == ([], False)


def test_jobs_of_kinds_that_are_not_there_are_refused(racks: Racks) -> None:
    with pytest.raises(LookupError, match=r"no kind of jobs 'shelves' here: there are .*racks"):
        AdapterJob("shelves", {"trainers": 1})
    with pytest.raises(ValueError, match="there is a kind of jobs 'racks' already"):
        register_job("racks", Racks)
    text = json.loads(AdapterJob("racks", {"trainers": 1}).dumps())
    text["fields"]["_kind"] = "shelves"
    with pytest.raises(JobFileError, match="no kind of jobs 'shelves'"):
        job_loads(json.dumps(text).encode())
    assert len(AdapterJob("local", {"mine": 1}).state(cached_path=None).mine) == 1
    with pytest.raises(ValueError, match="this host alone"):
        AdapterJob("local", {"mine": 2}).apply()


@pytest.mark.slow
def test_missing_hosts_are_named_with_the_reason_until_they_come(racks: Racks) -> None:
    racks.full = True
    job = AdapterJob("racks", {"trainers": 1, "loaders": 2})
    try:
        state = job.state(cached_path=None)
        assert state.trainers.initialized.get(SOON) is True  # meshes do not wait for each other
        until(lambda: str(job.progress).startswith("1/3 hosts joined"), "one has joined")
        assert str(job.progress) == "1/3 hosts joined. Missing: loaders_0, loaders_1 all racks are taken"
        with pytest.raises(TimeoutError, match="1/3 hosts joined"):
            job.wait(0.05)
        racks.full, messages = False, list[str]()
        assert job.wait(SOON, lambda progress: messages.append(str(progress))).missing == {}
        assert messages[-1] == "3/3 hosts joined"
        assert len(state.loaders.host_ids) == 2
    finally:
        job.kill()


@pytest.mark.slow
def test_a_job_keeps_its_key_until_all_hosts_have_it(racks: Racks) -> None:
    racks.full = True
    job = AdapterJob("racks", {"trainers": 1, "loaders": 1}, env={"MONARCH_JOB_MARK": "r"})
    try:
        state = job.state(cached_path=None)
        assert state.trainers.initialized.get(SOON) is True
        with pytest.raises(TrustError, match=r"not changed: loaders_0 could not join"):
            state.trainers.rotate_key()
        with pytest.raises(ValueError, match=r"is in .*/key: call rotate_key\(\) without"):
            state.trainers.rotate_key("other.key", force=True)
        racks.full = False
        assert state.loaders.initialized.get(SOON) is True
        state.trainers.rotate_key()
        meshes = [mesh.spawn_procs().spawn("where", Where) for mesh in (state.trainers, state.loaders)]
        assert [mesh.environment.call_one("MONARCH_JOB_MARK").get(SOON) for mesh in meshes] == ["r", "r"]
    finally:
        job.kill()


@pytest.mark.slow
def test_too_few_gpus_and_an_engine_that_never_starts_are_refused(racks: Racks) -> None:
    job = AdapterJob("racks", {"trainers": Role(gpus=4), "loaders": Role(gpus=2)})
    try:
        state = job.state(cached_path=None)
        assert state.loaders.initialized.get(SOON) is True
        with pytest.raises(HostsMissingError, match=r"trainers_0 has 2 GPUs, and 4 were asked for \(in rack-0\)"):
            job.wait(SOON)
        with pytest.raises(HostsMissingError, match="trainers_0 has 2 GPUs"):
            state.trainers.spawn_procs()
    finally:
        job.kill()
    racks.full = True
    job = AdapterJob("racks", {"loaders": 1}, patience=0.1)
    try:
        with pytest.raises(HostsMissingError, match=r"has not been started within 0\.1 s: all racks are taken"):
            job.state(cached_path=None).loaders.initialized.get(SOON)
    finally:
        job.kill()


@pytest.mark.slow
def test_hosts_taken_back_are_lost_in_the_words_of_their_engine(racks: Racks, shown: list[Any]) -> None:
    job = AdapterJob("racks", {"trainers": 1}, env={"MONARCH_JOB_MARK": "r"})
    trainers = job.state(cached_path=None).trainers
    actors = trainers.spawn_procs().spawn("where", Where)
    assert actors.environment.call_one("MONARCH_JOB_MARK").get(SOON) == "r"
    racks.revoked, racks.looks = True, 0
    until(lambda: racks.looks > 0, "the engine's word was read")
    assert actors.environment.call_one("MONARCH_JOB_MARK").get(SOON) == "r", "its agent answers"
    agent = current_runtime().part(HostRoutes).attached[trainers.host_ids[0]]
    os.kill(agent.pid, signal.SIGKILL)  # else it reports its own end
    for machine in racks.machines.values():
        machine.kill()
    with pytest.raises(SupervisionError, match="trainers_0 was taken back for the night"):
        until(lambda: actors.environment.call_one("MONARCH_JOB_MARK").get(SOON) == "", "its end")
    job.kill()


@pytest.mark.parametrize("forgotten", [False, True])
def test_killing_a_loaded_job_gives_up_its_hosts_first(
    racks: Racks, shown: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forgotten: bool
) -> None:
    def kill(job: Running) -> None:  # as Slurm does: SIGTERM gives notice to a host in use
        for agent in job.agents.values():
            racks.machines[agent.id].terminate()
            assert racks.machines[agent.id].wait(SOON) != -signal.SIGKILL

    job = AdapterJob("racks", {"trainers": 1}, env={"MONARCH_JOB_MARK": "r"})
    actors = job.state(cached_path=None).trainers.spawn_procs().spawn("where", Where)
    assert actors.environment.call_one("MONARCH_JOB_MARK").get(SOON) == "r"
    monkeypatch.setattr(racks, "kill", kill)
    copy = job_loads(job.dumps())
    if forgotten:  # as after an attach by name
        monkeypatch.setattr(adapter_job, "_jobs", weakref.WeakSet())
    copy.kill()
    with pytest.raises(SupervisionError, match="status: stopped"):
        actors.environment.call_one("MONARCH_JOB_MARK").get(SOON)
    assert (shown, [line for line in caplog.messages if "taken away" in line]) == ([], [])
    job.kill()


def test_ctrl_c_while_hosts_are_missing_ends_the_job(racks: Racks, monkeypatch: pytest.MonkeyPatch) -> None:
    racks.full = True
    job = AdapterJob("racks", {"trainers": 1, "loaders": 1})
    state = job.state(cached_path=None)

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.wait(SOON, interrupt)
    assert (job.active, running_jobs("racks")) == (False, [])
    assert all(machine.poll() is not None for machine in racks.machines.values())
    with pytest.raises(RuntimeError, match=r"killed|shut down"):
        state.loaders.spawn_procs()
