"""The parts of the data plane that need no other process: memory, ranges, offers, limits."""

import array
import mmap
import os
import random
import threading
from math import inf, isfinite, nan
from typing import Any

import numpy as np
import pytest

from monarch_nb.rdma.errors import Limit, TransferCancelledError
from monarch_nb.rdma.memory import Memory, Ranges, memory_of
from monarch_nb.rdma.regions import Regions, for_reading_only, writing

pytestmark = pytest.mark.timeout(60)


def shapes() -> list[Any]:
    import torch  # here: it takes as long as all other imports of all tests

    return [
        bytearray(b"0123456789abcdef"),
        memoryview(bytearray(b"0123456789abcdef")),
        array.array("d", [1.0, 2.0]),
        np.arange(4, dtype=np.int32).reshape(2, 2),
        torch.arange(16, dtype=torch.uint8),
        torch.arange(2, dtype=torch.float64).reshape(1, 2, 1),
        torch.arange(32, dtype=torch.uint8)[8:24],
        torch.zeros(8, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(1 + 2j, dtype=torch.complex128),
    ]


@pytest.mark.parametrize("index", range(9))
def test_memory_of_anything_contiguous_is_its_own_bytes(index: int) -> None:
    data = shapes()[index]
    memory = memory_of(data)
    assert memory.size == 16
    assert not memory.readonly
    view = memory.view()
    view[:] = bytes(range(1, 17))
    assert bytes(memory_of(data).part(3, 4).view()) == bytes(range(4, 8))


def test_memory_that_is_read_only_is_read_and_not_written() -> None:
    memory = memory_of(b"0123")
    assert memory.readonly
    assert bytes(memory.view()) == b"0123"
    with pytest.raises(TypeError):
        memory.view()[0] = 1
    with pytest.raises(ValueError, match="dst is read-only memory"):
        memory_of(b"0123", writable=True, what="dst")


def test_memory_with_gaps_or_none_is_refused_with_the_remedy() -> None:
    import torch

    with pytest.raises(ValueError, match=r"shape \(4, 2\) with strides \(1, 4\): use tensor.contiguous"):
        memory_of(torch.zeros(2, 4).t())
    with pytest.raises(ValueError, match="view with gaps"):
        memory_of(np.zeros(8)[::2])
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        memory_of(torch.zeros(2, 2).to_sparse())
    with pytest.raises(ValueError, match="lies on meta"):
        memory_of(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="resolve_conj"):
        memory_of(torch.zeros(2, dtype=torch.complex64).conj())
    elsewhere = type("Elsewhere", (torch.Tensor,), {"__torch_dispatch__": None})  # such as a DTensor
    with pytest.raises(ValueError, match="is an Elsewhere, which has no memory of its own: use its local part"):
        memory_of(torch.Tensor._make_wrapper_subclass(elsewhere, (2,)))
    for kind in (TypeError, ValueError):  # torchmonarch's is a ValueError
        with pytest.raises(kind, match="not str") as caught:
            memory_of("text")
        assert caught.type.__name__ == "BufferTypeError"  # which nobody takes for memory that has run out


def test_empty_memory_has_no_bytes() -> None:
    assert memory_of(bytearray()).size == 0


def test_ranges_contain_the_same_addresses_as_a_set() -> None:
    chance = random.Random(4)
    for _ in range(200):
        ranges, members = Ranges(), set[int]()
        for _ in range(30):
            start, size = chance.randrange(200), chance.randrange(1, 12)
            memory = Memory(start, size, None)
            addresses = set(range(start, start + size))
            assert ranges.hits(memory) == bool(addresses & members), (start, size, members)
            ranges.add(memory)
            members |= addresses


def test_an_offer_ends_and_its_mark_is_no_others_secret() -> None:
    regions = Regions()
    first = regions.offer(memory_of(bytearray(8)), "a")
    with regions.use(first.number, first.secret) as memory:
        assert memory.size == 8
    with pytest.raises(PermissionError):
        regions.use(first.number, bytes(16))
    assert regions.withdraw(first.number)
    assert not regions.withdraw(first.number)
    with pytest.raises(LookupError, match="it was dropped"):
        regions.use(first.number, first.secret)
    second = regions.offer(memory_of(bytearray(8)), "a")
    assert (second.mark, second.secret != first.secret) == (first.mark, True)


def test_ten_thousand_offers_come_and_go() -> None:
    regions = Regions()
    offers = [regions.offer(memory_of(bytearray(1)), "a") for _ in range(10_000)]
    assert len({region.mark for region in offers}) == len(regions) == 10_000
    assert regions.withdraw_all(lambda region: region.number % 2 == 0) == 5_000
    assert len(regions) == 5_000


def test_a_drop_waits_for_the_transfer_that_uses_the_memory() -> None:
    regions = Regions()
    region = regions.offer(memory_of(bytearray(8)), "a")
    with regions.use(region.number, region.secret):
        thread = threading.Thread(target=regions.withdraw, args=(region.number,))
        thread.start()
        thread.join(0.05)  # the drop is under way, and stays so
        assert thread.is_alive()
        assert region.memory is not None
    thread.join(10)
    assert region.memory is None


def test_memory_under_an_external_write_is_kept_until_it_ends() -> None:
    regions = Regions()
    region, second = (regions.offer(memory_of(bytearray(8)), "a") for _ in range(2))
    with writing(os.getpid(), regions.guard.descriptor, [region.number]) as stays:
        assert stays
        assert regions.withdraw(region.number)
        assert regions.withdraw(second.number)
        assert (region.memory is None, second.memory is None) == (False, True)
        with pytest.raises(LookupError, match="it was dropped"):
            regions.use(region.number, region.secret)
    regions.offer(memory_of(bytearray(8)), "a")
    assert region.memory is None
    regions.guard.close()
    with pytest.raises(FileNotFoundError), writing(2**22 - 1, 3, [1]):
        pass


def test_read_only_memory_cannot_be_written_with_bits_of_its_secret() -> None:
    regions = Regions()
    region = regions.offer(memory_of(bytearray(8)), "a", readonly=True)
    assert for_reading_only(region.secret)
    first, *rest = region.secret
    for secret in (region.secret, bytes((first ^ 1, *rest))):
        with pytest.raises(PermissionError):
            regions.use(region.number, secret, write=True)
    assert not for_reading_only(regions.offer(memory_of(bytearray(8)), "a").secret)
    assert regions.offer(memory_of(b"bytes"), "a").readonly


def test_memory_keeps_what_it_belongs_to() -> None:
    mapped = mmap.mmap(-1, 4096)
    memory = memory_of(mapped)
    with pytest.raises(BufferError):
        mapped.close()
    del memory
    mapped.close()


def test_a_limit_ends_by_time_and_by_cancel() -> None:
    with pytest.raises(TimeoutError, match="reading took longer than 0 s"):
        Limit(0.0, "reading").remaining()
    limit = Limit(60.0, "reading")
    assert 0 < limit.remaining() <= 60
    assert isfinite(Limit(inf, "reading").remaining()), "sockets take no other"
    for wrong in (nan, -1, "1", None):
        with pytest.raises(ValueError, match=f"a number of seconds >= 0, not {wrong!r}"):
            Limit(wrong, "reading")  # type: ignore[arg-type]
    limit.cancel()
    with pytest.raises(TransferCancelledError, match="reading was cancelled"):
        limit.remaining()
