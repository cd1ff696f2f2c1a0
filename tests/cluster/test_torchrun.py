"""torchrun's command lines as jobs: what they ask for, and the script on all processes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb._torchrun import _read, serve
from monarch_nb.actor import ActorError
from monarch_nb.job import job_load, running_jobs
from monarch_nb.runtime import current_runtime
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]
SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT")
told = {"argv": sys.argv[1:], **{name: os.environ[name] for name in names}}
with open(f"{sys.argv[2]}/{os.environ['RANK']}", "w") as out:
    json.dump(told, out)
if sys.argv[3] == "fail" and os.environ["RANK"] == "1":
    sys.exit(3)
"""


def test_the_script_runs_on_all_processes_with_the_environment_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(SCRIPT)
    line = ["torchrun", "--nnodes=2", "--nproc_per_node", "2", "--rdzv-backend=c10d", "train.py", "--out"]
    job = serve([*line, str(tmp_path), "well"])
    try:
        assert job.run_spmd() is True
        told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
        assert [(each["RANK"], each["LOCAL_RANK"], each["GROUP_RANK"]) for each in told] == [
            ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
        ]  # fmt: skip
        assert {each["WORLD_SIZE"] for each in told} == {"4"}
        assert len({each["MASTER_PORT"] for each in told}) == 1
        assert told[0]["argv"] == ["--out", str(tmp_path), "well"]
        job.dump("job.json")
        again: Any = job_load("job.json")
        assert again.can_run(job)
        again._script[-1] = "fail"
        with pytest.raises(ActorError, match=r"train\.py .* ended with status 3") as caught:
            again.run_spmd()
        frames = debug.post_mortem(caught.value)  # as the error offers: the processes are there until the next run
        assert [each.post_mortem for each in frames.sessions] == [True]
        frames.resume()
        failed = [each for each in current_runtime().meshes.values() if each.name == "spmd" and each.stopped is None]
        assert failed
        again._script[-1] = "well"
        assert again.run_spmd() is True
        assert all(each.stopped is not None for each in failed)
    finally:
        job.kill()
    assert running_jobs("process") == []


def test_command_lines_are_read_as_torchrun_reads_them() -> None:
    options, script = _read(["/usr/bin/torchrun", "--standalone", "-m", "pack.train", "--nnodes", "7"])
    assert (options.nnodes, options.nproc_per_node, script) == ("", "1", ["-m", "pack.train", "--nnodes", "7"])
    for line, story in (
        (["python", "train.py"], "begins with torchrun"),
        (["torchrun", "--nproc-per-node=gpu", "train.py"], "say how many, as a number"),
        (["torchrun", "--nnodes=2"], "no script is named"),
        (["torchrun", "--no-python", "train.sh"], "only Python programs"),
    ):
        with pytest.raises(ValueError, match=story):
            serve(line)
    role = SimpleNamespace(entrypoint="torchrun", args=["train.py"], num_replicas=3)
    with pytest.raises(LookupError, match="no kind of jobs 'mast'"):
        serve(SimpleNamespace(roles=[role]), "mast")
    with pytest.raises(ValueError, match="AppDef with one role; this has 2"):
        serve(SimpleNamespace(roles=[role, role]))
