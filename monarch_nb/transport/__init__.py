"""Sockets, keys, memory files and threads: carries out what `routing` decides. Nothing here unpickles."""

from monarch_nb.transport.errors import DescriptorLimitError, SharedMemoryError, TransportError, TrustError
from monarch_nb.transport.interrupts import throw_into
from monarch_nb.transport.node import Node
from monarch_nb.transport.parcel import Parcel

__all__ = [
    "DescriptorLimitError",
    "Node",
    "Parcel",
    "SharedMemoryError",
    "TransportError",
    "TrustError",
    "throw_into",
]
