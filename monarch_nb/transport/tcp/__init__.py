"""The transport between hosts: ZeroMQ on TCP, with its access control. ZeroMQ is imported at the first use of it."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.transport.tcp.listener import TcpListener
    from monarch_nb.transport.tcp.sockets import (
        DOWN,
        REFUSED,
        UP,
        DialledChannel,
        InboundChannel,
        Monitor,
        connect,
        dial,
        new_context,
    )

__all__ = [
    "DOWN", "REFUSED", "UP", "DialledChannel", "InboundChannel", "Monitor", "TcpListener", "connect", "dial",
    "new_context",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "listener": ("TcpListener",),
        "sockets": (
            "DOWN",
            "REFUSED",
            "UP",
            "DialledChannel",
            "InboundChannel",
            "Monitor",
            "connect",
            "dial",
            "new_context",
        ),
    },
)
