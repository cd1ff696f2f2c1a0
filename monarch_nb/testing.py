"""Test helpers: actors without processes, clusters without hosts; a clock that is set by hand, a network in memory."""

from monarch_nb.engine.cluster import Cluster, cluster
from monarch_nb.engine.in_process import in_process_host, kill
from monarch_nb.transport.memory.clock import VirtualClock
from monarch_nb.transport.memory.network import MemoryNetwork, MemoryNode, NetworkFaults

__all__ = [
    "Cluster",
    "MemoryNetwork",
    "MemoryNode",
    "NetworkFaults",
    "VirtualClock",
    "cluster",
    "in_process_host",
    "kill",
]
