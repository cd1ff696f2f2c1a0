"""The manifests of examples/kubernetes say what KubernetesJob makes and looks for."""

from pathlib import Path
from typing import Any

import pytest

from monarch_nb.job.kubernetes.template import labels_of, pod_template, secret_name

yaml = pytest.importorskip("yaml", reason="NOT TESTED HERE: pip install pyyaml")
pytestmark = pytest.mark.timeout(20)
FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
MADE = pod_template("trainers", {"image": "x", "port": 26600}, {})["spec"]


def templates(thing: Any) -> list[dict[str, Any]]:
    """The specs of pods in an object, wherever they are, with the labels beside."""
    if isinstance(thing, list):
        return [found for each in thing for found in templates(each)]
    if not isinstance(thing, dict):
        return []
    if "containers" in (thing.get("spec") or {}):
        return [thing]
    return [found for each in thing.values() for found in templates(each)]


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


@pytest.mark.parametrize("file", FILES)
def test_the_script_makes_pods_like_those_of_a_job(file: str) -> None:
    found = documents(file)
    assert all({"apiVersion", "kind", "metadata"} <= each.keys() for each in found)
    for pod in templates(found):
        [worker], [made] = pod["spec"]["containers"], MADE["containers"]
        for name in ("command", "args", "env", "readinessProbe", "volumeMounts"):
            assert worker[name] == made[name], name
        [volume] = pod["spec"]["volumes"]
        assert volume["secret"]["secretName"] == secret_name("trainers")
        assert volume["secret"]["defaultMode"] == 0o400
    assert templates(found) or file == "role.yaml"


@pytest.mark.parametrize("file", ["statefulset.yaml", "monarchmesh.yaml"])
def test_default_manifests_are_found_without_arguments(file: str) -> None:
    [pod] = templates(documents(file))
    assert pod["metadata"]["labels"] == labels_of("trainers")


def test_the_page_names_all_of_them() -> None:
    page = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.iterdir() if f"`{path.name}`" not in page} == {"README.md"}
