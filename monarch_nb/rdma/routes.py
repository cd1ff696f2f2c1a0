"""The movers in order of preference, and the choice of one for each process: the first that works, and why earlier ones
do not."""

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_nb._package import more
from monarch_nb.rdma.errors import Limit, RDMAError
from monarch_nb.rdma.memory import memory_of
from monarch_nb.rdma.movers import CannotReachError, Move, Mover, is_of_host, is_to_host
from monarch_nb.rdma.movers.cross_memory import CrossMemory, LocalMover
from monarch_nb.rdma.movers.gpu import GpuMover
from monarch_nb.rdma.movers.messages import Messages
from monarch_nb.rdma.movers.nixl import Nixl
from monarch_nb.rdma.movers.streams import Streams
from monarch_nb.settings import settings

if TYPE_CHECKING:
    from monarch_nb.rdma.service import RdmaService

_GPU_MOVERS = frozenset({"local", "gpu"})  # movers that take memory of this process on a GPU directly
_PIECE = 16 << 20  # bytes staged at a time
SOCKETS = frozenset({"streams", "messages"})  # the movers that go through sockets


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


@dataclass(slots=True)
class Route:
    """The mover between this process and another, with counts of transfers."""

    process: str
    mover: str = ""  # "" before the first transfer
    allowed: tuple[str, ...] = ()  # the movers allowed at its choice
    reasons: list[str] = field(default_factory=list)  # why better movers do not serve
    read: int = 0  # bytes read from the process
    written: int = 0  # bytes written to it
    transfers: int = 0
    seconds: float = 0.0  # spent in them

    def __str__(self) -> str:
        return f"{self.process} by {self.mover or 'nothing yet'}"


class RDMATcpFallbackWarning(UserWarning):
    """Memory is moved through sockets, since no faster mover reaches its process. Issued once per process."""


class RDMAReadTransferWarning(UserWarning):
    """torchmonarch's warning about a slow read. Not issued here: `monarch.rdma.routes()` lists the movers used."""


class RDMAWriteTransferWarning(UserWarning):
    """torchmonarch's warning about a slow write. Not issued here: `monarch.rdma.routes()` lists the movers used."""


class MoverRoutes:
    """The routes of one process. `movers` are in order of preference; `allowed` gives the names allowed now."""

    def __init__(
        self,
        movers: Mapping[str, Mover],
        allowed: Callable[[], tuple[str, ...]],
        moved: "Callable[[Route, int, float, bool], None]" = lambda route, size, seconds, write: None,
    ) -> None:
        self._movers = movers
        self._moved = moved  # called after each transfer
        self._allowed = allowed
        self._lock = threading.Lock()
        self._routes: dict[str, Route] = {}
        self._warned = False

    def all(self) -> list[Route]:
        """Returns the present routes, by process."""
        with self._lock:
            return [self._routes[process] for process in sorted(self._routes)]

    def of(self, process: str) -> Route:
        """Returns the route to a process, created if necessary."""
        route = self._routes.get(process)
        if route is None:
            with self._lock:
                route = self._routes.setdefault(process, Route(process))
        return route

    def quick(self, process: str, *, on_device: bool = False) -> bool:
        """Returns whether transfers need no other thread, so that a small one is faster on the calling thread.

        `on_device` is for transfers from GPU to GPU.
        """
        route = self.of(process)
        if on_device and route.mover not in _GPU_MOVERS:
            return False
        mover = self._movers.get(route.mover)
        return mover is not None and mover.alone and route.allowed == self._allowed()

    def transfer(self, moves: Sequence[Move], limit: Limit, *, write: bool, quick: bool = False) -> None:
        """Moves bytes from or to buffers of one process, for which `quick` has just returned True, if that is known.

        Blocks; raises what movers raise, and RDMAError.
        """
        route = self.of(moves[0].handle.process)
        begun = time.perf_counter()
        allowed = route.allowed if quick else self._allowed()
        for some in _by_device(moves):
            self._move(route, allowed, some, limit, write)
        size, seconds = sum(move.local.size for move in moves), time.perf_counter() - begun
        with self._lock:
            route.transfers += 1
            route.seconds += seconds
            if write:
                route.written += size
            else:
                route.read += size
        self._moved(route, size, seconds, write)

    def _move(self, route: Route, allowed: tuple[str, ...], moves: Sequence[Move], limit: Limit, write: bool) -> None:
        current = route.mover if route.allowed == allowed else ""
        reasons: list[str] = []
        for name in (*([current] if current else ()), *allowed):
            mover = self._movers[name]
            try:
                move = mover.write if write else mover.read
                if name in _GPU_MOVERS or is_to_host(moves):
                    move(moves, limit)
                else:
                    _staged(move, moves, limit, write=write)
            except CannotReachError as error:
                if str(error):
                    reasons.append(f"{name}: {error}")
                continue
            if current != name:
                route.mover, route.allowed, route.reasons = name, allowed, reasons
                self._warn(route)
            return
        reason = "; ".join(dict.fromkeys(reasons)) or "no mover is allowed"
        raise RDMAError(
            f"{moves[0].handle} cannot be reached by any mover that is allowed here ({', '.join(allowed) or 'none'}): "
            f"{reason}. monarch.config.configure(rdma_movers=...) says which are"
            + more("manual/data.md#which-way-do-my-bytes-go")
        )

    def _warn(self, route: Route) -> None:
        """Warns once per process that bytes go by sockets, except between machines without RDMA hardware."""
        if route.mover in SOCKETS and route.reasons and not self._warned:
            self._warned = True
            warnings.warn(
                f"memory of {route.process} is moved by {route.mover}, through sockets ({'; '.join(route.reasons)})",
                RDMATcpFallbackWarning,
                stacklevel=2,
            )


def _by_device(moves: Sequence[Move]) -> Sequence[Sequence[Move]]:
    """Separates transfers of buffers on the host from those of buffers on GPUs, which other movers serve."""
    if is_of_host(moves):
        return (moves,)
    parts = ([move for move in moves if (move.handle.device is not None) is on_device] for on_device in (False, True))
    return [part for part in parts if part]


def _staged(
    carry: Callable[[Sequence[Move], Limit], None], moves: Sequence[Move], limit: Limit, *, write: bool
) -> None:
    """Transfers memory that may lie on a GPU piece by piece, by a mover that supports memory of the host only."""
    for move in moves:
        for start in range(0, move.local.size, _PIECE):
            size = min(_PIECE, move.local.size - start)
            with move.local.part(start, size).on_host(write=not write) as room:
                carry([Move(move.handle, move.offset + start, memory_of(room))], limit)
