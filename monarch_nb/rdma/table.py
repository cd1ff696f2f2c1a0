"""Which way bytes take, as a table."""

from monarch_nb.mesh.text_table import text_table
from monarch_nb.rdma.buffer import service
from monarch_nb.rdma.routes import Route

__all__ = ["RouteTable", "routes"]

_HEADS = ("process", "mover", "read", "written", "transfers", "bytes/s", "why not a better one")


class RouteTable(tuple[Route, ...]):
    """The routes of this process: a tuple of them that shows itself as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "<no transfers yet: RDMABuffer.read_into and write_from make routes>"
        return text_table([_HEADS, *map(_row, self)])


def _row(route: Route) -> tuple[str, ...]:
    moved = route.read + route.written
    speed = f"{_bytes(round(moved / route.seconds))}/s" if route.seconds else ""
    return (
        route.process,
        route.mover,
        _bytes(route.read),
        _bytes(route.written),
        f"{route.transfers:,}",
        speed,
        "; ".join(route.reasons),
    )


def _bytes(count: int) -> str:
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def routes() -> RouteTable:
    """How bytes move between this process and each that it has read from or written to. Does not block."""
    return RouteTable(service().routes.all())
