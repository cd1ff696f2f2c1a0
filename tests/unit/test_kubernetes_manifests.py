"""The manifests of examples/kubernetes match the pods that KubernetesJob makes and finds."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.job.kubernetes import ImageSpec, KubernetesJob
from monarch_nb.job.kubernetes.template import USER, labels_of, lack_of, pod_template, quantity, secret_name
from monarch_nb.job.worker import main as work

yaml = pytest.importorskip("yaml", reason="NOT TESTED HERE: pip install pyyaml")
pytestmark = pytest.mark.timeout(20)
FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
TEMPLATE = pod_template("trainers", {"image": "x", "port": 26600}, {})["spec"]
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def templates(thing: Any) -> list[dict[str, Any]]:
    """The pod templates in an object, at any depth, with their labels."""
    if isinstance(thing, list):
        return [template for part in thing for template in templates(part)]
    if not isinstance(thing, dict):
        return []
    if "containers" in (thing.get("spec") or {}):
        return [thing]
    return [template for part in thing.values() for template in templates(part)]


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


@pytest.mark.parametrize("file", FILES)
def test_the_script_makes_pods_like_those_of_a_job(file: str) -> None:
    objects = documents(file)
    assert all({"apiVersion", "kind", "metadata"} <= item.keys() for item in objects)
    for pod in templates(objects):
        [worker], [template] = pod["spec"]["containers"], TEMPLATE["containers"]
        for name in ("command", "args", "env", "readinessProbe", "securityContext", "volumeMounts"):
            assert worker[name] == template[name], name
        assert pod["spec"]["securityContext"] == TEMPLATE["securityContext"]
        [volume] = pod["spec"]["volumes"]
        assert volume["secret"]["secretName"] == secret_name("trainers")
        assert volume["secret"]["defaultMode"] == 0o400
    assert templates(objects) or file == "role.yaml"


@pytest.mark.parametrize("file", ["statefulset.yaml", "monarchmesh.yaml"])
def test_default_manifests_are_found_without_arguments(file: str) -> None:
    [pod] = templates(documents(file))
    assert pod["metadata"]["labels"] == labels_of("trainers")


def test_the_page_names_all_of_them() -> None:
    page = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.iterdir() if f"`{path.name}`" not in page} == {"README.md"}


def violations(spec: dict[str, Any]) -> list[str]:
    """The fields of a pod that violate the pod security standard "restricted", which includes "baseline"."""
    pod, names = spec.get("securityContext", {}), []
    names += [volume["name"] for volume in spec.get("volumes", ()) if not VOLUMES & volume.keys()]
    for container in spec["containers"]:
        own = container.get("securityContext", {})
        context = {**pod, **own}
        checks = {
            "runAsNonRoot": context.get("runAsNonRoot") is True,
            "runAsUser": context.get("runAsUser") != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": own.get("capabilities", {}).get("drop") == ["ALL"],
            "privileged": not own.get("privileged"),
        }
        names += [name for name, good in checks.items() if not good]
    return names


def test_pods_meet_the_restricted_security_standard() -> None:
    def make(**image: Any) -> Any:
        job = KubernetesJob("lab")
        job.add_mesh("trainers", 1, image_spec=ImageSpec("x", **image))
        return pod_template("trainers", job._options["meshes"]["trainers"], {"A": "b"})["spec"]

    plain = make(shared_memory_size="1Gi", resources={"nvidia.com/gpu": 4})
    assert violations(plain) == []
    assert {plain["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    custom, image = make(run_as_user=7), make(run_as_user=None)
    assert (violations(custom), custom["securityContext"]["fsGroup"]) == ([], 7)
    assert (violations(image), image["securityContext"]["fsGroup"]) == ([], USER)
    assert "runAsUser" not in image["securityContext"]
    assert set(violations(make(enable_fuse=True))) >= {"privileged", "dev-fuse"}
    with pytest.raises(ValueError, match="do not run as root"):
        make(run_as_user=0)
    own = {"spec": {"securityContext": {"runAsUser": 0}, "containers": [{"name": "w"}]}}
    merged = pod_template("trainers", {"pod_template": own, "port": 1}, {})["spec"]["securityContext"]
    assert (merged["runAsUser"], merged["fsGroup"]) == (0, USER), "the key is readable whoever the image runs as"


def in_child(run: Callable[[], bool], user: int, group: int) -> bool:
    """Runs a function in a child that is another user, with one group and without capabilities of root."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(PermissionError):
            os.setgroups([group])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os._exit(0 if run() else 2)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: only root may become other users")
def test_the_key_is_read_through_the_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # as the kubelet mounts a Secret: links, for root and the fsGroup
        os.chmod(folder, 0o755)
        data = Path(folder, "..2026")
        data.mkdir()
        (data / "key").write_text("the key")
        for path, mode in ((data, 0o750), (data / "key", 0o440)):
            os.chown(path, 0, USER)
            path.chmod(mode)
        Path(folder, "..data").symlink_to("..2026")
        Path(folder, "key").symlink_to("..data/key")
        keys: list[Any] = []
        monkeypatch.setattr("monarch_nb.job.worker._work", lambda _address, key, *_: keys.append(key))

        def read() -> bool:
            work(["tcp://0.0.0.0:1", "--key", f"{folder}/key"])
            return keys == [b"the key"] and bool(os.environ["USER"])  # though no list of users has it

        assert in_child(read, 47110, USER)
        assert not in_child(read, 47110, 47110)


def test_requests_above_every_node_are_recognized() -> None:
    def lack(limits: dict[str, str], *nodes: dict[str, str]) -> str:
        pod = {"spec": {"containers": [{"resources": {"limits": limits}}]}}
        return lack_of(pod, [{"status": {"allocatable": node}} for node in nodes])

    large, small = {"cpu": "8", "memory": "64Gi", "gpu": "4"}, {"cpu": "64", "memory": "16Gi"}
    assert lack({"cpu": "7500m", "gpu": "4"}, large, small) == ""
    assert lack({"gpu": "8"}, large, small) == "it asks for gpu=8, and of 2 nodes none has more than 4"
    assert lack({"gpu": "1"}, small) == "it asks for gpu=1, and of 1 node none has any"
    assert (
        lack({"cpu": "64", "gpu": "4"}, large, small)
        == "it asks for cpu=64, gpu=4, and of 2 nodes none has all of that"
    )
    assert lack({"gpu": "8"}) == "", "nothing is known of nodes"
    assert [quantity(text) for text in ("500m", "2k", "1Ki", "1e3", 3, "x")] == [0.5, 2000, 1024, 1000, 3, 0]
