"""The movers that there are, the best first: one line each."""

from collections.abc import Callable
from typing import Any, Protocol

from monarch_nb.rdma.fabric import Fabric
from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.lessor import Lessor
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.movers import Mover
from monarch_nb.rdma.movers.cross_memory import CrossMemory
from monarch_nb.rdma.movers.local import Local
from monarch_nb.rdma.movers.messages import Messages
from monarch_nb.rdma.movers.nixl import Nixl
from monarch_nb.rdma.movers.streams import Streams
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.verbs import Listening, Outcome
from monarch_nb.settings import settings
from monarch_nb.wire import Verb

__all__ = ["LADDER", "End", "movers_named", "register"]


class End(Protocol):
    """What a mover may ask of the process that it is in."""

    address: str
    regions: Regions
    fabric: Fabric
    lessor: Lessor

    def ask(self, handle: Handle, verb: Verb[Any, Outcome], question: Any) -> Callable[[Limit], Outcome]:
        """Sends a request to the owner of a buffer; the result waits for the answer."""

    def dial(self, handle: Handle, limit: Limit) -> Listening:
        """Where streams to the owner of a buffer are to be opened."""


def movers_named() -> tuple[str, ...]:
    """The movers that the settings name; none where all may be used."""
    return tuple(name.strip() for name in settings.rdma_movers.split(",") if name.strip())


LADDER: dict[str, Callable[[End], Mover]] = {
    "local": lambda end: Local(end.address, end.regions),
    "cross-memory": lambda end: CrossMemory(),
    "nixl": lambda end: Nixl(end.fabric, end.lessor, lambda: "nixl" in movers_named()),
    "streams": lambda end: Streams(end.dial, lambda: max(1, settings.rdma_tcp_fallback_parallelism)),
    "messages": lambda end: Messages(end.ask),
}


def register(name: str, make: Callable[[End], Mover], *, before: str = "streams") -> None:
    """Adds a mover for processes that begin to use the data plane from now on, one rung above another.

    Raises ValueError for a name that is taken, or a `before` that is none.
    """
    if name in LADDER or before not in LADDER:
        raise ValueError(f"there is a mover {name!r} already" if name in LADDER else f"there is no mover {before!r}")
    rungs = list(LADDER.items())
    rungs.insert(list(LADDER).index(before), (name, make))
    LADDER.clear()
    LADDER.update(rungs)
