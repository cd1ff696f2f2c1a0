"""Helpers of torchmonarch that need no mesh: mocks, addresses, workspaces, tracing, options of jobs."""

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from monarch._src.actor.mock import (
    _actor_registry,
    _tensor_engine_registry,
    get_actor_class,
    get_tensor_engine_factory,
    get_tensor_engine_mock_registry_state,
    patch_actor,
    patch_tensor_engine,
    set_tensor_engine_mock_registry_state,
)
from monarch._src.actor.shape import ShapeExt, iter_ranks
from monarch._src.actor.telemetry import TracingForwarder
from monarch.actor import Actor, NDSlice, Shape
from monarch.job import JobState, LocalJob, MeshAdminConfig, TelemetryConfig
from monarch.tools.config import NOT_SET, Config
from monarch.tools.config.environment import CondaEnvironment
from monarch.tools.config.workspace import Workspace
from monarch.tools.network import AddrType, get_ipaddr, get_sockaddr
from monarch.tools.utils import MONARCH_HOME, conda

pytestmark = pytest.mark.timeout(60)


class First(Actor): ...


class Second(Actor): ...


class Third(Actor): ...


def test_patches_nest_and_are_undone_after_errors() -> None:
    with patch_actor(First, Second) as replacement:
        assert replacement is get_actor_class(First) is Second
        with contextlib.suppress(ZeroDivisionError), patch_actor(First, Third):
            assert get_actor_class(First) is Third
            raise ZeroDivisionError
        assert get_actor_class(First) is Second
    assert get_actor_class(First) is First
    assert _actor_registry == {}


def test_the_table_of_patched_tensor_engines_is_by_class() -> None:
    with patch_tensor_engine(First) as engine:
        state = get_tensor_engine_mock_registry_state()
    assert (state, _tensor_engine_registry) == ({First: engine}, {})
    set_tensor_engine_mock_registry_state(state)
    assert get_tensor_engine_factory(First) is engine
    _tensor_engine_registry.clear()


def test_a_patch_decorates_functions_of_both_kinds() -> None:
    @patch_actor(First, Second)
    def plain(more: int) -> tuple[type, int]:
        return get_actor_class(First), more

    @patch_actor(First, Second)
    async def waiting() -> type:
        await asyncio.sleep(0)
        return get_actor_class(First)

    async def main() -> type:
        async with patch_actor(First, Third):
            return get_actor_class(First)

    assert plain(3) == plain(more=3) == (Second, 3)
    assert asyncio.run(waiting()) is Second
    assert asyncio.run(main()) is Third
    assert get_actor_class(First) is First


def resolver(*answers: tuple[socket.AddressFamily, str]) -> Any:
    def getaddrinfo(host: str, port: int, family: int, type: int) -> list[Any]:
        matches = [(of, type, 6, "", (address, port)) for of, address in answers if of == family]
        if not matches:
            raise socket.gaierror(f"no address of {host}")
        return matches

    return getaddrinfo


@pytest.mark.parametrize(
    ("answers", "kind", "address", "with_port"),
    [
        ([(socket.AF_INET6, "2001:db8::7"), (socket.AF_INET, "192.0.2.7")], AddrType.Default, "2001:db8::7", None),
        ([(socket.AF_INET6, "2001:db8::7"), (socket.AF_INET, "192.0.2.7")], AddrType.IPv4, "192.0.2.7", None),
        ([(socket.AF_INET6, "fe80::1"), (socket.AF_INET, "192.0.2.7")], AddrType.Default, "192.0.2.7", "192.0.2.7:80"),
        ([(socket.AF_INET6, "2001:db8::7")], AddrType.IPv6, "2001:db8::7", "[2001:db8::7]:80"),
    ],
)
def test_a_host_is_found_by_its_name(
    answers: Any, kind: AddrType, address: str, with_port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(*answers))
    assert get_ipaddr("a.host", 80, kind) == address
    assert with_port is None or get_sockaddr("a.host", 80) == with_port


def test_a_name_without_an_address_that_others_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver((socket.AF_INET, "169.254.3.4")))
    with pytest.raises(RuntimeError, match=r"Unable to resolve `a\.host` to an IPv6 or IPv4 address"):
        get_sockaddr("a.host", 80)


def test_the_address_type_is_one_everywhere() -> None:
    import monarch.spmd

    assert monarch.spmd.AddrType is AddrType


