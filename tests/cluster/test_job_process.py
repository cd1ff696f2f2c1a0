"""Process jobs: created, loaded by another process, reported if lost, ended."""

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, SupervisionError, endpoint
from monarch_nb.job import (
    JobFileError,
    JobState,
    JobTrait,
    LocalJob,
    ProcessJob,
    hosts_from_config,
    job_load,
    job_loads,
    load_current_job,
    set_current_job,
)
from monarch_nb.job.record import lock_of
from tests.cluster.fault_tools import ROOT, SOON
from tests.cluster.worker_tools import light_host, start_worker, where  # noqa: F401 - a fixture
from tests.polling import until
from tests.processes import alive

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("host")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def job() -> Iterator[ProcessJob]:
    """A job killed at the end."""
    job = ProcessJob({"trainers": 1}, env={"MONARCH_JOB_MARK": "x"})
    yield job
    job.kill()


def pids_of(job: ProcessJob) -> list[int]:
    return [int(agent.id.partition("@")[0]) for agent in job._agents.values()]


@pytest.mark.slow
def test_a_process_job_gives_meshes_of_hosts_and_ends_them(folder: Path) -> None:
    job = ProcessJob({"trainers": 2, "loaders": 1}, env={"MONARCH_JOB_MARK": "7"})
    assert not job.active
    assert job.apply_id is None
    state = job.state(cached_path=None)
    try:
        assert (len(state.trainers), len(state.loaders)) == (2, 1)
        assert state.trainers.initialized.get(40) is True
        marks = where(state.trainers.spawn_procs()).environment.call("MONARCH_JOB_MARK").get(30)
        assert marks.values() == ["7", "7"]
        assert job.active
        with pytest.raises(
            AttributeError, match=r"'nobody' is not a host mesh of this job\. It has: loaders, trainers"
        ):
            state.nobody  # noqa: B018
        pids = pids_of(job)
        before = job.apply_id
        job.apply()  # nothing to do
        assert (pids_of(job), job.apply_id) == (pids, before)
    finally:
        job.kill()
    assert not any(map(alive, pids))
    assert not job.active
    assert list(folder.iterdir()) == []
    with pytest.raises(RuntimeError, match="shut down"):
        state.trainers.spawn_procs()


