"""Jobs on Lightning, against a stub of its SDK whose machines are processes of this machine. NOT the real service."""

import os
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.job import EngineError, LightningJob, Role, job_load, make_job, running_jobs
from tests.cluster.engine_tools import PYTHON, none_alive
from tests.cluster.fault_tools import SOON
from tests.cluster.worker_tools import Where, light_host  # noqa: F401 - a fixture
from tests.polling import until
from tests.ports import own_address

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]

GRACE_S = 2.0  # between SIGTERM and SIGKILL


class Machine:
    """A machine with its own loopback address."""

    def __init__(self, folder: Path, number: int, rank: int, command: str, env: dict[str, str]) -> None:
        self.rank, self.private_ip_address = rank, own_address()
        self._log = folder / f"machine{number}.log"
        self._stopped = self.pending = False
        words = shlex.split(command.replace("tcp://0.0.0.0:", f"tcp://{self.private_ip_address}:"))
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(words, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log)  # fmt: skip

    @property
    def status(self) -> str:
        if self.pending:
            return "Pending"
        code = self.process.poll()
        if self._stopped:
            return "Stopped"
        return "Running" if code is None else "Failed" if code else "Completed"

    @property
    def logs(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        self._stopped = True
        self.process.terminate()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:  # a host in use runs for as long as its engine allows
            self.process.kill()
            self.process.wait(20)


class Service:
    """The stub, with its class `Job`."""

    def __init__(self, folder: Path) -> None:
        self.jobs: dict[str, list[Machine]] = {}
        self.requests: list[dict[str, Any]] = []
        self.down = self.full = False
        self.count = 0  # machines
        service = self

        class Job:
            def __init__(self, *, name: str, teamspace: str | None = None) -> None:
                if service.down:
                    raise ConnectionError("503 Service Unavailable")
                if name not in service.jobs:
                    raise ValueError(f"Job {name} does not exist in Teamspace t")
                self.machines = tuple(service.jobs[name])
                self.num_machines = len(self.machines)
                first = self.machines[0]
                self.rank, self.private_ip_address = first.rank, first.private_ip_address
                self.status, self.logs = first.status, first.logs

            @classmethod
            def run(cls, **arguments: Any) -> None:
                if service.full:
                    raise RuntimeError("no credits are left")
                service.requests.append(arguments)
                assert arguments["name"] not in service.jobs, "Lightning takes a name once"
                machines = service.jobs[arguments["name"]] = list[Machine]()
                for rank in range(arguments["num_machines"]):
                    service.count += 1
                    machines.append(Machine(folder, service.count, rank, arguments["command"], arguments["env"] or {}))

            def stop(self) -> None:
                for machine in self.machines:
                    machine.stop()

        self.Job = Job


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    service, module = Service(tmp_path), types.ModuleType("lightning_sdk")
    module.Job = service.Job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning_sdk", module)
    yield service
    for machine in [machine for machines in service.jobs.values() for machine in machines]:
        machine.stop()


def test_machines_are_asked_for_joined_told_of_and_stopped(service: Service, tmp_path: Path) -> None:
    job = LightningJob({"trainers": 2}, "L4", python_exe=PYTHON, env={"MARK": "far", "MONARCH_NB_PRELOAD": ""})
    try:
        marks = job.state(str(tmp_path / "job.json")).trainers.spawn_procs().spawn("where", Where).mark.call().get(SOON)
        assert [mark for mark, _ in marks.values()] == ["far", "far"]
        [request] = service.requests
        assert (request["machine"], request["num_machines"], request["env"]["MARK"]) == ("L4", 2, "far")
        secret = Path(job._folder, "key").read_text().splitlines()[-1].strip()
        assert secret not in repr(request)
        assert [entry.apply_id for entry in running_jobs("lightning")] == [job.apply_id]
        assert job_load(str(tmp_path / "job.json")).can_run(job)
        [machines] = service.jobs.values()
        machines[1].process.kill()
        until(lambda: "trainers_1 is gone: its machine of Lightning job" in job._lost(), "its end")
        service.down = True
        with pytest.raises(EngineError, match=r"Lightning does not answer: 503 .*lightning login"):
            job._adapter.look(job._job)
        service.down = False
        job_load(str(tmp_path / "job.json")).kill()
        assert none_alive([pid for _, pid in marks.values()])
        assert running_jobs("lightning") == []
    finally:
        job.kill()


@pytest.mark.slow
def test_meshes_grow_by_a_lightning_job_that_ends_with_its_hosts(service: Service) -> None:
    job = LightningJob({"trainers": 1}, "L4", python_exe=PYTHON, env={"MARK": "far", "MONARCH_NB_PRELOAD": ""})
    try:
        procs = job.state(cached_path=None).trainers.spawn_procs()
        actors = procs.spawn("where", Where)
        actors.mark.call().get(SOON)
        service.full = True
        with pytest.raises(NoMoreHostsError, match="nothing has changed: Lightning has started no job: no credits are"):
            procs.grow(hosts=1)
        service.full = False
        procs.grow(hosts=1, timeout=SOON)
        assert [(request["machine"], request["num_machines"]) for request in service.requests] == [("L4", 1), ("L4", 1)]
        assert [mark for mark, _ in actors.mark.call().get(SOON).values()] == ["far", "far"]
        procs.shrink(hosts=-1)
        [first], [second] = service.jobs.values()
        assert (first.status, second.status) == ("Running", "Stopped")
        procs.grow(hosts=1, timeout=SOON)
        assert len(service.jobs) == 3
    finally:
        job.kill()
    assert {machine.status for machines in service.jobs.values() for machine in machines} == {"Stopped"}


def test_refusals_of_lightning_and_a_waiting_machine_are_reported(service: Service) -> None:
    service.full = True
    job = make_job("lightning", {"trainers": 1}, machine="A100", python_exe=PYTHON)
    with pytest.raises(EngineError, match="Lightning has started no job: no credits are left"):
        job.apply()
    assert not job.active
    with pytest.raises(EngineError, match="takes no image"):
        LightningJob({"trainers": Role(image="example/monarch:1")}).apply()
    service.full = False
    second = LightningJob({"trainers": 1}, python_exe=PYTHON)
    second.apply()
    try:
        [[machine]] = service.jobs.values()
        machine.pending = True
        [agent] = second._adapter.look(second._job).values()
        assert (agent.state, agent.joins) == ("waiting", ())
        assert agent.description.endswith("is Pending")
    finally:
        machine.pending = False
        second.kill()
    assert machine.status == "Stopped"
