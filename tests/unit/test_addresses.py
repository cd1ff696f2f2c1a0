"""Addresses of workers as users write them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_nb.routing.routes import AddressError, WorkerAddress, parse_dialled, parse_worker_address
from monarch_nb.routing.routes import ChannelEndpoint as Endpoint
from tests.effort import tries

pytestmark = pytest.mark.timeout(tries(30))

PORTS = st.integers(1, 65535)
LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z0-9]{1,5})?", fullmatch=True)
HOSTS = LABELS | st.ip_addresses().map(str)
TCP = st.builds(lambda host, port: Endpoint("tcp", host=host, port=port), HOSTS, PORTS)
IPC = st.from_regex(r"[a-zA-Z0-9_/.-]{1,40}", fullmatch=True).map(lambda path: Endpoint("ipc", path=path))
PROCESSES = st.just("") | st.from_regex(r"[a-z][a-zA-Z0-9_-]{0,12}(<[A-Za-z0-9]{1,12}>)?", fullmatch=True)


def test_a_plain_address_is_dialled_where_it_binds() -> None:
    address = parse_worker_address("tcp://worker-1.example:4444")
    assert address == WorkerAddress(*[Endpoint("tcp", host="worker-1.example", port=4444)] * 2)
    assert parse_worker_address("ipc:///tmp/a b@c/w0").dial.path == "/tmp/a b@c/w0"


def test_an_alias_is_dialled_at_one_place_and_binds_to_another() -> None:
    address = parse_worker_address("tcp://adv:4444@tcp://0.0.0.0:4445")
    assert (address.dial.url, address.bind.url) == ("tcp://adv:4444", "tcp://0.0.0.0:4445")
    assert parse_worker_address("tcp://adv:4444@tcp://*:0").bind == Endpoint("tcp", host="0.0.0.0", port=0)


def test_a_worker_may_bind_to_a_socket_that_it_is_given() -> None:
    address = parse_worker_address("tcp://127.0.0.1:fd7")
    assert (address.bind, str(address)) == (Endpoint("tcp", host="127.0.0.1", fd=7), "tcp://127.0.0.1:fd7")
    address = parse_worker_address("tcp://adv:4444@tcp://0.0.0.0:fd0")
    assert (address.dial.port, address.bind.fd) == (4444, 0)
    with pytest.raises(AddressError, match="dial the port that it is bound to"):
        parse_dialled("tcp://127.0.0.1:fd7")


def test_a_process_id_comes_first() -> None:
    address = parse_worker_address("service<2MuAHeDj>@tcp://adv:1@tcp://[::]:1")
    assert (address.process, address.dial.host, address.bind.host) == ("service<2MuAHeDj>", "adv", "::")
    assert str(address) == "service<2MuAHeDj>@tcp://adv:1@tcp://[::]:1"


def test_a_wildcard_to_dial_says_what_to_write_instead() -> None:
    with pytest.raises(NotImplementedError, match=r"tcp://its-name:4444@tcp://0\.0\.0\.0:4444"):
        parse_worker_address("tcp://*:4444")


@pytest.mark.parametrize("text", ["tls://a:1", "metatls://a:1", "inproc://7"])
def test_transports_that_are_not_there_yet_are_named(text: str) -> None:
    with pytest.raises(NotImplementedError, match="not part of this version"):
        parse_worker_address(text)


@pytest.mark.parametrize(
    "text",
    ["", "host:1", "tcp://", "tcp://h", "tcp://h:", "tcp://h:0", "tcp://h:65536", "tcp://h:-1", "tcp://h:٣", "tcp://:1",
     "tcp://a b:1", "tcp://[h]:1", "tcp://::1:1", "ipc://", "ipc://@abstract", "@tcp://h:1", "p q@tcp://h:1",
     "p tcp://h:1", "tcp://h:1@ipc:///x", "tcp://h:1@tcp://h", "http://h:1", "tcp://h:1\n",
     "tcp://h:fd", "tcp://h:fd-1", "tcp://h:fd1x", "tcp://h:FD1", "tcp://h:fd12345678", "ipc:///a\0b", "x" * 5000],
)  # fmt: skip
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        parse_worker_address(text)


def test_an_address_that_is_no_text_is_refused() -> None:
    with pytest.raises(AddressError, match="not bytes"):
        parse_worker_address(b"tcp://h:1")  # type: ignore[arg-type]


@given(PROCESSES, st.tuples(TCP, TCP) | st.tuples(IPC, IPC))
def test_a_written_address_is_read_back(process: str, ends: tuple[Endpoint, Endpoint]) -> None:
    address = WorkerAddress(*ends, process)
    assert parse_worker_address(str(address)) == address


@pytest.mark.fuzz
@settings(max_examples=tries(300))
@given(st.text(max_size=60) | st.text(alphabet="tcpi:/@[]*.0149ab%\0 ", max_size=40) | st.lists(
    st.sampled_from(["tcp://", "ipc://", "tls://", "@", "[::1]", "*", ":", "fd", "h", "1", "65535", "/p"]), max_size=9
).map("".join))  # fmt: skip
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_worker_address(text)
    except (AddressError, NotImplementedError):
        return
    assert parse_worker_address(str(address)) == address
