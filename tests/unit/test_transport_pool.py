"""Memory files are filled again once all holders have let go, and never before."""

import gc
import os
import time

import pytest

from monarch_nb.transport.pool import IDLE, LENT, MOST_IDLE, Pool
from monarch_nb.transport.shared import MemoryFile, available
from monarch_nb.wire import Pieces
from tests.polling import until
from tests.unit.transport_tools import End, ends, run_folder

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(not available(), reason="this system has no memory files")]
BIG = 1 << 20


def a_pool() -> Pool:
    return Pool(lambda pool: None)


def filled(pool: Pool, letter: bytes, size: int = BIG) -> MemoryFile:
    return pool.holding(memoryview(letter * size))


def inode(file: MemoryFile) -> int:
    return os.fstat(file.fd).st_ino


def is_open(fd: int, number: int) -> bool:
    """Whether this file is still open: other threads of this process open and close files meanwhile."""
    try:
        return os.fstat(fd).st_ino == number
    except OSError:
        return False


def test_a_file_that_was_given_back_is_filled_again() -> None:
    pool = a_pool()
    first = filled(pool, b"1")
    number, same = pool.lend([first], "h/b"), inode(first)
    del first
    pool.returned([number], "h/b")
    second = filled(pool, b"2", BIG - 5)
    assert inode(second) == same
    assert bytes(second.private()) == b"2" * (BIG - 5)


def test_small_buffers_share_a_file_that_is_filled_again() -> None:
    pool = a_pool()
    first = filled(pool, b"1")
    number, same = pool.lend([first], "h/b"), inode(first)
    del first
    pool.returned([number], "h/b")
    pieces = Pieces()
    for letter in range(100):
        assert pieces.add(memoryview(bytes([letter]) * 10_001))
    file = pool.holding(pieces)
    assert inode(file) == same
    content = bytes(file.private())
    assert content == bytes(pieces)
    assert [content[start : start + 10_001] for start in range(0, len(content), 10_048)] == [
        bytes([letter]) * 10_001 for letter in range(100)
    ]


def test_a_file_that_its_sender_still_holds_is_not_filled_again() -> None:
    pool = a_pool()
    first = filled(pool, b"1")
    pool.returned([pool.lend([first], "h/b")], "h/b")
    second = filled(pool, b"2")
    assert inode(second) != inode(first)
    assert bytes(first.private()) == b"1" * BIG


def test_every_recipient_must_return_a_loan_and_only_its_own() -> None:
    pool = a_pool()
    file = filled(pool, b"1")
    same = inode(file)
    numbers = [pool.lend([file], peer) for peer in ("h/b", "h/c")]
    del file
    pool.returned(numbers, "h/b")
    assert inode(filled(pool, b"2")) != same
    pool.returned(numbers, "h/c")
    pool.returned([99], "h/c")
    assert inode(filled(pool, b"3")) == same


def test_a_much_larger_file_is_left_for_larger_buffers() -> None:
    pool = a_pool()
    large = inode(filled(pool, b"1", 4 * BIG))
    assert inode(filled(pool, b"2")) != large
    assert inode(filled(pool, b"3", 3 * BIG)) == large


def test_idle_buffers_go_and_unreturned_loans_are_forgotten() -> None:
    pool = a_pool()
    lent = filled(pool, b"1")
    number = pool.lend([lent], "h/b")
    filled(pool, b"2")
    del lent
    now = time.monotonic()
    assert pool.tick(now + IDLE + 1)
    assert pool.lend([], "h/c") == 0
    assert not pool.tick(now + LENT + 1)
    pool.returned([number], "h/b")  # too late, and no matter
    assert not pool.tick(now)


def test_no_more_than_so_many_bytes_lie_idle() -> None:
    pool = a_pool()
    half = MOST_IDLE // 2 + BIG
    files = []
    for _ in range(2):
        file = MemoryFile.empty(half)
        os.ftruncate(file.fd, half)  # without pages
        files.append(pool._add(file))
    identities = [(file.fd, inode(file)) for file in files]
    del file
    files.clear()
    assert pool.tick(time.monotonic())
    assert sum(is_open(*identity) for identity in identities) == 1


def test_loans_return_over_the_network_when_the_receiver_drops_the_value() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            pool = a.node._pool
            a.send("h/b", b"p", b"\1" * BIG)
            _, frames = b.get()
            first = frames[1]
            del frames
            a.send("h/b", b"p", b"\2" * BIG)
            gc.collect()
            assert len(pool._loans) == 2
            assert bytes(b.get()[1][1]) == b"\2" * BIG
            until(lambda: len(pool._loans) == 1)
            for letter in (b"\3", b"\4", b"\5"):
                a.send("h/b", b"p", letter * BIG)
                assert bytes(b.get()[1][1]) == letter * BIG
            assert bytes(first) == b"\1" * BIG


def test_a_buffer_sent_to_oneself_is_not_refilled_in_use() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            a.send("h/a", b"p", b"\1" * BIG)
            _, frames = a.get()
            gc.collect()
            for letter in (b"\2", b"\3"):
                a.send("h/b", b"p", letter * BIG)
                assert bytes(b.get()[1][1]) == letter * BIG
            assert bytes(frames[1]) == b"\1" * BIG


def test_a_forwarded_buffer_is_not_returned_by_the_forwarder() -> None:
    with run_folder() as first, run_folder() as second:
        agent = End("h/agent", {"h": first, "g": second})
        a, b = End("h/a", first, agent="h/agent"), End("g/b", second)
        with ends(agent, a, b):
            a.send("g/b", b"p", b"\1" * BIG)
            _, frames = b.get()
            for letter in (b"\2", b"\3"):
                a.send("h/agent", b"p", letter * BIG)
                assert bytes(agent.get()[1][1]) == letter * BIG
            assert bytes(frames[1]) == b"\1" * BIG
