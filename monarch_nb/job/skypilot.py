"""SkyPilot jobs: agents on the nodes of clusters on clouds and Kubernetes, by SkyPilot's SDK."""

import io
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from monarch_nb.job.adapter import (
    Agent,
    Agents,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Role,
    Running,
    Seen,
    living_jobs,
    log_words,
    register_job,
)
from monarch_nb.job.adapter_job import AdapterJob

_INSTALL = "pip install 'monarch-nb[skypilot]'"
_KEY = "MONARCH_NB_KEY"  # the task's secret, which the worker reads from its standard input
_RANK = re.compile(r"rank=(\d+)")  # SkyPilot's prefix of the lines of several nodes
_ENDED = {
    "SUCCEEDED": "has ended",
    "FAILED": "has failed",
    "FAILED_SETUP": "has failed in its setup",
    "FAILED_DRIVER": "has failed",
    "CANCELLED": "was cancelled",
}


class SkyPilotJob(AdapterJob):
    """A host agent on each node of a SkyPilot cluster: `SkyPilotJob({"trainers": 4}, accelerators="H100:8")`.

    Meshes with equal hosts share one cluster, which is taken down by `kill()`, and by SkyPilot once the hosts have been
    unused for `idle_minutes` more. `setup` is the shell command that installs monarch-nb in the environment of
    `python_exe`, which must have the Python of this program. Arguments of a SkyPilot task's resources are passed in
    `resources`, beside the usual `infra`, `accelerators`, `cpus`, `memory`, `use_spot` and `image`. The agents are
    reached at the nodes' addresses, at `monarch_port`, which SkyPilot opens; only holders of the job's key,
    which the nodes get as a secret of the task, can connect.
    Needs `pip install 'monarch-nb[skypilot]'`. Raises EngineError, with SkyPilot's message.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", infra: str | None = None, accelerators: str | None = None,
        cpus: str | int | None = None, memory: str | int | None = None, use_spot: bool = False,
        image: str | None = None, setup: str = "", resources: Mapping[str, object] | None = None,
        idle_minutes: int = 10, python_exe: str = "python3", monarch_port: int = 26600,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        shortcuts = {"infra": infra, "accelerators": accelerators, "cpus": cpus, "memory": memory, "image_id": image}
        requested = {name: value for name, value in shortcuts.items() if value is not None} | dict(resources or {})
        options = {
            "resources": {**requested, "use_spot": use_spot}, "setup": setup, "idle_minutes": idle_minutes,
            "python": python_exe, "port": monarch_port,
        }  # fmt: skip
        super().__init__("skypilot", meshes, env, options=options)


class SkyPilot(JobAdapter):
    """The ids of agents are `cluster/rank/request`; the request launches the cluster."""

    keep_s = 3600.0  # users may have waited for these machines
    watch_s = 15.0  # each look is some requests to SkyPilot's server

    def start(self, wanted: AgentsWanted) -> Agents:
        """Requests a cluster for each group of equal hosts. Raises EngineError."""
        return self._launch(wanted, f"monarch-{wanted.job[:8]}")

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Requests another cluster, with nodes of the same kind."""
        return self._launch(wanted, f"monarch-{wanted.job[:8]}-{wanted.names[-1].replace('_', '-')}")

    def release(self, going: Running, job: Running) -> None:
        """Takes clusters without remaining agents down; other nodes stay the cluster's until its end."""
        in_use = {_cluster(agent) for name, agent in job.agents.items() if name not in going.agents}
        ended = {name: agent for name, agent in going.agents.items() if _cluster(agent) not in in_use}
        self.kill(structs.replace(job, agents=ended))

    def _launch(self, wanted: AgentsWanted, prefix: str) -> Agents:
        groups: dict[str, list[str]] = {}
        for name in wanted.names:
            role = structs.replace(wanted.role(name), hosts=1, spares=0)
            groups.setdefault(repr((role, sorted(wanted.environment_of(name).items()))), []).append(name)
        agents: dict[str, Agent] = {}
        try:
            for number, names in enumerate(groups.values()):
                cluster = f"{prefix}-{number}"
                agents.update({name: Agent(f"{cluster}/{rank}") for rank, name in enumerate(names)})
                request = _ask("launch", _task(wanted, names), cluster_name=cluster, down=True,
                               idle_minutes_to_autostop=wanted.options["idle_minutes"])  # fmt: skip
                agents.update({name: Agent(f"{cluster}/{rank}/{request}") for rank, name in enumerate(names)})
        except BaseException:  # an interrupt too
            self.kill(Running(wanted.job, str(wanted.folder), agents, dict(wanted.options)))
            raise
        return agents

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the nodes according to SkyPilot."""
        clusters = {agent.id.rpartition("/")[2]: _cluster(agent) for agent in job.agents.values()}
        states = {cluster: self._state(cluster, request) for request, cluster in clusters.items()}
        return {name: self._seen(job, agent, *states[_cluster(agent)]) for name, agent in job.agents.items()}

    @staticmethod
    def _state(cluster: str, request: str) -> tuple[Any, Seen | None]:
        """Returns the handle of a cluster whose task runs, or else the common state of its nodes."""
        sky = _sdk()
        clusters = _get("status", cluster_names=[cluster], refresh=sky.StatusRefreshMode.AUTO)
        status = clusters[0].status.name if clusters else ""
        if status == "UP":
            jobs = _get("job_status", cluster)
            task = next((state.name for state in jobs.values() if state is not None), "")
            if task == "RUNNING":
                return clusters[0].handle, None
            if task in _ENDED:
                words = log_words(_log(cluster))
                return None, Seen("ended", f"is gone: its task on SkyPilot's cluster {cluster} {_ENDED[task]}{words}")
            return None, Seen(
                "waiting", f"waits: its task on SkyPilot's cluster {cluster} is {task or 'not there yet'}"
            )
        if status in ("STOPPED", "AUTOSTOPPING"):
            return None, Seen("ended", f"is gone: SkyPilot's cluster {cluster} is {status}")
        [launch] = _ask("api_status", request_ids=[request]) or [None]
        if launch is not None and launch.status in ("FAILED", "CANCELLED"):
            try:
                sky.get(request)
                reason = "it was cancelled"
            except Exception as error:
                reason = str(error)
            return None, Seen("ended", f"is gone: SkyPilot has not launched the cluster {cluster}: {reason}")
        if status or (launch is not None and launch.status != "SUCCEEDED"):
            message = (launch.status_msg if launch is not None else "") or "is being provisioned"
            return None, Seen("waiting", f"waits: SkyPilot's cluster {cluster}: {message}")
        return None, Seen("ended", f"is gone: SkyPilot has no cluster {cluster} any more")

    @staticmethod
    def _seen(job: Running, agent: Agent, handle: Any, state: Seen | None) -> Seen:
        if state is not None:
            return state
        cluster, rank = _cluster(agent), int(agent.id.split("/")[1])
        ip_lists = [handle.cached_external_ips or [], handle.cached_internal_ips or []]
        addresses = dict.fromkeys(ips[rank] for ips in ip_lists if rank < len(ips) and ips[rank])
        if not addresses:
            return Seen("waiting", f"waits: node {rank} of SkyPilot's cluster {cluster} has no address yet")
        joins = tuple(f"tcp://{address}:{job.options['port']}" for address in addresses)
        return Seen("running", f"at {next(iter(addresses))}, node {rank} of SkyPilot's cluster {cluster}", joins)

    def detour(self, job: Running) -> str:
        """Explains how to reach the nodes by SSH, which SkyPilot has set up."""
        cluster = next(map(_cluster, job.agents.values()))
        return (
            f"let SkyPilot open the port, or meet the nodes by SSH, which it has set up: SSHJob(meshes={{'trainers': "
            f"['{cluster}', '{cluster}-worker1']}})"
        )

    def kill(self, job: Running) -> None:
        """Takes the clusters down. Raises EngineError where SkyPilot does not answer: they may run on, and cost."""
        for cluster in dict.fromkeys(map(_cluster, job.agents.values())):
            try:
                _get("down", cluster)
            except EngineError as error:
                if type(error.__cause__).__name__ != "ClusterDoesNotExist":
                    raise EngineError(f"{error}\nThe cluster may run on: sky down {cluster}") from error

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs whose folders are on this machine."""
        return living_jobs(self, "skypilot")

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the last lines of the node, as SkyPilot stores them."""
        _, rank, *_ = job.agents[name].id.split("/")
        lines = _log(_cluster(job.agents[name]))
        own = [line for line in lines if (match := _RANK.search(line)) is None or match[1] == rank]
        return own[-count:]

    def shell(self, job: Running, name: str) -> list[str]:
        """Returns an SSH command by the names that SkyPilot gives to nodes."""
        cluster, rank, *_ = job.agents[name].id.split("/")
        return ["ssh", cluster if rank == "0" else f"{cluster}-worker{rank}"]


def _cluster(agent: Agent) -> str:
    return agent.id.partition("/")[0]


def _task(wanted: AgentsWanted, names: Sequence[str]) -> Any:
    """Returns SkyPilot's task of these hosts: a worker on each node."""
    sky, options = _sdk(), wanted.options
    worker = [
        str(options["python"]), "-P", "-m", "monarch_nb.job.worker", f"tcp://0.0.0.0:{options['port']}",
        "--key", "-", *([] if wanted.keep_s is None else ["--keep", str(wanted.keep_s)]),
    ]  # fmt: skip
    run = f'printf %s "${_KEY}" | exec env -u {_KEY} {shlex.join(worker)}'
    try:
        return sky.Task(
            f"monarch-{wanted.job[:8]}", setup=options["setup"] or None, run=run, num_nodes=len(names),
            envs=wanted.environment_of(names[0]), secrets={_KEY: wanted.secret.read_text()},
            resources=sky.Resources(**_resources(options, wanted.role(names[0]))),
        )  # fmt: skip
    except Exception as error:
        raise EngineError(f"SkyPilot takes no such task: {error}") from error


