"""Hosts: the agent process that starts, watches and ends the procs of one machine."""

from monarch_nb.host.folders import find_run_folder, new_host_id, run_folder_for
from monarch_nb.host.launch import AgentHandle, AgentStartError, begin_agent
from monarch_nb.host.protocol import ProcSpec

__all__ = [
    "AgentHandle", "AgentStartError", "ProcSpec", "begin_agent", "find_run_folder", "new_host_id", "run_folder_for",
]  # fmt: skip
