"""The mover for RDMA devices, with an imitated device and owner: connections that are cut, owners that refuse."""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from monarch_nb.rdma import BufferDroppedError, OwnerLostError
from monarch_nb.rdma.errors import Limit, owner_lost
from monarch_nb.rdma.fabric import Fabric, LinkCutError, Span, Transfer
from monarch_nb.rdma.memory import Memory, memory_of
from monarch_nb.rdma.movers import CannotReachError, Move, nixl
from monarch_nb.rdma.movers.nixl import LeaseClient
from monarch_nb.rdma.verbs import BufferHandle, LeaseReply, LeaseRequest, TransferOutcome, own_identity
from monarch_nb.runtime import Future, pending_future, resolve_future

pytestmark = pytest.mark.timeout(20)


class Copy:
    """A transfer of the imitated device: over at the second look."""

    def __init__(self, device: "Device", copy: Callable[[], None], peer: str) -> None:
        self.device, self.copy, self.peer = device, copy, peer
        self.looks = 0
        self.moved = False

    def over(self) -> bool:
        self.looks += 1
        if self.peer in self.device.cut:
            raise LinkCutError("REMOTE_DISCONNECT")
        if self.looks < 2 or self.peer in self.device.silent:
            return False
        self.copy()
        self.moved = True
        return True

    def release(self) -> bool:
        self.device.released += 1
        return True


class Device(Fabric):
    """Copies within this process, and records its calls."""

    def __init__(self) -> None:
        super().__init__("reader")
        self.registered: set[Span] = set()
        self.peers: list[str] = []
        self.forgotten: list[str] = []
        self.cut: set[str] = set()
        self.silent: set[str] = set()
        self.released = 0
        self.count = itertools.count(1)

    def check(self, *, asked_for: bool) -> None:
        if not asked_for:
            raise CannotReachError("there is no RDMA device here")

    def register(self, memory: Memory, number: int = 0) -> Span:
        span = (memory.address, memory.size, next(self.count))
        self.registered.add(span)
        return span

    def deregister(self, span: Span) -> None:
        self.registered.remove(span)

    def connect(self, peer: str, words: bytes) -> None:
        self.peers.append(peer)

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)
        self.cut.discard(peer)

    def start(self, peer: str, local: Sequence[Span], remote: Sequence[Span], *, write: bool) -> Transfer:
        assert [span[1] for span in local] == [span[1] for span in remote]
        assert sum(span[1] for span in local) <= 16 << 20

        def copy() -> None:
            for (local_start, size, _), (remote_start, _, _) in zip(local, remote, strict=True):
                ctypes.memmove(remote_start if write else local_start, local_start if write else remote_start, size)

        return cast("Transfer", Copy(self, copy, peer))


class Owners(LeaseClient):
    """Owners that grant every request, unless `answers` differ."""

    def __init__(self) -> None:
        self.leases: set[int] = set()
        self.answers: list[LeaseReply | Exception] = []
        self.requests: list[LeaseRequest] = []
        self.numbers = itertools.count(1)

    def lease(self, handle: BufferHandle, question: LeaseRequest, limit: Limit) -> LeaseReply:
        self.requests.append(question)
        answer = self.answers.pop(0) if self.answers else LeaseReply("done", agent="owner", words=b"words")
        if isinstance(answer, Exception):
            raise answer
        number = next(self.numbers)
        self.leases.add(number)
        return LeaseReply(answer.how, answer.text, answer.index, number, answer.agent, answer.words)

    def renew(self, handle: BufferHandle, lease: int) -> Future[TransferOutcome]:
        future: Future[TransferOutcome] = pending_future()
        resolve_future(future, TransferOutcome("done" if lease in self.leases else "dropped"))
        return future

    def release(self, handle: BufferHandle, lease: int) -> None:
        self.leases.remove(lease)


device, owners = Device(), Owners()


@pytest.fixture(autouse=True)
def fresh() -> None:
    global device, owners
    device, owners = Device(), Owners()


def mover() -> nixl.Nixl:
    return nixl.Nixl(device, owners, asked_for=lambda: True)


def offer(data: Any, number: int = 1) -> BufferHandle:
    memory = memory_of(data)
    return BufferHandle("p", "trainer", number, bytes(16), memory.size, False, own_identity(), memory.address, 0)


def limit(seconds: float = 10) -> Limit:
    return Limit(seconds, "reading", "buffer")


def is_idle() -> bool:
    return not (owners.leases or device.registered)


