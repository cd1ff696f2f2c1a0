"""RDMABuffer between processes, by each mover: the same suite for all."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

import monarch_nb
from monarch_nb.actor import Actor, ActorError, ProcMesh, endpoint, this_host, this_proc
from monarch_nb.rdma import BufferDroppedError, OwnerLostError, RDMAAction, RDMABuffer, RDMAError, routes, transfers
from monarch_nb.rdma.fabric import nixl_name
from tests.cluster.actor_tools import Faults
from tests.cluster.rdma_conformance import CHECKS, Holder, mover_of
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]

WITHOUT_NIXL = "NOT TESTED HERE: NIXL is not installed (pip install 'monarch-nb[rdma]'); `make test-verbs` brings it"
MOVERS = [
    "cross-memory",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_name(), reason=WITHOUT_NIXL)),
    "streams",
    "messages",
]


class AsyncReader(Actor):
    """An async actor that reads."""

    @endpoint
    async def read(self, buffer: RDMABuffer) -> bytes:
        target = bytearray(buffer.size())
        await buffer.read_into(target)
        return bytes(target)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs(per_host={"gpus": 2}, name="rdma_procs")
    yield mesh
    mesh.stop().get()


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest) -> Iterator[str]:
    before = monarch_nb.config.get_global_config()["rdma_movers"]
    monarch_nb.configure(rdma_movers=request.param)
    yield request.param
    monarch_nb.configure(rdma_movers=before)


@pytest.fixture
def holder(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("holder", Holder)
    yield mesh
    mesh.stop().get()


@pytest.fixture(scope="module", params=["same process", "processes"])
def owner(request: pytest.FixtureRequest, procs: ProcMesh) -> Iterator[Any]:
    """An actor that owns memory."""
    mesh = procs.slice(gpus=0) if request.param == "processes" else this_proc()
    owner = mesh.spawn("holder", Holder)
    yield owner
    owner.stop().get()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_mover_reads_and_writes_memory_of_another_process(
    owner: Any, mover: str, check: Callable[[Any], None]
) -> None:
    check(owner)
    assert mover_of(owner) == mover


def test_a_killed_owner_is_an_error_that_says_so(mover: str, faults: Faults) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="short")
    mesh = procs.spawn("mortal", Holder)
    buffer, pid = mesh.offer.call_one(100, 1).get(), mesh.pid.call_one().get()
    target = bytearray(100)
    buffer.read_into(target).get(20)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid))
    with pytest.raises(OwnerLostError, match="mortal"):
        buffer.read_into(target).get(20)
    with pytest.raises(RDMAError, match="mortal"):
        buffer.write_from(target).get(20)
    assert faults.next().mesh_name == "mortal"
    procs.stop().get()


@pytest.mark.filterwarnings("ignore::monarch_nb.rdma.RDMATcpFallbackWarning")
def test_an_owner_that_cannot_listen_is_reached_by_messages() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="short")
    mesh = procs.spawn("poor", Holder)
    buffer = mesh.offer.call_one(100, 1).get()
    before = mesh.limit_descriptors.call_one(3).get()
    monarch_nb.configure(rdma_movers="streams,messages")
    try:
        target = bytearray(100)
        buffer.read_into(target).get(20)
        assert (target, buffer.backend) == (b"\x01" * 100, "messages")
        [reason] = {route.process: route for route in routes()}[buffer.handle.process].reasons
        assert "streams: its process cannot listen: OSError: [Errno 24]" in reason
    finally:
        monarch_nb.configure(rdma_movers="")
        mesh.limit_descriptors.call_one(before).get()  # it needs some to end
        procs.stop().get()


def test_atomic_steps_of_many_threads_all_count(holder: Any) -> None:
    buffer = holder.slice(gpus=0).offer.call_one(8, 0).get()

    def add() -> None:
        for _ in range(20):
            RDMAAction().fetch_add(buffer, bytearray(8), 1).submit().get(20)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert int.from_bytes(holder.slice(gpus=0).content.call_one().get(), "little") == 80


def test_actors_read_from_actors_and_from_the_controller(procs: ProcMesh, holder: Any) -> None:
    remote = holder.slice(gpus=0).offer.call_one(1000, 9).get()
    local = RDMABuffer(bytearray(b"m" * 500))
    readers = procs.spawn("later", AsyncReader)
    for reader in (holder.slice(gpus=1).read, readers.slice(gpus=1).read):
        assert reader.call_one(remote).get() == b"\x09" * 1000
        assert reader.call_one(local).get() == b"m" * 500
    local.drop().get()
    with pytest.raises(ActorError, match="BufferDroppedError"):
        readers.slice(gpus=0).read.call_one(local).get()
    readers.stop().get()


def test_a_buffer_is_read_in_its_own_process_too() -> None:
    memory = bytearray(b"0123456789")
    buffer = RDMABuffer(memory)
    target = bytearray(10)
    buffer.read_into(target).get()
    buffer.write_from(b"ab").get()
    assert (target, memory, buffer.backend) == (b"0123456789", b"ab23456789", "local")
    tensor = torch.ones(5, dtype=torch.bfloat16)
    tensors = RDMABuffer(tensor)
    for data in (memory, tensor):  # a freed block would be read, and written
        with pytest.raises((BufferError, RuntimeError), match=r"re-?siz"):
            data.extend(b"x") if isinstance(data, bytearray) else data.resize_(1000)
    tensor.data = torch.zeros(5, dtype=torch.bfloat16)
    tensors.read_into(got := torch.zeros(5, dtype=torch.bfloat16)).get()
    assert got.tolist() == [1] * 5
    buffer.drop().get()
    with pytest.raises(BufferDroppedError):
        buffer.read_into(target).get()


def test_buffers_of_an_actor_end_with_it(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=0).spawn("brief", Holder)
    buffer = mesh.offer.call_one(100, 1).get()
    mesh.stop().get()
    with pytest.raises(BufferDroppedError):
        buffer.read_into(bytearray(100)).get(20)


def test_a_read_only_buffer_is_not_written(holder: Any) -> None:
    buffer = holder.slice(gpus=0).offer.call_one(10, 1, True).get()
    with pytest.raises(PermissionError, match="read-only"):
        buffer.write_from(b"x")
    with pytest.raises(PermissionError, match="read-only"):
        RDMAAction().write_remote(buffer, b"x")
    assert RDMABuffer(b"bytes").readonly


def test_requests_that_do_not_fit_the_buffer_are_refused_at_once(holder: Any) -> None:
    buffer = holder.slice(gpus=0).offer.call_one(10, 1).get()
    with pytest.raises(ValueError, match="dst has 9 bytes, and must have at least the 10"):
        buffer.read_into(bytearray(9))
    with pytest.raises(ValueError, match="src has 11 bytes, and the buffer has room for 10"):
        buffer.write_from(bytes(11))
    with pytest.raises(ValueError, match="offset 10 is outside"):
        buffer.read_into(bytearray(9), offset=10)
    with pytest.raises(TypeError, match="float"):
        buffer.read_into(bytearray(10), offset=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one byte"):
        RDMABuffer(bytearray())
    wrong: Any = bytearray(10)
    for add in (RDMAAction().read_into, RDMAAction().write_from, lambda *args: RDMAAction().fetch_add(*args, 1)):
        with pytest.raises(TypeError, match="takes an RDMABuffer, not a bytearray"):
            add(wrong, bytearray(10))
    target = bytearray(20)
    action = RDMAAction().read_remote(memoryview(target)[:12], buffer)
    with pytest.raises(ValueError, match="use the same local bytes"):
        action.read_remote(memoryview(target)[9:], buffer)


def test_a_paused_owners_memory_is_read_and_written_without_its_help(holder: Any) -> None:
    buffer, pid = holder.slice(gpus=1).offer.call_one(100, 5).get(), holder.slice(gpus=1).pid.call_one().get()
    target = bytearray(100)
    buffer.read_into(target).get(20)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    try:
        target[:] = bytes(100)
        buffer.read_into(target).get(20)
        assert target == b"\x05" * 100
        buffer.write_from(b"soon").get(20)
        monarch_nb.configure(rdma_movers="messages")
        with pytest.raises(TimeoutError, match=r"longer than 0.2 s"):
            buffer.read_into(target, timeout=0.2).get(20)
    finally:
        monarch_nb.configure(rdma_movers="")
        os.kill(pid, signal.SIGCONT)
    assert holder.slice(gpus=1).content.call_one().get() == b"soon" + b"\x05" * 96


def test_a_transfer_is_cancelled(holder: Any) -> None:
    pid = holder.slice(gpus=1).pid.call_one().get()
    buffer = holder.slice(gpus=1).offer.call_one(100, 5).get()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    monarch_nb.configure(rdma_movers="messages")
    try:
        future = buffer.read_into(bytearray(100))
        assert future.cancel()
        assert future.cancelled()
    finally:
        monarch_nb.configure(rdma_movers="")
        os.kill(pid, signal.SIGCONT)


def test_await_works_outside_of_actors(holder: Any) -> None:
    buffer = holder.slice(gpus=0).offer.call_one(1 << 20, 2).get()
    target = bytearray(1 << 20)

    async def main() -> None:
        await asyncio.gather(buffer.read_into(target), RDMAAction().submit())
        await buffer.drop()

    asyncio.run(main())
    assert target.count(2) == 1 << 20


def test_routes_are_shown_as_a_table(holder: Any) -> None:
    buffer = holder.slice(gpus=0).offer.call_one(1000, 2).get()
    buffer.read_into(bytearray(1000)).get()
    row = {route.process: route for route in routes()}[buffer.handle.process]
    assert (row.mover, row.read >= 1000, row.transfers >= 1) == ("cross-memory", True, True)
    assert "cross-memory" in repr(routes())


def test_forbidden_sockets_are_named_in_the_error_with_the_setting(holder: Any) -> None:
    buffer = holder.slice(gpus=0).offer.call_one(10, 2).get()
    monarch_nb.configure(rdma_movers="streams", rdma_allow_tcp_fallback=False)
    try:
        with pytest.raises(RDMAError, match=r"configure\(rdma_movers"):
            buffer.read_into(bytearray(10)).get(20)
    finally:
        monarch_nb.configure(rdma_movers="", rdma_allow_tcp_fallback=True)


def offered_bytes() -> float:
    """Bytes that the controller offers, by the table; other tests may have left some."""
    sizes = [size.split() for name, _, size in transfers().offered if name == "controller"]
    return sum(float(number) * {"B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}[unit] for number, unit in sizes)


def test_transfers_of_all_processes_are_told_to_the_controller(procs: ProcMesh, holder: Any) -> None:
    buffer = holder.slice(gpus=0).offer.call_one(3 << 20, 9).get()
    holder.slice(gpus=1).read.call_one(buffer).get()
    local = RDMABuffer(bytearray(5_000_000))
    local.read_into(bytearray(5_000_000)).get()

    def is_reported() -> bool:
        rows = {(source, target): (mover, moved) for source, target, mover, moved, *_ in transfers().moved}
        row = rows.get(("rdma_procs gpus=0", "rdma_procs gpus=1"))
        return row == ("cross-memory", "3.00 MB") and ("controller", "controller") in rows

    until(is_reported)
    before = offered_bytes()
    assert before >= 4.9e6
    local.drop().get()
    until(lambda: offered_bytes() <= before - 5e6 + 1e5)
    assert "cross-memory" in repr(transfers())
