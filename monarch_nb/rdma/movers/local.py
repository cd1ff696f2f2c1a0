"""For buffers of this process: copies bytes from address to address."""

from collections.abc import Sequence

from monarch_nb.rdma.errors import BufferDroppedError
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.memory import move_bytes
from monarch_nb.rdma.movers.mover import CannotReachError, Move
from monarch_nb.rdma.regions import Regions

_PIECE = 64 << 20  # bytes copied between two checks of the limit


class LocalMover:
    """Moves bytes within this process."""

    alone = True

    def __init__(self, process: str, regions: Regions) -> None:
        self._process = process
        self._regions = regions

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Reads buffers into other memory of this process."""
        self._copy(moves, limit, into=False)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Writes other memory of this process into buffers."""
        self._copy(moves, limit, into=True)

    def close(self) -> None:
        """Does nothing: there are no resources."""

    def _copy(self, moves: Sequence[Move], limit: Limit, *, into: bool) -> None:
        for move in moves:
            if move.handle.process != self._process:
                raise CannotReachError  # without a text, since another process is no surprise
            try:
                with self._regions.use(move.handle.number, move.handle.secret, write=into) as memory:
                    local = move.local
                    for start in range(0, local.size, _PIECE):
                        limit.remaining()
                        size = min(_PIECE, local.size - start)
                        offered, part = memory.part(move.offset + start, size), local.part(start, size)
                        move_bytes(*((offered, part) if into else (part, offered)))
            except LookupError as error:
                raise BufferDroppedError(f"{move.handle} was dropped; its owner offers it no longer") from error
