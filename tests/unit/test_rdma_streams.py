"""Streams between two ends in one process: real sockets, no other process."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from monarch_nb.rdma.errors import BufferDroppedError, Limit, OwnerLostError
from monarch_nb.rdma.memory import memory_of
from monarch_nb.rdma.movers import CannotReachError, Move
from monarch_nb.rdma.movers.streams import BulkListener, Streams
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.verbs import BufferHandle, ProcessIdentity, StreamAddresses, own_identity
from monarch_nb.rdma.wire import Key, client_stream, receive, server_stream

pytestmark = pytest.mark.timeout(60)


class Relay:
    """Stands between the two ends and records the traffic; with `reads` it takes part in the encryption."""

    def __init__(self, port: int, *, reads: bool = False) -> None:
        self._port, self._reads = port, reads
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.seen = bytearray()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._ends += client, server
                if self._reads:
                    server.sendall(client.recv(8, socket.MSG_WAITALL))
                    client, server = server_stream(client), client_stream(server)
                    self._ends += client, server
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.seen += piece
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in (self._listening, *self._ends):
            end.close()


class Ends:
    """The owner's end and the other."""

    def __init__(self) -> None:
        self.regions = Regions()
        self.listeners: dict[str, BulkListener] = {}
        self.streams = Streams(self.dial, lambda: 3)

    def listener(self, process: str) -> BulkListener:
        return self.listeners.setdefault(process, BulkListener(self.regions))

    def dial(self, handle: BufferHandle, limit: Limit) -> StreamAddresses:
        try:
            return StreamAddresses(*self.listener(handle.process).open_for(own_identity()))
        except OSError:
            return StreamAddresses((("127.0.0.1", 1),), Key(0, b"", False))

    def offer(self, data: bytearray, process: str = "h/p1.0.0") -> BufferHandle:
        region = self.regions.offer(memory_of(data), "owner")
        return BufferHandle(process, "owner", region.number, region.secret, len(data), False, own_identity(), 0, 0)

    def read(self, handle: BufferHandle, seconds: float = 20) -> bytearray:
        target = bytearray(handle.size)
        self.streams.read([Move(handle, 0, memory_of(target))], Limit(seconds, "reading", handle))
        return target

    def idle_count(self) -> int:
        return sum(map(len, self.streams._idle.values()))


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.streams.close()
    for listener in both.listeners.values():
        listener.close()


def test_bytes_go_both_ways_on_streams_that_are_kept(ends: Ends) -> None:
    data = bytearray(b"0123456789")
    handle = ends.offer(data)
    for _ in range(3):
        assert ends.read(handle) == data
    ends.streams.write([Move(handle, 2, memory_of(b"xy"))], Limit(20, "writing", handle))
    assert data == b"01xy456789"
    assert ends.idle_count() == 1


def test_a_large_move_is_divided_among_streams(ends: Ends) -> None:
    data = bytearray(range(256)) * (80 << 10)
    handle = ends.offer(data)
    assert ends.read(handle) == data
    assert ends.idle_count() == 3


def test_a_dropped_buffer_leaves_the_stream_as_good_as_it_was(ends: Ends) -> None:
    handle = ends.offer(bytearray(10))
    ends.read(handle)
    ends.regions.withdraw(handle.number)
    with pytest.raises(BufferDroppedError, match="was dropped"):
        ends.read(handle)
    assert ends.read(ends.offer(bytearray(b"abc"))) == b"abc"
    assert ends.idle_count() == 1


def test_streams_of_processes_that_ended_are_closed_when_another_is_opened(ends: Ends) -> None:
    for number in range(4):
        ends.read(ends.offer(bytearray(1 << 10), f"h/p{number}.0.0"))
    assert ends.idle_count() == 4
    for number in range(3):
        ends.listeners[f"h/p{number}.0.0"].close()
    ends.read(ends.offer(bytearray(10), "h/p9.0.0"))
    assert ends.idle_count() == 2


def test_an_owner_that_is_gone_is_said_to_be_gone(ends: Ends) -> None:
    handle = ends.offer(bytearray(10))
    ends.read(handle)
    ends.listeners[handle.process].close()
    with pytest.raises((OwnerLostError, CannotReachError)):
        ends.read(handle)


def test_a_listener_without_the_key_gets_nothing(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        ends.streams = Streams(
            lambda handle, limit: StreamAddresses((("127.0.0.1", port),), Key(1, bytes(32), False)), lambda: 1
        )
        with pytest.raises(TimeoutError):
            ends.read(ends.offer(bytearray(10)), seconds=0.3)


AWAY = ProcessIdentity("another boot", 1, 1, 1)


def port_of(listener: BulkListener) -> int:
    """The port for other machines; this one may have no address but 127.0.0.1."""
    port: int = listener._sockets["0.0.0.0"].getsockname()[1]
    return port


def test_a_stranger_that_sends_byte_by_byte_is_cut_off() -> None:
    near, far = socket.socketpair()
    near.settimeout(0.2)
    gone = threading.Event()

    def drip() -> None:
        for _ in range(40):
            if gone.wait(0.05):
                return
            far.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with near, far:
        with pytest.raises(TimeoutError):
            receive(near, 40)
        gone.set()
        thread.join()


@pytest.mark.parametrize("encrypted", [True, False])
def test_streams_leaving_the_machine_are_encrypted_unless_switched_off(ends: Ends, encrypted: bool) -> None:
    data = bytearray(b"the weights of a model " * 200_000)
    handle = ends.offer(data)
    _, key = ends.listener(handle.process).open_for(AWAY, plain=not encrypted)
    relay = Relay(port_of(ends.listener(handle.process)))
    ends.streams = Streams(lambda handle, limit: StreamAddresses((("127.0.0.1", relay.port),), key), lambda: 1)
    assert ends.read(handle) == data
    ends.streams.write([Move(handle, 0, memory_of(b"new " * 100))], Limit(20, "writing", handle))
    assert data == b"new " * 100 + (b"the weights of a model " * 200_000)[400:]
    assert (b"weights of a model" not in relay.seen) == encrypted
    assert (b"new new" not in relay.seen) == encrypted
    relay.close()


def test_a_man_in_the_middle_is_detected(ends: Ends) -> None:
    handle = ends.offer(bytearray(b"the weights of a model"))
    _, key = ends.listener(handle.process).open_for(AWAY)
    relay = Relay(port_of(ends.listener(handle.process)), reads=True)
    ends.streams = Streams(lambda handle, limit: StreamAddresses((("127.0.0.1", relay.port),), key), lambda: 1)
    with pytest.raises(CannotReachError, match="does not have the key"):
        ends.read(handle)
    assert relay.seen, "it did read what the two ends said until then"
    assert b"weights" not in relay.seen
    relay.close()
