"""What is asked of Kubernetes, as plain data: secrets, pods, StatefulSets, MonarchMesh resources."""

import base64
from collections.abc import Mapping
from typing import Any

from monarch_nb.host.preemption import GRACE

GROUP, VERSION, PLURAL = "monarch.pytorch.org", "v1alpha1", "monarchmeshes"
RANK_LABEL = "apps.kubernetes.io/pod-index"
JOB_LABEL = "monarch-nb/job"
_GRACE_S = 30  # what Kubernetes takes where a pod does not say
_FOLDER = "/var/run/monarch-nb"
# What torchmonarch's programs have pods run that they make themselves: `python -u -c _WORKER_BOOTSTRAP_SCRIPT`.
_WORKER_BOOTSTRAP_SCRIPT = f"""\
import os, sys
from monarch_nb.job.worker import main
port, key = os.environ.get("MONARCH_PORT", "26600"), os.environ.get("MONARCH_KEY_FILE", "{_FOLDER}/key")
sys.exit(main([f"tcp://0.0.0.0:{{port}}", *(["--key", key] if os.path.exists(key) else [])]))
"""
_VOLUME = "monarch-key"


def labels_of(mesh: str) -> dict[str, str]:
    """What pods of a mesh are found by."""
    return {"app.kubernetes.io/name": "monarch-worker", "monarch.pytorch.org/mesh-name": mesh}


def selector_of(mesh: str) -> str:
    """The same as a text."""
    return ",".join(f"{label}={value}" for label, value in labels_of(mesh).items())


def secret_name(mesh: str) -> str:
    """The name of the Secret with the key of a mesh's job."""
    return f"{mesh}-monarch-key"


def secret(mesh: str, job: str, key: bytes, env: Mapping[str, str]) -> dict[str, Any]:
    """The job's key, and the environment that was asked for, which may hold secrets of the user."""
    data = {"key": key, **{f"env-{name}": value.encode() for name, value in env.items()}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": secret_name(mesh), "labels": {**labels_of(mesh), JOB_LABEL: job}},
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def pod_template(mesh: str, wanted: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """The pods of a mesh: the user's own template or an image, with the key mounted and a worker as their command."""
    template: dict[str, Any] = wanted.get("pod_template") or {"spec": {"containers": [_container(wanted)]}}
    spec = dict(template.get("spec") or {})
    worker, *others = spec.get("containers") or [{}]
    worker = dict(worker)
    if not worker.get("command"):
        worker["command"] = ["python", "-P", "-m", "monarch_nb.job.worker"]
        worker["args"] = [f"tcp://0.0.0.0:{wanted['port']}", "--key", f"{_FOLDER}/key"]
    mounts = [{"name": _VOLUME, "mountPath": _FOLDER, "readOnly": True}]
    variables: list[dict[str, Any]] = [{"name": "MONARCH_PORT", "value": str(wanted["port"])}]
    if all(each.get("name") != GRACE for each in worker.get("env", ())):
        variables.append({"name": GRACE, "value": str(spec.get("terminationGracePeriodSeconds", _GRACE_S))})
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(mesh), "key": f"env-{name}"}}} for name in env
    ]
    worker["volumeMounts"] = [*worker.get("volumeMounts", ()), *mounts]
    worker["env"] = [*worker.get("env", ()), *variables]
    worker.setdefault("ports", [{"containerPort": wanted["port"], "name": "monarch"}])
    worker.setdefault("readinessProbe", {"tcpSocket": {"port": wanted["port"]}, "periodSeconds": 2})
    volume = {
        "name": _VOLUME,
        "secret": {
            "secretName": secret_name(mesh),
            "defaultMode": 0o400,
            "items": [{"key": "key", "path": "key", "mode": 0o400}],
        },
    }
    spec.update(containers=[worker, *others], volumes=[*spec.get("volumes", ()), *_volumes(wanted), volume])
    metadata = dict(template.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels_of(mesh)}
    return {"metadata": metadata, "spec": spec}


def _container(wanted: Mapping[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "worker", "image": wanted["image"]}
    if wanted.get("resources"):
        amounts = {name: str(amount) for name, amount in wanted["resources"].items()}
        container["resources"] = {"requests": amounts, "limits": amounts}
    if wanted.get("enable_fuse"):
        container["securityContext"] = {"privileged": True}
        container["volumeMounts"] = [{"name": "dev-fuse", "mountPath": "/dev/fuse"}]
    if wanted.get("shared_memory_size"):
        shared = {"name": "dev-shm", "mountPath": "/dev/shm"}
        container["volumeMounts"] = [*container.get("volumeMounts", ()), shared]
    return container


def _volumes(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = []
    if wanted.get("enable_fuse"):
        volumes.append({"name": "dev-fuse", "hostPath": {"path": "/dev/fuse", "type": "CharDevice"}})
    if wanted.get("shared_memory_size"):
        memory = {"medium": "Memory", "sizeLimit": wanted["shared_memory_size"]}
        volumes.append({"name": "dev-shm", "emptyDir": memory})
    return volumes


def monarch_mesh(mesh: str, job: str, wanted: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """The resource that torchmonarch's operator makes pods of."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MonarchMesh",
        "metadata": _metadata(mesh, job, wanted),
        "spec": {"replicas": wanted["replicas"], "port": wanted["port"], "podTemplate": dict(template)},
    }


def stateful_set(mesh: str, job: str, wanted: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """The same where that operator is not installed: Kubernetes makes the pods itself."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(mesh, job, wanted),
        "spec": {
            "replicas": wanted["replicas"],
            "serviceName": f"{mesh}-svc",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels_of(mesh)},
            "template": dict(template),
        },
    }


def service(mesh: str, job: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the pods names."""
    ports = [{"port": wanted["port"], "name": "monarch"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{mesh}-svc", "labels": {**labels_of(mesh), JOB_LABEL: job}},
        "spec": {"clusterIP": "None", "selector": labels_of(mesh), "ports": ports, "publishNotReadyAddresses": True},
    }


def _metadata(mesh: str, job: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    labels = {**(wanted.get("labels") or {}), JOB_LABEL: job}
    annotations = {"annotations": dict(wanted["annotations"])} if wanted.get("annotations") else {}
    return {"name": mesh, "labels": labels, **annotations}
