"""Jobs whose classes start the workers themselves, as programs of torchmonarch derive them."""

import copy
import pickle
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from monarch._src.job.job import LoginJob
from monarch_nb.host.preemption import END
from monarch_nb.job import ProcessJob, job_load, new_service_proc_id, service_proc_addr
from monarch_nb.job.process import ProcessState, process_of
from tests.cluster.fault_tools import SOON
from tests.cluster.worker_tools import light_host, start_worker, where  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("host")]


def pids_of(job: ProcessJob) -> list[int]:
    return [process_of(agent)[0] for agent in job._agents.values()]


class OwnWorkers(ProcessJob):
    """Starts its own workers, as some programs of torchmonarch do."""

    def _create(self, client_script: str | None) -> None:
        self._tmpdir = tempfile.mkdtemp(prefix="own")
        address = service_proc_addr(f"ipc://{self._tmpdir}/hosts_0", new_service_proc_id())
        self.process = start_worker(address)
        self._host_to_pid["hosts_0"] = ProcessState(self.process.pid, address)


class OwnMachines(LoginJob):
    """Has a machine of each name, as own kinds of jobs of torchmonarch's programs do; all of them are here."""

    _transient = LoginJob._transient | {"processes"}

    def __init__(self, folder: str, machines: Sequence[str]) -> None:
        super().__init__()
        self._sockets = folder
        self.add_mesh("trainers", machines)
        self.processes: list[subprocess.Popen[bytes]] = []

    def _start_host(self, host: str) -> ProcessState:
        if host == "broken":
            raise OSError("no such machine")
        address = f"ipc://{self._sockets}/{host}"
        self.processes.append(start_worker(address))
        return ProcessState(self.processes[-1].pid, address)


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="own") as folder:
        yield folder


def ended(job: OwnMachines) -> bool:
    return all(process.wait(SOON) in (0, -END) for process in job.processes)


def test_a_login_job_starts_its_machines_as_its_class_says(sockets: str) -> None:
    job = OwnMachines(sockets, ["one", "two"])
    try:
        trainers = job.state(cached_path=None).trainers
        assert trainers.extent == {"hosts": 2}
        assert len({*where(trainers.spawn_procs()).pid.call().get(60).values()}) == 2
        assert pids_of(job) == [process.pid for process in job.processes]
    finally:
        job.kill()
        assert ended(job)
    with pytest.raises(NotImplementedError, match="_start_host"):
        LoginJob()._start_host("one")


def test_a_login_job_with_a_broken_machine_leaves_no_workers(sockets: str) -> None:
    job = OwnMachines(sockets, ["one", "broken"])
    with pytest.raises(OSError, match="no such machine"):
        job.apply()
    assert job.processes
    assert ended(job)
    assert not job.active


@pytest.mark.parametrize("connected", [False, True])
def test_files_and_copies_of_a_job_have_its_hosts(tmp_path: Path, sockets: str, connected: bool) -> None:
    job, file = OwnMachines(sockets, ["one"]), str(tmp_path / "job.json")
    try:
        if connected:
            job.state(file)  # which leaves futures and host meshes in it
        else:
            job.apply()
            job.dump(file)
        jobs = job, job_load(file), pickle.loads(pickle.dumps(job)), copy.deepcopy(job)
        assert all(duplicate.can_run(job) for duplicate in jobs)
        assert len({duplicate.state(None).trainers.host_ids for duplicate in jobs}) == 1
    finally:
        job.kill()
        assert ended(job)


@pytest.mark.slow
def test_jobs_may_start_their_own_workers_and_learn_of_their_shutdown() -> None:
    job = OwnWorkers({"hosts": 1})
    try:
        hosts = job.state(cached_path=None).hosts
        assert pids_of(job) == [job.process.pid]
        assert len(where(hosts.spawn_procs()).pid.call().get(60)) == 1
        assert hosts._inner_host_mesh is hosts
        hosts.shutdown().get(SOON)
        assert hosts._inner_host_mesh is None
    finally:
        job.kill()
        assert job.process.wait(SOON) in (0, -END)
        shutil.rmtree(job._tmpdir)
