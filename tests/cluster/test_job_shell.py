"""`monarch-nb job` as typed in a shell, with its errors."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_nb.cli import main as doctor
from monarch_nb.job import job_load, running_jobs
from monarch_nb.job.cli import main
from tests.cluster.fault_tools import ROOT
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture
from tests.polling import until
from tests.processes import alive

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]
TOML = """
[jobs.lab]
kind = "process"
meshes = { trainers = 2 }
env = { MARK = "lab" }

[jobs.far]
kind = "ssh"
meshes = { trainers = ["127.0.0.1:1"] }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "monarch.toml").write_text(TOML)
    return tmp_path


def job(*words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "monarch_nb", "job", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SHELL": "/bin/sh"}
    return subprocess.run(line, input=stdin, capture_output=True, text=True, check=False, env=env)


def test_without_asyncssh_jobs_are_listed_and_its_absence_is_named(folder: Path) -> None:
    without = "import sys\nsys.modules['asyncssh'] = None\nfrom monarch_nb.job.cli import main\nmain(['ls'])"
    line, env = [sys.executable, "-c", without], {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    assert [row.split()[0] for row in result.stdout.splitlines()] == ["JOB", "lab"]
    assert re.fullmatch(r".*\bneed the package asyncssh: install monarch-nb\[ssh\]\n", result.stderr)


def test_a_job_is_started_listed_read_entered_handed_over_and_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = job("start", "lab")
    assert started.returncode == 0, started.stderr
    assert "2/2 hosts joined" in started.stdout
    assert "It ends by itself once no program has used it for 8h (--keep)" in started.stdout
    saved = job_load(".monarch/jobs/lab.json")
    pids = [int(agent.id.partition("@")[0]) for agent in saved._agents.values()]
    try:
        assert main(["ls"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith(f"{saved.apply_id[:8]} (lab)") and "2 running" in line for line in lines), lines
        assert any(line.startswith("far") and "not started" in line for line in lines), lines
        Path(saved._folder, "trainers_1.log").write_text("one\ntwo\nthree\n")
        assert main(["logs", saved.apply_id[:6], "trainers_1", "-n", "2"]) == 0
        assert capsys.readouterr().out == "two\nthree\n"
        assert "a word of mine" in job("ssh", "lab", "trainers_1", stdin="echo a word of mine\n").stdout
        assert main(["attach", "lab"]) == 0
        assert job_load().apply_id == saved.apply_id
        assert doctor(["doctor", "lab", "--no-kernel"]) == 0
        output = capsys.readouterr().out
        assert "lab trainers_1\n✓ engine" in output
        assert "✓ socket" in output
        assert main(["logs", "lab", "nobody"]) == 1
        assert "there is no host 'nobody': there are trainers_0, trainers_1" in capsys.readouterr().err
        assert main(["kill", "lab"]) == 0
        assert capsys.readouterr().out.startswith("ended: ")
        assert not any(map(alive, pids))
    finally:
        saved.kill()


def test_shell_mistakes_are_reported_in_one_line_with_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(words) == 1
        return capsys.readouterr().err

    message = f"there is no job 'nope': {folder}/monarch.toml has far, lab\n"
    assert refused("start", "nope") == f"monarch-nb job start: {message}"
    for verb in ("attach", "logs", "ssh", "kill"):
        assert refused(verb, "lab") == (
            f"monarch-nb job {verb}: lab was not started from this folder: monarch-nb job start lab\n"
        )
        assert "no jobs that run begin with 'zz', and monarch.toml describes lab, far" in refused(verb, "zz")
    assert "no SSH server listens there" in refused("start", "far")
    assert refused("start", "lab", "--keep", "soon").startswith("monarch-nb job start: ")
    assert running_jobs("process") == running_jobs("ssh") == []
    Path("monarch.toml").write_text("[jobs.lab]\nkind = 1\n")
    assert "[jobs.lab] needs a kind and meshes" in refused("ls")


@pytest.mark.slow
def test_dead_jobs_are_reported_and_writable_files_are_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "lab", "--keep", "30s"]) == 0
    saved = job_load(".monarch/jobs/lab.json")
    try:
        pid = int(saved._agents["trainers_1"].id.partition("@")[0])
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid), "its end")
        capsys.readouterr()
        for verb in ("attach", "ssh"):
            assert main([verb, "lab"]) == 1
            error = capsys.readouterr().err
            assert f"lab is gone: trainers_1 (process {pid}) has ended" in error
            assert error.endswith("Start it anew: monarch-nb job start lab\n")
        Path(".monarch/jobs/lab.json").chmod(0o666)
        for verb in ("attach", "kill", "logs", "ssh"):
            assert main([verb, "lab"]) == 1
            assert "can be written by others (mode 666), and is not read: remove it" in capsys.readouterr().err
        assert main(["ls"]) == 0
        assert "can be written by others" in capsys.readouterr().err
        assert main(["kill", saved.apply_id[:8]]) == 0
    finally:
        saved.kill()
    assert running_jobs("process") == []
