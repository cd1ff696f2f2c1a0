"""Routes and transfers as tables."""

import time
from collections import Counter
from typing import TypedDict

from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.rdma.buffer import service
from monarch_nb.rdma.routes import Route
from monarch_nb.runtime import Runtime, current_runtime
from monarch_nb.shape import Point
from monarch_nb.wire import parse_address, size_text, text_table

MOVED = ("source", "target", "mover", "moved", "transfers", "rate")
OFFERED = ("registered memory of", "buffers", "bytes")
NOTHING = "no transfers between processes yet, and no registered memory: see monarch.rdma"
_HEADS = ("process", "mover", "read", "written", "transfers", "bytes/s", "why not a better one")


# The known transfers between two processes by a mover, or the memory that a process offers (no mover).
TransferRecord = TypedDict(
    "TransferRecord",
    {"from": str, "to": str, "mover": str, "bytes": int, "transfers": int, "rate": int, "regions": int},
    total=False,
)


class RouteTable(tuple[Route, ...]):
    """The routes of this process: a tuple that displays itself as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "<no transfers yet: RDMABuffer.read_into and write_from make routes>"
        return text_table([_HEADS, *map(_row, self)])


def _row(route: Route) -> tuple[str, ...]:
    moved = route.read + route.written
    speed = f"{size_text(round(moved / route.seconds))}/s" if route.seconds else ""
    return (
        route.process,
        route.mover,
        size_text(route.read),
        size_text(route.written),
        f"{route.transfers:,}",
        speed,
        "; ".join(route.reasons),
    )


class TransferTable:
    """Transfers between the processes of a cluster, largest first, and the memory that each process offers."""

    def __init__(self, runtime: Runtime) -> None:
        traffic, now = service().traffic_reporter.known(), time.time()
        names = _names(
            runtime, {address for flow in traffic.flows.values() for address in flow.key[:2]} | {*traffic.offered}
        )
        flows = sorted(traffic.flows.values(), key=lambda flow: -flow.size)
        moved: dict[str, TransferRecord] = {
            "|".join(flow.key): {
                "from": names[flow.source],
                "to": names[flow.target],
                "mover": flow.mover,
                "bytes": flow.size,
                "transfers": flow.transfers,
                "rate": round(traffic.rate(flow, now)),
            }
            for flow in flows
        }
        offered: dict[str, TransferRecord] = {
            process: {"from": names[process], "mover": "", "regions": offer.regions, "bytes": offer.size}
            for process, offer in sorted(traffic.offered.items())
        }
        self.records = moved | offered

    @property
    def moved(self) -> list[tuple[str, ...]]:
        """A row for each pair of processes and mover, as texts."""
        return [
            (
                record["from"],
                record["to"],
                record["mover"],
                size_text(record["bytes"]),
                f"{record['transfers']:,}",
                f"{size_text(record['rate'])}/s" if record["rate"] else "",
            )
            for record in self.records.values()
            if record["mover"]
        ]

    @property
    def offered(self) -> list[tuple[str, ...]]:
        """A row for each process that offers memory."""
        return [
            (record["from"], f"{record['regions']:,}", size_text(record["bytes"]))
            for record in self.records.values()
            if not record["mover"]
        ]

    def __repr__(self) -> str:
        parts = []
        if self.moved:
            parts.append(text_table([MOVED, *self.moved]))
        if self.offered:
            parts.append(text_table([OFFERED, *self.offered]))
        return "\n\n".join(parts) or NOTHING


def _names(runtime: Runtime, addresses: set[str]) -> dict[str, str]:
    """Display names of processes, with addresses where names are ambiguous."""
    names = {address: process_name(runtime, address) for address in addresses}
    counts = Counter(names.values())
    return {address: name if counts[name] < 2 else f"{name} ({address})" for address, name in names.items()}


def process_name(runtime: Runtime, address: str) -> str:
    """Display name of a process: its mesh and point, or "controller"."""
    if address == runtime.address:
        return "controller" if not runtime.part(MeshRegistry).started_by else "this process"
    uid, rank, _ = parse_address(address).place
    state = runtime.meshes.get(uid)
    if state is None:
        return address
    indices = {base: index for index, base in enumerate(state.region.ranks())}
    if rank not in indices or not state.region.labels:
        return state.name
    point = Point(indices[rank], state.region.extent)
    return f"{state.name} {' '.join(f'{label}={point[label]}' for label in state.region.labels)}"


def transfers() -> TransferTable:
    """Returns the transfers between all processes of the cluster, by mover; in the process that spawned them.

    Processes report transfers twice a second. Does not block.
    """
    return TransferTable(current_runtime())


def routes() -> RouteTable:
    """Returns the routes from this process to those that it has read from or written to. Does not block."""
    return RouteTable(service().routes.all())
