"""For tests of programs and of the engine: a clock that is told the time, a network in memory."""

from monarch_nb.transport.memory import MemoryNetwork, MemoryNode, NetworkFaults, VirtualClock

__all__ = ["MemoryNetwork", "MemoryNode", "NetworkFaults", "VirtualClock"]
