"""For other machines: authenticated TCP streams to the owner's memory, several in parallel for large pieces."""

import contextlib
import functools
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from monarch_nb.rdma.errors import BufferDroppedError, OwnerLostError, owner_lost
from monarch_nb.rdma.handle import BufferHandle
from monarch_nb.rdma.limits import Limit, side_by_side
from monarch_nb.rdma.movers.mover import CannotReachError, Move
from monarch_nb.rdma.verbs import StreamAddresses
from monarch_nb.rdma.wire import GO, HEAD, READ, WRITE, StreamError, greet, receive, receive_into

_DIAL_S = 2.0  # per address of the owner
_PARALLEL = 16 << 20  # bytes above which a move is divided among several streams
_IDLE = 8  # idle streams to one owner
_PIECE = 4 << 20  # bytes between two checks of the limit
_CUT = (StreamError, ConnectionError, ssl.SSLError)


class Streams:
    """Moves bytes of processes that accept TCP connections."""

    alone = False

    def __init__(self, dial: Callable[[BufferHandle, Limit], StreamAddresses], parallel: Callable[[], int]) -> None:
        self._dial = dial  # asks the owner for its addresses
        self._parallel = parallel
        self._lock = threading.Lock()
        self._listening: dict[str, StreamAddresses] = {}
        self._idle: dict[str, list[socket.socket]] = {}

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Reads from the owner's memory into that of this process."""
        for move in moves:
            self._move(move, READ, limit)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Writes memory of this process into the owner's."""
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
        """Closes the streams of a process that has ended."""
        with self._lock:
            self._listening.pop(process, None)
            connections = self._idle.pop(process, [])
        for connection in connections:
            connection.close()

    # -- one move ---------------------------------------------------------------------------------------------------

    def _move(self, move: Move, operation: int, limit: Limit) -> None:
        count = self._parallel() if move.local.size >= _PARALLEL else 1
        if count < 2:
            self._part(move, operation, limit)
            return
        step = -(-move.local.size // count)
        parts = [
            Move(move.handle, move.offset + start, move.local.part(start, min(step, move.local.size - start)))
            for start in range(0, move.local.size, step)
        ]
        side_by_side([functools.partial(self._part, part, operation, limit) for part in parts])

    def _part(self, move: Move, operation: int, limit: Limit) -> None:
        """Moves bytes on one stream. An idle stream that has died is replaced once."""
        handle = move.handle
        connection, reused = self._stream(handle, limit)
        complete = False
        try:
            try:
                self._exchange(connection, move, operation, limit)
            except _CUT:
                if not reused:
                    raise
                connection.close()
                connection = self._open(handle, limit)
                self._exchange(connection, move, operation, limit)
            complete = True
        except _CUT as error:
            self.forget(handle.process)
            raise self._cut_error(handle, limit, error) from error
        except BufferDroppedError:
            complete = True
            raise
        finally:
            if complete:
                self._keep(handle.process, connection)
            else:
                connection.close()

    def _exchange(self, connection: socket.socket, move: Move, operation: int, limit: Limit) -> None:
        handle, view = move.handle, move.local.view()
        connection.settimeout(limit.remaining())
        try:
            connection.sendall(HEAD.pack(operation, handle.number, handle.secret, move.offset, len(view)))
            if receive(connection, 1) != GO:
                raise BufferDroppedError(f"{handle} was dropped; its owner offers it no longer")
            for start in range(0, len(view), _PIECE):
                connection.settimeout(limit.remaining())
                piece = view[start : start + _PIECE]
                if operation == READ:
                    receive_into(connection, piece)
                else:
                    connection.sendall(piece)
            if operation == WRITE:
                connection.settimeout(limit.remaining())
                receive(connection, 1)
        except TimeoutError:
            limit.remaining()  # raises a better text
            raise

    def _cut_error(self, handle: BufferHandle, limit: Limit, error: BaseException) -> Exception:
        """Returns the error for a stream that was cut in a transfer: the buffer was dropped, or its process is lost."""
        with contextlib.suppress(StreamError, CannotReachError, OSError):
            probe = self._open(handle, limit)
            with probe:
                probe.settimeout(limit.remaining())
                probe.sendall(HEAD.pack(READ, handle.number, handle.secret, 0, 0))
                if receive(probe, 1) != GO:
                    return BufferDroppedError(f"{handle} was dropped in the middle of the transfer")
                return OwnerLostError(f"{handle}: the stream to its process was cut ({error}); try again")
        return owner_lost(handle, f"the stream to its process was cut ({error}): it has ended or its host is cut off")

    # -- streams ----------------------------------------------------------------------------------------------------

    def _stream(self, handle: BufferHandle, limit: Limit) -> tuple[socket.socket, bool]:
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
        """Closes idle streams whose peer is gone. Owners send nothing on idle streams."""
        with self._lock:
            for process, idle in tuple(self._idle.items()):
                for connection in _ended(idle):
                    idle.remove(connection)
                    connection.close()
                if not idle:
                    del self._idle[process]

    def _open(self, handle: BufferHandle, limit: Limit) -> socket.socket:
        self._sweep()
        listening = self._listening.get(handle.process)
        if listening is None:
            listening = self._dial(handle, limit)
            with self._lock:
                self._listening[handle.process] = listening
        errors = []
        for host, port in listening.addresses:
            try:
                connection = socket.create_connection((host, port), min(_DIAL_S, limit.remaining()))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return greet(connection, listening.key)
            except (OSError, StreamError) as error:
                errors.append(f"{host}:{port}: {error}")
        with self._lock:
            self._listening.pop(handle.process, None)
        limit.remaining()
        raise CannotReachError(f"no stream can be opened to it ({'; '.join(errors) or 'it has no address'})")


def _ended(idle: Sequence[socket.socket]) -> list[socket.socket]:
    """Returns the streams with something to read, which can only be the end."""
    poller = select.poll()
    for connection in idle:
        poller.register(connection, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(0)}
    return [connection for connection in idle if connection.fileno() in ready]