def test_a_large_read_goes_in_pieces_and_leaves_nothing_leased() -> None:
    remote, local = bytearray(b"ab" * (20 << 20)), bytearray(40 << 20)
    moves = nixl.Nixl(device, owners, asked_for=lambda: True)
    moves.read([Move(offer(remote), 0, memory_of(local))], limit())
    assert local == remote
    assert device.released == 1 + 3, "the first byte, which connects, and 40 MB in pieces of 16"
    moves.write([Move(offer(remote), 5, memory_of(b"xyz"))], limit())
    assert remote[:9] == b"ababaxyza"[:9]
    assert is_idle()
    assert [question.write for question in owners.requests] == [False, True]


def test_a_connection_that_has_died_since_is_made_again_once() -> None:
    remote, local = bytearray(b"new"), bytearray(3)
    reader = mover()
    reader.read([Move(offer(remote), 0, memory_of(local))], limit())
    device.cut.add("owner")
    remote[:] = b"now"
    reader.read([Move(offer(remote), 0, memory_of(local))], limit())
    assert (local, device.forgotten, len(owners.requests)) == (b"now", ["owner"], 3)
    assert is_idle()


def test_an_owner_unreachable_twice_is_left_to_another_mover() -> None:
    owners.answers = [LeaseReply("done", agent="first"), LeaseReply("done", agent="second")]
    device.cut = {"first", "second"}
    with pytest.raises(CannotReachError, match="bytes do not arrive"):
        mover().read([Move(offer(b"abc"), 0, memory_of(bytearray(3)))], limit())
    assert device.forgotten == ["first", "second"]
    assert is_idle()


def test_an_owner_that_has_died_since_is_lost() -> None:
    handle = offer(b"abc")
    device.cut.add("owner")
    owners.answers = [LeaseReply("done", agent="owner"), owner_lost(handle, "it was killed")]
    with pytest.raises(OwnerLostError, match=r"trainer.*killed"):
        mover().read([Move(handle, 0, memory_of(bytearray(3)))], limit())
    assert is_idle()


def test_where_no_first_byte_comes_another_mover_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_FIRST_S", 0.05)
    monkeypatch.setattr(nixl, "_ENDING_S", 0.05)
    device.silent.add("owner")
    with pytest.raises(CannotReachError, match="no byte has come"):
        mover().read([Move(offer(b"abc"), 0, memory_of(bytearray(3)))], limit())
    assert device.forgotten == ["owner"]
    assert is_idle()


def test_a_time_out_in_the_middle_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_ENDING_S", 0.05)
    reader, local = mover(), bytearray(3)
    reader.read([Move(offer(b"abc"), 0, memory_of(local))], limit())
    device.silent.add("owner")
    with pytest.raises(TimeoutError, match=r"longer than 0.1 s"):
        reader.read([Move(offer(b"xyz"), 0, memory_of(local))], limit(0.1))
    assert local == b"abc"
    assert is_idle()


def test_an_owner_that_ends_a_lease_cuts_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_RENEWED_S", 0.01)
    reader = mover()
    reader.read([Move(offer(b"abc"), 0, memory_of(bytearray(3)))], limit())
    device.silent.add("owner")
    owners.renew = lambda handle, lease: Owners().renew(handle, lease)  # type: ignore[method-assign]
    with pytest.raises(CannotReachError, match="ended the lease"):
        reader.read([Move(offer(b"xyz"), 0, memory_of(bytearray(3)))], limit())
    assert is_idle()


def test_of_many_buffers_the_dropped_one_is_named() -> None:
    owners.answers = [LeaseReply("dropped", "it was dropped", index=1)]
    moves = [Move(offer(b"abc", number), 0, memory_of(bytearray(3))) for number in (7, 8)]
    with pytest.raises(BufferDroppedError, match="buffer 8 of trainer"):
        mover().read(moves, limit())


def test_an_owner_without_a_device_says_so() -> None:
    owners.answers = [LeaseReply("refused", "there is no RDMA device")]
    with pytest.raises(CannotReachError, match="at its process: there is no RDMA device"):
        mover().read([Move(offer(b"abc"), 0, memory_of(bytearray(3)))], limit())


def test_without_a_device_nobody_is_asked() -> None:
    with pytest.raises(CannotReachError, match="no RDMA device"):
        nixl.Nixl(device, owners, asked_for=lambda: False).read(
            [Move(offer(b"abc"), 0, memory_of(bytearray(3)))], limit()
        )
    assert not owners.requests


def test_memory_that_a_connection_knows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_KNOWN", 10)
    reader, local = mover(), bytearray(3)
    for number in range(25):
        reader.read([Move(offer(b"abc", number), 0, memory_of(local))], limit())
    assert device.forgotten == ["owner", "owner"]
