"""A mover is one object and one line of registration, also from outside the package."""

from collections.abc import Iterator, Sequence

import pytest

import monarch_nb
from monarch_nb.connect import shutdown
from monarch_nb.rdma import RDMABuffer
from monarch_nb.rdma.errors import Limit
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.routes import MOVERS, register
from monarch_nb.rdma.service import RdmaService

pytestmark = pytest.mark.timeout(60)


class Courier:
    """Moves bytes of its own process, and counts."""

    alone = False

    def __init__(self, end: RdmaService) -> None:
        self._regions = end.regions
        self.carried = 0

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        for move in moves:
            with self._regions.use(move.handle.number, move.handle.secret) as memory:
                move.local.view()[:] = memory.part(move.offset, move.local.size).view()
            self.carried += move.local.size

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        raise AssertionError("nobody writes here")

    def close(self) -> None:
        """There is nothing to release."""


@pytest.fixture
def couriers() -> Iterator[list[Courier]]:
    instances: list[Courier] = []

    def make(end: RdmaService) -> Courier:
        instances.append(Courier(end))
        return instances[-1]

    shutdown()  # a process keeps the movers that it began with
    register("courier", make, before="local")
    yield instances
    del MOVERS["courier"]
    shutdown()


def test_a_mover_from_outside_carries_what_it_can_reach(couriers: list[Courier]) -> None:
    buffer, target = RDMABuffer(bytearray(b"0123456789")), bytearray(10)
    buffer.read_into(target).get(20)
    assert (target, couriers[0].carried) == (b"0123456789", 10)
    monarch_nb.configure(rdma_movers="local")
    try:
        buffer.read_into(target).get(20)
    finally:
        monarch_nb.configure(rdma_movers="")
    assert couriers[0].carried == 10, "it is not used where others are asked for"


def test_a_mover_has_a_name_of_its_own(couriers: list[Courier]) -> None:
    with pytest.raises(ValueError, match="there is a mover 'courier' already"):
        register("courier", Courier)
    with pytest.raises(ValueError, match="there is no mover 'pigeon'"):
        register("owl", Courier, before="pigeon")
