"""The host agent of a notebook kernel, on its way while the kernel still imports the library: the two take as long."""

import os

from msgspec import Struct

from monarch_nb.host.launch import AgentStartError, ComingAgent, begin_agent
from monarch_nb.host.procs.environment import PRELOAD, read_at_load
from monarch_nb.settings import TRAVELS_IN, settings

BegunWith = tuple[str, dict[str, str]]


class Ahead(Struct, frozen=True):
    """An agent nobody has asked for yet, and the environment it was started in."""

    agent: ComingAgent
    environ: dict[str, str]
    begun_with: BegunWith


_coming: list[Ahead] = []


def begun_with() -> BegunWith:
    """What a host agent takes from this process for good: the settings, and what libraries read when they load."""
    environ = {name: value for name, value in os.environ.items() if name == PRELOAD or read_at_load(name)}
    return settings.to_send(), environ


def agent_environment() -> dict[str, str]:
    """What an agent is started with."""
    return {**os.environ, TRAVELS_IN: settings.to_send()}


def start_ahead() -> None:
    """Start the agent of the controller that this process is about to become, unless `host_prestart` is off.

    Does not block, and raises nothing: where it does not work, who needs an agent is told.
    """
    if _coming or not settings.host_prestart:
        return
    try:
        agent = begin_agent(env=agent_environment(), lease_s=settings.mesh_orphan_timeout)
    except (AgentStartError, OSError):
        return
    _coming.append(Ahead(agent, dict(os.environ), begun_with()))


def take_ahead() -> Ahead | None:
    """The agent that is on its way, for whoever becomes the controller; once."""
    return _coming.pop() if _coming else None
