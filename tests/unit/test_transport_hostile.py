import contextlib
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest
import zmq

import monarch_nb.transport
from monarch_nb.routing.actions import PREFIX, PREFIX_SIZE
from monarch_nb.transport import Keys, Limits, Parcel, reason_of, reason_parcel
from monarch_nb.transport.packing import WHOLE, Assembly
from monarch_nb.wire.header import Header, Kind, encode_header
from tests.polling import until
from tests.unit.transport_tools import End, ends, run_folder

pytestmark = pytest.mark.timeout(60)
LIMITS = Limits(handshake_ms=400, strangers=8)


class Target:
    def __init__(self) -> None:
        self.keys = Keys.create()
        self.end = End("h1/agent", keys=self.keys, tcp_bind="tcp://127.0.0.1:*", limits=LIMITS)
        self.endpoint = self.end.node.tcp_endpoint or ""
        self.port = int(self.endpoint.rpartition(":")[2])
        self.friend = End("h0/c", keys=self.keys)
        self.friend.node.learn("h1", self.endpoint)

    def still_serves(self) -> None:
        self.friend.send("h1/agent", b"friend")
        header, frames = self.end.get()
        assert frames == [b"friend"]
        self.end.send(header.src, b"hello")
        assert self.friend.get()[1] == [b"hello"]

    def nothing_arrived(self) -> None:
        with pytest.raises(queue.Empty):
            self.end.inbox.get(timeout=0.3)


@pytest.fixture
def target() -> Iterator[Target]:
    result = Target()
    with ends(result.end, result.friend):
        yield result


@pytest.fixture
def dealer() -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    yield sock
    sock.close(0)
    context.term()


def message(address: str = "h9/x", dst: str = "h1/agent", seq: int = 0, incarnation: int = 5) -> list[bytes]:
    prefix = PREFIX.pack(0, 0, 1, incarnation, 0, seq, 0, 0)
    return [prefix + WHOLE[0] + encode_header(Header(Kind.CALL, dst, address)), b"body"]


def curve(dealer: "zmq.Socket[bytes]", server: Keys, client: Keys, name: str = "h9/x|0|5") -> None:
    dealer.setsockopt(zmq.ROUTING_ID, name.encode())
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server.public)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, client.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, client.secret)


def send_unless_refused(dealer: "zmq.Socket[bytes]") -> None:
    """Sends a message; libzmq gives up a connection that was refused, and a send that waits would then never end."""
    with contextlib.suppress(zmq.Again):
        dealer.send_multipart(message(), zmq.NOBLOCK)


def test_garbage_bytes_on_the_port_harm_nobody(target: Target) -> None:
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        os.urandom(100_000),
        b"\xff\0\0\0\0\0\0\0\1\x7f\3" + b"\0" * 53,
    ):
        with socket.create_connection(("127.0.0.1", target.port)) as stranger:
            try:
                stranger.sendall(garbage)
            except OSError:
                pass
    target.nothing_arrived()
    target.still_serves()


def test_a_client_without_encryption_cannot_deliver(target: Target, dealer: "zmq.Socket[bytes]") -> None:
    dealer.setsockopt(zmq.ROUTING_ID, b"h9/x|0|5")
    dealer.connect(target.endpoint)
    send_unless_refused(dealer)
    target.nothing_arrived()
    target.still_serves()


def test_a_client_that_knows_only_the_public_key_cannot_deliver(target: Target, dealer: "zmq.Socket[bytes]") -> None:
    curve(dealer, target.keys, Keys.create())
    dealer.connect(target.endpoint)
    send_unless_refused(dealer)
    target.nothing_arrived()
    target.still_serves()


