"""Agents on the nodes of a Ray cluster: one actor of Ray's on each, which starts and keeps an agent beside itself."""

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from monarch_nb.connect import UNUSED_WORDS
from monarch_nb.job.adapter import Agent, Agents, AgentsWanted, EngineError, JobAdapter, Running, Seen, living_jobs
from monarch_nb.job.helper import Answer, Ask
from monarch_nb.wire import json_decoder

_SPACE = "monarch-nb"  # Ray's namespace of these actors
_ANSWER_S = 2.0
_KILL_S = 15.0
_PULSE_S = 5.0
_JOB_ID = 36  # characters of a job's id, with which the names of its actors begin
_INSTALL = "pip install 'monarch-nb[ray]'"


class Keeper:
    """What runs inside Ray's actor: a helper, which has started the agent before it answers anything."""

    def __init__(self, request: bytes) -> None:
        from monarch_nb.job.helper import Helper

        self._helper = Helper()
        self._job = json_decoder(Ask).decode(request)
        self._helper.answer(self._job)
        threading.Thread(target=self._end_with_agent, name="monarch-keeper", daemon=True).start()

    def _end_with_agent(self) -> None:
        """An agent that ends by itself gives its place in the cluster back, the last one those of all."""
        while True:
            time.sleep(_PULSE_S)
            seen = self._helper.answer(Ask(do="look", job=self._job.job)).seen.values()
            if all(one.state == "ended" and UNUSED_WORDS in one.story for one in seen):
                _leave_ray()

    def ask(self, request: bytes) -> bytes:
        """The helper's answer."""
        return msgspec.json.encode(self._helper.answer(json_decoder(Ask).decode(request)))


def _leave_ray() -> None:
    """Ends this actor of Ray's, and what its job asked for if it is the last one."""
    import ray

    context = ray.get_runtime_context()
    others = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    name = context.get_actor_name() or ""
    job = name[:_JOB_ID]
    if not any(other.startswith(job) and other != name for other in others):
        try:
            ray.util.remove_placement_group(ray.util.get_placement_group(job))
        except ValueError:  # it was killed meanwhile
            pass
    os._exit(0)


class Ray(JobAdapter):
    """The ids of agents are the names of Ray's actors, which outlive this process."""

    watch_s = 2.0
    keep_s = 3600.0  # one may have waited for these nodes

    def start(self, wanted: AgentsWanted) -> Agents:
        """Asks for a placement group, and an actor in each bundle of it. Raises EngineError."""
        ray, options = _ray(wanted.options), wanted.options
        job = Running(wanted.job, str(wanted.folder), {name: Agent(f"{wanted.job}-{name}") for name in wanted.names},
                      dict(options))  # fmt: skip
        bundles = []
        for name in wanted.names:
            role = wanted.role(name)
            bundles.append({"CPU": float(role.cpus or 1), **({"GPU": float(role.gpus)} if role.gpus else {})})
        key = wanted.secret.read_text()
        try:
            group = ray.util.placement_group(
                bundles, strategy=options.get("strategy", "STRICT_SPREAD"), name=wanted.job, lifetime="detached"
            )
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            for number, name in enumerate(wanted.names):
                ask = Ask(do="start", job=f"{wanted.job}-{name.replace('_', '-')}", key=key, bound=True,
                          keep_s=wanted.keep_s, names={name: wanted.environment_of(name)})  # fmt: skip
                ray.remote(Keeper).options(
                    name=job.agents[name].id, namespace=_SPACE, lifetime="detached", num_cpus=bundles[number]["CPU"],
                    num_gpus=bundles[number].get("GPU", 0), max_restarts=0,
                    scheduling_strategy=place(group, placement_group_bundle_index=number),
                ).remote(msgspec.json.encode(ask))  # fmt: skip
        except BaseException:  # an interrupt too
            self.kill(job)
            raise
        return job.agents

    def look(self, job: Running) -> Mapping[str, Seen]:
        """How Ray's actors are, and the agents beside them."""
        ray = _ray(job.options)
        asked, seen = {}, {}
        for name, agent in job.agents.items():
            try:
                keeper = ray.get_actor(agent.id, namespace=_SPACE)
                ask = Ask(do="look", job=f"{job.job}-{name.replace('_', '-')}")
                asked[name] = keeper.ask.remote(msgspec.json.encode(ask))
            except ValueError:
                seen[name] = Seen("ended", "is gone: Ray knows its actor no more")
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        for name, answer in asked.items():
            if answer not in ready:
                seen[name] = Seen("waiting", "waits for a node of Ray's with what it needs, or its Ray actor is busy")
                continue
            try:
                told = json_decoder(Answer).decode(ray.get(answer))
                seen[name] = told.seen.get(name, Seen("ended", told.error or "did not start"))
            except ray.exceptions.RayError as error:
                words = str(error).strip().splitlines()
                seen[name] = Seen("ended", f"is gone: {words[0] if words else type(error).__name__}")
        return seen

    def kill(self, job: Running) -> None:
        """Ends the agents, Ray's actors and the placement group."""
        ray = _ray(job.options)
        keepers, ended = [], []
        for name, agent in job.agents.items():
            try:
                keepers.append(ray.get_actor(agent.id, namespace=_SPACE))
            except ValueError:
                continue
            ask = Ask(do="kill", job=f"{job.job}-{name.replace('_', '-')}")
            ended.append(keepers[-1].ask.remote(msgspec.json.encode(ask)))
        group = ray.util.placement_group_table().values()
        if any(each["name"] == job.job and each["state"] == "PENDING" for each in group):
            ended.clear()  # its actors have started nothing, and will not answer
        if ended:
            ray.wait(ended, num_returns=len(ended), timeout=_KILL_S)
        for keeper in keepers:
            ray.kill(keeper)
        try:
            ray.util.remove_placement_group(ray.util.get_placement_group(job.job))
        except ValueError:
            return

    def running(self) -> Mapping[str, Running]:
        """Those whose folders this machine has."""
        return living_jobs(self, "ray")


def _ray(options: Mapping[str, Any]) -> Any:
    """Ray's client, connected. Raises EngineError."""
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
