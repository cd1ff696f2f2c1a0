"""%mesh on the hosts of a job, in a real kernel."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)
TOML = """
[jobs.lab]
kind = "process"
meshes = { trainers = 2, loaders = 1 }
env = { MARK = "lab" }
"""


@pytest.mark.slow
def test_meshes_use_hosts_of_jobs_by_kind_and_name(nb: Notebook, tmp_path: Path) -> None:
    nb.run(f"import os; here = os.getcwd(); os.chdir({str(tmp_path)!r})").ok()
    (tmp_path / "monarch.toml").write_text(TOML)
    try:
        cell = nb.run("%mesh near hosts=2 slots=1 --job process env={'MARK':'cell'}").ok()
        assert cell.text == "<ProcMesh 'near' {hosts=2, slots=1}>"
        assert "[####################] 2/2 hosts joined" in cell.stdout
        assert "'cell'" in nb.run("%%on near\nimport os\nos.environ['MARK']").text
        assert "near is reused" in nb.run("%mesh near hosts=2 slots=1 --job process env={'MARK':'cell'}").ok().stdout
        assert nb.run("%mesh trainers slots=2 --job lab").ok().text == "<ProcMesh 'trainers' {hosts=2, slots=2}>"
        assert nb.run("%mesh loaders --job lab").ok().text == "<ProcMesh 'loaders' {hosts=1, gpus=1}>"
        assert "'lab'" in nb.run("%%on loaders\nimport os\nos.environ['MARK']").text
        line = [sys.executable, "-m", "monarch_nb", "job", "ls"]
        listed = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert "(lab)  process  trainers=2, loaders=1  3 running" in " ".join(listed.split("\n")), listed
        saved = json.loads((tmp_path / ".monarch/jobs/lab.json").read_text())
        ended = subprocess.run(
            [*line[:-1], "kill", saved["apply_id"][:8]], cwd=tmp_path, capture_output=True, text=True
        )
        assert ended.stdout.startswith("ended: "), ended.stderr
        assert "the job has no mesh 'others'" in nb.run("%mesh others --job lab").stderr
        assert "there is no kind of jobs 'slurn' here" in nb.run("%mesh others hosts=1 --job slurn").stderr
    finally:
        nb.run("%stop near trainers loaders")
        nb.run("from monarch.job import running_jobs\nfor job in running_jobs('process'): job.kill()").ok()
        nb.run("os.chdir(here)").ok()


def test_a_job_of_another_program_is_used_and_ended_from_views(nb: Notebook, tmp_path: Path) -> None:
    nb.run(f"import os; here = os.getcwd(); os.chdir({str(tmp_path)!r})").ok()
    (tmp_path / "monarch.toml").write_text(TOML)
    shell = [sys.executable, "-m", "monarch_nb", "job"]
    subprocess.run([*shell, "start", "lab"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    number = json.loads((tmp_path / ".monarch/jobs/lab.json").read_text())["apply_id"]
    view = ViewClient(nb)
    try:
        (engine,) = [engine for engine in view.ask("places")["result"]["places"] if engine["name"] == "lab"]
        assert (engine["why"], engine["hosts"]) == ("", {"trainers": 2, "loaders": 1})
        assert not job_in(view, number)["here"]
        assert job_in(view, number)["hosts"] == {"trainers": 2, "loaders": 1}
        assert f"process job {number[:8]} (lab): trainers=2, loaders=1, 3 running, st" in job_in(view, number)["text"]
        refused = nb.run(f"%mesh trainers hosts=3 slots=1 --job {number[:8]}").stderr
        assert f"{number[:8]} has 2 hosts for trainers: leave hosts= out" in refused
        spawned = nb.run(f"%mesh trainers slots=1 --job {number[:8]}").ok()
        assert spawned.text == "<ProcMesh 'trainers' {hosts=2, slots=1}>"
        assert "'lab'" in nb.run("%%on trainers\nimport os\nos.environ['MARK']").text
        assert job_in(view, number)["here"]
        assert view.ask("end_job", job=number)["result"]["text"] == f"ended the process job {number[:8]} (lab)"
        assert job_in(view, number) is None
        assert not (tmp_path / ".monarch/jobs/lab.json").exists()
        assert "does not run any more" in view.ask("end_job", job=number)["error"]
        assert f"no jobs that run begin with '{number[:8]}'" in nb.run(f"%mesh others --job {number[:8]}").stderr
    finally:
        subprocess.run([*shell, "kill", number[:8]], cwd=tmp_path, capture_output=True)
        view.close()
        nb.run("%stop trainers")
        nb.run("os.chdir(here)").ok()


def job_in(view: ViewClient, number: str) -> Any:
    """That job, as views list it."""
    return next((job for job in view.ask("jobs")["result"]["jobs"] if job["id"] == number), None)
