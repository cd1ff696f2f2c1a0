"""Jobs without an engine: the host of the controller itself."""

from collections.abc import Mapping

from monarch_nb.job.adapter import HERE, Agent, Agents, AgentsWanted, JobAdapter, Running, Seen


class OwnHost(JobAdapter):
    """The host of this process, whose agent is there already, or is started when it is first needed."""

    keep_s = None  # it ends with this process
    watch_s = 0.0

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts nothing. Raises ValueError for meshes of several hosts."""
        if any(not name.endswith("_0") for name in wanted.names):
            raise ValueError("a local job has this host alone, one for each mesh; jobs of kind 'process' have several")
        return {name: Agent("", HERE) for name in wanted.names}

    def look(self, job: Running) -> Mapping[str, Seen]:
        """They run, as this process does."""
        return {name: Seen("running", joins=(HERE,)) for name in job.agents}

    def kill(self, job: Running) -> None:
        """Ends nothing: the agent ends with this process."""

    def running(self) -> Mapping[str, Running]:
        """None that others could use."""
        return {}
