"""Functions of torchmonarch's command line, on our jobs."""

import sys
from pathlib import Path

import pytest

from monarch.tools import commands
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "jobs_here.py").write_text(
        "from monarch.job import ProcessJob\njob = ProcessJob({'trainers': 2}, env={'MONARCH_NB_PRELOAD': ''})\n"
    )
    monkeypatch.delitem(sys.modules, "jobs_here", raising=False)
    return tmp_path


def test_a_job_is_applied_and_commands_run_on_its_hosts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands.context_use("mine")
    commands.apply_job("jobs_here.job")
    try:
        assert (folder / ".monarch" / "mine" / "state.json").exists()
        script = folder / "script.sh"
        script.write_text('echo "$WORD"; exit 3')
        output = capfd.readouterr().out
        assert "Job is ready" in output
        assert commands.exec_on_job([], script=str(script), env=["WORD=here"], point_str="hosts=1") == 3
        assert "here\n" in capfd.readouterr().out
        assert commands.exec_on_job(["sh", "-c", f"pwd > {folder}/at"], workdir="/", mesh_name="trainers") == 0
        assert (folder / "at").read_text() == "/\n"
        with pytest.raises(ValueError, match=r"Mesh 'x' not found. Available: \['trainers'\]"):
            commands.exec_on_job(["true"], mesh_name="x")
        with pytest.raises(ValueError, match=r"expected KEY=VALUE\): 'WORD'"):
            commands.exec_on_job(["true"], env=["WORD"])
        with pytest.raises(ValueError, match="'second' is no place"):
            commands.exec_on_job(["true"], point_str="second")
    finally:
        commands.context_rm("mine")
    assert commands.load_current_job()._lost()
    commands.context_ls()
    assert capfd.readouterr().out.splitlines()[-1] == "* default"
    with pytest.raises(ValueError, match="cannot name a context"):
        commands.context_rm("../x")
    with pytest.raises(LookupError):
        commands.kill("process:///nosuch")
