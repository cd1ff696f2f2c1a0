"""torchrun's command lines as jobs: their requests, and the script on all processes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb._torchrun import TorchrunCommand, serve
from monarch_nb.actor import ActorError, ProcMesh, run_on
from monarch_nb.job import job_load, running_jobs
from monarch_nb.runtime import current_runtime
from monarch_nb.spmd import SPMDProgram, run
from tests.cluster.fault_tools import ROOT
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]
SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT")
record = {"argv": sys.argv[1:], **{name: os.environ[name] for name in names}}
with open(f"{sys.argv[2]}/{os.environ['RANK']}", "w") as out:
    json.dump(record, out)
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
        records = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
        assert [(record["RANK"], record["LOCAL_RANK"], record["GROUP_RANK"]) for record in records] == [
            ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
        ]  # fmt: skip
        assert {record["WORLD_SIZE"] for record in records} == {"4"}
        assert len({record["MASTER_PORT"] for record in records}) == 1
        assert records[0]["argv"] == ["--out", str(tmp_path), "well"]
        job.dump("job.json")
        again: Any = job_load("job.json")
        assert again.can_run(job)
        again._script[-1] = "fail"
        old_uids = {*current_runtime().meshes}  # also those of other tests
        with pytest.raises(ActorError, match=r"train\.py .* ended with status 3") as caught:
            again.run_spmd()
        frames = debug.post_mortem(caught.value)  # as the error offers: the processes are there until the next run
        assert [session.post_mortem for session in frames.sessions] == [True]
        frames.resume()
        meshes = current_runtime().meshes
        failed = [mesh for uid, mesh in meshes.items() if uid not in old_uids and mesh.stopped is None]
        assert failed
        again._script[-1] = "well"
        assert again.run_spmd() is True
        assert all(mesh.stopped is not None for mesh in failed)
    finally:
        job.kill()
    assert running_jobs("process") == []


def test_command_lines_are_read_as_torchrun_reads_them() -> None:
    line = ["/usr/bin/torchrun", "--standalone", "--max-restarts=3", "-m", "pack.train", "--nnodes", "7"]
    command = TorchrunCommand.read(line)
    assert (command.hosts, command.procs, command.left_out) == (0, 0, ("--max-restarts",))
    assert command.script == ("-m", "pack.train", "--nnodes", "7")
    assert TorchrunCommand.read(["torchrun", "--nproc-per-node=auto", "train.py"], local=True).procs > 0
    for line, message in (
        (["python", "train.py"], "begins with torchrun"),
        (["torchrun", "--nproc-per-node=gpu", "train.py"], "say how many, as a number"),
        (["torchrun", "--nnodes=1:4", "train.py"], "a mesh has as many hosts as it was made with"),
        (["torchrun", "--nnodes=2"], "no script is named"),
        (["torchrun", "--no-python", "train.sh"], "only Python programs"),
    ):
        with pytest.raises(ValueError, match=message):
            serve(line)
    role = SimpleNamespace(entrypoint="torchrun", args=["train.py"], num_replicas=3)
    with pytest.raises(LookupError, match="no kind of jobs 'mast'"):
        serve(SimpleNamespace(roles=[role]), "mast")
    with pytest.raises(ValueError, match="AppDef with one role; this has 2"):
        serve(SimpleNamespace(roles=[role, role]))


TWICE = """
import json, os, random, sys, threading
import beside
with open(os.path.join(os.path.dirname(__file__), "drawn"), "a") as drawn:
    print(random.random(), file=drawn)
random.seed(0)
rank = int(os.environ["RANK"])
values = [beside.VALUE, rank, os.environ["WORLD_SIZE"], sys.argv[1:], __name__, os.path.basename(__file__),
         threading.current_thread() is threading.main_thread(), "values" in vars()]
