"""Leftovers of jobs that ended by themselves are tidied, but none of running or used jobs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from monarch_nb.job import Agent, ProcessJob, job_load
from monarch_nb.job.adapter import adapter_of
from monarch_nb.job.cli import main
from monarch_nb.job.helper import Helper
from monarch_nb.job.report import KEPT_S, Ask, tidied
from tests.cluster.fault_tools import ROOT, SOON
from tests.polling import until
from tests.processes import alive

pytestmark = pytest.mark.timeout(60)
PROCESSES = adapter_of("process")
STARTS = """
import os, signal
from monarch_nb.job import ProcessJob

if __name__ == "__main__":
    job = ProcessJob({"trainers": 1})
    job.apply()
    job.dump("job.json")
    print(job._agents["trainers_0"].id.partition("@")[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def end(pid: int) -> None:
    os.kill(pid, 9)
    until(lambda: not alive(pid), "its end")


def test_leftovers_of_an_ended_job_are_tidied_unless_still_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    job, second = ProcessJob({"trainers": 1}), ProcessJob({"loaders": 1})
    try:
        job.apply()
        second.apply()
        folder = Path(job._folder)
        (folder / "key").touch()
        end(int(job._agents["trainers_0"].id.partition("@")[0]))
        assert list(tidied("process", PROCESSES, 0.0)) == []
        assert (folder / "key").exists(), "this process may ask for other hosts of the job yet"
        for instance in (job, second):
            assert instance._use is not None
            instance._use.close()  # as the system does when a process ends
        assert list(tidied("process", PROCESSES)) == []
        assert (folder / "trainers_0.log").exists(), "for who wonders why"
        assert not (folder / "key").exists()
        assert main(["tidy"]) == 0
        assert f"removed: process job {str(job.apply_id)[:8]}, started " in capsys.readouterr().out
        assert not folder.exists()
        assert Path(second._folder).exists(), "it lives"
        assert main(["tidy"]) == 0
        assert capsys.readouterr().out == "nothing is left of jobs that ended by themselves\n"
    finally:
        second.kill()
        job.kill()


def test_the_job_of_a_killed_program_can_be_loaded_and_tidied(capsys: pytest.CaptureFixture[str]) -> None:
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, env=env, timeout=SOON)
    worker = int(done.stdout)
    try:
        assert list(tidied("process", PROCESSES, 0.0)) == []
        job = job_load("job.json")
        assert job.can_run(ProcessJob({"trainers": 1}))
    finally:
        end(worker)
    assert main(["tidy"]) == 0
    output = capsys.readouterr().out
    assert "removed: process job" in output
    Path(".monarch/jobs").mkdir(parents=True)
    os.rename("job.json", ".monarch/jobs/trainers.json")
    assert main(["tidy"]) == 0
    assert "trainers.json, whose job is gone" in capsys.readouterr().out
    assert not Path(".monarch/jobs/trainers.json").exists()


def test_a_machine_keeps_logs_of_ended_agents_for_a_day(tmp_path: Path) -> None:
    folders = {}
    for name, agent in {"old": Agent("4194999@1"), "new": Agent("4194999@1"), "living": None}.items():
        folder = folders[name] = tmp_path / "state" / "monarch-nb" / "jobs" / f"mnb-agents-{name}"
        folder.mkdir(parents=True)
        start_time = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
        agents = {"a_0": agent or Agent(f"{os.getpid()}@{start_time}")}
        (folder / f"{os.uname().nodename}.agents.json").write_bytes(msgspec.json.encode(agents))
        (folder / "a_0.log").write_text("its last words")
        if name != "new":
            for path in folder.iterdir():
                os.utime(path, (time.time() - KEPT_S - 10,) * 2)
    Helper().answer(Ask(do="start", job="next", names={}))
    assert {name: folder.exists() for name, folder in folders.items()} == {"old": False, "new": True, "living": True}
