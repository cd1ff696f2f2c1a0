"""Ray jobs: a Ray actor on each node, which starts an agent beside itself."""

import inspect
import os
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from monarch_nb.host.options import UNUSED_WORDS
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
    register_job,
)
from monarch_nb.job.adapter_job import AdapterJob
from monarch_nb.job.report import Ask, HelperReply
from monarch_nb.wire import counted, json_decoder

_SPACE = "monarch-nb"  # the Ray namespace of the actors
_ANSWER_S = 2.0
_KILL_S = 15.0
_PULSE_S = 5.0
_SPREAD, _NODE = "STRICT_SPREAD", "ray.io/node-id"
_INSTALL = "pip install 'monarch-nb[ray]'"


class RayJob(AdapterJob):
    """A host agent on each of so many nodes of a Ray cluster: `RayJob({"trainers": Role(hosts=4, gpus=8)})`.

    Ray places them by a placement group: one per node with `strategy` "STRICT_SPREAD", maybe several on one with
    "PACK". A Ray actor holds the resources of its agent, and ends with it. `address` is the cluster's, by default that
    of the cluster of this machine. The agents must be reachable from here at any free port of their nodes.
    Needs `pip install 'monarch-nb[ray]'`, the same on all nodes. Raises EngineError.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", address: str = "auto", strategy: str = "STRICT_SPREAD",
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__("ray", meshes, env, options={"address": address, "strategy": strategy})


class Keeper:
    """Runs inside the Ray actor: a helper that starts the agent before it answers requests."""

    def __init__(self, request: bytes, group: str) -> None:
        from monarch_nb.job.helper import Helper

        self._helper, self._group = Helper(), group
        self._job = json_decoder(Ask).decode(request)
        self._helper.answer(self._job)
        threading.Thread(target=self._end_with_agent, name="monarch-keeper", daemon=True).start()

    def _end_with_agent(self) -> None:
        """Ends the Ray actor when its agent ends as unused; the last one removes the placement group."""
        while True:
            time.sleep(_PULSE_S)
            states = self._helper.answer(Ask(do="look", job=self._job.job)).seen.values()
            if all(state.state == "ended" and UNUSED_WORDS in state.description for state in states):
                _leave_ray(self._group)

    def ask(self, request: bytes) -> bytes:
        """Returns the helper's answer."""
        return msgspec.json.encode(self._helper.answer(json_decoder(Ask).decode(request)))


def _leave_ray(group: str) -> None:
    """Ends this Ray actor, and its placement group if it is the last of the group."""
    import ray

    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    if not any(name.startswith(f"{group}-") for name in names - {ray.get_runtime_context().get_actor_name()}):
        _remove(ray, group)
    os._exit(0)


