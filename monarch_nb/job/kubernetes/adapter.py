"""Agents in pods: what asks the cluster's API for them, looks at them and ends them."""

import base64
import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from monarch_nb.connect.routes import Routes
from monarch_nb.job.adapter import (
    Agent,
    Agents,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Running,
    Seen,
    living_jobs,
    mesh_of,
)
from monarch_nb.job.kubernetes import template as make
from monarch_nb.job.kubernetes.config import api_client
from monarch_nb.job.kubernetes.pods import rank_of, seen_of
from monarch_nb.job.tunnels import opened_here
from monarch_nb.runtime import runtime

_SECONDS = 30.0
_FORWARDING = "Forwarding from 127.0.0.1:"


class Kubernetes(JobAdapter):
    """The ids of agents are `namespace/mesh/rank`: pods come and go, and are found by label and rank."""

    keep_s = None  # the cluster would start again what ends by itself

    def __init__(self) -> None:
        self._forwards: dict[tuple[str, str], tuple[subprocess.Popen[str], str]] = {}
        self._lock = threading.Lock()

    def start(self, wanted: AgentsWanted) -> Agents:
        """Makes a Secret with the key, and a MonarchMesh (or a StatefulSet) for each mesh that is not there already."""
        job = Running(wanted.job, str(wanted.folder), {}, dict(wanted.options))
        try:
            for mesh, config in wanted.options["meshes"].items():
                if config["provisioned"]:
                    self._provision(wanted, mesh, config)
                else:
                    self._read_key(wanted, mesh, config)
        except BaseException:  # an interrupt too
            self._delete(job)
            raise
        return {name: Agent(f"{wanted.options['namespace']}/{name.replace('_', '/')}") for name in wanted.names}

    def look(self, job: Running) -> Mapping[str, Seen]:
        """How the pods are."""
        seen: dict[str, Seen] = {}
        for mesh, config in job.options["meshes"].items():
            names = [name for name in job.agents if mesh_of(name) == mesh]
            if not names:
                continue
            path = f"/api/v1/namespaces/{job.options['namespace']}/pods"
            found = _call(job.options, "GET", path, query=[("labelSelector", config["selector"])])
            pods = {rank_of(pod, config["rank_label"]): pod for pod in found.get("items") or ()}
            for rank, name in enumerate(names):
                pod = pods.get(rank)
                none = Seen("waiting", f"waits: there is no pod of {mesh} with rank {rank} ({config['selector']})")
                seen[name] = none if pod is None else seen_of(pod, config["port"])
        return seen

    def kill(self, job: Running) -> None:
        """Deletes what was made for the job; pods that were there before stay as they are."""
        self._forget(job)
        self._delete(job)

    def running(self) -> Mapping[str, Running]:
        """Those whose folders this machine has."""
        return living_jobs(self, "kubernetes")

    def hold(self, job: Running, keep: bool) -> None:
        """Ways into the cluster end with the last use."""
        if not keep:
            self._forget(job)

    def join(self, job: Running, name: str, joins: Sequence[str]) -> Sequence[str]:
        """The pod's own address; from outside of the cluster the first one is reached by a forwarded port."""
        way = self._forwards.get((job.job, name))
        if way is not None and way[0].poll() is None:
            return (way[1],)
        inside = not job.options.get("through_first") or job.options.get("attach_to")
        if inside or runtime().part(Routes).gateway is not None:
            return joins
        return (self._forward(job, name, joins[0]),)

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """The log of the pod."""
        pod = self._pod(job, name)
        path = f"/api/v1/namespaces/{job.options['namespace']}/pods/{pod}/log"
        text = _call(job.options, "GET", path, query=[("tailLines", str(count))], plain=True)
        return str(text).splitlines()

    def shell(self, job: Running, name: str) -> list[str]:
        """The command `kubectl exec`."""
        return [*_kubectl(job.options), "exec", "-it", self._pod(job, name), "--", "sh"]

    def _pod(self, job: Running, name: str) -> str:
        story = self.look(job)[name].story
        before, _, rest = story.partition("pod ")
        if not rest or before.startswith("waits: there"):
            raise LookupError(f"{name} {story}")
        return rest.split()[0].rstrip(":")

    def _provision(self, wanted: AgentsWanted, mesh: str, config: Mapping[str, Any]) -> None:
        options, role = wanted.options, wanted.roles[mesh]
        env = {**wanted.environment, **role.env}
        config = {**config, "replicas": role.hosts}
        space = options["namespace"]
        key = wanted.secret.read_bytes()
        template = make.pod_template(mesh, config, env)
        _create(options, f"/api/v1/namespaces/{space}/secrets", make.secret(mesh, wanted.job, key, env))
        path = f"/apis/{make.GROUP}/{make.VERSION}/namespaces/{space}/{make.PLURAL}"
        try:
            _create(options, path, make.monarch_mesh(mesh, wanted.job, config, template))
        except _NotThereError:  # no operator makes pods of such resources
            _create(options, f"/api/v1/namespaces/{space}/services", make.service(mesh, wanted.job, config))
            sets = f"/apis/apps/v1/namespaces/{space}/statefulsets"
            _create(options, sets, make.stateful_set(mesh, wanted.job, config, template))

    def _read_key(self, wanted: AgentsWanted, mesh: str, config: Mapping[str, Any]) -> None:
        """The key of pods that are there already, from their Secret; none if they have none."""
        name = config.get("secret") or make.secret_name(mesh)
        try:
            found = _call(wanted.options, "GET", f"/api/v1/namespaces/{wanted.options['namespace']}/secrets/{name}")
        except _NotThereError:
            if config.get("secret"):
                raise EngineError(f"there is no Secret {name} in namespace {wanted.options['namespace']}") from None
            return
        key = base64.b64decode((found.get("data") or {}).get("key", ""))
        file = wanted.folder / "key"
        if file.exists() and file.read_bytes() != key:
            raise EngineError(f"{mesh} has another key than the other meshes: use a job of its own for it")
        file.touch(0o600)
        file.write_bytes(key)

    def _delete(self, job: Running) -> None:
        space = job.options["namespace"]
        for mesh, config in job.options["meshes"].items():
            if not config["provisioned"]:
                continue
            for path in (
                f"/apis/{make.GROUP}/{make.VERSION}/namespaces/{space}/{make.PLURAL}/{mesh}",
                f"/apis/apps/v1/namespaces/{space}/statefulsets/{mesh}",
                f"/api/v1/namespaces/{space}/services/{mesh}-svc",
                f"/api/v1/namespaces/{space}/secrets/{make.secret_name(mesh)}",
            ):
                try:
                    found = _call(job.options, "GET", path)
                    if ((found.get("metadata") or {}).get("labels") or {}).get(make.JOB_LABEL) == job.job:
                        _call(job.options, "DELETE", path)
                except _NotThereError:
                    continue

    def _forward(self, job: Running, name: str, address: str) -> str:
        port = address.rpartition(":")[2]
        line = [
            *_kubectl(job.options),
            "port-forward",
            "--address",
            "127.0.0.1",
            f"pod/{self._pod(job, name)}",
            f":{port}",
        ]
        try:
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise EngineError(
                "from outside of the cluster a pod is reached with `kubectl port-forward`, and there is no kubectl "
                "here: install it, or forward a port yourself and name it with attach_to='tcp://127.0.0.1:PORT'"
            ) from None
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said.startswith(_FORWARDING):
            process.kill()
            process.wait()
            process.stdout.close()
            raise EngineError(f"kubectl port-forward to {name} has failed: {said.strip() or 'it has ended'}")
        way = f"tcp://127.0.0.1:{said.removeprefix(_FORWARDING).split()[0]}"
        opened_here(way, job, name, (address,))
        with self._lock:
            self._forwards[(job.job, name)] = (process, way)
        return way

    def _forget(self, job: Running) -> None:
        with self._lock:
            mine = [key for key in self._forwards if key[0] == job.job]
            ended = [self._forwards.pop(key)[0] for key in mine]
        for process in ended:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class _NotThereError(EngineError):
    """The API knows nothing of that path."""


