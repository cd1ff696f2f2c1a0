"""Casts through real agents: spread, answered, folded."""

import contextlib
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest

from monarch_nb.host import protocol, verbs
from monarch_nb.wire import Kind, Layout, Run
from tests.cluster.host_client import Client, hosted
from tests.polling import until

pytestmark = pytest.mark.timeout(60)


def test_a_cast_reaches_every_proc_once_and_its_answers_come_folded() -> None:
    with hosted() as (_, client):
        layout = Layout("p", (client.host,), 4)
        client.started(*client.spawn(4, "echoes", layout=layout))
        client.answers(client.cast(layout, [Run(0, 4)], "hello"), 4)  # now all procs are connected
        answers, messages = client.answers(client.cast(layout, [Run(0, 4, seq=5)], "hello", b"x" * 100), 4)
        assert answers == {n: [f"{n}.0.5".encode(), b"x" * 100] for n in range(4)}
        assert len(messages) < 4
        assert Kind.FOLDED in {header.kind for header in messages}


def test_a_slice_keeps_its_places_numbers_and_lives() -> None:
    with hosted() as (_, client):
        layout = Layout("p", (client.host,), 4)
        client.started(*client.spawn(4, "echoes", layout=layout))
        runs = [Run(1, 2, 2, incarnation=3, seq=9, index=10, index_stride=5)]
        answers, _ = client.answers(client.cast(layout, runs, "hello"), 2)
        assert answers == {10: [b"1.3.9", b""], 15: [b"3.3.9", b""]}


def test_large_answers_travel_alone() -> None:
    with hosted() as (_, client):
        layout = Layout("p", (client.host,), 2)
        client.started(*client.spawn(2, "echoes", layout=layout))
        answers, messages = client.answers(client.cast(layout, [Run(0, 2)], "big"), 2)
        assert [len(answers[n][1]) for n in range(2)] == [1 << 20] * 2
        assert [header.kind for header in messages] == [Kind.REPLY] * 2


def test_a_broadcast_goes_out_under_its_senders_name() -> None:
    with hosted() as (_, client):
        layout = Layout("p", (client.host,), 2)
        addresses = client.spawn(2, "echoes", layout=layout)
        client.cast(layout, [Run(0, 2)], "news", answers=False)
        for address in addresses:
            assert f"told {client.address} news" in client.log(address, until="news\n")


@pytest.mark.slow
def test_living_procs_answer_a_cast_though_one_dies() -> None:
    with hosted() as (_, client):
        layout = Layout("p", (client.host,), 3)
        addresses = client.spawn(3, "echoes", layout=layout)
        client.started(*addresses)
        port = client.cast(layout, [Run(0, 3)], "die")
        answers: dict[int, list[bytes]] = {}
        while not {0, 2} <= answers.keys():  # the dead rank's message may be returned, if it died at once
            answers |= client.answers(port, 1)[0]
        assert [answers[n][0] for n in (0, 2)] == [b"0.0.-1", b"2.0.-1"]
        assert client.exited(addresses[1])[0].exitcode == 9
        answers, messages = client.answers(client.cast(layout, [Run(0, 3)], "again"), 3)
        returned = [header for header in messages if header.kind == Kind.RETURNED]
        assert [(header.index, header.rank, header.method) for header in returned] == [(1, 1, "again")]
        assert "Exited(code=9)" in msgspec.msgpack.decode(answers[1][0])[0]


@contextlib.contextmanager
def three_hosts() -> Iterator[tuple[list[Client], Layout]]:
    """Three agents connected by TCP, each with two echoing procs and one client."""
    with contextlib.ExitStack() as stack:
        pairs = [
            stack.enter_context(hosted(tcp="tcp://127.0.0.1:0", insecure_loopback=True, prewarm=False))
            for _ in range(3)
        ]
        clients = [client for _, client in pairs]
        endpoints = {handle.host: handle.endpoint or "" for handle, _ in pairs}
        layout = Layout("p", tuple(endpoints), 2)
        for number, client in enumerate(clients):
            client.ask(verbs.HOSTS, protocol.Hosts(endpoints))
            wish = protocol.SpawnProcs(
                mesh=layout.uid, ranks=(2 * number, 2 * number + 1), runner="tests.cluster.host_runners:echoes",
                sys_path=(client.root,), bootstrap_env_cold=True,
            )  # fmt: skip
            client.started(*client.ask(verbs.SPAWN, wish).addresses)
        yield clients, layout


@pytest.mark.slow
def test_a_cast_goes_down_a_tree_of_hosts_and_answers_return() -> None:
    with three_hosts() as (clients, layout):
        answers, messages = clients[0].answers(clients[0].cast(layout, [Run(0, 6)], "hello", fanout=1), 6)
        assert answers == {n: [f"{n}.0.-1".encode(), b""] for n in range(6)}
        assert {header.src for header in messages if header.kind == Kind.FOLDED} <= {clients[0].agent}


@pytest.mark.slow
def test_losing_a_host_under_a_cast_does_not_delay_the_others() -> None:
    with three_hosts() as (clients, layout):
        os.kill(clients[2].status().pid, signal.SIGKILL)
        port = clients[0].cast(layout, [Run(0, 6)], "hello")
        answers: dict[int, list[bytes]] = {}
        while not {0, 1, 2, 3} <= answers.keys():  # messages to the lost host may be returned any time
            answers |= clients[0].answers(port, 1)[0]


def test_a_caller_that_is_gone_costs_the_agent_nothing() -> None:
    with hosted() as (handle, client):
        layout = Layout("p", (client.host,), 2)
        pids = [proc.pid for proc in client.started(*client.spawn(2, "echoes", layout=layout))]
        second = Client(handle.host, handle.run_folder, "second")
        second.cast(layout, [Run(0, 2)], "mute")
        second.close()
        answers, _ = client.answers(client.cast(layout, [Run(0, 2)], "hello"), 2)
        assert len(answers) == 2
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: client.status().procs[0].exit is not None)
