"""For other machines: authenticated TCP streams to the owner's memory, several in parallel for large pieces.

`Streams` is the end of the process that moves bytes, `BulkListener` that of the owner: a listening socket, and a thread
for each stream.
"""

import contextlib
import fcntl
import functools
import itertools
import logging
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

from monarch_nb.rdma.errors import BufferDroppedError, Limit, OwnerLostError, owner_lost, side_by_side
from monarch_nb.rdma.movers import CannotReachError, Move
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.verbs import BufferHandle, ProcessIdentity, StreamAddresses, own_identity
from monarch_nb.rdma.wire import (
    DROPPED,
    GO,
    HEAD,
    READ,
    WRITE,
    Key,
    StreamError,
    greet,
    make_ready,
    receive,
    receive_into,
    welcome,
)

_DIAL_S = 2.0  # per address of the owner
_PARALLEL = 16 << 20  # bytes above which a move is divided among several streams
_IDLE = 8  # idle streams to one owner
_PIECE = 4 << 20  # bytes between two checks of the limit; a drop waits for one piece at most
_CUT = (StreamError, ConnectionError, ssl.SSLError)
_HANDSHAKE_S = 5.0
_STALLED_S = 20.0  # without a byte within a piece, after which the memory is released
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_AGAIN_S = 0.1
_STRANGERS = 32  # connections at a time that have not proved their key yet
logger = logging.getLogger(__name__)


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


class BulkListener:
    """Listens from the first request on: on the loopback for processes of this machine, on all networks for others."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._lock = threading.Lock()
        self._sockets: dict[str, socket.socket] = {}  # by the address they are bound to
        self._streams: set[socket.socket] = set()
        self._keys: dict[int, Key] = {}
        self._numbers = itertools.count(1)
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._closed = False

    def open_for(self, asker: ProcessIdentity, *, plain: bool = False) -> tuple[tuple[tuple[str, int], ...], Key]:
        """Returns addresses for streams of a process, and a key. Raises OSError.

        Streams that leave this machine are encrypted unless `plain` is true.
        """
        inside = own_identity().same_network(asker)
        bound = "127.0.0.1" if inside else "0.0.0.0"
        encrypted = not inside and not plain
        if encrypted:
            make_ready()
        with self._lock:
            if self._closed:
                raise OSError("this process leaves the cluster")
            listening = self._sockets.get(bound)
            if listening is None:
                listening = self._sockets[bound] = socket.create_server((bound, 0), backlog=128)
                threading.Thread(
                    target=self._accept, args=(listening,), name="monarch-rdma-listen", daemon=True
                ).start()
            key = Key(next(self._numbers), secrets.token_bytes(32), encrypted)
            self._keys[key.number] = key
            port = listening.getsockname()[1]
        hosts = ("127.0.0.1",) if bound == "127.0.0.1" else own_addresses()
        return tuple((host, port) for host in hosts), key

    def close(self) -> None:
        """Ends all streams."""
        with self._lock:
            self._closed = True
            ends = [*self._sockets.values(), *self._streams]
            self._sockets.clear()
            self._streams.clear()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_AGAIN_S)  # such as no free descriptor; the dialling side waits, or uses another mover
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="monarch-rdma-stream", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_S)
            try:
                connection = welcome(connection, self._keys)
            finally:
                self._strangers.release()
            with self._lock:
                if self._closed:
                    return
                self._streams.add(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            room = memoryview(bytearray(HEAD.size))
            while True:
                connection.settimeout(None)
                receive_into(connection, room)
                connection.settimeout(_STALLED_S)
                if not self._carry_out(connection, *HEAD.unpack(room)):
                    return
        except (OSError, StreamError) as error:
            logger.debug("a stream ended: %s", error)
        finally:
            with self._lock:
                self._streams.discard(connection)
            connection.close()

    def _carry_out(
        self, connection: socket.socket, operation: int, number: int, secret: bytes, offset: int, size: int
    ) -> bool:
        """Executes a request; False ends the stream, the only way to report a missing piece to the other side."""
        begun = False
        try:
            for start in range(offset, offset + size, _PIECE) or (offset,):
                with self._regions.use(number, secret, write=operation != READ) as memory:
                    end = min(start + _PIECE, offset + size)
                    if not 0 <= start <= end <= memory.size:
                        raise PermissionError("outside of the buffer")
                    with memory.part(start, end - start).on_host(write=operation != READ) as piece:
                        if not begun:
                            connection.sendall(GO)
                            begun = True
                        if operation == READ:
                            connection.sendall(piece)
                        else:
                            receive_into(connection, piece)
        except (LookupError, PermissionError):
            if begun:
                return False
            connection.sendall(DROPPED)
            return True
        if operation != READ:
            connection.sendall(GO)
        return True


def own_addresses() -> tuple[str, ...]:
    """Returns the addresses at which other machines may reach this one, the most likely first."""
    addresses: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent: only the route is looked up
        addresses.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        addresses += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with contextlib.suppress(OSError):
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    return tuple(dict.fromkeys(address for address in addresses if not address.startswith("127.")))
