"""Sockets, keys, memory files and threads: carries out the decisions of `routing`. Nothing here unpickles."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names
from monarch_nb.transport.clock import ThreadClock
from monarch_nb.transport.errors import (
    DescriptorLimitError,
    SharedMemoryError,
    TransportError,
    TrustError,
    UnreachableError,
    descriptors_for,
    is_descriptor_limit,
    lost_here,
)
from monarch_nb.transport.interrupts import (
    AGAIN_S,
    calm,
    held_back,
    interrupt_program,
    take_back,
    throw_into,
    uninterrupted,
)
from monarch_nb.transport.parcel import Body, Parcel
from monarch_nb.transport.protocols import Clock, Transport

if TYPE_CHECKING:
    from monarch_nb.transport.keys import Keys, KeyStep, require_keys
    from monarch_nb.transport.node import Node
    from monarch_nb.transport.tcp.greeting import Unready, greet, knock, split
    from monarch_nb.transport.tcp.sockets import Limits, bound_at
from monarch_nb.transport.parcel import reason_of, reason_parcel

__all__ = [
    "AGAIN_S",
    "Body",
    "Clock",
    "DescriptorLimitError",
    "KeyStep",
    "Keys",
    "Limits",
    "Node",
    "Parcel",
    "SharedMemoryError",
    "ThreadClock",
    "Transport",
    "TransportError",
    "TrustError",
    "UnreachableError",
    "Unready",
    "bound_at",
    "calm",
    "descriptors_for",
    "greet",
    "held_back",
    "interrupt_program",
    "is_descriptor_limit",
    "knock",
    "lost_here",
    "reason_of",
    "reason_parcel",
    "require_keys",
    "split",
    "take_back",
    "throw_into",
    "uninterrupted",
]

__getattr__ = lazy_names(
    __name__,
    {
        "tcp.greeting": ("Unready", "greet", "knock", "split"),
        "keys": ("KeyStep", "Keys", "require_keys"),
        "node": ("Node",),
        "tcp.sockets": ("Limits", "bound_at"),
    },
)
