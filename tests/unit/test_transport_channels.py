"""Writing to sockets whose connections come and go."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from monarch_nb.transport.errors import NotConnectedError
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.tcp import sockets
from monarch_nb.transport.tcp.endpoints import Limits, bound_at
from monarch_nb.transport.tcp.sockets import DialledChannel, InboundChannel

pytestmark = pytest.mark.timeout(30)
LIMITS = Limits()


@pytest.fixture
def context() -> Iterator[sockets.Context]:
    context = sockets.new_context()
    yield context
    context.destroy(0)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader("not started", 0.01)
    yield reader
    reader.close()


def listening(
    context: sockets.Context, endpoint: str = "tcp://127.0.0.1:0", bound: int | None = None
) -> sockets.Socket:
    router = sockets.listener(context, endpoint, None, LIMITS)
    sockets.listen(router, endpoint, LIMITS, bound)
    return router


def test_the_first_write_after_a_handshake_is_never_refused(context: sockets.Context, reader: Reader) -> None:
    """libzmq's own send refused about one in twenty: it had looked for connections within the last millisecond."""
    for _ in range(150):
        router = listening(context)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        dealer = sockets.dial(context, endpoint, "here/me|0|1", None, LIMITS)
        events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sockets.connect(dealer, endpoint)
        connected = False
        while not connected:
            with contextlib.suppress(zmq.Again):
                dealer.send(b"before", zmq.DONTWAIT)
            with contextlib.suppress(zmq.Again):
                connected = bool(parse_monitor_message(events.recv_multipart(zmq.NOBLOCK)))
        DialledChannel(dealer, reader, None).write(b"hello", ())
        dealer.disable_monitor()
        events.close(0)
        dealer.close(0)
        router.close(0)


def test_two_routers_on_one_listening_socket_do_not_block_each_other(context: sockets.Context) -> None:
    """As while a node changes its key: the router that does not get a connection would wait for the next one."""
    with socket.create_server(("127.0.0.1", 0)) as shared:
        endpoint = bound_at(shared.fileno())
        routers = [listening(context, endpoint, os.dup(shared.fileno())) for _ in range(2)]
    for number in range(20):
        dealer = sockets.dial(context, endpoint, f"here/me|0|{number}", None, LIMITS)
        dealer.setsockopt(zmq.SNDTIMEO, 9_000)
        sockets.connect(dealer, endpoint)
        dealer.send(b"hello")
        ((router,), _, _) = zmq.select(routers, [], [], 9)
        assert router.recv_multipart()[1] == b"hello"
        dealer.close(0)
    for router in routers:
        router.close(0)


def test_a_connection_found_gone_is_told_before_anything_else_is_read(context: sockets.Context, reader: Reader) -> None:
    """A peer that has dialled again says so in its next message: the report of the loss comes before."""
    events: list[str] = []
    router = listening(context)
    nobody = InboundChannel(
        router, b"never/seen|0|1", reader, lost=lambda: events.append("lost"), reroute=lambda: events.append("gone")
    )
    nobody.write(b"left for the reading thread", ())
    assert events == []
    reader.run_calls()
    assert events == ["lost", "gone"]
    events.clear()
    reader.ident = threading.get_ident()
    with pytest.raises(NotConnectedError):  # under the link's lock: the link is told by this
        nobody.write(b"from the reading thread", ())
    assert events == []
    reader.run_calls()
    assert events == ["gone"]
    router.close(0)
