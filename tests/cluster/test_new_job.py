"""A new kind of jobs is one adapter and one line of registration, also from outside the package."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from monarch_nb.actor import Actor, endpoint
from monarch_nb.job import (
    AdapterJob,
    Agent,
    AgentsWanted,
    JobFileError,
    Running,
    job_loads,
    kinds,
    register_job,
    running_jobs,
    unregister_job,
)
from tests.cluster.fault_tools import SOON, until
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture
from tests.processes import alive

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("host")]


class Racks:
    """An engine that keeps a book of what it runs, as schedulers do; its machines are met over TCP, with the key."""

    def __init__(self) -> None:
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
        self.jobs[wanted.job] = Running(str(wanted.folder), agents)
        return agents

    def ended(self, agents: Mapping[str, Agent]) -> Mapping[str, str]:
        ended = {name: self.machines[agent.id].poll() for name, agent in agents.items()}
        return {name: f"was taken back with status {status}" for name, status in ended.items() if status is not None}

    def kill(self, agents: Mapping[str, Agent]) -> None:
        for agent in agents.values():
            self.machines[agent.id].terminate()
            self.machines[agent.id].wait(SOON)
        self.jobs = {job: entry for job, entry in self.jobs.items() if entry.agents != agents}

    def running(self) -> Mapping[str, Running]:
        return self.jobs


class Where(Actor):
    @endpoint
    def mark(self) -> str:
        return os.environ["MONARCH_JOB_MARK"]


@pytest.fixture
def racks() -> Iterator[Racks]:
    racks = Racks()
    register_job("racks", lambda: racks)
    yield racks
    unregister_job("racks")
    for machine in racks.machines.values():
        machine.kill()
        machine.wait()


def test_a_kind_of_jobs_from_outside_gives_hosts_is_listed_found_again_and_tells_who_died(racks: Racks) -> None:
    assert kinds() == ["local", "process", "racks"]
    job = AdapterJob("racks", {"trainers": 1, "loaders": 1}, env={"MONARCH_JOB_MARK": "r", "TORCH_TEST_MARK": "1"})
    trainers = job.state(cached_path=None).trainers
    assert trainers.spawn_procs().spawn("where", Where).mark.call_one().get(SOON) == "r"
    folder = Path(racks.jobs[str(job.apply_id)].folder)
    secret = folder.joinpath("key").read_text().splitlines()[-1]
    assert len(secret) == 40
    assert not any(secret in word for line in racks.lines for word in line)

    found = job_loads(job.dumps())  # as from its file, in another process
    assert (found.apply_id, found.can_run(job)) == (job.apply_id, True)
    [listed] = running_jobs("racks")  # where the file is lost
    assert (listed.apply_id, list(listed.state().loaders.extent.items())) == (job.apply_id, [("hosts", 1)])

    racks.machines["rack-1"].kill()
    racks.machines["rack-1"].wait()
    with pytest.raises(RuntimeError, match=r"the job is gone: .*: loaders_0 was taken back with status -9"):
        job.state()
    pid = racks.machines["rack-0"].pid
    listed.kill()
    until(lambda: not alive(pid), "the end of the job")
    assert (running_jobs("racks"), folder.exists()) == ([], False)


def test_jobs_of_kinds_that_are_not_there_are_refused(racks: Racks) -> None:
    with pytest.raises(LookupError, match="no kind of jobs 'slurm' here: there are local, process, racks"):
        AdapterJob("slurm", {"trainers": 1})
    with pytest.raises(ValueError, match="there is a kind of jobs 'racks' already"):
        register_job("racks", Racks)
    text = json.loads(AdapterJob("racks", {"trainers": 1}).dumps())
    text["fields"]["_kind"] = "slurm"
    with pytest.raises(JobFileError, match="no kind of jobs 'slurm'"):
        job_loads(json.dumps(text).encode())
    assert len(AdapterJob("local", {"mine": 1}).state(cached_path=None).mine) == 1
    with pytest.raises(ValueError, match="this host alone"):
        AdapterJob("local", {"mine": 2}).apply()
