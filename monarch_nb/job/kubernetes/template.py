"""Kubernetes objects as plain data: manifests of requested objects, and states of pods from the API."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monarch_nb.host.preemption import GRACE
from monarch_nb.job.adapter import Seen
from monarch_nb.wire import counted

GROUP, VERSION, PLURAL = "monarch.pytorch.org", "v1alpha1", "monarchmeshes"
RANK_LABEL = "apps.kubernetes.io/pod-index"
JOB_LABEL = "monarch-nb/job"
_GRACE_S = 30  # the default of Kubernetes for pods that do not set it
_FOLDER = "/var/run/monarch-nb"
# The command of pods that torchmonarch's programs make themselves: `python -u -c _WORKER_BOOTSTRAP_SCRIPT`.
_WORKER_BOOTSTRAP_SCRIPT = f"""\
import os, sys
from monarch_nb.job.worker import main
port, key = os.environ.get("MONARCH_PORT", "26600"), os.environ.get("MONARCH_KEY_FILE", "{_FOLDER}/key")
sys.exit(main([f"tcp://0.0.0.0:{{port}}", *(["--key", key] if os.path.exists(key) else [])]))
"""
_VOLUME = "monarch-key"
Json = Mapping[str, Any]  # an object of the API
_ORDINAL = re.compile(r"-(\d+)$")
_LONGEST_MESSAGE = 200  # letters of a message
_USUAL = ("ContainerCreating", "PodInitializing")
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)")
_SUFFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0} | {
    f"{letter}{binary}": (1024.0 if binary else 1000.0) ** power
    for power, letters in enumerate(("kK", "M", "G", "T", "P", "E"), start=1)
    for letter in letters
    for binary in ("", "i")
}
USER = 1000  # the user of pods whose image spec names none; root may not be needed


def labels_of(mesh: str) -> dict[str, str]:
    """Returns the labels of the pods of a mesh."""
    return {"app.kubernetes.io/name": "monarch-worker", "monarch.pytorch.org/mesh-name": mesh}


def selector_of(mesh: str) -> str:
    """Returns the labels as a selector."""
    return ",".join(f"{label}={value}" for label, value in labels_of(mesh).items())


def secret_name(mesh: str) -> str:
    """Returns the name of the Secret with the key of a mesh's job."""
    return f"{mesh}-monarch-key"