with open(os.path.join(os.path.dirname(__file__), f"out{rank}"), "w") as out:
    json.dump(values, out)
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
"""


def test_a_script_runs_again_and_again_in_the_same_processes(host: Any, tmp_path: Path) -> None:
    script, beside = tmp_path / "twice.py", tmp_path / "beside.py"
    script.write_text(TWICE)
    beside.write_text("VALUE = 1")
    procs: ProcMesh = host.spawn_procs(per_host={"gpus": 2}, name="again")

    def run_script(*arguments: str, on: Any = procs) -> list[Any]:
        run(str(script), *arguments, on=on)
        return [json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(len(on))]

    rest = [["x"], "__main__", "twice.py", True, False]
    assert run_script("x") == [[1, rank, "2", *rest] for rank in range(2)]
    beside.write_text("VALUE = 22")
    assert run_script("x") == [[22, rank, "2", *rest] for rank in range(2)]
    assert run_script("x", on=procs.slice(gpus=slice(1, 2))) == [[22, 0, "1", *rest]]
    drawn = (tmp_path / "drawn").read_text().split()
    assert len(set(drawn)) == len(drawn) == 5
    assert run_script("exit", "0")[0][3] == ["exit", "0"]
    with pytest.raises(ActorError, match=r"twice\.py exit 3 ended with status 3"):
        run_script("exit", "3")
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "__init__.py").touch()
    (pack / "__main__.py").write_text("import sys\nran = (__package__, sys.argv[1:])")
    run_on(procs, f"import sys; sys.path.insert(0, {str(tmp_path)!r})").get()
    run("-m", "pack", "a", "b", on=procs)
    assert procs.run(of_main, "ran").get().values() == [("pack", ["a", "b"])] * 2
    with pytest.raises(ActorError, match="the ranks find no module nowhere"):
        run("-m", "nowhere", on=procs)
    with pytest.raises(FileNotFoundError, match=r"there is no script none\.py"):
        run("none.py", on=procs)
    procs.stop().get()


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
norm = torch.nn.utils.get_total_norm([distribute_tensor(torch.ones(4), mesh, [Shard(0)])] * 2).full_tensor().item()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize("stream", ["None", "open(os.devnull, 'w')", "io.TextIOWrapper(sys.stdout.buffer)"])
def test_a_script_that_replaces_stdout_does_not_mute_the_next(host: Any, tmp_path: Path, stream: str) -> None:
    def state() -> tuple[bool, bool]:
        return sys.stdout is sys.__stdout__, sys.stdout.closed

    script = tmp_path / "mute.py"
    script.write_text(f"import io, os, sys\nsys.stdout = {stream}\n")
    procs = host.spawn_procs(per_host={"gpus": 2})
    run(str(script), on=procs)
    assert procs.run(state).get().values() == [(True, False)] * 2


def test_a_script_with_a_device_mesh_runs_twice(host: Any, tmp_path: Path) -> None:
    """DTensor keeps what it knows of the mesh of the first run, whose groups the script itself has destroyed."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    procs: ProcMesh = host.spawn_procs(per_host={"gpus": 2}, name="sharded")
    for _ in range(2):
        run(str(script), on=procs)
        assert procs.run(of_main, "norm").get().values() == pytest.approx([8**0.5] * 2)
    procs.stop().get()


REMEMBERS = """
import sys

class ConfigManager:
    def parse_args(self, args=sys.argv[1:]):
        return args
"""


def test_torchtitan_reads_the_arguments_of_each_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manager: Any = ModuleType("torchtitan.config.manager")
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "4"])
    exec(REMEMBERS, vars(manager))
    monkeypatch.setitem(sys.modules, manager.__name__, manager)
    script = tmp_path / "train.py"
    script.write_text("import sys\nread = sys.modules['torchtitan.config.manager'].ConfigManager().parse_args()")
    SPMDProgram.read([str(script), "--steps", "6"]).run()
    assert of_main("read") == ["--steps", "6"]


def of_main(name: str) -> Any:
    return getattr(sys.modules["__main__"], name)


@pytest.mark.slow
def test_the_command_ends_with_the_status_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit(int(sys.argv[1]))")
    environment = {**os.environ, "PYTHONPATH": ROOT, "MONARCH_NB_PRELOAD": ""}

    def run_command(*words: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "monarch_nb", "torchrun", *words]
        return subprocess.run(line, env=environment, text=True, capture_output=True, timeout=60)

    success = run_command("--nproc-per-node", "2", str(script), "0")
    assert (success.returncode, success.stderr) == (0, "")
    assert sorted(line[-6:] for line in success.stdout.splitlines()) == ["rank 0", "rank 1"]
    failure = run_command("--nproc-per-node", "2", str(script), "3")
    assert failure.returncode == 1
    assert "ended with status 3" in failure.stderr
    assert run_command("none.py").returncode == 2