class Ray(JobAdapter):
    """The ids of agents are the names of Ray's actors, which outlive this process."""

    watch_s = 2.0
    keep_s = 3600.0  # users may have waited for these nodes

    def start(self, wanted: AgentsWanted) -> Agents:
        """Requests a placement group, and an actor in each bundle of it. Raises EngineError."""
        return self._start(wanted, wanted.job, {})

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Requests another placement group; with one agent per node, on nodes that the job does not use yet."""
        ray, selector = _ray(job.options), dict[str, str]()
        if job.options.get("strategy", _SPREAD) == _SPREAD:
            if "bundle_label_selector" not in inspect.signature(ray.util.placement_group).parameters:
                raise EngineError(
                    f"Ray {ray.__version__} cannot be asked for nodes other than those that the job has: install a "
                    "newer one, or make the job with strategy='PACK'"
                )
            nodes = sorted({node for group in _groups(ray, job) for node in group["bundles_to_node_id"].values()})
            selector = {_NODE: f"!in({','.join(filter(None, nodes))})"}
        return self._start(wanted, f"{wanted.job}+{wanted.names[0]}", selector)

    def release(self, going: Running, job: Running) -> None:
        """Ends these agents, their Ray actors, and placement groups without other agents.

        Raises EngineError for groups with other agents: Ray returns the resources of a group only as a whole.
        """
        in_use = {_group(name, agent) for name, agent in job.agents.items() if name not in going.agents}
        groups = {_group(name, agent) for name, agent in going.agents.items()}
        self._end(going, groups - in_use)
        if groups & in_use:
            raise EngineError("Ray keeps their places in the placement group until all that came with them have gone")

    def _start(self, wanted: AgentsWanted, group_name: str, labels: Mapping[str, str]) -> Agents:
        ray, options = _ray(wanted.options), wanted.options
        job = Running(wanted.job, str(wanted.folder),
                      {name: Agent(f"{group_name}-{name}") for name in wanted.names}, dict(options))  # fmt: skip
        bundles = []
        for name in wanted.names:
            role = wanted.role(name)
            bundles.append({"CPU": float(role.cpus or 1), **({"GPU": float(role.gpus)} if role.gpus else {})})
        key = wanted.secret.read_text()
        selector = {"bundle_label_selector": [dict(labels)] * len(bundles)} if labels else {}
        try:
            group = ray.util.placement_group(
                bundles, strategy=options.get("strategy", _SPREAD), name=group_name, lifetime="detached", **selector
            )
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            for number, name in enumerate(wanted.names):
                ask = Ask(do="start", job=f"{wanted.job}-{name.replace('_', '-')}", key=key, bound=True,
                          keep_s=wanted.keep_s, names={name: wanted.environment_of(name)})  # fmt: skip
                ray.remote(Keeper).options(
                    name=job.agents[name].id, namespace=_SPACE, lifetime="detached", num_cpus=bundles[number]["CPU"],
                    num_gpus=bundles[number].get("GPU", 0), max_restarts=0,
                    scheduling_strategy=strategy(group, placement_group_bundle_index=number),
                ).remote(msgspec.json.encode(ask), group_name)  # fmt: skip
        except BaseException:  # an interrupt too
            self._end(job, {group_name})
            raise
        return job.agents

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the agents, from their Ray actors."""
        ray = _ray(job.options)
        refs, states = {}, {}
        for name, agent in job.agents.items():
            try:
                keeper = ray.get_actor(agent.id, namespace=_SPACE)
                ask = Ask(do="look", job=f"{job.job}-{name.replace('_', '-')}")
                refs[name] = keeper.ask.remote(msgspec.json.encode(ask))
            except ValueError:
                states[name] = Seen("ended", "is gone: Ray knows its actor no more")
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_ANSWER_S) if refs else ([], [])
        unplaceable = _unplaceable(ray, job) if len(ready) < len(refs) else {}
        for name, answer in refs.items():
            if answer not in ready:
                states[name] = unplaceable.get(_group(name, job.agents[name])) or Seen(
                    "waiting", "waits for a node of Ray's with what it needs, or its Ray actor is busy"
                )
                continue
            try:
                reply = json_decoder(HelperReply).decode(ray.get(answer))
                states[name] = reply.seen.get(name, Seen("ended", reply.error or "did not start"))
            except ray.exceptions.RayError as error:
                words = str(error).strip().splitlines()
                states[name] = Seen("ended", f"is gone: {words[0] if words else type(error).__name__}")
        return states

    def kill(self, job: Running) -> None:
        """Ends the agents, their Ray actors and the placement groups."""
        self._end(job, {_group(name, agent) for name, agent in job.agents.items()})

    def _end(self, job: Running, groups: Collection[str]) -> None:
        ray = _ray(job.options)
        pending = {group["name"] for group in _groups(ray, job) if group["state"] == "PENDING"}
        keepers, ended = [], []
        for name, agent in job.agents.items():
            try:
                keepers.append(ray.get_actor(agent.id, namespace=_SPACE))
            except ValueError:
                continue
            if _group(name, agent) in pending:  # its actor does not run, and will not answer
                continue
            ask = Ask(do="kill", job=f"{job.job}-{name.replace('_', '-')}")
            ended.append(keepers[-1].ask.remote(msgspec.json.encode(ask)))
        if ended:
            ray.wait(ended, num_returns=len(ended), timeout=_KILL_S)
        for keeper in keepers:
            ray.kill(keeper)
        for group in groups:
            _remove(ray, group)

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs whose folders are on this machine."""
        return living_jobs(self, "ray")


def _group(name: str, agent: Agent) -> str:
    """Returns the name of the placement group of an agent."""
    return agent.id.removesuffix(f"-{name}")


def _groups(ray: Any, job: Running) -> list[dict[str, Any]]:
    """Returns Ray's entries of the placement groups of a job."""
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    return [group for group in groups if group["name"].partition("+")[0] == job.job]


def _unplaceable(ray: Any, job: Running) -> dict[str, Seen]:
    """Returns the states of placement groups that no nodes can satisfy, even when empty, by name."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    states = {}
    for group in _groups(ray, job):
        if group["state"] != "PENDING":
            continue
        bundles = list(group["bundles"].values())
        spread = group["strategy"] == _SPREAD
        too_few = spread and len(bundles) > len(nodes)
        lacking = next((bundle for bundle in bundles if not any(_fits(bundle, node) for node in nodes)), None)
        if lacking is not None:
            needs = ", ".join(f"{count:g} {name}" for name, count in sorted(lacking.items()))
            largest = ", ".join(
                f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}" for name in sorted(lacking)
            )
            reason = f"{needs} on one node, and of {counted(len(nodes), 'node')} none has that (the most: {largest})"
        elif too_few:
            reason = f"{counted(len(bundles), 'node')}, and the cluster has {len(nodes)} (strategy='PACK' shares them)"
        else:
            continue
        description = f"waits for {reason}. It will wait for ever, unless Ray gets such nodes"
        states[group["name"]] = Seen("waiting", description, stuck=True)
    return states


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(resource, 0) >= count for resource, count in bundle.items())


def _remove(ray: Any, group: str) -> None:
    try:
        ray.util.remove_placement_group(ray.util.get_placement_group(group))
    except ValueError:  # it is gone
        return


def _ray(options: Mapping[str, Any]) -> Any:
    """Returns Ray's client, connected. Raises EngineError."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise EngineError(f"a RayJob needs the package ray: {_INSTALL}") from None
    if not ray.is_initialized():
        try:
            ray.init(
                address=options.get("address", "auto"), namespace=_SPACE, log_to_driver=False, logging_level="ERROR"
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise EngineError(f"no Ray cluster is reached: {error}. Start one (ray start --head), or name it") from None
    return ray


register_job("ray", Ray)
