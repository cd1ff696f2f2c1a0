"""For tests: actors without processes; and of the engine itself, a clock that is told the time, a network in memory."""

from monarch_nb.mesh.inline import in_process_host, kill
from monarch_nb.transport.memory import MemoryNetwork, MemoryNode, NetworkFaults, VirtualClock

__all__ = ["MemoryNetwork", "MemoryNode", "NetworkFaults", "VirtualClock", "in_process_host", "kill"]
