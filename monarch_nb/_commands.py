"""The commands of torchmonarch's command line as functions on jobs: `monarch.tools.commands`."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from monarch_nb.job import DEFAULT_JOB_PATH, exec_command, job_load, load_current_job, set_current_job, shell
from monarch_nb.job.named import find_job
from monarch_nb.mesh import HostMesh

__all__ = [
    "DEFAULT_JOB_PATH",
    "MONARCH_DIR",
    "apply_job",
    "context_create",
    "context_ls",
    "context_rm",
    "context_use",
    "exec_on_job",
    "kill",
    "kill_and_confirm",
    "load_current_job",
    "shell_on_job",
]

MONARCH_DIR = ".monarch"
_STATE = "state.json"
_DEFAULT = "default"


def apply_job(module_path: str | None = None) -> None:
    """Applies the current job of this folder, or `module.attribute`, which becomes it; blocks until hosts answer."""
    if module_path is not None:
        set_current_job(module_path)
    began = time.monotonic()
    for hosts in _hosts().values():
        hosts.initialized.get()
    _say(f"Job is ready ({time.monotonic() - began:.0f}s)")


def exec_on_job(
    cmd: list[str],
    run_all: bool = False,
    mesh_name: str | None = None,
    point_str: str | None = None,
    env: list[str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
    script: str | None = None,
    per_host: dict[str, int] | None = None,
) -> int:
    """Runs a command on hosts of the current job; returns its largest exit status. Blocks.

    Runs on the first host of the first mesh, or at `point_str` ("hosts=1") of it, with the output here; on a mesh, or
    on all with `run_all`, with the output in files there. `script` is a file for bash to run, "-" for stdin; `env` has
    NAME=VALUE; `kill` ends the job afterwards. Raises ValueError for any other text, and for an unknown mesh.
    """
    variables = _environment(env)
    if script is not None:
        cmd = ["bash", "-c", sys.stdin.read() if script == "-" else Path(script).read_text()]
    point = None if point_str is None else _point(point_str)
    job = load_current_job()
    host_meshes = _hosts()
    if run_all or mesh_name is not None:
        meshes = list(host_meshes) if run_all else [_named(host_meshes, mesh_name)]
        output = f"/tmp/monarch_exec_{os.urandom(4).hex()}"
        _say(f"Output → {output}/ on each worker")
        requests = [
            exec_command(
                host_meshes[mesh], cmd, env=variables, workdir=workdir, output_dir=f"{output}/{mesh}/$SUBDIR",
                per_host=per_host,
            )
            for mesh in meshes
        ]  # fmt: skip
    else:
        first = next(iter(host_meshes.values()))
        rank = 0 if point is None else None
        requests = [exec_command(first, cmd, env=variables, workdir=workdir, rank=rank, point=point, per_host=per_host)]
    status = max(future.get() for future in requests)
    if kill:
        job.kill()
    return status


def shell_on_job(
    mesh_name: str | None = None,
    point_str: str | None = None,
    env: list[str] | None = None,
    workdir: str | None = None,
    kill: bool = False,
) -> int:
    """Opens a shell on a host of the current job, by default the first; returns its exit status; see `exec_on_job`."""
    variables = _environment(env)
    point = None if point_str is None else _point(point_str)
    job = load_current_job()
    meshes = _hosts()
    hosts = meshes[_named(meshes, mesh_name)]
    host = hosts.flatten("rank").slice(rank=0) if point is None else hosts.slice(**point)
    status = shell(host, env=variables, workdir=workdir)
    if kill:
        job.kill()
    return status


def kill(server_handle: str) -> None:
    """Ends a job, by `kind:///id`, its id or its name in monarch.toml. Raises LookupError if it does not run."""
    find_job(server_handle.rpartition("/")[2]).kill()


def kill_and_confirm(server_handle: str, timeout_after_kill: int = 300) -> None:
    """As `kill`, which already waits until the engine has confirmed the end."""
    kill(server_handle)


def context_create(name: str) -> None:
    """Creates a folder for another job of this folder."""
    _context(name).mkdir(parents=True, exist_ok=True)
    _say(f"Created context '{name}'")


def context_use(name: str) -> None:
    """Makes a context the place of this folder's jobs from now on."""
    link = Path(DEFAULT_JOB_PATH)
    if link.exists() and not link.is_symlink():  # written before contexts existed
        _context(_DEFAULT).mkdir(parents=True, exist_ok=True)
        link.rename(_context(_DEFAULT) / _STATE)
    _context(name).mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(name) / _STATE)
    _say(f"Switched to context '{name}'")


def context_rm(name: str) -> None:
    """Removes a context and ends its job."""
    with contextlib.suppress(FileNotFoundError):
        job_load(str(_context(name) / _STATE)).kill()
    current = _current()
    shutil.rmtree(_context(name), ignore_errors=True)
    if current == name:
        context_use(_DEFAULT)
    _say(f"Removed context '{name}'")


def context_ls() -> None:
    """Lists the contexts and marks the current one."""
    folder = Path(MONARCH_DIR)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for name in names:
        _say(f"{'*' if name == _current() else ' '} {name}")
    if not names:
        _say("No contexts.")


def _hosts() -> Mapping[str, HostMesh]:
    meshes = load_current_job().state()._hosts
    if not meshes:
        raise RuntimeError("the job has no host meshes")
    return meshes


def _named(meshes: Mapping[str, object], name: str | None) -> str:
    if name is None:
        return next(iter(meshes))
    if name not in meshes:
        raise ValueError(f"Mesh {name!r} not found. Available: {list(meshes)}")
    return name


def _environment(env: Iterable[str] | None) -> dict[str, str]:
    variables = {}
    for item in env or ():
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"Invalid env var (expected KEY=VALUE): {item!r}")
        variables[name] = value
    return variables


def _point(text: str) -> dict[str, int]:
    pairs: Sequence[tuple[str, str, str]] = [pair.partition("=") for pair in text.split(",")]
    if not all(value.strip().isdecimal() for _, _, value in pairs):
        raise ValueError(f"{text!r} is no place: write it as 'hosts=1' or 'hosts=1,gpus=0'")
    return {name.strip(): int(value) for name, _, value in pairs}


def _context(name: str) -> Path:
    if not name or name != os.path.basename(name) or name.startswith("."):
        raise ValueError(f"{name!r} cannot name a context: it is a folder in {MONARCH_DIR}")
    return Path(MONARCH_DIR, name)


def _current() -> str | None:
    link = Path(DEFAULT_JOB_PATH)
    return Path(os.readlink(link)).parts[0] if link.is_symlink() else None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
