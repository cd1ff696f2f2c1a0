"""Writing to sockets whose connections come and go."""

import contextlib
import threading

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from monarch_nb.transport.errors import NotConnectedError
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.tcp import sockets
from monarch_nb.transport.tcp.endpoints import Limits
from monarch_nb.transport.tcp.sockets import DialledChannel, InboundChannel

pytestmark = pytest.mark.timeout(30)
LIMITS = Limits()


def test_the_first_write_after_a_handshake_is_never_refused() -> None:
    """libzmq's own send refused about one in twenty: it had looked for connections within the last millisecond."""
    context = sockets.new_context()
    reader = Reader("reads nothing", 0.01)
    try:
        for _ in range(150):
            router = sockets.listener(context, "tcp://127.0.0.1:0", None, LIMITS)
            sockets.listen(router, "tcp://127.0.0.1:0", LIMITS)
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
    finally:
        context.destroy(0)
        reader.close()


def test_a_connection_found_gone_is_told_before_anything_else_is_read() -> None:
    """A peer that has dialled again says so in its next message: the report of the loss comes before."""
    context = sockets.new_context()
    reader = Reader("another thread's", 0.01)
    events: list[str] = []
    try:
        router = sockets.listener(context, "tcp://127.0.0.1:0", None, LIMITS)
        sockets.listen(router, "tcp://127.0.0.1:0", LIMITS)
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
    finally:
        context.destroy(0)
        reader.close()
