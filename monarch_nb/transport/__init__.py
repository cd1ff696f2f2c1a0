"""Sockets, keys, memory files and threads: carries out the decisions of `routing`. Nothing here unpickles."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names
from monarch_nb.transport.errors import (
    DescriptorLimitError,
    SharedMemoryError,
    TransportError,
    TrustError,
    UnreachableError,
    descriptors_for,
    is_descriptor_limit,
    lost_here,
    room_for,
)
from monarch_nb.transport.interrupts import (
    AGAIN_S,
    calm,
    held_back,
    inside,
    interrupt_program,
    must_not_wait,
    raised_by_handler,
    signal_again,
    take_back,
    throw_into,
    uninterrupted,
)
from monarch_nb.transport.parcel import Body, Parcel, reason_of, reason_parcel
from monarch_nb.transport.protocols import Clock, ThreadClock, Transport

if TYPE_CHECKING:
    from monarch_nb.transport.keys import Keys, KeyStep, require_keys
    from monarch_nb.transport.node import Node
    from monarch_nb.transport.tcp.endpoints import Limits, Unready, bound_at, greet, knock, split

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
    "inside",
    "interrupt_program",
    "is_descriptor_limit",
    "knock",
    "lost_here",
    "must_not_wait",
    "raised_by_handler",
    "reason_of",
    "reason_parcel",
    "require_keys",
    "room_for",
    "signal_again",
    "split",
    "take_back",
    "throw_into",
    "uninterrupted",
]

__getattr__ = lazy_names(
    __name__,
    {
        "keys": ("KeyStep", "Keys", "require_keys"),
        "node": ("Node",),
        "tcp.endpoints": ("Limits", "Unready", "bound_at", "greet", "knock", "split"),
    },
)