def _resources(options: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """Returns the arguments of SkyPilot's resources for a host: the job's, and over them the role's."""
    arguments = {**options["resources"], "ports": [str(options["port"])]}
    if role.gpus is not None:
        kind = str(arguments.get("accelerators") or "").partition(":")[0]
        if not kind:
            raise EngineError(f"{role.gpus} GPUs on each host: of which kind? accelerators='H100' names it")
        arguments["accelerators"] = f"{kind}:{role.gpus}"
    if role.cpus is not None:
        arguments["cpus"] = str(role.cpus)
    if role.memory:
        arguments["memory"] = role.memory.removesuffix("B").removesuffix("i").removesuffix("G")
    if role.image:
        arguments["image_id"] = f"docker:{role.image}"
    return arguments


def _log(cluster: str) -> list[str]:
    """Returns the lines of all nodes of a cluster."""
    text = io.StringIO()
    try:
        _sdk().tail_logs(cluster, None, False, 0, text)
    except Exception:  # there is none yet, or none any more
        return []
    return text.getvalue().strip().splitlines()


def _ask(name: str, *arguments: Any, **options: Any) -> Any:
    """Returns the result of a function of SkyPilot's SDK. Raises EngineError, with its error as the cause."""
    function: Callable[..., Any] = getattr(_sdk(), name)
    try:
        return function(*arguments, **options)
    except Exception as error:
        raise EngineError(f"SkyPilot, asked for {name}: {error}. See `sky check` and `sky api info`") from error


def _get(name: str, *arguments: Any, **options: Any) -> Any:
    """Returns the result of a request of SkyPilot's SDK. Raises EngineError, with its error as the cause."""
    return _ask("get", _ask(name, *arguments, **options))


def _sdk() -> Any:
    """Returns SkyPilot's module. Raises EngineError."""
    try:
        import sky
    except ImportError:
        raise EngineError(f"a SkyPilotJob needs the package skypilot: {_INSTALL}") from None
    return sky


register_job("skypilot", SkyPilot)
