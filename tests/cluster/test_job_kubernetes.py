"""Jobs on Kubernetes, against a stub of its API whose pods are processes of this machine. NOT a real cluster."""

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import SupervisionError, heal_mesh
from monarch_nb.connect import shutdown
from monarch_nb.exceptions import NoMoreHostsError
from monarch_nb.job import Agent, EngineError, ImageSpec, KubeConfig, KubernetesJob, job_load, running_jobs
from monarch_nb.job.kubernetes.template import pod_template, rank_of, secret, seen_of
from tests.cluster.engine_tools import none_alive
from tests.cluster.fault_tools import SOON
from tests.cluster.kubernetes_stub import Cluster
from tests.cluster.worker_tools import Where, light_host  # noqa: F401 - a fixture
from tests.polling import until

pytest.importorskip("kubernetes", reason="NOT TESTED HERE: pip install 'monarch-nb[kubernetes]'")
pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("host")]
IMAGE = ImageSpec("example/monarch:1", resources={"nvidia.com/gpu": 4}, shared_memory_size="1Gi")


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["MonarchMesh", "StatefulSet"])
def operator(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operator: bool) -> Iterator[Cluster]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cluster = Cluster(tmp_path, operator=operator)
    yield cluster
    cluster.close()


def job_on(cluster: Cluster, **options: Any) -> KubernetesJob:
    """A job with directly reachable pods, and an API configured by a file."""
    job = KubernetesJob("lab", kubeconfig=KubeConfig.from_path(str(cluster.config)), **options)
    del job._options["through_first"]
    return job


def test_pods_are_made_joined_told_of_and_deleted(cluster: Cluster, operator: bool, tmp_path: Path) -> None:
    cluster.held = True
    job = job_on(cluster, env={"MARK": "of the user"})
    job.add_mesh("trainers", 2, image_spec=IMAGE)
    try:
        state = job.state(cached_path=str(tmp_path / "job.json"))
        until(lambda: "Unschedulable: 0/4 nodes have GPUs" in str(job.progress), "the reason")
        assert str(job.progress).startswith("0/2 hosts joined. Missing: trainers_0 waits: pod trainers-0 is Pending")
        cluster.held = False
        for name in cluster.pods:
            cluster.run_pod(name)
        actors = state.trainers.spawn_procs().spawn("where", Where)
        replies = actors.mark.call().get(SOON).values()
        assert {mark for mark, _ in replies} == {"of the user"}
        state.trainers.rotate_key()
        [secret] = [thing for thing in cluster.objects.values() if thing["kind"] == "Secret"]
        assert base64.b64decode(secret["data"]["key"]) == Path(job._folder, "key").read_bytes()
        assert actors.mark.call().get(SOON).values() == replies
        kinds = sorted(thing["kind"] for thing in cluster.objects.values())
        assert kinds == (["MonarchMesh", "Secret"] if operator else ["Secret", "Service", "StatefulSet"])
        secrets = [thing["data"]["key"] for thing in cluster.objects.values() if thing["kind"] == "Secret"]
        specs = repr([thing["spec"] for thing in cluster.objects.values() if "spec" in thing])
        assert secrets[0] not in specs
        assert "of the user" not in specs
        second = job_on(cluster)
        second.add_mesh("trainers", 1, image_spec=IMAGE)
        with pytest.raises(EngineError, match="there is a Secret trainers-monarch-key in namespace lab already"):
            second.apply()
        assert len(cluster.pods) == 2, "nothing of another job was deleted"
        assert [entry.apply_id for entry in running_jobs("kubernetes")] == [job.apply_id]
        copy = job_load(str(tmp_path / "job.json"))
        assert copy.can_run(job)
        cluster.evict("trainers-1")
        with pytest.raises(RuntimeError, match=r"trainers_1 is gone: pod trainers-1 has ended \(Evicted: The node was"):
            job.state()
        copy.kill()
        assert (cluster.objects, cluster.pods) == ({}, {})
        assert none_alive([pid for _, pid in replies])
    finally:
        job.kill()


def pods_and_agents(cluster: Cluster, job: KubernetesJob) -> tuple[list[str], list[str]]:
    """The existing pods, and the pods of the agents of the job."""
    return sorted(cluster.pods), sorted(agent.id.replace("/", "-") for agent in job._agents.values())