def secret(mesh: str, job: str, key: bytes, env: Mapping[str, str]) -> dict[str, object]:
    """Returns a Secret with the job's key and the requested environment, which may hold secrets of the user."""
    data = {"key": key, **{f"env-{name}": value.encode() for name, value in env.items()}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": secret_name(mesh), "labels": {**labels_of(mesh), JOB_LABEL: job}},
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def pod_template(mesh: str, config: Json, env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the pods of a mesh: the user's template or an image, with the key mounted and a worker as the command.

    Pods of an image meet the pod security standard "restricted", except those with FUSE, which are privileged. The
    group of a pod may read the key, whatever user its container runs as.
    """
    template: dict[str, Any] = config.get("pod_template") or _pod(config)
    spec = dict(template.get("spec") or {})
    spec["securityContext"] = {
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        **(spec.get("securityContext") or {}),
    }
    worker, *sidecars = spec.get("containers") or [{}]
    worker = dict(worker)
    if not worker.get("command"):
        worker["command"] = ["python", "-P", "-m", "monarch_nb.job.worker"]
        worker["args"] = [f"tcp://0.0.0.0:{config['port']}", "--key", f"{_FOLDER}/key"]
    mounts = [{"name": _VOLUME, "mountPath": _FOLDER, "readOnly": True}]
    variables: list[dict[str, Any]] = [{"name": "MONARCH_PORT", "value": str(config["port"])}]
    if all(variable.get("name") != GRACE for variable in worker.get("env", ())):
        variables.append({"name": GRACE, "value": str(spec.get("terminationGracePeriodSeconds", _GRACE_S))})
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(mesh), "key": f"env-{name}"}}} for name in env
    ]
    worker["volumeMounts"] = [*worker.get("volumeMounts", ()), *mounts]
    worker["env"] = [*worker.get("env", ()), *variables]
    worker.setdefault("ports", [{"containerPort": config["port"], "name": "monarch"}])
    worker.setdefault("readinessProbe", {"tcpSocket": {"port": config["port"]}, "periodSeconds": 2})
    volume = {
        "name": _VOLUME,
        "secret": {
            "secretName": secret_name(mesh),
            "defaultMode": 0o400,
            "items": [{"key": "key", "path": "key", "mode": 0o400}],
        },
    }
    spec.update(containers=[worker, *sidecars], volumes=[*spec.get("volumes", ()), *_volumes(config), volume])
    metadata = dict(template.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels_of(mesh)}
    return {"metadata": metadata, "spec": spec}


def _pod(config: Json) -> dict[str, object]:
    spec: dict[str, Any] = {"containers": [_container(config)]}
    if not config.get("enable_fuse"):
        user = config.get("run_as_user", USER)
        ids = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
        spec["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **ids}
    return {"spec": spec}


def _container(config: Json) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "worker", "image": config["image"]}
    if config.get("resources"):
        amounts = {name: str(amount) for name, amount in config["resources"].items()}
        container["resources"] = {"requests": amounts, "limits": amounts}
    if config.get("enable_fuse"):
        container["securityContext"] = {"privileged": True}
        container["volumeMounts"] = [{"name": "dev-fuse", "mountPath": "/dev/fuse"}]
    else:
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if config.get("shared_memory_size"):
        shared = {"name": "dev-shm", "mountPath": "/dev/shm"}
        container["volumeMounts"] = [*container.get("volumeMounts", ()), shared]
    return container


def _volumes(config: Json) -> list[dict[str, object]]:
    volumes: list[dict[str, object]] = []
    if config.get("enable_fuse"):
        volumes.append({"name": "dev-fuse", "hostPath": {"path": "/dev/fuse", "type": "CharDevice"}})
    if config.get("shared_memory_size"):
        memory = {"medium": "Memory", "sizeLimit": config["shared_memory_size"]}
        volumes.append({"name": "dev-shm", "emptyDir": memory})
    return volumes


def monarch_mesh(mesh: str, job: str, config: Json, template: Json) -> dict[str, object]:
    """Returns the resource from which torchmonarch's operator makes pods."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MonarchMesh",
        "metadata": _metadata(mesh, job, config),
        "spec": {"replicas": config["replicas"], "port": config["port"], "podTemplate": dict(template)},
    }


def stateful_set(mesh: str, job: str, config: Json, template: Json) -> dict[str, object]:
    """Returns the resource for clusters without that operator: Kubernetes makes the pods itself."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(mesh, job, config),
        "spec": {
            "replicas": config["replicas"],
            "serviceName": f"{mesh}-svc",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels_of(mesh)},
            "template": dict(template),
        },
    }


def service(mesh: str, job: str, config: Json) -> dict[str, object]:
    """Returns a headless service, which gives the pods names."""
    ports = [{"port": config["port"], "name": "monarch"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{mesh}-svc", "labels": {**labels_of(mesh), JOB_LABEL: job}},
        "spec": {"clusterIP": "None", "selector": labels_of(mesh), "ports": ports, "publishNotReadyAddresses": True},
    }


def _metadata(mesh: str, job: str, config: Json) -> dict[str, object]:
    labels = {**(config.get("labels") or {}), JOB_LABEL: job}
    annotations = {"annotations": dict(config["annotations"])} if config.get("annotations") else {}
    return {"name": mesh, "labels": labels, **annotations}


# -- pods as the API describes them


def rank_of(pod: Json, label: str) -> int | None:
    """Returns the rank of a pod: its label, else the number at the end of its name, as in a StatefulSet."""
    metadata = pod.get("metadata") or {}
    text = (metadata.get("labels") or {}).get(label)
    if text is None and label == RANK_LABEL:  # clusters before 1.28 do not set it
        match = _ORDINAL.search(str(metadata.get("name", "")))
        text = match[1] if match is not None else None
    return int(text) if text is not None and str(text).isdecimal() else None


def _port_of(pod: Json, default: int) -> int:
    """Returns the port of the worker of a pod: MONARCH_PORT of a container, else the default."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == "MONARCH_PORT" and str(variable.get("value", "")).isdecimal():
                return int(variable["value"])
    return default


def life_of(pod: Json) -> str:
    """Returns an id of a pod that changes when its worker restarts; empty if the API gives no uid."""
    uid = (pod.get("metadata") or {}).get("uid", "")
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return f"{uid}/{sum(status.get('restartCount', 0) for status in statuses)}" if uid else ""


def seen_of(pod: Json, port: int) -> Seen:
    """Returns the state of a pod, with the address of its worker."""
    status = pod.get("status") or {}
    name, phase = (pod.get("metadata") or {}).get("name", "?"), status.get("phase", "Unknown")
    node = (pod.get("spec") or {}).get("nodeName")
    location = f"pod {name}{f' on {node}' if node else ''}"
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return Seen("ended", f"is gone: {location} is being deleted")
    if phase in ("Failed", "Succeeded"):
        reason = status.get("reason") or _terminated(status) or phase
        message = f": {_short(status['message'])}" if status.get("message") else ""
        return Seen("ended", f"is gone: {location} has ended ({reason}{message})")
    trouble = _waiting(status)
    if trouble:
        return Seen("waiting", f"waits: {location}: {trouble}")
    if phase != "Running":
        return Seen("waiting", f"waits: {location} is {phase}{_condition(status) or _wait_text(status)}")
    ready = {entry.get("type"): entry.get("status") for entry in status.get("conditions") or ()}.get("Ready")
    if ready == "False" or not status.get("podIP"):
        return Seen("running", f"{location} runs, and is not ready yet")
    address = str(status["podIP"])
    return Seen("running", location, (f"tcp://{f'[{address}]' if ':' in address else address}:{_port_of(pod, port)}",))


def unexplained(pod: Json) -> bool:
    """Returns whether a pod waits and its status has no reason: an event may have it."""
    status = pod.get("status") or {}
    return status.get("phase") == "Pending" and not _waiting(status) and not _condition(status)


def unschedulable(pod: Json) -> bool:
    """Returns whether the scheduler has looked for a node and found none."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(entry.get("type") == "PodScheduled" and entry.get("reason") == "Unschedulable" for entry in conditions)


def warning_of(events: Iterable[Json]) -> str:
    """Returns the last warning among some events, such as " (FailedMount: ...)"; empty if there is none."""
    warnings = [event for event in events if event.get("type") == "Warning" and event.get("message")]
    last = max(warnings, key=_time_of, default=None)
    return "" if last is None else f" ({last.get('reason')}: {_short(last['message'])})"


def lack_of(pod: Json, nodes: Sequence[Json]) -> str:
    """Describes the resources requested by a pod that no node has, even when empty; empty if one has all."""
    requests = _requests(pod)
    offers = [(node.get("status") or {}).get("allocatable") or {} for node in nodes]
    if not nodes or any(all(quantity(o.get(name, 0)) >= need for name, (need, _) in requests.items()) for o in offers):
        return ""
    of = f"of {counted(len(nodes), 'node')} none has"
    lacks = []
    for name, (need, text) in requests.items():
        largest = max((offer.get(name, 0) for offer in offers), key=quantity)
        if quantity(largest) < need:
            lacks.append(
                f"it asks for {name}={text}, and {of} {f'more than {largest}' if quantity(largest) else 'any'}"
            )
    if lacks:
        return "; ".join(lacks)
    needs = ", ".join(f"{name}={text}" for name, (_, text) in requests.items())
    return f"it asks for {needs}, and {of} all of that"


def quantity(text: object) -> float:
    """Parses a number of Kubernetes such as "500m", "8" or "16Gi"; 0 for other text."""
    match = _QUANTITY.fullmatch(str(text))
    try:
        return float(match[1]) * _SUFFIXES[match[2]] if match is not None else 0.0
    except (KeyError, ValueError):
        return 0.0


def _requests(pod: Json) -> dict[str, tuple[float, str]]:
    """Returns the resources requested by all containers of a pod, as numbers and as text."""
    texts: dict[str, list[str]] = {}
    for container in (pod.get("spec") or {}).get("containers") or ():
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            texts.setdefault(name, []).append(str(amount))
    return {name: (sum(map(quantity, parts)), "+".join(parts)) for name, parts in texts.items()}


def _time_of(event: Json) -> str:
    times = (event.get("eventTime"), event.get("lastTimestamp"), (event.get("metadata") or {}).get("creationTimestamp"))
    return max(str(time or "") for time in times)


def _waiting(status: Json) -> str:
    """Returns the unusual reason for which a container does not start; empty if there is none."""
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason and reason not in _USUAL:
            ended = _terminated({"containerStatuses": [{"state": container.get("lastState") or {}}]})
            message = _short(waiting.get("message") or container.get("image") or "")
            return f"{reason} ({message}){f', {ended}' if ended else ''}"
    return ""


def _wait_text(status: Json) -> str:
    states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    reasons = [reason for state in states if (reason := (state.get("waiting") or {}).get("reason"))]
    return f" ({reasons[0]})" if reasons else ""


def _terminated(status: Json) -> str:
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            return f"{ended.get('reason') or 'ended'}, exit status {ended.get('exitCode')}"
    return ""


def _condition(status: Json) -> str:
    """Returns why a pod is not scheduled, or else another false condition with an unusual reason."""
    conditions = status.get("conditions") or ()
    false = [entry for entry in conditions if entry.get("status") == "False" and entry.get("message")]
    for condition in sorted(false, key=lambda entry: entry.get("type") != "PodScheduled"):
        if condition.get("reason") != "ContainersNotReady":
            return f" ({condition.get('reason')}: {_short(condition['message'])})"
    return ""


def _short(text: str) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[: _LONGEST_MESSAGE - 3]}..."
