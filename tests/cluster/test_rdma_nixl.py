"""Features of the mover for RDMA devices. UCX needs no device if this mover is configured by name."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import monarch_nb
from monarch_nb.actor import Actor, ProcMesh, endpoint, this_host
from monarch_nb.host.linux import rdma_devices
from monarch_nb.rdma import RDMABuffer, get_rdma_backend, is_ibverbs_available, routes
from monarch_nb.rdma.buffer import service
from monarch_nb.rdma.errors import Limit
from monarch_nb.rdma.fabric import Fabric, nixl_name
from monarch_nb.rdma.memory import memory_of
from monarch_nb.rdma.movers import CannotReachError, Move
from monarch_nb.rdma.movers.nixl import Nixl
from tests.cluster.rdma_conformance import LARGE, SOON, Holder
from tests.cluster.test_rdma import WITHOUT_NIXL
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(not nixl_name(), reason=WITHOUT_NIXL)]


class Owner(Holder):
    """Reports its costs."""

    @endpoint
    def seconds(self) -> float:
        return sum(psutil.Process().cpu_times()[:2])

    @endpoint
    def leases(self) -> int:
        return len(service()._leases._leases)


class Forker(Actor):
    @endpoint
    def read(self, buffer: RDMABuffer) -> tuple[str, list[str]]:
        buffer.read_into(bytearray(buffer.size())).get(20)
        way, (reading, writing) = buffer.backend, os.pipe()
        child = os.fork()
        if not child:
            for fabric in (service().fabric, Fabric("child")):
                try:
                    fabric.check(asked_for=True)
                    fabric.register(memory_of(bytearray(1)))
                except CannotReachError as error:
                    os.write(writing, f"{error}\n".encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as stream:
            errors = stream.read().splitlines()
        assert os.waitpid(child, 0)[1] == 0
        return way, errors


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    monarch_nb.configure(rdma_movers="nixl,messages")
    mesh = this_host().spawn_procs(per_host={"gpus": 1}, name="fabric")
    yield mesh
    mesh.stop().get()
    monarch_nb.configure(rdma_movers="")


@pytest.fixture
def owner(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("owner", Owner)
    yield mesh
    mesh.stop().get()


def test_an_owner_of_unused_memory_takes_no_processor_time(owner: Any) -> None:
    buffer = owner.offer.call_one(LARGE, 5).get()
    target = bytearray(LARGE)
    buffer.read_into(target).get(20)
    assert (buffer.backend, target.count(5)) == ("nixl", LARGE)
    until(lambda: owner.leases.call_one().get() == 0)
    before = owner.seconds.call_one().get()
    time.sleep(1)
    assert owner.seconds.call_one().get() - before < 0.3, "NIXL's own thread would have taken all of that second"


def test_a_paused_owner_is_waited_for_until_the_timeout_then_serves(owner: Any) -> None:
    buffer, pid = owner.offer.call_one(LARGE, 5).get(), owner.pid.call_one().get()
    target = bytearray(LARGE)
    buffer.read_into(target).get(20)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    try:
        with pytest.raises(TimeoutError, match=r"longer than 0.5 s"):
            buffer.read_into(target, timeout=0.5).get(20)
    finally:
        os.kill(pid, signal.SIGCONT)
    target[:] = bytes(LARGE)
    buffer.read_into(target).get(20)
    assert (buffer.backend, target.count(5)) == ("nixl", LARGE)


def test_transfers_of_many_threads_share_the_agent(owner: Any) -> None:
    buffers = owner.offer_many.call_one(100_000, 8).get()
    errors: list[BaseException] = []

    def read(number: int) -> None:
        target = bytearray(100_000)
        try:
            for _ in range(10):
                buffers[number].read_into(target).get(30)
                assert target.count(number) == 100_000
                buffers[number].write_from(target).get(30)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_a_forked_child_learns_that_the_libraries_do_not_survive_that(procs: ProcMesh, owner: Any) -> None:
    buffer = owner.offer.call_one(1000, 3).get()
    forking = this_host().spawn_procs(per_host={"gpus": 1}, name="forking")
    way, errors = forking.spawn("forker", Forker).read.call_one(buffer).get(60)
    forking.stop().get()
    assert way == "nixl"
    assert ["forked from one that may use NIXL" in line for line in errors] == [True, True]


PROGRAM = """
import monarch_nb
from monarch_nb.actor import this_host
from tests.cluster.rdma_conformance import SOON, Holder
monarch_nb.configure(rdma_movers="nixl")
procs = this_host().spawn_procs(per_host={"gpus": 1}, name="short")
buffer = procs.spawn("holder", Holder).offer.call_one(1000, 3).get(SOON)
target = bytearray(1000)
buffer.read_into(target).get(SOON)
assert target.count(3) == 1000
print(buffer.backend)
raise SystemExit(7)
"""


def test_a_process_that_used_it_ends_with_its_own_status() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (7, "nixl"), done.stderr


def test_without_a_device_nixl_is_used_only_on_request(owner: Any) -> None:
    if rdma_devices():
        pytest.skip("there is a device")
    assert not is_ibverbs_available()
    buffer = owner.offer.call_one(1000, 3).get()
    monarch_nb.configure(rdma_movers="")
    try:
        buffer.read_into(bytearray(1000)).get(20)
        assert buffer.backend == "cross-memory"
        with pytest.raises(CannotReachError, match="there is no RDMA device"):
            service().fabric.check(asked_for=False)
    finally:
        monarch_nb.configure(rdma_movers="nixl,messages")


def without_nixl() -> None:
    sys.modules.update(dict.fromkeys(("nixl_cu12", "nixl_cu13", "nixl")))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::monarch_nb.rdma.RDMATcpFallbackWarning")
def test_owners_without_nixl_are_reached_by_another_mover_with_the_reason(procs: ProcMesh) -> None:
    poor = this_host().spawn_procs(per_host={"gpus": 1}, name="poor", bootstrap=without_nixl)
    try:
        buffer = poor.spawn("holder", Holder).offer.call_one(1000, 3).get(SOON)
        target = bytearray(1000)
        buffer.read_into(target).get(SOON)
        assert (target, buffer.backend) == (b"\x03" * 1000, "messages")
        [reason] = next(route.reasons for route in routes() if route.process == buffer.handle.process)
        assert "nixl: at its process: NIXL is not installed" in reason
    finally:
        poor.stop().get()


def test_with_a_device_it_is_taken_without_being_asked_for(owner: Any) -> None:
    if not rdma_devices():
        pytest.skip("NOT TESTED HERE: there is no RDMA device; `make test-verbs` makes one")
    assert (is_ibverbs_available(), get_rdma_backend()) == (True, "ibverbs")
    buffer = owner.offer.call_one(1000, 3).get()
    target, by_itself = bytearray(1000), Nixl(service().fabric, service().lease_client, asked_for=lambda: False)
    by_itself.read([Move(buffer.handle, 0, memory_of(target))], Limit(30, "reading", buffer))
    assert target == b"\x03" * 1000
