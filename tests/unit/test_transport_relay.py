import queue
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from monarch_nb.routing.actions import LinkConfig
from monarch_nb.transport import Keys, TransportError
from monarch_nb.wire.header import Kind
from tests.unit.transport_tools import End, ends, run_folder

pytestmark = pytest.mark.timeout(60)


class TwoHosts:
    """Two hosts, an agent and a process on each; the agents know each other by TCP."""

    def __init__(self, folder: Path, **options: object) -> None:
        keys = Keys.create()
        self.agents = [
            End(f"h{n}/agent", folder / f"{n}", keys=keys, tcp_bind="tcp://127.0.0.1:*", **options) for n in (1, 2)
        ]
        one, two = (agent.node for agent in self.agents)
        one.learn("h2", two.tcp_endpoint)
        two.learn("h1", one.tcp_endpoint)
        self.procs = [End(f"h{n}/p", folder / f"{n}", agent=f"h{n}/agent", consume=False, **options) for n in (1, 2)]
        self.controller = End("h0/c", keys=keys)
        self.controller.node.learn("h1", one.tcp_endpoint)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with run_folder() as folder:
        made = TwoHosts(folder)
        with ends(*made.procs, *made.agents, made.controller):
            yield made


def test_a_message_to_another_host_goes_through_the_agents_in_order(hosts: TwoHosts) -> None:
    one, two = hosts.procs
    for number in range(300):
        one.send("h2/p", b"p", b"x" * number, index=number, call="k")
    for number in range(300):
        header, frames = two.get()
        assert (header.index, header.src, header.call) == (number, "h1/p", "k")
        assert bytes(frames[1]) == b"x" * number
    two.send("h1/p", b"answer", kind=Kind.REPLY)
    assert one.get()[1] == [b"answer"]


def test_a_large_body_crosses_hosts_whole_and_private(hosts: TwoHosts) -> None:
    one, two = hosts.procs
    body = bytes(range(256)) * 20_000
    for _ in range(3):
        one.send("h2/p", b"p", body, b"small", lane=0)
        _, frames = two.get()
        assert bytes(frames[1]) == body
        frames[1][:4] = b"mine"


def test_a_controller_that_nobody_can_dial_reaches_processes_and_is_answered(hosts: TwoHosts) -> None:
    hosts.controller.send("h1/p", b"call")
    header, frames = hosts.procs[0].get()
    assert frames == [b"call"]
    hosts.procs[0].send(header.src, b"reply", kind=Kind.REPLY)
    assert hosts.controller.get()[1] == [b"reply"]


def test_an_urgent_message_stays_urgent_on_every_link(hosts: TwoHosts) -> None:
    one, two = hosts.procs
    one.send("h2/p", b"stop", lane=1)
    assert two.get()[1] == [b"stop"]
    assert ("h2/agent", 1) in hosts.agents[0].node._links._peers
    assert ("h2/p", 1) in hosts.agents[1].node._links._peers


def test_an_undeliverable_message_returns_with_reason_and_identity(hosts: TwoHosts) -> None:
    one, _ = hosts.procs
    hosts.agents[1].node.forget("h2/dead", "h2/dead was killed by signal 9")
    one.send("h2/dead", b"body", port=11, index=5, mesh="m", rank=3, call="k", incarnation=2)
    header, frames = one.get()
    assert (header.kind, header.status) == (Kind.RETURNED, Kind.CALL)
    assert (header.port, header.index, header.mesh, header.rank, header.call) == (11, 5, "m", 3, "k")
    assert header.incarnation == 2
    assert "killed by signal 9" in msgspec.msgpack.decode(frames[0], type=list[str])[0]


def test_messages_under_way_to_a_process_that_dies_come_back(hosts: TwoHosts) -> None:
    one, _ = hosts.procs
    one.send("h2/starting", b"body", port=12)
    one.send("h2/p", b"fence")
    hosts.procs[1].get()
    hosts.agents[1].node.forget("h2/starting", "it never started")
    header, frames = one.get()
    assert (header.kind, header.port) == (Kind.RETURNED, 12)
    assert msgspec.msgpack.decode(frames[0], type=list[str])[0] == "it never started"


def test_a_host_that_nobody_knows_is_said_by_the_agent(hosts: TwoHosts) -> None:
    one, _ = hosts.procs
    one.send("h9/p", b"body", port=13)
    header, frames = one.get()
    assert (header.kind, header.port) == (Kind.RETURNED, 13)
    assert "h9/p" in msgspec.msgpack.decode(frames[0], type=list[str])[0]


def test_a_message_never_goes_round_in_circles() -> None:
    with run_folder() as folder:
        keys = Keys.create()
        one = End("h1/agent", folder / "1", keys=keys, tcp_bind="tcp://127.0.0.1:*")
        two = End("h2/agent", folder / "2", keys=keys, tcp_bind="tcp://127.0.0.1:*")
        one.node.learn("h3", two.node.tcp_endpoint, via="h2/agent")
        one.node.learn("h2", two.node.tcp_endpoint)
        two.node.learn("h1", one.node.tcp_endpoint)
        two.node.learn("h3", via="h1/agent")
        proc = End("h1/p", folder / "1", agent="h1/agent")
        with ends(one, two, proc):
            proc.send("h3/p", b"body", port=14)
            header, frames = proc.get()
            assert (header.kind, header.port) == (Kind.RETURNED, 14)
            assert "8 processes" in msgspec.msgpack.decode(frames[0], type=list[str])[0]


def test_a_slow_receiver_slows_its_sender_and_not_the_relays() -> None:
    config = LinkConfig(window=1 << 20)
    with run_folder() as folder:
        hosts = TwoHosts(folder, config=config)
        one, two = hosts.procs
        with ends(*hosts.procs, *hosts.agents, hosts.controller):
            import threading

            sent: queue.SimpleQueue[int] = queue.SimpleQueue()

            def run() -> None:
                for number in range(120):
                    one.send("h2/p", b"x" * 100_000, index=number)
                    sent.put(number)

            thread = threading.Thread(target=run)
            thread.start()
            parcels = [two.inbox.get(timeout=20)[1] for _ in range(10)]
            with pytest.raises(queue.Empty):
                two.inbox.get(timeout=1)
            assert sent.qsize() <= 45  # a window for each of the three links, and a little
            hosts.controller.send("h1/p", b"others")
            one.get()
            for _ in range(110):
                two.node.consumed(parcels.pop(0))
                header, parcel = two.inbox.get(timeout=20)
                parcels.append(parcel)
            assert header.index == 119
            thread.join()


@pytest.mark.parametrize("where", ["h2/agent", "h2"])
def test_a_gone_host_makes_sends_fail_at_once(hosts: TwoHosts, where: str) -> None:
    one, _ = hosts.agents
    one.node.forget(where, "host h2 is lost")
    with pytest.raises(TransportError, match="host h2 is lost"):
        one.send("h2/p", b"x")
