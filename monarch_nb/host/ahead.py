"""The host agent of a notebook kernel, started while the kernel still imports the library."""

import os

from msgspec import Struct

from monarch_nb.host.launch import AgentStartError, ComingAgent, begin_agent
from monarch_nb.host.procs.environment import PRELOAD, read_at_load
from monarch_nb.settings import TRAVELS_IN, settings

BegunWith = tuple[str, dict[str, str]]


class Ahead(Struct, frozen=True):
    """An agent that has not been requested yet, and the environment it was started in."""

    agent: ComingAgent
    environ: dict[str, str]
    begun_with: BegunWith


_coming: list[Ahead] = []


def begun_with() -> BegunWith:
    """Returns what a host agent keeps from its start: settings, and variables that are read when libraries load."""
    environ = {name: value for name, value in os.environ.items() if name == PRELOAD or read_at_load(name)}
    return settings.to_send(), environ


def agent_environment() -> dict[str, str]:
    """Returns the environment of an agent started now."""
    return {**os.environ, TRAVELS_IN: settings.to_send()}


def start_ahead() -> None:
    """Starts the agent of the controller that this process is about to become, unless `host_prestart` is off.

    Does not block, and raises nothing: the first request for an agent reports errors.
    """
    if _coming or not settings.host_prestart:
        return
    try:
        agent = begin_agent(env=agent_environment(), lease_s=settings.mesh_orphan_timeout)
    except (AgentStartError, OSError):
        return
    _coming.append(Ahead(agent, dict(os.environ), begun_with()))


def take_ahead() -> Ahead | None:
    """Returns the agent that is starting, for the new controller; once."""
    return _coming.pop() if _coming else None
