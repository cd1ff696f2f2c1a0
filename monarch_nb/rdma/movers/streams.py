"""To other machines: authenticated TCP streams straight to the owner's memory, several in parallel for large pieces."""

import contextlib
import functools
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from monarch_nb.rdma.errors import BufferDroppedError, OwnerLostError, owner_lost
from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.movers.mover import CannotReachError, Move
from monarch_nb.rdma.side_by_side import side_by_side
from monarch_nb.rdma.verbs import Listening
from monarch_nb.rdma.wire import GO, HEAD, READ, WRITE, StreamError, greet, receive, receive_into

__all__ = ["Streams"]

_DIAL_S = 2.0  # for each address of the owner
_PARALLEL = 16 << 20  # bytes; from here on a move is divided among several streams
_IDLE = 8  # streams to one owner that are kept for later
_PIECE = 4 << 20  # bytes between two looks at the limit
_CUT = (StreamError, ConnectionError, ssl.SSLError)


class Streams:
    """For buffers of processes whose machine can be dialled."""

    alone = False

    def __init__(self, dial: Callable[[Handle, Limit], Listening], parallel: Callable[[], int]) -> None:
        self._dial = dial  # asks the owner where it listens
        self._parallel = parallel
        self._lock = threading.Lock()
        self._listening: dict[str, Listening] = {}
        self._idle: dict[str, list[socket.socket]] = {}

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """From the owner's memory into that of this process."""
        for move in moves:
            self._move(move, READ, limit)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """From memory of this process into the owner's."""
        for move in moves:
            self._move(move, WRITE, limit)

    def close(self) -> None:
        """Ends all streams."""
        with self._lock:
            idle, self._idle = self._idle, {}
            self._listening.clear()
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def forget(self, process: str) -> None:
        """A process has ended: its streams have, too."""
        with self._lock:
            self._listening.pop(process, None)
            connections = self._idle.pop(process, [])
        for connection in connections:
            connection.close()

    # -- one move ---------------------------------------------------------------------------------------------------

    def _move(self, move: Move, what: int, limit: Limit) -> None:
        count = self._parallel() if move.local.size >= _PARALLEL else 1
        if count < 2:
            self._part(move, what, limit)
            return
        step = -(-move.local.size // count)
        parts = [
            Move(move.handle, move.offset + start, move.local.part(start, min(step, move.local.size - start)))
            for start in range(0, move.local.size, step)
        ]
        side_by_side([functools.partial(self._part, part, what, limit) for part in parts])

    def _part(self, move: Move, what: int, limit: Limit) -> None:
        """On one stream. One that was kept and has died meanwhile is replaced, once."""
        handle = move.handle
        connection, kept = self._stream(handle, limit)
        whole = False
        try:
            try:
                self._exchange(connection, move, what, limit)
            except _CUT:
                if not kept:
                    raise
                connection.close()
                connection = self._open(handle, limit)
                self._exchange(connection, move, what, limit)
            whole = True
        except _CUT as error:
            self.forget(handle.process)
            raise self._story(handle, limit, error) from error
        except BufferDroppedError:
            whole = True
            raise
        finally:
            if whole:
                self._keep(handle.process, connection)
            else:
                connection.close()

    def _exchange(self, connection: socket.socket, move: Move, what: int, limit: Limit) -> None:
        handle, view = move.handle, move.local.view()
        connection.settimeout(limit.left())
        try:
            connection.sendall(HEAD.pack(what, handle.number, handle.secret, move.offset, len(view)))
            if receive(connection, 1) != GO:
                raise BufferDroppedError(f"{handle} was dropped; its owner offers it no longer")
            for start in range(0, len(view), _PIECE):
                connection.settimeout(limit.left())
                piece = view[start : start + _PIECE]
                if what == READ:
                    receive_into(connection, piece)
                else:
                    connection.sendall(piece)
            if what == WRITE:
                connection.settimeout(limit.left())
                receive(connection, 1)
        except TimeoutError:
            limit.left()  # says it better
            raise

    def _story(self, handle: Handle, limit: Limit, error: BaseException) -> Exception:
        """Why a stream was cut in the middle: the buffer was dropped meanwhile, or its process is gone."""
        with contextlib.suppress(StreamError, CannotReachError, OSError):
            probe = self._open(handle, limit)
            with probe:
                probe.settimeout(limit.left())
                probe.sendall(HEAD.pack(READ, handle.number, handle.secret, 0, 0))
                if receive(probe, 1) != GO:
                    return BufferDroppedError(f"{handle} was dropped in the middle of the transfer")
                return OwnerLostError(f"{handle}: the stream to its process was cut ({error}); try again")
        return owner_lost(handle, f"the stream to its process was cut ({error}): it has ended or its host is cut off")

    # -- streams ----------------------------------------------------------------------------------------------------

    def _stream(self, handle: Handle, limit: Limit) -> tuple[socket.socket, bool]:
        with self._lock:
            idle = self._idle.get(handle.process)
            if idle:
                return idle.pop(), True
        return self._open(handle, limit), False

    def _keep(self, process: str, connection: socket.socket) -> None:
        with self._lock:
            idle = self._idle.setdefault(process, [])
            if len(idle) < _IDLE:
                idle.append(connection)
                return
        connection.close()

    def _sweep(self) -> None:
        """Closes kept streams whose other end is gone: nothing is ever sent on one that nobody asked for."""
        with self._lock:
            for process, idle in tuple(self._idle.items()):
                for connection in _ended(idle):
                    idle.remove(connection)
                    connection.close()
                if not idle:
                    del self._idle[process]

    def _open(self, handle: Handle, limit: Limit) -> socket.socket:
        self._sweep()
        listening = self._listening.get(handle.process)
        if listening is None:
            listening = self._dial(handle, limit)
            with self._lock:
                self._listening[handle.process] = listening
        errors = []
        for host, port in listening.addresses:
            try:
                connection = socket.create_connection((host, port), min(_DIAL_S, limit.left()))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return greet(connection, listening.key)
            except (OSError, StreamError) as error:
                errors.append(f"{host}:{port}: {error}")
        with self._lock:
            self._listening.pop(handle.process, None)
        limit.left()
        raise CannotReachError(f"no stream can be opened to it ({'; '.join(errors) or 'it has no address'})")


def _ended(idle: Sequence[socket.socket]) -> list[socket.socket]:
    """Those that have something to read, which can only be their end."""
    poller = select.poll()
    for connection in idle:
        poller.register(connection, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(0)}
    return [connection for connection in idle if connection.fileno() in ready]
