"""Leases of memory for RDMA devices: what an owner keeps, for whom, and how long."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from monarch_nb.rdma.fabric import Fabric, Span
from monarch_nb.rdma.memory import Memory, memory_of
from monarch_nb.rdma.movers.nixl import MemoryLeases
from monarch_nb.rdma.regions import OfferedRegion, Regions
from monarch_nb.rdma.verbs import LeaseRequest, ReleaseMemoryLease, RenewMemoryLease
from tests.polling import until

pytestmark = pytest.mark.timeout(20)


class Device(Fabric):
    """Registers on paper."""

    def __init__(self) -> None:
        super().__init__("owner")
        self.registered: dict[int, Span] = {}
        self.driven = 0

    def register(self, memory: Memory, number: int = 0) -> Span:
        assert number not in self.registered
        self.registered[number] = (memory.address, memory.size, number)
        return self.registered[number]

    def deregister(self, span: Span) -> None:
        del self.registered[span[2]]

    def connection_data(self, spans: Sequence[Span]) -> bytes:
        return b"words for %d" % len(spans)

    def drive(self) -> None:
        self.driven += 1


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def regions() -> Iterator[Regions]:
    result = Regions()
    yield result
    result.guard.close()


@pytest.fixture
def leases(regions: Regions, device: Device) -> Iterator[MemoryLeases]:
    result = MemoryLeases(regions, device)
    yield result
    result.close()


def request(*regions: OfferedRegion, write: bool = False) -> LeaseRequest:
    return LeaseRequest(tuple((region.number, region.secret) for region in regions), write)


def test_dropped_memory_stays_until_its_last_lease_ends(regions: Regions, leases: MemoryLeases, device: Device) -> None:
    region = regions.offer(memory_of(bytearray(100)), "owner")
    first, second = leases.lease(request(region)), leases.lease(request(region, write=True))
    assert (first.how, second.how, first.words, len(device.registered)) == ("done", "done", b"words for 1", 1)
    regions.withdraw(region.number)
    assert leases.lease(request(region)).how == "dropped"
    leases.release(ReleaseMemoryLease(first.lease))
    leases.release(ReleaseMemoryLease(first.lease))
    assert region.memory is not None
    assert device.registered
    leases.release(ReleaseMemoryLease(second.lease))
    until(lambda: region.memory is None)
    assert not device.registered


def test_a_region_is_registered_once_and_forgotten_when_it_is_dropped(
    regions: Regions, leases: MemoryLeases, device: Device
) -> None:
    region = regions.offer(memory_of(bytearray(100)), "owner")
    for _ in range(3):
        leases.release(ReleaseMemoryLease(leases.lease(request(region)).lease))
    assert list(device.registered) == [region.number]
    regions.withdraw(region.number)
    assert not device.registered


def test_one_refused_buffer_is_named_and_none_is_leased(regions: Regions, leases: MemoryLeases, device: Device) -> None:
    good, bad = (regions.offer(memory_of(bytearray(8)), "owner") for _ in range(2))
    forged = LeaseRequest(((good.number, good.secret), (bad.number, bytes(16))), write=False)
    answer = leases.lease(forged)
    assert (answer.how, answer.index, answer.lease, answer.words) == ("dropped", 1, 0, b"")
    regions.withdraw(good.number)
    until(lambda: good.memory is None)


def test_read_only_buffers_are_leased_for_reading(regions: Regions, leases: MemoryLeases) -> None:
    region = regions.offer(memory_of(b"for reading"), "owner")
    assert leases.lease(request(region)).how == "done"
    answer = leases.lease(request(region, write=True))
    assert answer.how == "dropped"
    assert "read-only" in answer.text


def test_a_lease_that_nobody_renews_ends(regions: Regions, device: Device) -> None:
    leases = MemoryLeases(regions, device, seconds=0.2)
    region = regions.offer(memory_of(bytearray(100)), "owner")
    renewed, lapsed = leases.lease(request(region)), leases.lease(request(region))
    del lapsed  # its holder has ended
    regions.withdraw(region.number)
    for _ in range(30):
        assert leases.renew(RenewMemoryLease(renewed.lease)).how == "done"
        assert region.memory is not None
        time.sleep(0.01)
    until(lambda: region.memory is None)
    assert leases.renew(RenewMemoryLease(renewed.lease)).how == "dropped"
    leases.close()


def test_nothing_is_driven_while_nobody_holds_a_lease(regions: Regions, leases: MemoryLeases, device: Device) -> None:
    region = regions.offer(memory_of(bytearray(100)), "owner")
    lease = leases.lease(request(region))
    until(lambda: device.driven > 3)
    leases.release(ReleaseMemoryLease(lease.lease))
    [driver] = [thread for thread in threading.enumerate() if thread.name == "monarch-rdma-leases"]
    until(lambda: not leases._leases and not leases._returned)
    count = device.driven
    time.sleep(0.1)
    assert device.driven <= count + 1
    leases.close()
    assert not driver.is_alive()
    assert leases.lease(request(region)).how == "lost"