class Busy(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def spin(self, path: str) -> None:
        Path(path).touch()
        while True:
            pass


def test_killing_a_busy_job_asks_nobody_and_is_no_failure(folder: Path, job: ProcessJob, shown: list[Any]) -> None:
    busy = job.state(cached_path=None).trainers.spawn_procs(per_host={"gpus": 2}).spawn("busy", Busy)
    pids = [*pids_of(job), *busy.pid.call().get(SOON).values()]
    spinning = busy.spin.call(str(folder / "begun"))
    until((folder / "begun").exists, "it spins")
    run_folder = Path(os.path.realpath(f"{job._folder}/trainers_0")).parent
    began = time.monotonic()
    job.kill()
    assert time.monotonic() - began < 3  # 0.1 s on a quiet machine; 8 s if ranks were asked
    assert not any(map(alive, pids))
    assert not run_folder.exists()
    with pytest.raises(SupervisionError, match="stopped"):
        spinning.get(SOON)
    assert shown == []


@pytest.mark.slow
def test_a_job_whose_workers_are_frozen_is_killed_too(
    folder: Path, job: ProcessJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch_nb.job.process._ENDING_S", 0.5)
    busy = job.state(cached_path=None).trainers.spawn_procs().spawn("busy", Busy)
    pids = [*pids_of(job), *busy.pid.call().get(SOON).values()]
    os.kill(pids[0], signal.SIGSTOP)
    job.kill()
    until(lambda: not any(map(alive, pids)), "the end of the job")


INTERRUPTED = """
import sys
from monarch_nb.job import ProcessJob
from monarch_nb.connect import own_hosts
from tests.cluster.test_job_process import Busy
own_hosts.EXIT_SECONDS = 300.0
if __name__ == "__main__":
    job = ProcessJob({"trainers": 1})
    busy = job.state(cached_path=None).trainers.spawn_procs().spawn("busy", Busy)
    print(*busy.pid.call().get(40).values(), flush=True)
    try:
        busy.spin.call(sys.argv[1]).get()
    finally:
        if "kill" in sys.argv:
            job.kill()
        else:
            print(job._agents["trainers_0"].id.partition("@")[0], job._folder, flush=True)
"""


@pytest.mark.parametrize("ending", ["kill", pytest.param("leave", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_program_with_a_busy_job_at_once(folder: Path, ending: str) -> None:
    env = {**os.environ, "PYTHONPATH": ROOT}
    line = [sys.executable, "-c", INTERRUPTED, str(folder / "begun"), ending]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env, stderr=subprocess.DEVNULL) as program:
        try:
            assert program.stdout is not None
            pid = int(program.stdout.readline())
            until((folder / "begun").exists, "it spins")
            program.send_signal(signal.SIGINT)
            assert program.wait(20) == -signal.SIGINT
            assert not alive(pid)
            if ending == "leave":
                worker, job_folder = program.stdout.read().split()
                assert alive(int(worker))
                os.kill(int(worker), signal.SIGTERM)
                until(lambda: not alive(int(worker)), "its end")
                shutil.rmtree(job_folder)
        finally:
            program.kill()


LEFT = """
from monarch_nb.job import ProcessJob
job = ProcessJob({"trainers": 1})
job.keep_for("6s")  # from its start: on a busy machine this program takes seconds to reach the host
procs = job.state("job.json").trainers.spawn_procs(name="trainers")
procs.initialized.get(40)
procs.detach("7s")
print(job._agents["trainers_0"].id.partition("@")[0], flush=True)
"""


@pytest.mark.slow
def test_unused_hosts_end_in_time_unless_a_mesh_was_detached_there(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": ROOT, "XDG_STATE_HOME": str(folder)}
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, env=env, check=True)
    start = time.monotonic()
    until(lambda: not alive(int(done.stdout)), "its end")
    assert time.monotonic() - start > 7, "the lease of the mesh comes first"
    job = job_load("job.json")
    with pytest.raises(RuntimeError, match=r"(?s)is gone: .* no program has used this host for 6 s"):
        job.state(None)
    job.kill()


def test_how_long_hosts_are_kept_is_checked(job: ProcessJob) -> None:
    assert job.keep == 60
    job.keep_for("8h")
    assert job.keep == 8 * 3600
    job.keep_for(None)
    assert job.keep is None
    with pytest.raises(ValueError, match="keep=0 must be a positive time"):
        job.keep_for(0)
    with pytest.raises(ValueError, match=r"a LocalJob live until kill\(\)"):
        LocalJob().keep_for("1h")


OTHER = """
import sys
from monarch_nb.actor import Actor, endpoint
from monarch_nb.job import ProcessJob, job_load
job = ProcessJob({"trainers": 1}, env={"MONARCH_JOB_MARK": "x"})
class A(Actor):
    @endpoint
    def number(self): return 1
state = job.state()
procs = state.trainers.spawn_procs()
print(job.apply_id, procs.spawn("a", A).number.call().get(30).values(), flush=True)
if "kill" in sys.argv:
    job.kill()
"""


def elsewhere(*arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", OTHER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=50, check=True)


def test_another_process_finds_the_job_and_learns_which_it_is(folder: Path, job: ProcessJob) -> None:
    job.state().trainers.initialized.get(60)  # a host not yet reached when the job ends is retried for a while
    assert oct(os.stat(".monarch/job_state.json").st_mode & 0o777) == "0o600"
    done = elsewhere("kill")
    assert done.stdout == f"{job.apply_id} [1]\n"
    notice = " ".join(done.stderr.split())
    assert f"using a job that runs already: ProcessJob {str(job.apply_id)[:8]} (trainers=1), started 20" in notice
    assert f"seconds ago) by process {os.getpid()}" in notice
    until(lambda: not any(map(alive, pids_of(job))), "the end of the job")
    assert not Path(".monarch/job_state.json").exists()


@pytest.mark.slow
def test_a_job_lives_on_when_its_client_has_gone(folder: Path, job: ProcessJob) -> None:
    first = elsewhere().stdout.split()[0]
    state = job.state()
    assert job.apply_id == first
    assert state.trainers.initialized.get(30) is True


@pytest.mark.slow
def test_a_job_that_is_gone_is_noticed_and_told(folder: Path, job: ProcessJob, caplog: Any, shown: list[Any]) -> None:
    job.state().trainers.initialized.get(30)
    first, pid = job.apply_id, pids_of(job)[0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "its end")
    with pytest.raises(RuntimeError, match=f"the job is gone: .*process {pid}"):
        job.state()
    second = ProcessJob({"trainers": 1}, env={"MONARCH_JOB_MARK": "x"})
    try:
        with caplog.at_level(logging.WARNING, "monarch_nb.job"):
            assert second.state().trainers.initialized.get(30) is True
        assert f"names a job that is gone: ProcessJob {str(first)[:8]} (trainers=1), started 20" in caplog.text
        assert f"trainers_0 (process {pid}) has ended" in caplog.text
        assert second.apply_id != first
    finally:
        second.kill()


def test_processes_that_reuse_a_pid_are_not_taken_for_the_job(folder: Path, job: ProcessJob) -> None:
    job.apply()
    job.dump("saved.json")
    text = json.loads(Path("saved.json").read_text())
    agent = text["fields"]["_agents"]["trainers_0"]
    agent[0] = f"{os.getpid()}@{agent[0].partition('@')[2]}"
    copy = job_loads(json.dumps(text).encode())
    assert isinstance(copy, ProcessJob)
    assert not copy.can_run(copy)
    copy._folder = ""
    copy.kill()  # it must spare this process


def test_a_job_of_another_specification_is_ended_with_a_notice(folder: Path, job: ProcessJob, caplog: Any) -> None:
    job.state()
    old = pids_of(job)
    larger = ProcessJob({"trainers": 2})
    try:
        with caplog.at_level(logging.WARNING, "monarch_nb.job"):
            larger.state()
        assert "differs from this one: ProcessJob" in caplog.text
        assert "<ProcessJob trainers=2> takes its place" in caplog.text
        until(lambda: not any(map(alive, old)), "the end of the old one")
    finally:
        larger.kill()


def test_files_that_others_could_have_written_and_pickles_are_refused(folder: Path, job: ProcessJob) -> None:
    job.dump("job.json")
    assert isinstance(job_load("job.json"), ProcessJob)
    os.chmod("job.json", 0o620)
    with pytest.raises(JobFileError, match="can be written by others"):
        job.state("job.json")
    assert not job.active
    Path("job.pkl").write_bytes(pickle.dumps({"a": 1}))
    os.chmod("job.pkl", 0o600)
    with pytest.raises(JobFileError, match="is a pickle"):
        job.state("job.pkl")
    os.mkfifo("pipe", 0o600)
    for path in ("pipe", "."):
        with pytest.raises(JobFileError, match="is not a file"):
            job_load(path)
    for data in (b"", b"{}", b"\xff", b'{"format": "x", "kind": "os:system", "fields": {}}', b"[" * 10000):
        with pytest.raises(JobFileError):
            job_loads(data)
    data = json.loads(ProcessJob({"a": 1}).dumps())
    for wrong in (
        {"kind": "os:system"},
        {"kind": "no.such:Thing"},
        {"fields": {}},
        {"fields": {"_agents": {"a": [1, "2"]}}},
    ):
        with pytest.raises(JobFileError):
            job_loads(json.dumps({**data, **wrong}).encode())


class Custom(JobTrait):
    """A user's own job."""

    _transient = frozenset({"handle"})

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.handle = object()

    def _restored(self) -> None:
        self.handle = object()

    def _create(self, client_script: str | None) -> None:
        self.size += 1

    def _state(self) -> JobState:
        return LocalJob(["mine"]).state()

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, Custom)

    def _kill(self) -> None:
        self.size = 0


class SlowCustom(Custom):
    """One whose machines come when `release` is set."""

    _transient = Custom._transient | {"creating", "release"}

    def __init__(self) -> None:
        super().__init__(0)
        self.creating, self.release = threading.Event(), threading.Event()

    def _create(self, client_script: str | None) -> None:
        super()._create(client_script)
        self.creating.set()
        assert self.release.wait(SOON)


def test_threads_that_ask_one_job_get_its_one_set_of_hosts() -> None:
    job = SlowCustom()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(job.state, None)
        assert job.creating.wait(SOON)
        second = pool.submit(job.apply)
        assert not wait([second], 0.1).done, "the hosts are not there yet"
        job.release.set()
        assert first.result(SOON).mine is not None
        second.result(SOON)
    assert job.size == 1
    assert pickle.loads(pickle.dumps(Custom(1))).size == 1


def test_programs_that_ask_at_once_with_one_file_share_a_job(folder: Path, host: Any, caplog: Any) -> None:
    job, second = SlowCustom(), Custom(0)
    Path("mine.json.lock").write_text("by a process that was killed")
    with ThreadPoolExecutor(2) as pool:
        states = [pool.submit(job.state, "mine.json")]
        assert job.creating.wait(SOON)
        states.append(pool.submit(second.state, "mine.json"))
        until(lambda: f"mine.json is being started or looked for by process {os.getpid()} (" in caplog.text)
        job.release.set()
        assert [state.result(SOON).mine for state in states] == [host, host]
    assert (second.apply_id, second.size) == (job.apply_id, 0)
    assert os.listdir() == ["mine.json"]


def test_a_job_that_ends_leaves_the_file_of_its_successor(folder: Path, host: Any, caplog: Any) -> None:
    job, successor = Custom(0), Custom(1)
    job.state("mine.json")
    successor.apply()
    with ThreadPoolExecutor(1) as pool:
        with lock_of("mine.json"):  # as a program that starts the successor
            ended = pool.submit(job.kill)
            until(lambda: "mine.json is being started or looked for by process" in caplog.text)
            successor.dump("mine.json")
        ended.result(SOON)
    assert job_load("mine.json").apply_id == successor.apply_id
    successor.kill()
    assert os.listdir() == []


def test_jobs_of_users_are_saved_without_what_they_call_transient(folder: Path, host: Any, caplog: Any) -> None:
    job = Custom(3)
    assert job.state("mine.json").mine == host
    second = Custom(9)
    assert second.state("mine.json").mine == host
    assert second.apply_id == job.apply_id
    copy = job_loads(job.dumps())
    assert isinstance(copy, Custom)
    assert copy.size == 4
    job.size = object()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="its attribute 'size' is not plain data"):
        job.dumps()


def test_local_jobs_give_this_host_under_each_name_and_run_scripts(folder: Path, host: Any) -> None:
    state = LocalJob(hosts=("trainers", "loaders")).state()
    assert state.trainers == state.loaders == host
    assert not Path(".monarch").exists()
    Path("client.py").write_text("import os\nprint(os.environ['MONARCH_BATCH_JOB'])\n")
    job = LocalJob()
    with pytest.raises(ValueError, match="no client script"):
        job.process  # noqa: B018
    job.apply("client.py")
    assert job.process.wait(SOON) == 0
    assert [path.read_text() for path in Path(".monarch/logs").glob("*/stdout.log")] == ["1\n"]
    job.kill()


CLIENT = """
from monarch_nb.job import LocalJob, ProcessJob
for job in LocalJob(), ProcessJob({"trainers": 1}):  # as if started by hand
    print(*job.state()._hosts, job.apply_id)
print(*LocalJob().state(None)._hosts)
job.kill()
"""


@pytest.mark.slow
def test_a_client_script_gets_the_hosts_of_its_job(folder: Path) -> None:
    Path("client.py").write_text(CLIENT)
    job = LocalJob(hosts=("trainers", "loaders"))
    job.apply("client.py")
    assert job.process.wait(SOON) == 0
    [out] = Path(".monarch/logs").glob("*/stdout.log")
    assert out.read_text().splitlines() == [f"trainers loaders {job.apply_id}"] * 2 + ["hosts"]
    assert [path.name for path in out.parent.iterdir() if path.suffix == ".json"] == []  # it ended the job
    assert not Path(".monarch/job_state.json").exists()


def test_arguments_that_make_no_job_are_refused() -> None:
    for meshes in ({"a b": 1}, {"a": 0}, {"a": True}, {"a": 1.5}):
        with pytest.raises(ValueError, match="mesh"):
            ProcessJob(meshes)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="client script"):
        ProcessJob({"a": 1}).apply("train.py")
    with pytest.raises(NotImplementedError, match="telemetry by SQL"):
        LocalJob().telemetry_query_client()


def test_the_current_job_of_a_folder_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="set_current_job"):
        load_current_job()
    Path("jobs_of_test.py").write_text("from monarch_nb.job import LocalJob\njob = LocalJob(['a'])\nother = 3\n")
    monkeypatch.syspath_prepend(str(folder))
    set_current_job("jobs_of_test.job")
    assert repr(load_current_job()) == "<LocalJob a>"
    set_current_job("jobs_of_test.other")
    with pytest.raises(TypeError, match="is an int, not a job"):
        load_current_job()
    with pytest.raises(ValueError, match=r"module\.attribute"):
        set_current_job("nothing")


@pytest.mark.slow
def test_hosts_from_config_are_two_workers() -> None:
    import atexit

    exits: list[Any] = []
    before, atexit.register = atexit.register, lambda function, *_: exits.append(function)  # type: ignore[assignment]
    try:
        hosts = hosts_from_config("pool")
    finally:
        atexit.register = before
    assert dict(hosts.extent) == {"hosts": 2}
    assert hosts.initialized.get(40) is True
    for function in exits:
        function()


@pytest.mark.slow
def test_each_state_has_host_meshes_of_its_own_that_stop_alone() -> None:
    job = ProcessJob({"hosts": 2})
    try:
        first, second = job.state(cached_path=None).hosts, job.state(cached_path=None).hosts
        assert first is not second
        first_actors, second_actors = (
            where(hosts.slice(hosts=slice(0, 2)).spawn_procs(per_host={"gpus": 1}, name=name))
            for hosts, name in ((first, "one"), (second, "two"))
        )
        first_pids, second_pids = first_actors.pid.call().get(60).values(), second_actors.pid.call().get(60).values()
        first.stop().get(SOON)
        until(lambda: not any(alive(pid) for pid in first_pids), "the end of what ran on the first")
        assert second_actors.pid.call().get(SOON).values() == second_pids
        actors = where(first.spawn_procs())  # it can be used again
        assert len(actors.pid.call().get(SOON)) == 2
        second.shutdown().get(SOON)
        until(lambda: not any(alive(pid) for pid in second_pids), "the end of what ran on the second")
    finally:
        job.kill()
