"""Traffic between processes, as one table without processes."""

import random

import pytest

from monarch_nb.rdma.service import Traffic
from monarch_nb.rdma.verbs import Flow, OfferedMemory, TrafficReport

pytestmark = pytest.mark.timeout(60)
NOTHING = OfferedMemory(0, 0)


def test_a_rate_is_current_at_first_and_past_after_a_while() -> None:
    traffic = Traffic()
    traffic.add(TrafficReport("a", [Flow("b", "a", "streams", 100, 1, 1.0)], NOTHING, 10.0))
    traffic.add(TrafficReport("a", [Flow("b", "a", "streams", 500, 2, 1.5)], NOTHING, 11.0))
    [flow] = traffic.flows.values()
    assert (flow.size, flow.transfers) == (500, 2)
    assert traffic.rate(flow, 12.0) == 800.0
    assert traffic.rate(flow, 15.0) == 0.0


def test_reports_that_come_again_or_late_count_once() -> None:
    chance = random.Random(1)
    for _ in range(50):
        traffic, sizes = Traffic(), {"cross-memory": 0, "streams": 0}
        for step in range(20):
            mover = chance.choice(sorted(sizes))
            sizes[mover] += chance.randrange(100)
            report = TrafficReport("a", [Flow("b", "a", mover, sizes[mover], step, step / 10)], NOTHING, float(step))
            for _ in range(chance.randrange(1, 3)):
                traffic.add(report)
        assert {flow.mover: flow.size for flow in traffic.flows.values()}.items() <= sizes.items()


def test_offers_are_current_and_ended_processes_forgotten() -> None:
    traffic = Traffic()
    traffic.add(TrafficReport("a", [Flow("b", "a", "local", 1, 1, 0.1)], OfferedMemory(2, 64), 1.0))
    assert traffic.offered == {"a": OfferedMemory(2, 64)}
    traffic.add(TrafficReport("a", [], NOTHING, 2.0))
    assert traffic.offered == {}
    traffic.forget(["b"])
    assert traffic.flows == {}
