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
        first, second = (agent.node for agent in self.agents)
        first.learn("h2", second.tcp_endpoint)
        second.learn("h1", first.tcp_endpoint)
        self.procs = [End(f"h{n}/p", folder / f"{n}", agent=f"h{n}/agent", consume=False, **options) for n in (1, 2)]
        self.controller = End("h0/c", keys=keys)
        self.controller.node.learn("h1", first.tcp_endpoint)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with run_folder() as folder:
        result = TwoHosts(folder)
        with ends(*result.procs, *result.agents, result.controller):
            yield result


def test_a_message_to_another_host_goes_through_the_agents_in_order(hosts: TwoHosts) -> None:
    first, second = hosts.procs
    for number in range(300):
        first.send("h2/p", b"p", b"x" * number, index=number, call="k")
    for number in range(300):
        header, frames = second.get()
        assert (header.index, header.src, header.call) == (number, "h1/p", "k")
        assert bytes(frames[1]) == b"x" * number
    second.send("h1/p", b"answer", kind=Kind.REPLY)
    assert first.get()[1] == [b"answer"]


def test_a_large_body_crosses_hosts_whole_and_private(hosts: TwoHosts) -> None:
    first, second = hosts.procs
    body = bytes(range(256)) * 20_000
    for _ in range(3):
        first.send("h2/p", b"p", body, b"small", lane=0)
        _, frames = second.get()
        assert bytes(frames[1]) == body
        frames[1][:4] = b"mine"


def test_a_controller_that_nobody_can_dial_reaches_processes_and_is_answered(hosts: TwoHosts) -> None:
    hosts.controller.send("h1/p", b"call")
    header, frames = hosts.procs[0].get()
    assert frames == [b"call"]
    hosts.procs[0].send(header.src, b"reply", kind=Kind.REPLY)
    assert hosts.controller.get()[1] == [b"reply"]


def test_an_urgent_message_stays_urgent_on_every_link(hosts: TwoHosts) -> None:
    first, second = hosts.procs
    first.send("h2/p", b"stop", lane=1)
    assert second.get()[1] == [b"stop"]
    assert ("h2/agent", 1) in hosts.agents[0].node._links._peers
    assert ("h2/p", 1) in hosts.agents[1].node._links._peers


def test_an_undeliverable_message_returns_with_reason_and_identity(hosts: TwoHosts) -> None:
    first, _ = hosts.procs
    hosts.agents[1].node.forget("h2/dead", "h2/dead was killed by signal 9")
    first.send("h2/dead", b"body", port=11, index=5, mesh="m", rank=3, call="k", incarnation=2)
    header, frames = first.get()
    assert (header.kind, header.status) == (Kind.RETURNED, Kind.CALL)
    assert (header.port, header.index, header.mesh, header.rank, header.call) == (11, 5, "m", 3, "k")
    assert header.incarnation == 2
    assert "killed by signal 9" in msgspec.msgpack.decode(frames[0], type=list[str])[0]


def test_messages_under_way_to_a_process_that_dies_come_back(hosts: TwoHosts) -> None:
    first, _ = hosts.procs
    first.send("h2/starting", b"body", port=12)
    first.send("h2/p", b"fence")
    hosts.procs[1].get()
    hosts.agents[1].node.forget("h2/starting", "it never started")
    header, frames = first.get()
    assert (header.kind, header.port) == (Kind.RETURNED, 12)
    assert msgspec.msgpack.decode(frames[0], type=list[str])[0] == "it never started"


def test_a_host_that_nobody_knows_is_said_by_the_agent(hosts: TwoHosts) -> None:
    first, _ = hosts.procs
    first.send("h9/p", b"body", port=13)
    header, frames = first.get()
    assert (header.kind, header.port) == (Kind.RETURNED, 13)
    assert "h9/p" in msgspec.msgpack.decode(frames[0], type=list[str])[0]


def test_a_message_never_goes_round_in_circles() -> None:
    with run_folder() as folder:
        keys = Keys.create()
        first = End("h1/agent", folder / "1", keys=keys, tcp_bind="tcp://127.0.0.1:*")
        second = End("h2/agent", folder / "2", keys=keys, tcp_bind="tcp://127.0.0.1:*")
        first.node.learn("h3", second.node.tcp_endpoint, via="h2/agent")
        first.node.learn("h2", second.node.tcp_endpoint)
        second.node.learn("h1", first.node.tcp_endpoint)
        second.node.learn("h3", via="h1/agent")
        proc = End("h1/p", folder / "1", agent="h1/agent")
        with ends(first, second, proc):
            proc.send("h3/p", b"body", port=14)
            header, frames = proc.get()
            assert (header.kind, header.port) == (Kind.RETURNED, 14)
            assert "8 processes" in msgspec.msgpack.decode(frames[0], type=list[str])[0]


def test_a_slow_receiver_slows_its_sender_and_not_the_relays() -> None:
    config = LinkConfig(window=1 << 20)
    with run_folder() as folder:
        hosts = TwoHosts(folder, config=config)
        first, second = hosts.procs
        with ends(*hosts.procs, *hosts.agents, hosts.controller):
            import threading

            sent: queue.SimpleQueue[int] = queue.SimpleQueue()

            def run() -> None:
                for number in range(120):
                    first.send("h2/p", b"x" * 100_000, index=number)
                    sent.put(number)

            thread = threading.Thread(target=run)
            thread.start()
            parcels = [second.inbox.get(timeout=20)[1] for _ in range(10)]
            with pytest.raises(queue.Empty):
                second.inbox.get(timeout=1)
            assert sent.qsize() <= 45  # a window for each of the three links, and a little
            hosts.controller.send("h1/p", b"others")
            first.get()
            for _ in range(110):
                second.node.consumed(parcels.pop(0))
                header, parcel = second.inbox.get(timeout=20)
                parcels.append(parcel)
            assert header.index == 119
            thread.join()


@pytest.mark.parametrize("address", ["h2/agent", "h2"])
def test_a_gone_host_makes_sends_fail_at_once(hosts: TwoHosts, address: str) -> None:
    first, _ = hosts.agents
    first.node.forget(address, "host h2 is lost")
    with pytest.raises(TransportError, match="host h2 is lost"):
        first.send("h2/p", b"x")