def test_a_set_scales_with_its_meshes_and_returns_its_last_pods(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.held = True  # no pod runs: the requests suffice here
    job = job_on(cluster)
    job.add_mesh("trainers", 2, image_spec=IMAGE)
    job.add_mesh("loaders", 1, image_spec=IMAGE)
    job.apply()
    adapter = job.adapter

    def add(*names: str) -> dict[str, Agent]:
        new = dict(adapter.add(job._job, job.wanting("trainers", names, ())))
        job.keep_agents({**job.agents, **new})
        return new

    def release(*names: str) -> None:
        released = {name: agent for name, agent in job.agents.items() if name in names}
        remaining = {name: agent for name, agent in job.agents.items() if name not in names}
        before = job._job
        job.keep_agents(remaining)
        adapter.release(job.running(released), before)

    try:
        assert add("trainers_2", "trainers_3")["trainers_3"].id == "lab/trainers/3"
        pods = ["loaders-0", "trainers-0", "trainers-1", "trainers-2", "trainers-3"]
        assert pods_and_agents(cluster, job) == (pods, [f"lab-{pod}" for pod in pods])
        release("trainers_3")
        assert "trainers-3" not in cluster.pods
        with pytest.raises(EngineError, match="trainers-1: of the pods of a set only the last can be given back"):
            release("trainers_1")
        assert add("trainers_4")["trainers_4"].id == "lab/trainers/1", "the one that is idle"
        assert [pod for pod in cluster.pods if pod.startswith("trainers")] == ["trainers-0", "trainers-1", "trainers-2"]
        with pytest.raises(EngineError, match="trainers-0"):
            release("trainers_0", "trainers_2")
        assert sorted(cluster.pods) == ["loaders-0", "trainers-0", "trainers-1"]
    finally:
        job.kill()
    assert (cluster.pods, cluster.objects) == ({}, {})


@pytest.mark.slow
def test_meshes_grow_onto_more_pods_and_evicted_pods_are_replaced(
    cluster: Cluster, tmp_path: Path, shown: list[Any]
) -> None:
    job = job_on(cluster, env={"MARK": "of the user"})
    job.add_mesh("trainers", 1, image_spec=IMAGE)
    try:
        procs = job.state(cached_path=str(tmp_path / "job.json")).trainers.spawn_procs()
        actors = procs.spawn("where", Where)
        actors.mark.call().get(SOON)
        result = procs.grow(hosts=1, timeout=SOON)
        assert result.sizes["hosts"] == 2
        marks = [mark for mark, _ in actors.mark.call().get(SOON).values()]
        assert marks == ["of the user"] * 2
        cluster.evict("trainers-1")
        cluster.make_anew("trainers-1")
        until(lambda: "trainers_1 is gone: its pod has ended. In its place: pod trainers-1" in job._lost(), "the loss")
        with pytest.raises(SupervisionError):
            until(lambda: actors.mark.call().get(SOON) is None, "its end")
        heal_mesh(actors, replace=True, timeout=SOON)
        assert len(actors.mark.call().get(SOON).values()) == 2
        assert sorted(cluster.pods) == ["trainers-0", "trainers-1"], "what the cluster has made anew was taken"
        copy = job_load(str(tmp_path / "job.json"))
        assert isinstance(copy, KubernetesJob)
        assert pods_and_agents(cluster, copy)[1] == ["lab-trainers-0", "lab-trainers-1"]
        assert procs.shrink(hosts=-1).freed
        until(lambda: sorted(cluster.pods) == ["trainers-0"], "it is given back")
    finally:
        job.kill()
    assert (cluster.objects, cluster.pods) == ({}, {})


@pytest.mark.slow
@pytest.mark.parametrize("operator", [True], ids=["pods that are there"], indirect=True)
def test_pods_that_are_there_are_found_by_labels_and_stay(cluster: Cluster) -> None:
    key = cluster.folder / "key"
    from monarch_nb.transport import Keys

    Keys.load_or_create(key)
    manifest = secret("trainers", "x", key.read_bytes(), {"MARK": "theirs"})
    cluster.objects["/api/v1/namespaces/lab/secrets/trainers-monarch-key"] = manifest
    template = pod_template("trainers", {"image": "x", "port": 26611}, {"MARK": "theirs"})
    for rank in (1, 0):
        cluster.add_pod(f"mine-{rank}", rank, template)
    job = job_on(cluster)
    job.add_mesh("trainers", 2)
    try:
        state = job.state(cached_path=None)
        procs = state.trainers.spawn_procs()
        actors = procs.spawn("where", Where)
        assert [mark for mark, _ in actors.mark.call().get(SOON).values()] == ["theirs", "theirs"]
        with pytest.raises(NoMoreHostsError, match=r"there are 2 pods of trainers .*, of which 0 are not used yet"):
            procs.grow(hosts=1)
        cluster.add_pod("mine-2", 2, template)
        procs.grow(hosts=1, timeout=SOON)
        assert len(actors.mark.call().get(SOON).values()) == 3
        procs.shrink(hosts=-1)
    finally:
        job.kill()
    assert len(cluster.pods) == 3
    assert "DELETE" not in " ".join(cluster.asked)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [True], ids=["outside"], indirect=True)
