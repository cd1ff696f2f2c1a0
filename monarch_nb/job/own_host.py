"""Jobs without an engine: the host of the controller itself."""

from collections.abc import Mapping

from monarch_nb.job.adapter import Agent, Agents, AgentsWanted, Running


class OwnHost:
    """The host of this process, whose agent is there already, or is started when it is first needed."""

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts nothing. Raises ValueError for meshes of several hosts."""
        if any(not name.endswith("_0") for name in wanted.names):
            raise ValueError("a local job has this host alone, one for each mesh; jobs of kind 'process' have several")
        return {name: Agent("", "") for name in wanted.names}

    def ended(self, agents: Agents) -> Mapping[str, str]:
        """None: this process runs."""
        return {}

    def kill(self, agents: Agents) -> None:
        """Ends nothing: the agent ends with this process."""

    def running(self) -> Mapping[str, Running]:
        """None that others could use."""
        return {}
