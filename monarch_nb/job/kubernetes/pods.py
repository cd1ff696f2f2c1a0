"""What the state of a pod means to those who wait for it: pure, what the API says in, words out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_nb.job.adapter import Seen
from monarch_nb.job.kubernetes.template import RANK_LABEL

_ORDINAL = re.compile(r"-(\d+)$")
_FEW = 200  # letters of a message


def rank_of(pod: Mapping[str, Any], label: str) -> int | None:
    """Which pod of a mesh it is: by its label, else by the number at the end of its name, as a StatefulSet gives it."""
    metadata = pod.get("metadata") or {}
    text = (metadata.get("labels") or {}).get(label)
    if text is None and label == RANK_LABEL:  # clusters before 1.28 do not set it
        match = _ORDINAL.search(str(metadata.get("name", "")))
        text = match[1] if match is not None else None
    return int(text) if text is not None and str(text).isdecimal() else None


def port_of(pod: Mapping[str, Any], default: int) -> int:
    """Where the worker of a pod listens: MONARCH_PORT of a container, else the default."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == "MONARCH_PORT" and str(variable.get("value", "")).isdecimal():
                return int(variable["value"])
    return default


def life_of(pod: Mapping[str, Any]) -> str:
    """Names a pod from one start of its worker to the next; empty where the API does not tell."""
    uid = (pod.get("metadata") or {}).get("uid", "")
    starts = [each.get("restartCount", 0) for each in (pod.get("status") or {}).get("containerStatuses") or ()]
    return f"{uid}/{sum(starts)}" if uid else ""


def seen_of(pod: Mapping[str, Any], port: int) -> Seen:
    """How a pod is, and where its worker is met."""
    status = pod.get("status") or {}
    name, phase = (pod.get("metadata") or {}).get("name", "?"), status.get("phase", "Unknown")
    node = (pod.get("spec") or {}).get("nodeName")
    where = f"pod {name}{f' on {node}' if node else ''}"
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return Seen("ended", f"is gone: {where} is being deleted")
    if phase in ("Failed", "Succeeded"):
        why = status.get("reason") or _terminated(status) or phase
        message = f": {_short(status['message'])}" if status.get("message") else ""
        return Seen("ended", f"is gone: {where} has ended ({why}{message})")
    trouble = _waiting(status)
    if trouble:
        return Seen("waiting", f"waits: {where}: {trouble}")
    if phase != "Running":
        return Seen("waiting", f"waits: {where} is {phase}{_condition(status.get('conditions') or ())}")
    ready = {each.get("type"): each.get("status") for each in status.get("conditions") or ()}.get("Ready")
    if ready == "False" or not status.get("podIP"):
        return Seen("running", f"{where} runs, and is not ready yet")
    address = str(status["podIP"])
    return Seen("running", where, (f"tcp://{f'[{address}]' if ':' in address else address}:{port_of(pod, port)}",))


def _waiting(status: Mapping[str, Any]) -> str:
    """What a container that does not start waits for, but for what is usual."""
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            ended = _terminated({"containerStatuses": [{"state": container.get("lastState") or {}}]})
            said = _short(waiting.get("message") or container.get("image") or "")
            return f"{reason} ({said}){f', {ended}' if ended else ''}"
    return ""


def _terminated(status: Mapping[str, Any]) -> str:
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            return f"{ended.get('reason') or 'ended'}, exit status {ended.get('exitCode')}"
    return ""


def _condition(conditions: Sequence[Mapping[str, Any]]) -> str:
    for each in conditions:
        if each.get("status") == "False" and each.get("message"):
            return f" ({each.get('reason')}: {_short(each['message'])})"
    return ""


def _short(text: str) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _FEW else f"{line[: _FEW - 3]}..."
