"""Agents in pods: requests them from the cluster's API, observes them and ends them."""

import base64
import contextlib
import json
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

from monarch_nb.connect.routes import HostRoutes, Tunnel
from monarch_nb.host.bound import end_bound, start_bound
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
from monarch_nb.job.kubernetes.template import (
    lack_of,
    life_of,
    rank_of,
    seen_of,
    unexplained,
    unschedulable,
    warning_of,
)
from monarch_nb.job.record import register_tunnel
from monarch_nb.runtime import current_runtime

_KILL_S = 1
_FORWARDING = "Forwarding from 127.0.0.1:"
_REQUEST_S = 30.0
_SAME_S = 10.0  # how long lists of events and nodes are reused
_NOT_ALLOWED = "violates PodSecurity"


class NotThereError(EngineError):
    """There is no object at that path."""


def _create_object(options: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> None:
    """Creates an object. Raises EngineError, also if there is one of that name."""
    try:
        _request(options, "POST", path, body=body)
    except EngineError as error:
        if "(409)" not in str(error):
            raise
        raise EngineError(
            f"there is a {body['kind']} {body['metadata']['name']} in namespace {options['namespace']} already, of "
            "another job: kill that one, choose another name, or attach to its pods by add_mesh without an image"
        ) from None


def _request(
    options: Mapping[str, Any], verb: str, path: str, *, body: Any = None, query: Sequence[tuple[str, str]] = (),
    plain: bool = False,
) -> Any:  # fmt: skip
    """Sends a request to the API. Raises EngineError with its message."""
    client = api_client(options.get("kubeconfig", ""))
    content_type = "application/merge-patch+json" if verb == "PATCH" else "application/json"
    headers = {"Accept": "*/*" if plain else "application/json", "Content-Type": content_type}
    try:
        # The client's own connection and credentials, whose interface is the same in all its versions.
        for setting in client.configuration.auth_settings().values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        url = f"{client.configuration.host}{path}{f'?{urlencode(query)}' if query else ''}"
        data = None if body is None else json.dumps(body)
        response = client.rest_client.pool_manager.request(
            verb, url, headers=headers, body=data, timeout=_REQUEST_S, retries=False
        )
        status, text = response.status, response.data.decode(errors="replace")
    except Exception as error:  # of urllib3, in many kinds
        raise EngineError(
            f"the Kubernetes API at {client.configuration.host} does not answer: {_innermost(error)}"
        ) from None
    finally:
        client.close()
    if status == 404:
        raise NotThereError(f"Kubernetes knows no {path}: {_error_message(text)}")
    if status >= 400:
        raise EngineError(f"Kubernetes refuses {verb} {path} ({status}): {_error_message(text)}")
    return text if plain else json.loads(text or "{}")


def _innermost(error: BaseException) -> str:
    """Returns the text of the root cause, without the wrappers of the HTTP client."""
    inner = getattr(error, "reason", None) or error.__cause__ or error.__context__
    if isinstance(inner, BaseException):
        return _innermost(inner)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _error_message(body: Any) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(body or "").strip()[:200]


class Kubernetes(JobAdapter):
    """The ids of agents are `namespace/mesh/rank`: pods come and go, and are found by label and rank."""

    chooses = True
    keep_s = None  # the cluster would restart pods that end by themselves

    def __init__(self) -> None:
        self._forwards: dict[tuple[str, str], tuple[subprocess.Popen[str], str]] = {}
        self._uses: Counter[str] = Counter()  # uses of jobs
        self._lives: dict[tuple[str, str], str] = {}  # the observed life of the pod, by job and name
        self._joined: dict[tuple[str, str], str] = {}  # the life that has joined
        self._lists: dict[str, tuple[float, list[Any]]] = {}  # time and items of the last answers
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
            with contextlib.suppress(EngineError):  # an API that has died is reported once
                self._delete(job)
            raise
        return {name: Agent(f"{wanted.options['namespace']}/{name.replace('_', '/')}") for name in wanted.names}

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Adds pods of the same kind.

        Pods that exist without an agent of the job are used first, and pods that the cluster has created to replace
        ended ones.
        """
        mesh, count = mesh_of(wanted.names[0]), len(wanted.names)
        config, ranks = job.options["meshes"][mesh], self._pod_ranks(job, mesh)
        ended = {name for name, state in self.look(job).items() if state.state == "ended"}
        used = _ranks({name: agent for name, agent in job.agents.items() if name not in ended}, mesh)
        free = [rank for rank in ranks if rank not in used]
        if config["provisioned"]:
            last = max((*used, *ranks), default=-1)
            free += range(last + 1, last + 1 + count - len(free))
            self._scale(job, mesh, max((*used, *ranks, *free[:count])) + 1)
        elif len(free) < count:
            raise EngineError(
                f"there are {len(ranks)} pods of {mesh} ({config['selector']}), of which {len(free)} are not used yet. "
                "They were not made by this job: have whatever made them make more, as by kubectl scale, and grow again"
            )
        space = job.options["namespace"]
        return {name: Agent(f"{space}/{mesh}/{rank}") for name, rank in zip(wanted.names, free, strict=False)}

    def release(self, going: Running, job: Running) -> None:
        """Deletes the last pods of a mesh that have no agent any more. Raises EngineError where others stay."""
        for mesh in dict.fromkeys(map(mesh_of, going.agents)):
            if not job.options["meshes"][mesh]["provisioned"]:
                continue
            in_use = _ranks({name: agent for name, agent in job.agents.items() if name not in going.agents}, mesh)
            count = max(in_use, default=-1) + 1
            if count <= max(self._pod_ranks(job, mesh), default=-1):
                self._scale(job, mesh, count)
            idle = sorted(rank for rank in _ranks(going.agents, mesh) - in_use if rank < count)
            if idle:
                raise EngineError(
                    f"{', '.join(f'{mesh}-{rank}' for rank in idle)}: of the pods of a set only the last can be given "
                    "back. It stays, idle, is the first that a mesh grows onto, and goes once no pod behind it is used"
                )

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the pods."""
        states: dict[str, Seen] = {}
        for mesh, config in job.options["meshes"].items():
            names = [name for name in job.agents if mesh_of(name) == mesh]
            if not names:
                continue
            path = f"/api/v1/namespaces/{job.options['namespace']}/pods"
            reply = _request(job.options, "GET", path, query=[("labelSelector", config["selector"])])
            pods = {rank_of(pod, config["rank_label"]): pod for pod in reply.get("items") or ()}
            for name in names:
                rank = _rank(job.agents[name])
                pod = pods.get(rank)
                if pod is None:
                    text = f"waits: there is no pod of {mesh} with rank {rank} ({config['selector']})"
                    warning = self._warning(job, mesh) if config["provisioned"] else ""
                    state = Seen("waiting", f"{text}{warning}", stuck=_NOT_ALLOWED in warning)
                else:
                    state = self._explain(job, pod, seen_of(pod, config["port"]))
                states[name] = self._check_life(job, name, pod, state)
        return states

    def _explain(self, job: Running, pod: Mapping[str, Any], state: Seen) -> Seen:
        """Adds why a pod waits if its status does not say so, and whether it would wait forever."""
        if state.state != "waiting":
            return state
        if unexplained(pod):
            return Seen("waiting", f"{state.description}{self._warning(job, pod['metadata']['name'])}")
        if unschedulable(pod) and (lack := lack_of(pod, self._nodes(job))):
            text = f"{state.description}, and will for ever unless the cluster gets other nodes: {lack}"
            return Seen("waiting", text, stuck=True)
        return state

    def _warning(self, job: Running, name: str) -> str:
        """Returns the last warning about an object; empty if there is none, or it may not be read."""
        path = f"/api/v1/namespaces/{job.options['namespace']}/events"
        return warning_of(self._list(job, path, [("fieldSelector", f"involvedObject.name={name},type=Warning")]))

    def _nodes(self, job: Running) -> list[Any]:
        return self._list(job, "/api/v1/nodes", [])

    def _list(self, job: Running, path: str, query: list[tuple[str, str]]) -> list[Any]:
        """Returns the items of a list, which may be some seconds old; none if the API refuses it."""
        key = f"{job.job} {path} {query}"
        since, items = self._lists.get(key, (0.0, []))
        if time.monotonic() - since < _SAME_S and since:
            return items
        items = []
        with contextlib.suppress(EngineError):
            items = list(_request(job.options, "GET", path, query=query).get("items") or ())
        self._lists[key] = time.monotonic(), items
        return items

    def joined(self, job: Running, name: str) -> None:
        """Records the life of the pod: a new or restarted pod is another host from now on."""
        self._joined[(job.job, name)] = self._lives.get((job.job, name), "")

    def _check_life(self, job: Running, name: str, pod: Mapping[str, Any] | None, state: Seen) -> Seen:
        life, joined = "" if pod is None else life_of(pod), self._joined.get((job.job, name), "")
        if not joined:
            self._lives[(job.job, name)] = life
        elif life != joined and state.state != "ended":
            return Seen("ended", f"is gone: its pod has ended. In its place: {state.description}")
        return state

    def kill(self, job: Running) -> None:
        """Deletes the objects that were created for the job; pods that existed before remain."""
        self._forget(job)
        self._delete(job)

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs whose folders are on this machine."""
        return living_jobs(self, "kubernetes")

    def hold(self, job: Running, keep: bool) -> None:
        """Counts the uses of a job; the last one closes its port forwards."""
        with self._lock:
            self._uses[job.job] += 1 if keep else -1
            last = self._uses[job.job] <= 0
        if last:
            self._forget(job)

    def join(self, job: Running, name: str, joins: Sequence[str]) -> Sequence[str]:
        """Returns the pod's own addresses; for the first pod, outside of the cluster, a forwarded port here."""
        way = self._forwards.get((job.job, name))
        if way is not None and way[0].poll() is None:
            return (way[1],)
        inside = not job.options.get("through_first") or job.options.get("attach_to")
        if inside or current_runtime().part(HostRoutes).gateway is not None:
            return joins
        return (self._forward(job, name, joins[0]),)

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the last lines of the pod's log."""
        pod = self._pod(job, name)
        path = f"/api/v1/namespaces/{job.options['namespace']}/pods/{pod}/log"
        text = _request(job.options, "GET", path, query=[("tailLines", str(count))], plain=True)
        return str(text).splitlines()

    def shell(self, job: Running, name: str) -> list[str]:
        """Returns a `kubectl exec` command line."""
        return [*_kubectl(job.options), "exec", "-it", self._pod(job, name), "--", "sh"]

    def _pod(self, job: Running, name: str) -> str:
        description = self.look(job)[name].description
        before, _, rest = description.partition("pod ")
        if not rest or before.startswith("waits: there"):
            raise LookupError(f"{name} {description}")
        return rest.split()[0].rstrip(":")

    def key_changed(self, job: Running) -> None:
        """Puts the job's key into the Secrets that its pods read."""
        key = base64.b64encode(Path(job.folder, "key").read_bytes()).decode()
        for mesh, config in job.options["meshes"].items():
            name = config.get("secret") or make.secret_name(mesh)
            path = f"/api/v1/namespaces/{job.options['namespace']}/secrets/{name}"
            try:
                _request(job.options, "PATCH", path, body={"data": {"key": key}})
            except EngineError as error:
                raise EngineError(
                    f"the hosts have another key, but the Secret {name} still has the former one, so that pods of "
                    f"{mesh} that are started again cannot be reached: {error}"
                ) from error

    def _provision(self, wanted: AgentsWanted, mesh: str, config: Mapping[str, Any]) -> None:
        options, role = wanted.options, wanted.roles[mesh]
        env = {**wanted.environment, **role.env}
        config = {**config, "replicas": role.hosts}
        space = options["namespace"]
        key = wanted.secret.read_bytes()
        template = make.pod_template(mesh, config, env)
        _create_object(options, f"/api/v1/namespaces/{space}/secrets", make.secret(mesh, wanted.job, key, env))
        path = f"/apis/{make.GROUP}/{make.VERSION}/namespaces/{space}/{make.PLURAL}"
        try:
            _create_object(options, path, make.monarch_mesh(mesh, wanted.job, config, template))
        except NotThereError:  # no operator makes pods of such resources
            _create_object(options, f"/api/v1/namespaces/{space}/services", make.service(mesh, wanted.job, config))
            sets = f"/apis/apps/v1/namespaces/{space}/statefulsets"
            _create_object(options, sets, make.stateful_set(mesh, wanted.job, config, template))

    def _pod_set(self, job: Running, mesh: str) -> tuple[str, dict[str, Any]]:
        """Returns the path and content of the object that creates the pods of a mesh."""
        space = job.options["namespace"]
        path = f"/apis/{make.GROUP}/{make.VERSION}/namespaces/{space}/{make.PLURAL}/{mesh}"
        try:
            return path, _request(job.options, "GET", path)
        except NotThereError:
            path = f"/apis/apps/v1/namespaces/{space}/statefulsets/{mesh}"
            return path, _request(job.options, "GET", path)

    def _pod_ranks(self, job: Running, mesh: str) -> list[int]:
        """Returns the ranks of the pods of a mesh, running or not."""
        config = job.options["meshes"][mesh]
        if config["provisioned"]:
            return list(range(int(self._pod_set(job, mesh)[1]["spec"]["replicas"])))
        path = f"/api/v1/namespaces/{job.options['namespace']}/pods"
        pods = _request(job.options, "GET", path, query=[("labelSelector", config["selector"])]).get("items") or ()
        return sorted(rank for pod in pods if (rank := rank_of(pod, config["rank_label"])) is not None)

    def _scale(self, job: Running, mesh: str, pods: int) -> None:
        path, resource = self._pod_set(job, mesh)
        if int(resource["spec"]["replicas"]) != pods:
            _request(job.options, "PATCH", path, body={"spec": {"replicas": pods}})

    def _read_key(self, wanted: AgentsWanted, mesh: str, config: Mapping[str, Any]) -> None:
        """Writes the key of existing pods, from their Secret, into the job's folder, if they have one."""
        name = config.get("secret") or make.secret_name(mesh)
        try:
            secret = _request(wanted.options, "GET", f"/api/v1/namespaces/{wanted.options['namespace']}/secrets/{name}")
        except NotThereError:
            if config.get("secret"):
                raise EngineError(f"there is no Secret {name} in namespace {wanted.options['namespace']}") from None
            return
        key = base64.b64decode((secret.get("data") or {}).get("key", ""))
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
                    resource = _request(job.options, "GET", path)
                    if ((resource.get("metadata") or {}).get("labels") or {}).get(make.JOB_LABEL) != job.job:
                        continue
                    _request(job.options, "DELETE", path)
                except NotThereError:
                    continue
                if f"/{make.PLURAL}/" in path or "/statefulsets/" in path:
                    self._end_pods(job, config["selector"])

    @staticmethod
    def _end_pods(job: Running, selector: str) -> None:
        """Ends pods at once, without SIGTERM as a notice; after their grace period if this user may not delete pods."""
        path = f"/api/v1/namespaces/{job.options['namespace']}/pods"
        with contextlib.suppress(EngineError):
            for pod in _request(job.options, "GET", path, query=[("labelSelector", selector)]).get("items") or ():
                _request(
                    job.options, "DELETE", f"{path}/{pod['metadata']['name']}", body={"gracePeriodSeconds": _KILL_S}
                )

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
        if shutil.which(line[0]) is None:
            raise EngineError(
                "from outside of the cluster a pod is reached with `kubectl port-forward`, and there is no kubectl "
                "here: install it, or forward a port yourself and name it with attach_to='tcp://127.0.0.1:PORT'"
            )
        process = start_bound(line, errors=subprocess.STDOUT)
        assert process.stdout is not None
        try:
            output = process.stdout.readline()
            if not output.startswith(_FORWARDING):
                raise EngineError(f"kubectl port-forward to {name} has failed: {output.strip() or 'it has ended'}")
        except BaseException:  # an interrupt too
            end_bound(process)
            raise
        threading.Thread(target=_drain, args=(process.stdout,), name="monarch-forward", daemon=True).start()
        way = f"tcp://127.0.0.1:{output.removeprefix(_FORWARDING).split()[0]}"
        route = f"port {port} of pod {self._pod(job, name)}, through kubectl port-forward"
        register_tunnel(way, job, name, (address,), Tunnel(route))
        with self._lock:
            self._forwards[(job.job, name)] = (process, way)
        return way

    def _forget(self, job: Running) -> None:
        with self._lock:
            self._uses.pop(job.job, None)
            forwards = [key for key in self._forwards if key[0] == job.job]
            for query in [key for key in self._lists if key.startswith(f"{job.job} ")]:
                del self._lists[query]
            for lives in (self._lives, self._joined):
                for key in [key for key in lives if key[0] == job.job]:
                    del lives[key]
            ended = [self._forwards.pop(key)[0] for key in forwards]
        for process in ended:
            end_bound(process)


def _rank(agent: Agent) -> int:
    return int(agent.id.rpartition("/")[2])


def _ranks(agents: Agents, mesh: str) -> set[int]:
    return {_rank(agent) for name, agent in agents.items() if mesh_of(name) == mesh}


def _drain(output: IO[str]) -> None:
    """Discards the output of kubectl, which has a line for each connection."""
    with contextlib.suppress(ValueError, OSError):  # closed
        for _ in output:
            pass


def _kubectl(options: Mapping[str, Any]) -> list[str]:
    config = options.get("kubeconfig", "")
    option = ["--kubeconfig", config] if config and not config.startswith("memory:") else []
    return ["kubectl", *option, "--namespace", options["namespace"]]
