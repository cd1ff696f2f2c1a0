"""The movers, in order of preference."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_nb.rdma.movers import Mover
from monarch_nb.rdma.movers.cross_memory import CrossMemory
from monarch_nb.rdma.movers.gpu import GpuMover
from monarch_nb.rdma.movers.local import LocalMover
from monarch_nb.rdma.movers.messages import Messages
from monarch_nb.rdma.movers.nixl import Nixl
from monarch_nb.rdma.movers.streams import Streams
from monarch_nb.settings import settings

if TYPE_CHECKING:
    from monarch_nb.rdma.service import RdmaService


def movers_named() -> tuple[str, ...]:
    """Returns the movers that the settings name; empty if all are allowed."""
    return tuple(name.strip() for name in settings.rdma_movers.split(",") if name.strip())


MOVERS: dict[str, Callable[["RdmaService"], Mover]] = {
    "local": lambda end: LocalMover(end.address, end.regions),
    "cross-memory": lambda end: CrossMemory(),
    "gpu": lambda end: GpuMover(),
    "nixl": lambda end: Nixl(end.fabric, end.lease_client, lambda: "nixl" in movers_named()),
    "streams": lambda end: Streams(end.dial, lambda: max(1, settings.rdma_tcp_fallback_parallelism)),
    "messages": lambda end: Messages(end.ask),
}


def register(name: str, make: Callable[["RdmaService"], Mover], *, before: str = "streams") -> None:
    """Adds a mover that is preferred to `before`, for processes that first use the data plane later.

    Raises ValueError if the name is taken or `before` is not a mover.
    """
    if name in MOVERS or before not in MOVERS:
        raise ValueError(f"there is a mover {name!r} already" if name in MOVERS else f"there is no mover {before!r}")
    ordered = list(MOVERS.items())
    ordered.insert(list(MOVERS).index(before), (name, make))
    MOVERS.clear()
    MOVERS.update(ordered)
