"""A controller's costs do not grow with its hosts where they need not."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.scale import PER_HOST, SOON, Cost, beside, measure
from benchmarks.virtual_hosts import Member, VirtualCluster
from monarch_nb.actor import ActorError
from monarch_nb.collectives import service
from monarch_nb.collectives.verbs import BROKEN, END_WAITS, RENEW, WAITS
from monarch_nb.config import configured
from monarch_nb.connect import hosts as attached_hosts
from monarch_nb.connect import shutdown
from monarch_nb.connect.hosts import accept_hosts
from monarch_nb.lifecycle import interrupts
from monarch_nb.lifecycle.interrupts import doing, interrupted
from monarch_nb.runtime import DOING, INTERRUPT
from monarch_nb.transport.memory.network import NetworkFaults
from monarch_nb.wire import Lane

pytestmark = pytest.mark.timeout(60)

FANOUT = 8
HOSTS = 160


@pytest.fixture(scope="module")
def costs() -> Iterator[dict[str, tuple[Cost, Cost]]]:
    """All costs, with 10 hosts and with 40; without beats, which would come at random."""
    shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attached_hosts, "_BEAT_S", 1e6)
        few, many = measure(10), measure(40)
    yield {small.what: (small, large) for small, large in zip(few.costs, many.costs, strict=True)}
    shutdown()


@pytest.mark.parametrize("kind", ["spawn actors", "call, same answers", "call, other answers", "broadcast"])
def test_casts_to_forty_hosts_cost_as_many_messages_as_to_ten(costs: dict[str, tuple[Cost, Cost]], kind: str) -> None:
    assert [cost.sent for cost in costs[kind]] == [FANOUT, FANOUT]
    assert max(cost.received for cost in costs[kind]) <= 2 * FANOUT


def test_one_death_among_many_is_one_message_and_heals_cheaply(costs: dict[str, tuple[Cost, Cost]]) -> None:
    few, many = costs["a death told"]
    assert few.received == many.received == 1
    few, many = costs["a death healed"]
    # Among them a cast, in which all ranks give up the process groups of the lost one, with up to 2 * FANOUT replies.
    assert few.sent == many.sent <= 2 * FANOUT
    assert max(few.received, many.received) <= 3 * FANOUT


def test_early_messages_to_a_host_wait_for_its_processes() -> None:
    with VirtualCluster(4, NetworkFaults(lag={Lane.URGENT: 0.1})) as cluster:  # the lane of requests for processes
        joined = beside(lambda: accept_hosts(3, at="tcp://10.0.0.1:22222", timeout=SOON))
        cluster.join_all()
        procs = joined().spawn_procs(per_host={"gpus": PER_HOST})
        members: Any = procs.spawn("members", Member)
        assert members.rank.call().get(SOON).get(3 * PER_HOST - 1) == 3 * PER_HOST - 1


def test_ranks_that_wait_for_one_that_raised_are_freed_by_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, patience in ((service, "_ANSWER_S"), (service, "_ENDS_S"), (interrupts, "SILENT_AFTER")):
        monkeypatch.setattr(module, patience, SOON)  # late ranks are asked again, alone
    with configured(call_error_window="300ms"), VirtualCluster(HOSTS + 1, NetworkFaults()) as cluster:
        joined = beside(lambda: accept_hosts(HOSTS, at="tcp://10.0.0.1:22222", timeout=SOON))
        cluster.join_all()
        members: Any = joined().spawn_procs(per_host={"gpus": PER_HOST}).spawn("members", Member)
        members.initialized.get(SOON)
        with pytest.raises(ActorError, match="nan") as caught:
            members.train.call().get(SOON)
        assert len(caught.value.failures) == HOSTS * PER_HOST
        counts = [cluster.messages[verb.name] for verb in (WAITS, END_WAITS, BROKEN, RENEW)]
        # The rank that raised is asked alone for its groups.
        assert counts == [FANOUT + 1, FANOUT, FANOUT, FANOUT]

        # Interrupts and DOING are casts, too.
        ranks = range(HOSTS * PER_HOST)
        reactions = interrupted(members._state, ranks)
        assert {rank for rank, reaction in reactions.items() if reaction is not None and reaction.ended} == set(ranks)
        assert {rank: did.seconds for rank, did in doing(members._state, ranks).get(SOON).items()} == {
            rank: float(rank) for rank in ranks
        }
        assert [cluster.messages[verb.name] for verb in (INTERRUPT, DOING)] == [FANOUT, FANOUT]
