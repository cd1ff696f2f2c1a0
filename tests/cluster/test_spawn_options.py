"""Processes with their own command, interpreter or processors, and spawn callbacks."""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_nb.actor import Actor, Point, SupervisionError, endpoint, this_host
from monarch_nb.host.command import BootstrapCommand, default_bootstrap_cmd
from monarch_nb.mesh.proc import (
    get_active_proc_meshes,
    register_proc_mesh_spawn_callback,
    unregister_proc_mesh_spawn_callback,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("host")]


class Probe(Actor):
    @endpoint
    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @endpoint
    def processors(self) -> set[int]:
        return os.sched_getaffinity(0)

    @endpoint
    def executable(self) -> str:
        return sys.executable

    @endpoint
    def executable_of_child(self) -> str:
        procs = this_host().spawn_procs(name="child")
        try:
            child: Any = procs.spawn("probe", Probe)
            return str(child.executable.call_one().get(30))
        finally:
            procs.stop().get(30)


def twin(folder: Path) -> str:
    """Another environment with the same packages."""
    packages = Path(msgspec.__file__).parents[1]
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    site.mkdir(parents=True)
    (site / "site-packages").symlink_to(packages)
    return str(folder / "bin" / "python")


def probes(procs: Any) -> Any:
    return procs.spawn("probe", Probe)


@pytest.mark.slow
def test_a_bootstrap_command_brings_its_environment() -> None:
    command = default_bootstrap_cmd().with_env({"MONARCH_TEST_ONE": "1", "LANG": None})
    procs = this_host().spawn_procs(per_host={"x": 2}, bootstrap_command=command)
    variables = probes(procs).environment.call("MONARCH_TEST_ONE", "LANG", "LOCAL_RANK").get(30)
    assert variables.values() == [["1", None, "0"], ["1", None, "1"]]
    procs.stop().get(20)


@pytest.mark.slow
def test_a_bootstrap_command_may_differ_by_place_and_run_a_wrapper() -> None:
    def command(point: Point) -> BootstrapCommand:
        usual = default_bootstrap_cmd()
        wrapped = ["-c", 'export MONARCH_TEST_PLACE="$0"; exec "$@"', str(point["x"]), usual.program, *usual.args]
        return BootstrapCommand("/bin/sh", "wrapper", wrapped, usual.env)

    procs = this_host().spawn_procs(per_host={"x": 2}, bootstrap_command=command)
    assert probes(procs).environment.call("MONARCH_TEST_PLACE").get(30).values() == [["0"], ["1"]]
    procs.stop().get(20)


def test_a_bootstrap_command_may_begin_with_an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    this_host()
    monkeypatch.setenv("MONARCH_TEST_TWO", "2")
    command = default_bootstrap_cmd()
    command.inherit_env = False
    procs = this_host().spawn_procs(bootstrap_command=command)
    assert probes(procs).environment.call_one("MONARCH_TEST_TWO", "HOME").get(30) == [None, None]
    procs.stop().get(20)


def test_a_command_that_starts_no_proc_fails_with_its_status() -> None:
    procs = this_host().spawn_procs(bootstrap_command=BootstrapCommand("/bin/sh", None, ["-c", "exit 7"], {}))
    with pytest.raises(SupervisionError, match="7"):
        procs.initialized.get(20)
    missing = this_host().spawn_procs(bootstrap_command=BootstrapCommand("/no/such/program", None, [], {}))
    with pytest.raises(SupervisionError, match="/no/such/program"):
        missing.initialized.get(20)


def test_a_bootstrap_command_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="not a BootstrapCommand"):
        this_host().spawn_procs(bootstrap_command=lambda point: "python")  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="no command line"):
        this_host().spawn_procs(bootstrap_command=BootstrapCommand("a\0b", None, [], {}))


@pytest.mark.skipif(sys.platform != "linux", reason="processes cannot be bound elsewhere")
def test_proc_bind_restricts_a_process_to_its_processors() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    procs = this_host().spawn_procs(per_host={"x": 2}, proc_bind=[{"cpus": str(first)}, {"physcpubind": str(last)}])
    assert probes(procs).processors.call().get(30).values() == [{first}, {last}]
    procs.stop().get(20)


def test_proc_bind_needs_an_entry_for_each_process_of_a_host() -> None:
    with pytest.raises(ValueError, match=r"proc_bind length \(1\) must equal procs_per_host \(2\)"):
        this_host().spawn_procs(per_host={"x": 2}, proc_bind=[{"cpus": "0"}])


@pytest.mark.slow
def test_another_interpreter_is_inherited_by_this_host_inside(tmp_path: Path) -> None:
    python = twin(tmp_path)
    procs = this_host().with_python_executable(python).spawn_procs()
    probe = probes(procs)
    assert probe.executable.call_one().get(30) == python
    assert probe.executable_of_child.call_one().get(60) == python
    procs.stop().get(20)


def test_callbacks_hear_of_each_proc_mesh_and_active_ones_are_listed() -> None:
    meshes: list[Any] = []
    register_proc_mesh_spawn_callback(meshes.append)
    try:
        procs = this_host().spawn_procs(name="watched")
    finally:
        unregister_proc_mesh_spawn_callback(meshes.append)
    assert meshes == [procs]
    assert procs in get_active_proc_meshes()
    procs.stop().get(20)
    assert procs not in get_active_proc_meshes()
    with pytest.raises(ValueError, match="not in list"):
        unregister_proc_mesh_spawn_callback(meshes.append)
