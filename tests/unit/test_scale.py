"""What a controller pays does not grow with its hosts where it need not."""

from collections.abc import Iterator

import pytest

from monarch_nb.connect import shutdown
from tests.benchmarks.scale import PER_HOST, Cost, measure

pytestmark = pytest.mark.timeout(60)

FANOUT = 8


@pytest.fixture(scope="module")
def costs() -> Iterator[dict[str, tuple[Cost, Cost]]]:
    """Of everything, with 10 hosts and with 40."""
    shutdown()
    few, many = measure(10), measure(40)
    yield {one.what: (one, other) for one, other in zip(few.costs, many.costs, strict=True)}
    shutdown()


@pytest.mark.parametrize("what", ["spawn actors", "call, same answers", "call, other answers", "broadcast"])
def test_a_cast_is_as_many_messages_to_forty_hosts_as_to_ten(costs: dict[str, tuple[Cost, Cost]], what: str) -> None:
    assert [cost.sent for cost in costs[what]] == [FANOUT, FANOUT]
    assert max(cost.received for cost in costs[what]) <= 2 * FANOUT


def test_one_death_among_many_is_one_message_and_its_heal_a_few(costs: dict[str, tuple[Cost, Cost]]) -> None:
    few, many = costs["a death told"]
    assert few.received == many.received == 1
    few, many = costs["a death healed"]
    # Besides, each rank is asked to give up the process groups that the lost one was in, and its host is sent a word.
    assert few.sent - 10 * (PER_HOST + 1) == many.sent - 40 * (PER_HOST + 1) <= FANOUT
