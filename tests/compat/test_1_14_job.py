"""Section 1.14: local jobs and jobs of processes; their files: tests/cluster/test_job_process.py."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, HostMesh, attach_to_workers, endpoint, this_host
from monarch.job import (
    SERVICE_PROC_IDS_ENV,
    SERVICE_PROC_RANK_ENV,
    ImageSpec,
    JobState,
    JobTrait,
    KubernetesJob,
    LocalJob,
    PortForwarder,
    SlurmJob,
    SSHJob,
    deserialize_service_proc_ids,
    exec_command,
    hosts_from_config,
    job_load,
    job_loads,
    load_current_job,
    new_service_proc_id,
    ranked_service_proc_id_from_env,
    serialize_service_proc_ids,
    service_proc_addr,
    service_proc_addrs,
    set_current_job,
    shell,
)
from monarch.spmd import SPMDActor
from tests.cluster.worker_tools import short_folder, workers_at

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Echo(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value


def test_a_local_job_is_this_host_under_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = LocalJob(hosts=("trainers", "evaluators")).state(cached_path=None)
    assert isinstance(state, JobState)
    assert state.trainers == state.evaluators == this_host()
    with pytest.raises(AttributeError, match="trainers"):
        _ = state.nobody
    assert [getattr(state, f"{name}_url") for name in ("telemetry", "dashboard", "admin")] == [None] * 3
    assert state.query_engine_client is None


def test_a_local_job_has_one_mesh_called_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = LocalJob()
    procs = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
    assert procs.spawn("echo", Echo).echo.call_one(1).get(30) == 1
    procs.stop().get(20)
    assert isinstance(job, JobTrait)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (job_load, "filename"),
        (shell, "host_mesh_singleton env workdir"),
        (
            SlurmJob,
            "meshes python_exe slurm_args monarch_port job_name ntasks_per_node time_limit partition log_dir exclusive "
            "gpus_per_node cpus_per_task mem job_start_timeout account qos out_of_cluster attach_to bind_to",
        ),
        (KubernetesJob, "namespace timeout kubeconfig attach_to"),
        (
            KubernetesJob.add_mesh,
            "name num_replicas label_selector pod_rank_label image_spec port pod_template labels annotations",
        ),
        (ImageSpec, "image resources enable_fuse shared_memory_size"),
        (SSHJob, "python_exe ssh_args monarch_port transport"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_parameters_have_the_names_that_programs_use(function: Any, expected: str) -> None:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert names[: len(expected.split())] == expected.split()


def test_hosts_are_started_with_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [new_service_proc_id(), new_service_proc_id()]
    text = serialize_service_proc_ids(ids)
    assert deserialize_service_proc_ids(text) == ids
    assert len(set(map(str, ids))) == 2
    assert ranked_service_proc_id_from_env() is None
    monkeypatch.setenv(SERVICE_PROC_IDS_ENV, text)
    monkeypatch.setenv(SERVICE_PROC_RANK_ENV, "1")
    monkeypatch.setenv("OTHER_RANK", "2")
    assert ranked_service_proc_id_from_env() == ids[1]
    with pytest.raises(ValueError, match="2 hosts"):
        ranked_service_proc_id_from_env(rank_env="OTHER_RANK")
    for wrong in ('{"a": 1}', "[1]", "no"):
        with pytest.raises(ValueError):
            deserialize_service_proc_ids(wrong)


def test_an_address_with_an_id_is_attached() -> None:
    with short_folder() as folder:
        addresses = service_proc_addrs([f"ipc://{folder}/w"], [new_service_proc_id()])
        assert addresses[0].endswith(f"@ipc://{folder}/w")
        assert service_proc_addr("ipc:///x", None) == "ipc:///x"
        assert service_proc_addrs(["ipc:///x"], None) == ["ipc:///x"]
        with pytest.raises(ValueError, match="1 addresses"):
            service_proc_addrs(["ipc:///x"], [])
        with workers_at(*addresses):
            hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
            assert hosts.initialized.get(30) is True
            hosts.shutdown().get(20)


class Placed(Actor):
    @endpoint
    async def host(self) -> HostMesh:
        return this_host()


def test_this_host_in_an_actor_equals_the_slice_of_its_host() -> None:
    with short_folder() as folder, workers_at(*(addresses := [f"ipc://{folder}/a", f"ipc://{folder}/b"])):
        hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
        placed = hosts.spawn_procs(per_host={"gpus": 1}).spawn("placed", Placed)
        parts = [hosts.slice(hosts=rank) for rank in range(2)]
        assert placed.host.call().get(30).values() == parts
        assert parts[0] != parts[1]
        assert hosts != parts[0]
        with pytest.raises(ValueError, match="singleton HostMesh"):
            shell(hosts)
        assert len({*placed.host.call().get(30).values(), *parts}) == 2
        hosts.shutdown().get(20)


def test_jobs_have_the_methods_that_programs_call() -> None:
    for name in ("apply", "state", "kill", "dump", "dumps", "active", "apply_id", "enable_telemetry", "enable_admin"):
        assert hasattr(JobTrait, name), name
    for name in ("telemetry_query_client", "profile", "remote_mount", "gather_mount"):
        assert hasattr(JobTrait, name), name
    for name in ("_state", "_create", "can_run", "_kill"):
        assert name in JobTrait.__abstractmethods__
    for endpoint_name in ("get_host_port", "setup_env", "main"):
        assert hasattr(SPMDActor, endpoint_name)
    assert hasattr(PortForwarder, "forward")
    for function in (job_loads, set_current_job, load_current_job, exec_command, hosts_from_config):
        assert callable(function)
