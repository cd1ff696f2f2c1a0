"""Messages between many procs and from their controller, counted on the network."""

from collections import Counter
from typing import Any

import pytest

from monarch_nb.actor import Actor, current_rank, endpoint
from monarch_nb.host import verbs
from monarch_nb.testing import Cluster
from monarch_nb.transport.memory.transport import MemoryTransport
from monarch_nb.wire import parse_address

HOSTS = 3
PROCS = 12  # on each
METHODS = Counter[tuple[str, str]]  # of messages, by method and destination


class Member(Actor):
    @endpoint
    def rank(self) -> int:
        return current_rank().rank


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> METHODS:
    counts: METHODS = Counter()
    send = MemoryTransport.send

    def count(self: MemoryTransport, header: Any, *args: Any, **options: Any) -> None:
        counts[header.method, header.dst] += 1
        send(self, header, *args, **options)

    monkeypatch.setattr(MemoryTransport, "send", count)
    return counts


def spawn(simulated: Cluster) -> tuple[Any, Any]:
    procs = simulated.hosts().spawn_procs(per_host={"procs": PROCS})
    members: Any = procs.spawn("members", Member)
    simulated.result(members.rank.call())
    simulated.settle()
    return procs, members


def test_procs_at_rest_send_nothing(simulated: Cluster, messages: METHODS) -> None:
    procs, _ = spawn(simulated)
    messages.clear()
    simulated.advance(600)
    assert not messages
    simulated.result(procs.stop())


def test_a_start_is_reported_to_the_owner_alone(simulated: Cluster, messages: METHODS) -> None:
    procs, _ = spawn(simulated)
    started = {dst: count for (method, dst), count in messages.items() if method == verbs.PROC_STARTED.name}
    assert list(started.values()) == [HOSTS * PROCS]
    assert not any(parse_address(dst).is_proc for dst in started)
    simulated.result(procs.stop())


def test_a_stop_is_one_message_to_each_host(simulated: Cluster, messages: METHODS) -> None:
    procs, _ = spawn(simulated)
    messages.clear()
    simulated.result(procs.stop())
    assert [count for (method, _), count in messages.items() if method == verbs.STOP.name] == [1] * HOSTS
