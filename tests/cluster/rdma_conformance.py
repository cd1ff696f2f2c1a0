"""Checks that every mover passes, between any two processes."""

import contextlib
import os
import resource
from collections.abc import Callable
from typing import Any

import msgspec

from monarch_nb.actor import Actor, endpoint
from monarch_nb.rdma import BufferDroppedError, Put, RDMAAction, RDMABuffer, RDMAError, routes
from monarch_nb.rdma.buffer import service
from monarch_nb.rdma.verbs import BufferHandle

SOON = 40.0
LARGE = 24 << 20  # above the sizes from which movers divide a move


class Holder(Actor):
    """Owns memory."""

    def __init__(self) -> None:
        self.memory: list[Any] = []

    @endpoint
    def offer(self, size: int, fill: int, readonly: bool = False) -> RDMABuffer:
        self.memory.append(bytearray([fill]) * size)
        return RDMABuffer(self.memory[-1], readonly=readonly)

    @endpoint
    def offer_many(self, size: int, count: int) -> list[RDMABuffer]:
        self.memory += [bytearray([number % 256]) * size for number in range(count)]
        return [RDMABuffer(part) for part in self.memory[-count:]]

    @endpoint
    def offer_tensor(self) -> RDMABuffer:
        import torch

        self.memory.append(torch.arange(1000, dtype=torch.float32))
        return RDMABuffer(self.memory[-1])

    @endpoint
    def content(self) -> bytes:
        return bytes(self.memory[-1])

    @endpoint
    def read(self, buffer: RDMABuffer) -> bytes:
        data = bytearray(buffer.size())
        buffer.read_into(data).get()
        return bytes(data)

    @endpoint
    def length(self, value: Put[bytes]) -> int:
        return len(value.get())

    @endpoint
    def held(self) -> int:
        """Number of values of other hosts that this process has fetched."""
        return len(service().puts._foreign)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def limit_descriptors(self, count: int) -> int:
        """Limits open descriptors (with 3, nothing can be opened); returns the previous limit."""
        before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
        return before


def buffer_of(handle: BufferHandle) -> RDMABuffer:
    buffer = RDMABuffer.__new__(RDMABuffer)
    buffer.__setstate__(handle)
    return buffer


@contextlib.contextmanager
def refused(*kinds: type[BaseException], text: str = "") -> Any:
    """As pytest.raises, also in programs that have no pytest."""
    try:
        yield
    except kinds as error:
        if text not in str(error):
            raise
    else:
        raise AssertionError(f"no {kinds} was raised")


def bytes_are_read_and_written_and_nothing_else_changes(holder: Any) -> None:
    buffer = holder.offer.call_one(1000, 7).get(SOON)
    target = bytearray(b"x" * 1010)
    buffer.read_into(target).get(SOON)
    assert target == b"\x07" * 1000 + b"x" * 10
    buffer.write_from(b"y" * 10, offset=5).get(SOON)
    assert holder.content.call_one().get(SOON) == b"\x07" * 5 + b"y" * 10 + b"\x07" * 985
    buffer.read_into(target, offset=990).get(SOON)
    assert target[:12] == b"\x07" * 12


