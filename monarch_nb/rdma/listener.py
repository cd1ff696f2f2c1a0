"""The owner's end of streams: a listening socket, and a thread for each stream."""

import contextlib
import fcntl
import itertools
import logging
import secrets
import socket
import struct
import threading
import time

from monarch_nb.rdma.handle import ProcessIdentity, own_identity
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.wire import DROPPED, GO, HEAD, READ, Key, StreamError, make_ready, receive_into, welcome

_PIECE = 4 << 20  # bytes during which the memory is held; a drop waits for one piece at most
_HANDSHAKE_S = 5.0
_STALLED_S = 20.0  # without a byte within a piece, after which the memory is released
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_AGAIN_S = 0.1
_STRANGERS = 32  # connections at a time that have not proved their key yet

logger = logging.getLogger(__name__)


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