def test_a_client_with_foreign_keys_cannot_deliver_and_learns_why(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = End("h9/c", keys=Keys.create())
    stranger.node.learn("h1", target.endpoint)
    with ends(stranger):
        stranger.send("h1/agent", b"x")
        target.nothing_arrived()
    target.still_serves()


def test_senseless_messages_with_the_right_key_are_counted_and_survived(
    target: Target, dealer: "zmq.Socket[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    curve(dealer, target.keys, target.keys)
    dealer.connect(target.endpoint)
    good = message()[0]
    for frame0 in (
        b"",
        b"x",
        os.urandom(PREFIX_SIZE - 1),
        PREFIX.pack(0, 0, 1, 5, 0, 0, 0, 0),  # no header
        PREFIX.pack(0, 0, 1, 5, 0, 1, 0, 0) + WHOLE[0] + os.urandom(40),
        PREFIX.pack(0, 0, 1, 5, 0, 2, 0, 0) + WHOLE[0] + msgspec.msgpack.encode([1]),
        PREFIX.pack(0, 0, 1, 5, 0, 3, 0, 0) + WHOLE[0] + pickle.dumps(print),
        PREFIX.pack(0, 0, 1, 5, 0, 4, 0, 0)
        + WHOLE[0]
        + encode_header(Header(Kind.CALL, "h1/agent", "h9/x", buffers=((0, -1, 5), (0, -1, 5)))),
    ):
        dealer.send_multipart([frame0, b"body"])
    dealer.send_multipart([PREFIX.pack(0, 0, 1, 5, 0, 5, 0, 0) + good[PREFIX_SIZE:], b"good"])
    assert target.end.get()[1] == [b"good"]
    assert target.end.node.garbage >= 6
    assert "dropped a message from h9/x" in caplog.text
    target.still_serves()


def test_senseless_announcements_of_large_bodies_are_dropped(target: Target, dealer: "zmq.Socket[bytes]") -> None:
    curve(dealer, target.keys, target.keys)
    dealer.connect(target.endpoint)
    good = message()[0][PREFIX_SIZE + 4 :]
    seq = 0
    for announcement, pieces in (
        (b"rubbish", [b"x"]),
        (msgspec.msgpack.encode([-5]), [b"x"]),
        (msgspec.msgpack.encode([3]), [b"four"]),
        (msgspec.msgpack.encode([1 << 62]), [b"x"]),  # more memory than there is
        (msgspec.msgpack.encode([1 << 40]), [b"x"]),
        (msgspec.msgpack.encode([10**12] * 1000), [b"x"]),
        (msgspec.msgpack.encode([1, 1]), [b"x"]),  # never completed
    ):
        dealer.send_multipart([PREFIX.pack(0, 0, 1, 5, 0, seq, 0, 0) + b"\0\1\0\0" + good, announcement])
        dealer.send_multipart([PREFIX.pack(1, 0, 1, 5, 0, seq + 1, 0, 0), *pieces])
        seq += 2
    dealer.send_multipart([PREFIX.pack(0, 0, 1, 5, 0, seq, 0, 0) + b"\0\0\0\0" + good, b"good"])
    assert target.end.get()[1] == [b"good"]
    target.still_serves()


@pytest.mark.parametrize(
    "name", ["", "nobody", "a|b|c", "h9/x|0", "h9/x|x|5", "h9/x|0|zz", "/|0|5", "h9/x/y|0|5", "é/x|999|5"]
)
def test_routing_ids_that_are_no_addresses_are_dropped(target: Target, dealer: "zmq.Socket[bytes]", name: str) -> None:
    curve(dealer, target.keys, target.keys, name or "x")
    dealer.connect(target.endpoint)
    dealer.send_multipart(message())
    until(lambda: target.end.node.garbage)  # the handshake may outlast `nothing_arrived`
    target.nothing_arrived()
    assert target.end.node.garbage == 1
    target.still_serves()


def test_a_frame_above_the_limit_cuts_the_connection(target: Target, dealer: "zmq.Socket[bytes]") -> None:
    curve(dealer, target.keys, target.keys)
    dealer.connect(target.endpoint)
    dealer.send_multipart([message()[0], bytes(8 << 20)])
    target.nothing_arrived()
    target.still_serves()


def test_an_unfinished_handshake_is_cut_off(target: Target) -> None:
    with socket.create_connection(("127.0.0.1", target.port)) as slow:
        slow.settimeout(20)
        slow.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f")
        while slow.recv(1000):  # libzmq's greeting; then the end
            pass
    target.still_serves()


def test_many_strangers_are_cut_off_and_friends_still_connect(target: Target) -> None:
    strangers = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(60)]
    try:
        tcp = target.end.node._tcp
        assert tcp is not None
        limiter = tcp._limiter
        assert limiter is not None
        end = time.monotonic() + 20
        while limiter.refused < 40 and time.monotonic() < end:
            time.sleep(0.01)
        assert limiter.refused >= 40
        target.still_serves()
    finally:
        for stranger in strangers:
            stranger.close()


def test_an_invalid_memory_file_is_refused_and_its_sender_informed() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        read, write = os.pipe()
        with ends(a, b):
            for pid, fd in ((os.getpid(), read), (os.getpid(), 9999), (1 << 30, 0)):
                a.node.send(Header(Kind.CALL, "h/b", "h/a", buffers=((pid, fd, 5),), port=fd), a.node.snapshot([]))
                header, frames = a.get()
                assert (header.kind, header.port, header.status) == (Kind.RETURNED, fd, Kind.CALL)
                assert "memory file" in msgspec.msgpack.decode(frames[0], type=list[str])[0]
            a.send("h/b", b"fine")
            assert b.get()[1] == [b"fine"]
        os.close(read)
        os.close(write)


def test_the_transport_never_unpickles() -> None:
    folder = os.path.dirname(monarch_nb.transport.__file__)
    for name in os.listdir(folder):
        if name.endswith(".py"):
            with open(os.path.join(folder, name)) as file:
                assert "import pickle" not in file.read(), name
    assert threading.active_count() >= 1


@pytest.mark.parametrize("portable", [True, False])
def test_an_announcement_takes_no_memory_before_its_pieces_come(portable: bool) -> None:
    before = psutil.Process().memory_info().rss
    announced = Assembly(Header(Kind.CALL, "h1/a", "h2/b"), 0, msgspec.msgpack.encode([1 << 40]), portable=portable)
    announced.add(memoryview(b"x" * 1000))
    assert not announced.complete
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x90"], [b"\x91\x01"], [b"\xa3why"]])
def test_a_message_returned_without_a_reason_still_counts_as_returned(frames):
    assert reason_of(Parcel(frames)) == "it was returned"
    assert reason_of(reason_parcel("it is gone")) == "it is gone"
