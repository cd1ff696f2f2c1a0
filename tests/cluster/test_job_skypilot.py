"""Jobs on SkyPilot, against a stub of its SDK whose nodes are processes of this machine. NOT the real service."""

import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.job import EngineError, Role, SkyPilotJob, job_load, make_job, running_jobs
from tests.cluster.engine_tools import PYTHON, none_alive
from tests.cluster.fault_tools import SOON
from tests.cluster.worker_tools import Where, light_host  # noqa: F401 - a fixture
from tests.polling import until
from tests.ports import own_address

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]

Status = Enum("Status", ["INIT", "UP", "STOPPED"])
JobStatus = Enum("JobStatus", ["SETTING_UP", "RUNNING", "SUCCEEDED", "FAILED"])


class ClusterDoesNotExist(ValueError):
    """SkyPilot's exception."""


@dataclass
class Cluster:
    """A cluster whose nodes have their own loopback addresses."""

    task: Any
    folder: Path
    status: Status = Status.INIT
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def bring_up(self) -> None:
        self.status = Status.UP
        for rank in range(self.task["num_nodes"]):
            self.addresses.append(own_address())
            line = self.task["run"].replace("tcp://0.0.0.0:", f"tcp://{self.addresses[-1]}:")
            env = {**os.environ, **self.task["envs"], **self.task["secrets"], "SKYPILOT_NODE_RANK": str(rank)}
            with open(self.folder / f"node{rank}.log", "wb") as log:
                self.processes.append(
                    subprocess.Popen(["bash", "-c", line], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                     start_new_session=True)
                )  # fmt: skip

    @property
    def job(self) -> JobStatus:
        codes = [process.poll() for process in self.processes]
        if any(codes):
            return JobStatus.FAILED
        return JobStatus.RUNNING if None in codes else JobStatus.SUCCEEDED

    @property
    def handle(self) -> Any:
        addresses = list(self.addresses)
        return types.SimpleNamespace(cached_external_ips=addresses, cached_internal_ips=["10.9.9.9"] * len(addresses))

    def end_node(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].wait()

    def down(self) -> None:
        for rank in range(len(self.processes)):
            self.end_node(rank)


class Sky(types.ModuleType):
    """The module."""

    StatusRefreshMode = types.SimpleNamespace(AUTO="AUTO")

    def __init__(self, folder: Path) -> None:
        super().__init__("sky")
        self.folder = folder
        self.clusters: dict[str, Cluster] = {}
        self.launched: list[tuple[str, Any, dict[str, Any]]] = []
        self.requests: dict[str, Any] = {}
        self.unavailable = self.slow = self.silent = False

    def Task(self, name: str, **options: Any) -> Any:  # noqa: N802 - SkyPilot's name
        return {"name": name, **options}

    def Resources(self, **arguments: Any) -> Any:  # noqa: N802 - SkyPilot's name
        return arguments

    def _request(self, result: Any) -> str:
        if self.silent:
            raise ConnectionError("the API server is not healthy")
        number = f"request-{len(self.requests)}"
        self.requests[number] = result
        return number

    def get(self, request: str) -> Any:
        result = self.requests[request]
        if isinstance(result, Exception):
            raise result
        return result

    def api_status(self, request_ids: list[str]) -> list[Any]:
        result = self.requests[request_ids[0]]
        status = "FAILED" if isinstance(result, Exception) else "RUNNING" if self.slow else "SUCCEEDED"
        return [types.SimpleNamespace(status=status, status_msg="trying us-east-1")]

    def launch(self, task: Any, cluster_name: str, **options: Any) -> str:
        self.launched.append((cluster_name, task, options))
        if self.unavailable:
            return self._request(RuntimeError("no H100 in any region"))
        folder = self.folder / cluster_name
        folder.mkdir()
        self.clusters[cluster_name] = Cluster(task, folder)
        if not self.slow:
            self.clusters[cluster_name].bring_up()
        return self._request((1, None))

    def status(self, cluster_names: list[str], refresh: str) -> str:
        return self._request([self.clusters[name] for name in cluster_names if name in self.clusters])

    def job_status(self, cluster_name: str) -> str:
        return self._request({1: self.clusters[cluster_name].job})

    def down(self, cluster_name: str) -> str:
        cluster = self.clusters.pop(cluster_name, None)
        if cluster is None:
            return self._request(ClusterDoesNotExist(cluster_name))
        cluster.down()
        return self._request(None)

    def tail_logs(self, cluster_name: str, job_id: None, follow: bool, tail: int, output_stream: io.StringIO) -> int:
        for rank in range(len(self.clusters[cluster_name].addresses)):
            text = (self.clusters[cluster_name].folder / f"node{rank}.log").read_text()
            output_stream.write("".join(f"(worker{rank}, rank={rank}, pid=7) {line}\n" for line in text.splitlines()))
        return 0


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sky]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    module = Sky(tmp_path)
    monkeypatch.setitem(sys.modules, "sky", module)
    yield module
    for cluster in module.clusters.values():
        cluster.down()


ENV = {"MARK": "far", "MONARCH_NB_PRELOAD": ""}


