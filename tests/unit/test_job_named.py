"""Jobs by name: the entries of monarch.toml."""

import re
from pathlib import Path

import pytest
from IPython.core.error import UsageError

from monarch_kernel.jobs import Jobs
from monarch_nb.job import (
    DEFAULT_JOB_PATH,
    AdapterJob,
    JobsFileError,
    KubernetesJob,
    Role,
    SlurmJob,
    SSHJob,
    job_load,
    job_loads,
    job_named,
    make_job,
)
from monarch_nb.job.cli import main as job_cli
from monarch_nb.job.named import arguments_of, described_jobs, find_file, job_file

pytestmark = pytest.mark.timeout(20)
FILE = """
[jobs.lab]
kind = "slurm"
partition = "gpu"
meshes = { trainers = { hosts = 4, gpus = 8 }, loaders = 2 }

[jobs.desk]
kind = "ssh"
python_exe = "/opt/py"
meshes = { trainers = ["me@n1", "n2:2222"] }

[jobs.pods]
kind = "kubernetes"
namespace = "lab"
image = "example/x"
meshes = { trainers = { hosts = 2, resources = { "nvidia.com/gpu" = 1 } }, loaders = 1 }

[jobs.wrong]
kind = "slurm"
partitoin = "gpu"
meshes = { a = 1 }
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "monarch.toml").write_text(FILE)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    return tmp_path / "monarch.toml"


def test_jobs_of_a_folder_above_have_their_kinds_and_arguments(file: Path) -> None:
    assert find_file() == file
    lab = job_named("lab")
    assert isinstance(lab, SlurmJob)
    assert (lab._meshes, lab._options["partition"]) == ({"trainers": 4, "loaders": 2}, "gpu")
    assert lab._role("trainers") == Role(hosts=4, gpus=8)
    assert repr(job_named("desk")) == "<SSHJob trainers=2>"
    pods = job_named("pods")
    assert isinstance(pods, KubernetesJob)
    assert pods._options["meshes"]["trainers"]["resources"] == {"nvidia.com/gpu": 1}
    assert pods._options["meshes"]["loaders"]["image"] == "example/x"
    assert job_file("lab") == str(file.parent / ".monarch/jobs/lab.json")


def test_a_mesh_has_as_many_spares_as_configured() -> None:
    job = make_job("slurm", {"trainers": {"hosts": 4, "spares": 2}, "loaders": 2}, spares=1)
    assert isinstance(job, SlurmJob)
    assert (job._role("trainers").spares, job._role("loaders").spares) == (2, 1)
    assert repr(job) == "<SlurmJob trainers=4 and 2 spares, loaders=2 and 1 spare>"
    desk = make_job("ssh", {"trainers": ["n1", "n2", "n3"]}, spares=1)
    assert repr(desk) == "<SSHJob trainers=2 and 1 spare>"
    pods = make_job("kubernetes", {"trainers": Role(hosts=2)}, namespace="lab", spares=1)
    assert repr(pods) == "<KubernetesJob trainers=2 and 1 spare>"
    for wrong in (-1, 3, True, "1"):
        with pytest.raises(ValueError, match="spares"):
            make_job("ssh", {"trainers": ["n1", "n2", "n3"]}, spares=wrong)
    assert "spares" in arguments_of("ssh") & arguments_of("kubernetes") & arguments_of("slurm")


def test_mistakes_in_a_job_file_are_reported_with_their_line(file: Path, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"no job 'nobody': .*monarch\.toml has desk, lab, pods, wrong"):
        job_named("nobody")
    with pytest.raises(JobsFileError, match=r"\[jobs\.wrong\]: .*partitoin"):
        job_named("wrong")
    for text in ("[jobs", "jobs = 3"):
        file.write_text(text)
        with pytest.raises(JobsFileError, match=r"monarch\.toml"):
            described_jobs()
    with pytest.raises(LookupError, match="no kind of jobs 'x'"):
        make_job("x", {"a": 1})
    with pytest.raises(ValueError, match=r"a: .*gpsu"):
        make_job("slurm", {"a": {"gpsu": 1}})
    with pytest.raises(TypeError, match=r"no 'partiton' \(did you mean partition\?\)"):
        make_job("slurm", {"a": 1}, partiton="all")
    with pytest.raises(LookupError, match=r"no kind of jobs 'slurmm' here \(did you mean slurm\?\)"):
        make_job("slurmm", {"a": 1})


@pytest.mark.parametrize("table", ["kind = 3", "kind = 'slurm'", "kind = 'nosuch'\nmeshes = { a = 1 }"])
def test_a_wrong_table_breaks_its_job_only(file: Path, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"[jobs.bad]\n{table}\n[jobs.good]\nkind = 'process'\nmeshes = {{ a = 2 }}\n")
    assert isinstance(job_named("good"), AdapterJob)
    with pytest.raises(JobsFileError, match=r"monarch\.toml: \[jobs\.bad\]"):
        job_named("bad")
    with pytest.raises(UsageError, match=r"--job bad: .*\[jobs\.bad\]"):
        Jobs().hosts("a", "bad", {}, {})
    assert job_cli(["ls"]) == 1
    shown = capsys.readouterr()
    assert re.search(r"good +process +a +not started", shown.out)
    assert "[jobs.bad]" in shown.err


def test_the_arguments_of_a_kind_are_known() -> None:
    assert {"partition", "time_limit", "env"} <= arguments_of("slurm")
    assert {"namespace", "image", "resources"} <= arguments_of("kubernetes")
    assert isinstance(make_job("ssh", {"a": ["b"]}), SSHJob)


def test_idle_time_of_hosts_is_set_in_files_or_cells() -> None:
    job = make_job("process", {"trainers": 1}, keep="2h")
    assert isinstance(job, AdapterJob)
    assert job.keep == 7200
    assert "keep" in arguments_of("ssh")
    with pytest.raises(ValueError, match=r"live until kill\(\)"):
        make_job("kubernetes", {"trainers": 1}, namespace="lab", keep="2h")


def test_jobs_are_loaded_by_name_or_as_the_only_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(FileNotFoundError, match=r"no job in .*job_state[.]json, and none was started from this folder"):
        job_load()
    with pytest.raises(FileNotFoundError, match="lab was not started from this folder: monarch-nb job start lab"):
        job_load("lab")
    jobs = {name: AdapterJob("process", {name: 1}) for name in ("lab", "cells")}
    jobs["lab"].dump(job_file("lab"))
    assert [load()._meshes for load in (job_load, lambda: job_load("lab"))] == [{"lab": 1}] * 2
    jobs["cells"].dump(job_file("cells"))  # by %mesh cells --job process, say
    assert job_load("cells")._meshes == {"cells": 1}
    with pytest.raises(FileNotFoundError, match=r"by name cells, lab were started .* which, as job_load\('cells'\)"):
        job_load()
    jobs["cells"].dump(DEFAULT_JOB_PATH)
    assert job_load()._meshes == {"cells": 1}
    with pytest.raises(FileNotFoundError, match="no job in nosuch"):
        job_load("nosuch")


def test_a_saved_job_is_found_after_its_class_has_moved() -> None:
    saved = SlurmJob({"trainers": 2}).dumps()
    earlier = saved.replace(b"monarch_nb.job.slurm:", b"monarch_nb.job.batch.slurm_job:")
    assert saved != earlier
    assert [type(job_loads(text)) for text in (saved, earlier)] == [SlurmJob, SlurmJob]