def test_a_workspace_maps_folders_to_where_they_go(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("x = 1\n")
    assert Workspace(dirs=[project]).dirs == {project: "project"}
    assert Workspace(dirs={str(project): ""}).dirs == {project: ""}
    Workspace(dirs=[project]).merge(tmp_path / "out")
    Workspace(dirs={project: ""}).merge(tmp_path / "flat")
    assert (tmp_path / "out" / "project" / "train.py").read_text() == "x = 1\n"
    assert (tmp_path / "flat" / "train.py").exists()
    assert Workspace.null() == Workspace(env=None) != Workspace()
    for wrong in ([""], {"": "x"}):
        with pytest.raises(AssertionError):
            Workspace(dirs=wrong)
    with pytest.raises(TypeError, match="a list of folders"):
        Workspace(dirs="project")


def test_a_configuration_of_a_scheduler_can_be_made() -> None:
    config = Config(scheduler="slurm", workspace=Workspace.null())
    assert (config.scheduler, config.dryrun, Config().scheduler) == ("slurm", False, NOT_SET)
    with pytest.warns(FutureWarning):
        assert Config(workspace="code").workspace == Workspace(dirs={"code": ""})  # type: ignore[arg-type]
    with pytest.warns(FutureWarning):
        assert Config(workspace=None).workspace == Workspace.null()  # type: ignore[arg-type]


def test_the_active_conda_environment_is_asked_for_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = CondaEnvironment()
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    with pytest.raises(AssertionError, match="no Conda environment is active"):
        environment.conda_prefix  # noqa: B018
    monkeypatch.setenv("CONDA_PREFIX", "/opt/envs/train")
    assert (environment.conda_prefix, conda.active_env_name()) == ("/opt/envs/train", "train")
    assert CondaEnvironment("/x").conda_prefix == "/x"
    monkeypatch.setenv("MONARCH_HOME", str(tmp_path / "home"))
    assert MONARCH_HOME("a", "b") == tmp_path / "home" / "a" / "b"
    assert (tmp_path / "home" / "a" / "b").is_dir()


def test_shapes_have_their_helpers() -> None:
    shape = Shape(["a", "b"], NDSlice.new_row_major([2, 4]))
    assert ShapeExt.slice(shape, a=1, b=slice(1, 3)).ranks() == [5, 6]
    parts = [NDSlice(offset=0, sizes=[3], strides=[1]), NDSlice(offset=2, sizes=[3], strides=[1])]
    assert list(iter_ranks(parts)) == [0, 1, 2, 3, 4]
    assert list(iter_ranks(parts[1])) == [2, 3, 4]


def test_records_become_events_of_the_span_that_is_recorded() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    records = logging.getLogger("of a test")
    handler = TracingForwarder()
    records.addHandler(handler)
    try:
        records.warning("nobody records")
        with sdk.TracerProvider().get_tracer("test").start_as_current_span("training") as span:
            records.warning("step %d", 3)
    finally:
        records.removeHandler(handler)
    assert [(event.name, event.attributes["log.severity"]) for event in span.events] == [("step 3", "WARNING")]


def test_services_that_are_not_here_are_accepted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    job = LocalJob(["trainers"])
    with caplog.at_level(logging.WARNING):
        assert job.enable_telemetry(TelemetryConfig(include_dashboard=True)) is job
        assert job.enable_telemetry(retention_secs=60, mesh_admin_config=MeshAdminConfig()).enable_admin() is job
        assert LocalJob().enable_admin(MeshAdminConfig("[::]:1729")).active is False
        TracingForwarder(), TracingForwarder()
    for name in ("enable_telemetry", "enable_admin"):
        assert sum(name in record.getMessage() for record in caplog.records) <= 1
    for wrong in (job.enable_telemetry, job.enable_admin):
        with pytest.raises(TypeError, match="nonsense"):
            wrong(nonsense=1)


def test_a_state_has_the_service_addresses_of_a_custom_job() -> None:
    state = JobState({}, admin_url="http://x:1729", telemetry_url="http://x")
    assert (state.admin_url, state.telemetry_url, state.dashboard_url) == ("http://x:1729", "http://x", None)
    assert JobState({}).admin_url is None


def test_a_process_program_started_by_a_person_explains_itself() -> None:
    import subprocess
    import sys

    line = [sys.executable, "-m", "monarch._src.actor.bootstrap_main"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "a host agent starts this program" in done.stderr


def test_services_that_work_differently_say_so_where_they_are_requested() -> None:
    import subprocess
    import sys

    code = (
        "from monarch.job import LocalJob; from monarch._src.actor.telemetry import TracingForwarder\n"
        "for _ in range(2): LocalJob().enable_telemetry().enable_admin(); TracingForwarder()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stderr.count("enable_telemetry: accepted") == done.stderr.count("enable_admin: accepted") == 1
    assert done.stderr.count("TracingForwarder: accepted") == 1