def test_from_outside_one_forwarded_port_leads_to_all_pods(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{cluster.kubectl()}:{os.environ['PATH']}")
    job = KubernetesJob("lab", kubeconfig=KubeConfig.from_path(str(cluster.config)),
                        env={"MARK": "far"})  # fmt: skip
    job.add_mesh("trainers", 2, image_spec=IMAGE, port=26612)
    try:
        state = job.state(cached_path=None)
        actors = state.trainers.spawn_procs().spawn("where", Where)
        replies = actors.mark.call().get(SOON).values()
        assert [mark for mark, _ in replies] == ["far", "far"]
        state.trainers.rotate_key()
        assert actors.mark.call().get(SOON).values() == replies
    finally:
        job.kill()
    assert cluster.pods == {}
    shutdown()  # gateways are kept


@pytest.mark.parametrize("operator", [False], ids=["StatefulSet"], indirect=True)
def test_what_pods_wait_for_and_what_never_comes_is_said(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.held, cluster.refused = True, True
    quota = {"type": "Warning", "reason": "FailedCreate", "message": "forbidden: exceeded quota: gpus, requested: 4"}
    cluster.events["involvedObject.name=trainers"] = [quota]
    cluster.nodes = [{"status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": gpus}}} for gpus in ("2", "1")]
    job = job_on(cluster)
    job.add_mesh("trainers", 2, image_spec=IMAGE)
    try:
        job.state(cached_path=None)
        until(lambda: "(FailedCreate: forbidden: exceeded quota" in str(job.progress), "why there are no pods")
        assert not caplog.records, "the quota may become free"
        cluster.refused = False
        [stateful_set] = [thing for thing in cluster.objects.values() if thing["kind"] == "StatefulSet"]
        cluster.scale(stateful_set, 2)
        never = (
            "waits: pod trainers-0 is Pending (Unschedulable: 0/4 nodes have GPUs), and will for ever unless the "
            "cluster gets other nodes: it asks for nvidia.com/gpu=4, and of 2 nodes none has more than 2"
        )
        until(lambda: never in str(job.progress), "what no node has")
        until(lambda: [message for message in caplog.messages if never in message], "it is said, though nobody asks")
        kubelet = {"type": "Warning", "reason": "FailedMount", "message": "MountVolume.SetUp failed for monarch-key"}
        cluster.events["involvedObject.name=trainers-1"] = [kubelet]
        cluster.pods["trainers-1"]["status"]["conditions"] = []
        until(lambda: "trainers-1 is Pending (FailedMount: MountVolume" in str(job.progress), "the event of a pod")
    finally:
        job.kill()
        shutdown()  # if this test is the first of its process, the job started the controller


def test_an_api_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, operator=True)
    cluster.close()
    job = job_on(cluster)
    job.add_mesh("trainers", 1, image_spec=IMAGE)
    with pytest.raises(EngineError) as caught:
        job.apply()
    assert re.fullmatch(r"the Kubernetes API at \S+ does not answer: Connection refused", str(caught.value))


def test_the_states_of_pods_are_told_in_words() -> None:
    def describe(status: dict[str, Any], **metadata: Any) -> str:
        agent = seen_of({"metadata": {"name": "t-0", **metadata}, "spec": {"nodeName": "n1"}, "status": status}, 26600)
        return f"{agent.state}: {agent.description} {' '.join(agent.joins)}".strip()

    image = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"}}}
    crash = {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
             "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}  # fmt: skip
    assert describe({"phase": "Pending", "containerStatuses": [image]}) == (
        "waiting: waits: pod t-0 on n1: ImagePullBackOff (Back-off pulling image x)"
    )
    assert describe({"phase": "Running", "containerStatuses": [crash]}).endswith(
        "(back-off 10s), OOMKilled, exit status 137"
    )
    assert describe({"phase": "Running", "podIP": "fd00::1"}) == "running: pod t-0 on n1 tcp://[fd00::1]:26600"
    assert describe({"phase": "Running"}, deletionTimestamp="now") == "ended: is gone: pod t-0 on n1 is being deleted"
    assert rank_of({"metadata": {"name": "t-12"}}, "apps.kubernetes.io/pod-index") == 12
    assert rank_of({"metadata": {"name": "t-12"}}, "mine") is None


def test_contradictory_arguments_are_refused() -> None:
    job = KubernetesJob("lab")
    for name in ("", "Trainers", "a_b", "1a", "a" * 64):
        with pytest.raises(ValueError, match="cannot name a mesh of pods"):
            job.add_mesh(name, 1)
    with pytest.raises(ValueError, match="two ways"):
        job.add_mesh("a", 1, image_spec=IMAGE, pod_template={})
    with pytest.raises(ValueError, match="these are made"):
        job.add_mesh("a", 1, image_spec=IMAGE, label_selector="x=y")
    with pytest.raises(ValueError, match="these pods are there"):
        job.add_mesh("a", 1, labels={})
    with pytest.raises(ValueError, match="at least one mesh"):
        job.apply()
    job.add_mesh("a", 1)
    with pytest.raises(EngineError, match=r"does not run in a pod: .*KubeConfig\.from_path"):
        job.apply()
