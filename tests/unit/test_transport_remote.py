"""What the layers above ask of TCP connections: their state, their peers, what listens."""

import socket

import pytest

from monarch_nb.transport import Keys, Parcel, TrustError, UnreachableError, Unready, greet, knock, split
from monarch_nb.wire.header import Header, Kind
from tests.polling import until
from tests.ports import free_port
from tests.unit.transport_tools import End, ends

pytestmark = pytest.mark.timeout(30)
LOOPBACK = "tcp://127.0.0.1:*"


def agent(host: str, keys: Keys | None, **options: object) -> End:
    return End(f"{host}/agent", keys=keys, tcp_bind=LOOPBACK, **options)


def test_both_ends_know_whether_a_connection_is_up() -> None:
    keys = Keys.create()
    listener, dialler = agent("h1", keys), End("h0/c", keys=keys)
    dialler.node.learn("h1", listener.node.tcp_endpoint)
    with ends(listener, dialler):
        assert not dialler.node.connected("h1/agent")
        dialler.send("h1/agent", lane=1)
        listener.get()
        until(lambda: dialler.node.connected("h1/agent"))
        assert dialler.node.connected("h1/p.0.0")  # over the same connection
        assert listener.node.connected("h0/c")
        dialler.node.close(0)
        listener.send("h0/c", lane=1)  # only a write shows that the other end is gone
        until(lambda: not listener.node.connected("h0/c"))


def test_both_lanes_are_there_for_a_process_that_nobody_can_dial() -> None:
    keys = Keys.create()
    listener, dialler = agent("h1", keys), End("h0/c", keys=keys)
    dialler.node.learn("h1", listener.node.tcp_endpoint)
    with ends(listener, dialler):
        dialler.send("h1/agent", lane=1)
        listener.get()
        listener.send("h0/c", b"bulk", lane=0)
        assert dialler.get()[1] == [b"bulk"]


def test_a_lost_agent_that_had_dialled_is_dialled_once_it_listens() -> None:
    keys = Keys.create()
    stable = agent("h1", keys)
    endpoint = f"tcp://127.0.0.1:{free_port()}"  # reserved while nobody listens there
    dying = End("h2/agent", keys=keys, tcp_bind=endpoint)
    dying.node.learn("h1", stable.node.tcp_endpoint)
    with ends(stable):
        dying.send("h1/agent")
        stable.get()
        stable.node.learn("h2", endpoint)
        stable.send("h2/agent", b"first")
        dying.get()
        dying.node.close(0.2)
        stable.send("h2/agent", b"lost")
        successor = End("h2/agent", keys=keys, tcp_bind=endpoint)
        with ends(successor):
            until(lambda: (stable.send("h2/agent", b"found"), not successor.inbox.empty())[1])
            assert successor.get()[1] in ([b"lost"], [b"found"])


def test_hosts_may_have_keys_of_their_own() -> None:
    first, second = Keys.create(), Keys.create()
    a, b, c = agent("h1", first), agent("h2", second), End("h0/c")
    with ends(a, b, c):
        c.node.learn("h1", a.node.tcp_endpoint, keys=first)
        c.node.learn("h2", b.node.tcp_endpoint, keys=second)
        for end in (a, b):
            c.send(end.node.address, b"hello")
            assert end.get()[1] == [b"hello"]
        with pytest.raises(TrustError):
            c.node.learn("h3", "tcp://127.0.0.1:5")


def test_a_listener_can_be_asked_for_its_name() -> None:
    keys = Keys.create()
    a, c = agent("h7", keys), End("h0/c", keys=keys)
    c.node.learn("there", a.node.tcp_endpoint)
    with ends(a, c):
        c.node.send_to_whoever("there", Header(Kind.CONTROL, "", c.node.address, port=5), Parcel([b"who?"]))
        header, _ = a.get()
        assert header.src == "h0/c"
        a.send(header.src, b"h7", kind=Kind.CONTROL, lane=1, port=header.port)
        header, frames = c.get()
        assert (header.src, header.port, frames) == ("h7/agent", 5, [b"h7"])


def test_a_forgotten_host_is_named_with_the_reason_until_learned_again() -> None:
    keys = Keys.create()
    a, c = agent("h1", keys), End("h0/c", keys=keys)
    c.node.learn("h1", a.node.tcp_endpoint)
    with ends(a, c):
        c.send("h1/agent")
        a.get()
        c.node.forget("h1", "it burned down")
        with pytest.raises(UnreachableError, match="it burned down"):
            c.send("h1/p.0.0")
        c.node.learn("h1", a.node.tcp_endpoint)
        c.send("h1/agent", b"again")
        assert a.get()[1] == [b"again"]


def test_knocking_and_greeting_tell_what_listens() -> None:
    with_key, without = agent("h1", Keys.create()), agent("h2", None, insecure_loopback=True)
    with ends(with_key, without):
        assert greet(str(with_key.node.tcp_endpoint), 5) == "CURVE"
        assert greet(str(with_key.node.tcp_endpoint), 5, stay=0.05) == "CURVE"
        assert greet(str(without.node.tcp_endpoint), 5) == "NULL"
        assert knock(str(without.node.tcp_endpoint), 5) is True
        endpoint = str(with_key.node.tcp_endpoint)
    assert knock(endpoint, 5) is False
    with pytest.raises(Unready, match=f"nobody listens at {endpoint}"):
        greet(endpoint, 5)
    with pytest.raises(UnreachableError, match="no machine is known as"):
        greet("tcp://no-such-machine.invalid:5", 5)


def test_a_peer_that_hangs_up_differs_from_a_silent_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="says nothing"):
            greet(endpoint, 0.1)
        server.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Unready):
        greet(endpoint, 1)


@pytest.mark.parametrize("endpoint", ["tcp://[::1]:80", "tcp://node7:80"])
def test_endpoints_are_split_into_host_and_port(endpoint: str) -> None:
    assert split(endpoint) == (endpoint[6:-3].strip("[]"), 80)