def test_nodes_are_launched_joined_reported_and_taken_down(sky: Sky, tmp_path: Path) -> None:
    job = SkyPilotJob({"trainers": 2}, infra="aws", accelerators="L4:1", python_exe=PYTHON, env=ENV)
    try:
        actors = job.state(str(tmp_path / "job.json")).trainers.spawn_procs().spawn("where", Where)
        replies = actors.mark.call().get(SOON)
        assert [mark for mark, _ in replies.values()] == ["far", "far"]
        assert actors.environment.call("MONARCH_NB_KEY").get(SOON).values() == [None, None]
        [(cluster, task, options)] = sky.launched
        assert (task["num_nodes"], options["down"], options["idle_minutes_to_autostop"]) == (2, True, 10)
        assert {name: task["resources"][name] for name in ("infra", "accelerators", "ports", "use_spot")} == {
            "infra": "aws", "accelerators": "L4:1", "ports": ["26600"], "use_spot": False,
        }  # fmt: skip
        secret = Path(job._folder, "key").read_text().splitlines()[-1].strip()
        assert secret not in repr({name: value for name, value in task.items() if name != "secrets"})
        assert [entry.apply_id for entry in running_jobs("skypilot")] == [job.apply_id]
        assert job._adapter.shell(job._job, "trainers_1") == ["ssh", f"{cluster}-worker1"]
        sky.silent = True
        with pytest.raises(EngineError, match=r"SkyPilot, asked for status: the API server is not healthy.*sky check"):
            job._adapter.look(job._job)
        sky.silent = False
        sky.clusters[cluster].end_node(1)
        until(lambda: f"its task on SkyPilot's cluster {cluster} has failed" in job._lost(), "its end")
        job_load(str(tmp_path / "job.json")).kill()
        assert none_alive([pid for _, pid in replies.values()])
        assert (sky.clusters, running_jobs("skypilot")) == ({}, [])
    finally:
        job.kill()


@pytest.mark.slow
def test_meshes_grow_by_another_cluster_that_goes_with_its_hosts(sky: Sky) -> None:
    job = SkyPilotJob({"trainers": 1}, python_exe=PYTHON, env=ENV)
    try:
        procs = job.state(cached_path=None).trainers.spawn_procs()
        actors = procs.spawn("where", Where)
        actors.mark.call().get(SOON)
        sky.unavailable = True
        with pytest.raises(NoMoreHostsError, match="no H100 in any region"):
            procs.grow(hosts=1, timeout=SOON)
        sky.unavailable = False
        procs.grow(hosts=1, timeout=SOON)
        assert [mark for mark, _ in actors.mark.call().get(SOON).values()] == ["far", "far"]
        assert len(sky.clusters) == 2
        procs.shrink(hosts=-1)
        assert len(sky.clusters) == 1
    finally:
        job.kill()
    assert sky.clusters == {}


def test_what_skypilot_waits_for_or_refuses_is_reported_in_its_words(sky: Sky) -> None:
    sky.slow = True
    job = make_job("skypilot", {"trainers": {"hosts": 1, "gpus": 8, "memory": "64G"}}, accelerators="H100")
    job.apply()
    assert isinstance(job, SkyPilotJob)
    [(_, task, _)] = sky.launched
    assert (task["resources"]["accelerators"], task["resources"]["memory"]) == ("H100:8", "64")
    [agent] = job._adapter.look(job._job).values()
    assert (agent.state, agent.joins) == ("waiting", ())
    assert agent.description.endswith(": trying us-east-1")
    job.kill()
    assert sky.clusters == {}
    sky.slow, sky.unavailable = False, True
    second = SkyPilotJob({"trainers": 1})
    second.apply()
    [agent] = second._adapter.look(second._job).values()
    assert agent.state == "ended"
    assert re.search(r"SkyPilot has not launched the cluster monarch-\w+-0: no H100 in any region$", agent.description)
    second.kill()
    with pytest.raises(EngineError, match=r"of which kind\? accelerators='H100'"):
        SkyPilotJob({"trainers": Role(gpus=8)}).apply()


@pytest.mark.skipif(find_spec("sky") is None, reason="NOT TESTED HERE: pip install 'monarch-nb[skypilot]'")
def test_skypilots_own_functions_take_what_they_are_given() -> None:
    import sky  # type: ignore[import-not-found,unused-ignore]

    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "launch": ((None,), {"cluster_name": "c", "down": True, "idle_minutes_to_autostop": 10}),
        "status": ((), {"cluster_names": ["c"], "refresh": sky.StatusRefreshMode.AUTO}),
        "job_status": (("c",), {}),
        "down": (("c",), {}),
        "get": (("r",), {}),
        "api_status": ((), {"request_ids": ["r"]}),
        "tail_logs": (("c", None, False, 0, io.StringIO()), {}),
    }
    for name, (arguments, options) in calls.items():
        inspect.signature(getattr(sky, name)).bind(*arguments, **options)
    resources = sky.Resources(infra="aws", accelerators="L4:1", ports=["26600"], use_spot=False, cpus="4", memory="16")
    task = sky.Task("t", setup=None, run="true", num_nodes=2, envs={}, secrets={"A": "b\nc"}, resources=resources)
    assert task.num_nodes == 2
    assert sky.exceptions.ClusterDoesNotExist