def large_memory_comes_whole(holder: Any) -> None:
    buffer = holder.offer.call_one(LARGE, 3).get(SOON)
    target = bytearray(LARGE)
    buffer.read_into(target).get(SOON)
    assert target.count(3) == LARGE
    source = bytes(range(256)) * (LARGE // 256)
    buffer.write_from(source).get(SOON)
    buffer.read_into(target).get(SOON)
    assert target == source
    buffer.drop().get(SOON)


def one_byte_and_odd_sizes_and_places_come_whole(holder: Any) -> None:
    buffer = holder.offer.call_one(70_001, 1).get(SOON)
    for offset, size in ((0, 1), (70_000, 1), (1, 4095), (4097, 4096), (12_345, 54_321)):
        buffer.write_from(bytes([size % 251]) * size, offset=offset).get(SOON)
        target = bytearray(70_001)
        buffer.read_into(target, offset=offset).get(SOON)
        assert target[:size] == bytes([size % 251]) * size


def a_tensor_is_read_into_a_tensor(holder: Any) -> None:
    import torch

    buffer = holder.offer_tensor.call_one().get(SOON)
    target = torch.zeros(1000)
    buffer.read_into(target).get(SOON)
    assert torch.equal(target, torch.arange(1000, dtype=torch.float32))
    buffer.write_from(target.flip(0).contiguous()).get(SOON)
    buffer.read_into(target.view(torch.uint8)).get(SOON)
    assert torch.equal(target, torch.arange(1000, dtype=torch.float32).flip(0))


def a_dropped_buffer_is_said_to_be_dropped(holder: Any) -> None:
    buffer = holder.offer.call_one(100, 1).get(SOON)
    target = bytearray(100)
    buffer.read_into(target).get(SOON)
    buffer.drop().get(SOON)
    buffer.drop().get(SOON)
    with refused(BufferDroppedError, text="holder"):
        buffer.read_into(target).get(SOON)
    with refused(BufferDroppedError, text="holder"):
        buffer.write_from(target).get(SOON)


def a_forged_handle_gets_nothing(holder: Any) -> None:
    buffer = holder.offer.call_one(100, 1).get(SOON)
    target = bytearray(100)
    forged = buffer_of(msgspec.structs.replace(buffer.handle, secret=bytes(16)))
    with refused(RDMAError):
        forged.read_into(target).get(SOON)
    with refused(RDMAError):
        forged.write_from(target).get(SOON)
    unknown = buffer_of(msgspec.structs.replace(buffer.handle, number=1_000_000, secret=bytes(16)))
    with refused(RDMAError):
        unknown.write_from(target).get(SOON)
    assert target == bytes(100)
    assert holder.content.call_one().get(SOON) == b"\x01" * 100


def what_is_for_reading_is_not_written_with_a_forged_handle_either(holder: Any) -> None:
    reading = holder.offer.call_one(100, 1, True).get(SOON).handle
    first, *rest = reading.secret
    for secret in (reading.secret, bytes((first ^ 1, *rest))):
        forged = buffer_of(msgspec.structs.replace(reading, readonly=False, secret=secret))
        with refused(RDMAError, PermissionError):
            forged.write_from(bytes(100)).get(SOON)
    assert holder.content.call_one().get(SOON) == b"\x01" * 100


def an_action_moves_many_at_once(holder: Any) -> None:
    buffers = holder.offer_many.call_one(64, 300).get(SOON)
    targets = [bytearray(64) for _ in buffers]
    action = RDMAAction()
    for buffer, target in zip(buffers, targets, strict=True):
        action.read_remote(target, buffer)
    action.submit().get(SOON)
    assert targets == [bytearray([rank % 256]) * 64 for rank in range(300)]
    action = RDMAAction()
    for rank, buffer in enumerate(buffers[:20]):
        action.write_remote(buffer, bytes([100 + rank]) * 32)
    action.submit(timeout=SOON).get()
    RDMAAction().read_remote(targets[4], buffers[4]).submit().get(SOON)
    assert targets[4] == b"\x68" * 32 + b"\x04" * 32


def one_dropped_buffer_fails_the_action_and_names_itself(holder: Any) -> None:
    good, bad = (holder.offer.call_one(64, rank).get(SOON) for rank in (1, 2))
    bad.drop().get(SOON)
    action = RDMAAction().read_remote(bytearray(64), good).read_remote(bytearray(64), bad)
    with refused(BufferDroppedError, text=f"buffer {bad.handle.number} of"):
        action.submit().get(SOON)


def a_transfer_that_was_given_no_time_ends_with_a_time_out(holder: Any) -> None:
    buffer = holder.offer.call_one(LARGE, 3).get(SOON)
    target = bytearray(LARGE)
    with refused(TimeoutError, text="longer than"):
        buffer.read_into(target, timeout=0.0001).get(SOON)
    assert set(target) <= {0, 3}, "each byte is an old or a new one"
    buffer.read_into(target).get(SOON)
    assert target.count(3) == LARGE
    buffer.drop().get(SOON)


def steps_that_add_and_swap_are_atomic(holder: Any) -> None:
    buffer = holder.offer.call_one(8, 0).get(SOON)
    before = bytearray(8)
    for expected in range(3):
        RDMAAction().fetch_add(buffer, before, 5).submit().get(SOON)
        assert int.from_bytes(before, "little") == 5 * expected
    RDMAAction().compare_and_swap(buffer, before, 15, -1).submit().get(SOON)
    RDMAAction().compare_and_swap(buffer, before, 15, 3).submit().get(SOON)
    assert int.from_bytes(before, "little", signed=True) == -1
    assert int.from_bytes(holder.content.call_one().get(SOON), "little", signed=True) == -1


CHECKS: tuple[Callable[[Any], None], ...] = (
    bytes_are_read_and_written_and_nothing_else_changes,
    large_memory_comes_whole,
    one_byte_and_odd_sizes_and_places_come_whole,
    a_tensor_is_read_into_a_tensor,
    a_dropped_buffer_is_said_to_be_dropped,
    a_forged_handle_gets_nothing,
    what_is_for_reading_is_not_written_with_a_forged_handle_either,
    an_action_moves_many_at_once,
    one_dropped_buffer_fails_the_action_and_names_itself,
    a_transfer_that_was_given_no_time_ends_with_a_time_out,
    steps_that_add_and_swap_are_atomic,
)
WITHOUT_TORCH = tuple(check for check in CHECKS if check is not a_tensor_is_read_into_a_tensor)


def mover_of(holder: Any) -> str:
    """Which mover serves a holder after a transfer."""
    process = holder.offer.call_one(1, 0).get(SOON).handle.process
    return next(route.mover for route in routes() if route.process == process)