def _kubectl(options: Mapping[str, Any]) -> list[str]:
    config = options.get("kubeconfig", "")
    named = ["--kubeconfig", config] if config and not config.startswith("memory:") else []
    return ["kubectl", *named, "--namespace", options["namespace"]]


def _create(options: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> None:
    try:
        _call(options, "POST", path, body=body)
    except EngineError as error:
        if "(409)" not in str(error):
            raise
        raise EngineError(
            f"there is a {body['kind']} {body['metadata']['name']} in namespace {options['namespace']} already, of "
            "another job: kill that one, choose another name, or attach to its pods by add_mesh without an image"
        ) from None


def _call(
    options: Mapping[str, Any], verb: str, path: str, *, body: Any = None, query: Sequence[tuple[str, str]] = (),
    plain: bool = False,
) -> Any:  # fmt: skip
    """One request to the API. Raises EngineError, with its words."""
    client = api_client(options.get("kubeconfig", ""))
    headers = {"Accept": "*/*" if plain else "application/json", "Content-Type": "application/json"}
    try:
        # The client's own connection and credentials, whose interface is the same in all its versions.
        for each in client.configuration.auth_settings().values():
            if each["in"] == "header" and each["value"]:
                headers[each["key"]] = each["value"]
        url = f"{client.configuration.host}{path}{f'?{urlencode(query)}' if query else ''}"
        data = None if body is None else json.dumps(body)
        response = client.rest_client.pool_manager.request(
            verb, url, headers=headers, body=data, timeout=_SECONDS, retries=1
        )
        status, text = response.status, response.data.decode(errors="replace")
    except Exception as error:  # of urllib3, in many kinds
        raise EngineError(f"the Kubernetes API does not answer: {type(error).__name__}: {error}") from None
    finally:
        client.close()
    if status == 404:
        raise _NotThereError(f"Kubernetes knows no {path}: {_message(text)}")
    if status >= 400:
        raise EngineError(f"Kubernetes refuses {verb} {path} ({status}): {_message(text)}")
    return text if plain else json.loads(text or "{}")


def _message(body: Any) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(body or "").strip()[:200]
