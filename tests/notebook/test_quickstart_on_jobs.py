"""The quickstart on hosts of each engine: its first cells name a job, and the kernel is restarted while it trains."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_nb._parsing import parsed
from tests.cluster.engine_tools import PYTHON, SlurmCluster, SSHServer, needs, none_alive
from tests.cluster.kubernetes_stub import Cluster
from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook
from tests.polling import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SPAWN = """
%%mesh workers gpus={gpus} --job lab
import torch

torch.set_num_threads(1)
"""
RAY = """
import sys, ray
found = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(found.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
Started = tuple[str, dict[str, str], Callable[[], object]]  # a job of monarch.toml, the environment, and its end


def on_processes(folder: Path) -> Started:
    return 'kind = "process"\nmeshes = { hosts = 2 }', {}, lambda: None


def on_ssh(folder: Path) -> Started:
    needs("sshd", "ssh-keygen", package="openssh-server openssh-client")
    pytest.importorskip("asyncssh", reason="NOT TESTED HERE: pip install 'monarch-nb[ssh]'")
    server = SSHServer(folder)
    lines = [
        'kind = "ssh"', f'meshes = {{ hosts = ["{server.name}", "{server.name}"] }}', f'python_exe = "{PYTHON}"',
        f'ssh_args = "-i {server.identity}"', f'known_hosts = "{server.known_hosts}"', 'reach = "tunnel"',
    ]  # fmt: skip
    return "\n".join(lines), {}, server.close


def on_slurm(folder: Path) -> Started:
    needs("slurmctld", "slurmd", "munged", "sbatch", package="slurmctld slurmd slurm-client munge")
    if os.geteuid():
        pytest.skip("NOT TESTED HERE: a Slurm of one's own needs root")
    slurm = SlurmCluster(folder)
    lines = f'kind = "slurm"\nmeshes = {{ hosts = 2 }}\npython_exe = "{PYTHON}"\npartition = "all"'
    return lines, {"SLURM_CONF": str(slurm.conf)}, slurm.close


def on_mpi(folder: Path) -> Started:
    needs("mpirun", package="openmpi-bin")
    words = "--allow-run-as-root --oversubscribe" if os.geteuid() == 0 else "--oversubscribe"
    return f'kind = "mpi"\nmeshes = {{ hosts = 2 }}\npython_exe = "{PYTHON}"\nmpi_args = "{words}"', {}, lambda: None


def on_ray(folder: Path) -> Started:
    pytest.importorskip("ray", reason="NOT TESTED HERE: pip install 'monarch-nb[ray]'")
    env = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    head = subprocess.Popen([sys.executable, "-c", RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, **env})  # fmt: skip
    assert head.stdout is not None
    address = head.stdout.readline().strip()
    assert address, "a cluster of Ray's"
    lines = f'kind = "ray"\nmeshes = {{ hosts = 2 }}\nstrategy = "PACK"\naddress = "{address}"'
    return lines, env, lambda: head.communicate(timeout=60)


def on_kubernetes(folder: Path) -> Started:
    """A stub of its API: pods are processes, and one forwarded port leads to the first of them."""
    pytest.importorskip("kubernetes", reason="NOT TESTED HERE: pip install 'monarch-nb[kubernetes]'")
    cluster = Cluster(folder, operator=True)
    lines = [
        'kind = "kubernetes"', "meshes = { hosts = 2 }", 'namespace = "lab"', f'kubeconfig = "{cluster.config}"',
        'image = "example/monarch:1"',
    ]  # fmt: skip
    return "\n".join(lines), {"PATH": f"{cluster.kubectl()}:{os.environ['PATH']}"}, cluster.close


ENGINES = {
    "kubernetes": on_kubernetes, "mpi": on_mpi, "process": on_processes, "ray": on_ray, "slurm": on_slurm,
    "ssh": on_ssh,
}  # fmt: skip


@pytest.fixture(params=sorted(ENGINES))
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose monarch.toml has a job of two hosts, "lab"."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/quickstart.ipynb")
    folder = tmp_path / "engine"
    folder.mkdir()
    settings, env, end = ENGINES[request.param](folder)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "monarch.toml").write_text(f"[jobs.lab]\n{settings}\n")
    yield tmp_path
    end()


def definitions(source: str) -> str:
    """The definitions of a cell, without its other statements."""
    tree = parsed(source)
    parts = [part for part in tree.body if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
    return "\n\n".join(ast.unparse(part) for part in parts)


def test_training_on_two_hosts_survives_a_kernel_restart_and_a_kill(lab: Path) -> None:
    cells = {cell.id: cell.source for cell in Example("quickstart.ipynb").cells}
    notebook = Notebook(folder=lab)
    try:
        notebook.run(cells["load"], 120).ok()
        notebook.run(cells["data"], 60).ok()
        joined = notebook.run(SPAWN.format(gpus=2), 120).ok()
        assert "2/2 hosts joined" in joined.stdout
        notebook.run("workers = workers.flatten('gpus')").ok()
        for name in ("trainer", "spawn", "train"):
            notebook.run(cells[name], 120).ok()
        pids = notebook.run("[*pids.values()]").ok().text
        last = float(notebook.run("float(last[1])").ok().text)
        assert "is left for 5m" in notebook.run("%detach workers --lease 5m").ok().stdout
        notebook.restart()
        notebook.run(cells["load"], 120).ok()
        notebook.run(cells["data"], 60).ok()
        back = notebook.run("%attach workers", 60).ok()
        assert "workers is back: 4 procs with trainers" in back.stdout
        notebook.run(cells["trainer"]).ok()
        notebook.run(definitions(cells["spawn"])).ok()
        notebook.run(definitions(cells["train"])).ok()
        notebook.run("pids = trainers.pid.call().get(); curves = [[]]").ok()
        assert notebook.run("[*pids.values()]").ok().text == pids
        notebook.run("checkpoint, saved_at = trainers.slice(gpus=0).save.call_one().get(), 80").ok()
        again = float(notebook.run("train(80, 90); float(curves[-1][0][1])", 60).ok().text)
        assert again < 2 * last < 1.5, "it is the model that was trained before"
        assert "SIGKILL" in notebook.run(cells["kill"], 60).traceback
        for name in ("after", "heal", "resume", "curve", "result"):
            shown = notebook.run(cells[name], 120).ok()
        match = re.search(r"test accuracy +([\d.]+)%", shown.stdout)
        assert match is not None, shown
        assert float(match[1]) > 95
        assert "is reused" in notebook.run(SPAWN.format(gpus=2), 60).ok().stdout
        ranks = [int(pid) for pid in notebook.run("print(*trainers.pid.call().get().values())").ok().stdout.split()]
        notebook.run("%stop workers").ok()
        notebook.run("from monarch.job import job_load; job_load('.monarch/jobs/lab.json').kill()", 60).ok()
        assert none_alive(ranks)
        until(lambda: "not started" in shell(lab, "ls"), "the job's end")
    finally:
        shell(lab, "kill", "lab")
        notebook.close()


def shell(lab: Path, *words: str) -> str:
    line = [sys.executable, "-m", "monarch_nb", "job", *words]
    return subprocess.run(line, cwd=lab, capture_output=True, text=True, check=False).stdout
