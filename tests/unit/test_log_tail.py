"""Output of a proc that a host agent sends to followers: windows, late followers, and those that take nothing."""

import random

import pytest

from monarch_nb.logs.tailer import BEHIND_S, FULL, RECENT, WINDOW, LogMessages, Sending, Tail
from monarch_nb.logs.verbs import LogBlock, LogChunk

pytestmark = pytest.mark.timeout(60)

PIECE = 64 * 1024
LINE = b"x" * 1023 + b"\n"


def block(data: bytes) -> LogBlock:
    return LogBlock(1, 0, 1.0, "c:1", data)


class Follower:
    """A follower of a proc's output, who takes it or not."""

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}  # by offset
        self.received = 0
        self.lines = 0
        self.skipped = 0
        self.ended = False
        self.position = 0

    def take(self, chunk: LogChunk) -> None:
        assert chunk.offset >= self.received, "every chunk comes once, and in order"
        assert chunk.position >= self.position
        if chunk.data:
            self.data[chunk.offset] = chunk.data
            self.lines += chunk.data.count(b"\n")
        self.received = chunk.offset + len(chunk.data)
        self.skipped += chunk.skipped
        self.ended = self.ended or chunk.ended
        self.position = chunk.position


def deliver(sendings: list[Sending], followers: dict[str, Follower]) -> None:
    for name, chunk in sendings:
        followers[name].take(chunk)


def test_a_reader_that_takes_everything_gets_everything_in_order() -> None:
    tail, follower = Tail("h/p.0.0"), Follower()
    written = b""
    deliver(tail.follow("me", 0), {"me": follower})
    for number in range(100):
        data = b"%d\n" % number * 1000
        written += data
        deliver(tail.add((block(data),), len(written), ended=False), {"me": follower})
        tail.took("me", follower.received)
    deliver(tail.add((), len(written), ended=True), {"me": follower})
    assert b"".join(follower.data.values()) == written
    assert (follower.skipped, follower.ended, follower.position) == (0, True, len(written))


def test_a_reader_that_takes_nothing_gets_a_window_and_a_count() -> None:
    tail, follower = Tail("h/p.0.0"), Follower()
    deliver(tail.follow("me", 0), {"me": follower})
    for _ in range(40):
        deliver(tail.add((block(LINE * 64),), tail.total, ended=False), {"me": follower})
    assert WINDOW <= follower.received < WINDOW + PIECE
    deliver(tail.add((), tail.total, ended=True), {"me": follower})
    assert follower.ended
    assert follower.lines + follower.skipped == 40 * 64


def test_a_late_acknowledgement_brings_the_missed_count_and_new_lines() -> None:
    tail, follower = Tail("h/p.0.0"), Follower()
    deliver(tail.follow("me", 0), {"me": follower})
    for _ in range(12):
        deliver(tail.add((block(LINE * 64),), tail.total, ended=False), {"me": follower})
    deliver(tail.took("me", follower.received), {"me": follower})
    assert follower.lines + follower.skipped == 12 * 64
    deliver(tail.add((block(b"news\n"),), tail.total + 5, ended=False), {"me": follower})
    assert list(follower.data.values())[-1] == b"news\n"


def test_a_full_window_is_waited_for_and_not_for_long() -> None:
    tail, follower = Tail("h/p.0.0"), Follower()
    deliver(tail.follow("me", 0), {"me": follower})
    assert not tail.waits(100.0)
    while follower.received < WINDOW:
        deliver(tail.add((block(LINE * 64),), tail.total, ended=False), {"me": follower})
    assert tail.waits(100.0)
    assert tail.waits(100.0 + BEHIND_S / 2)
    assert not tail.waits(100.0 + BEHIND_S), "the follower is skipped"
    tail.took("me", follower.received)
    assert not tail.waits(200.0)
    tail.add((block(LINE * 512),), tail.total, ended=False)
    assert tail.waits(300.0), "each time anew"
    tail.leave("me")
    assert not tail.waits(300.0)


def test_a_late_reader_gets_recent_lines_from_where_it_asks() -> None:
    tail, late, now, ended = Tail("h/p.0.0"), Follower(), Follower(), Follower()
    tail.add((block(b"leaving "), block(b"with three\n")), 19, ended=False)
    deliver(tail.follow("late", 8), {"late": late})
    deliver(tail.follow("now", -1), {"now": now})
    assert (late.data, now.data) == ({8: b"with three\n"}, {})
    deliver(tail.add((block(b"end\n"),), 23, ended=False), {"late": late, "now": now})
    assert late.data[19] == now.data[19] == b"end\n"
    tail.add((), 23, ended=True)
    deliver(tail.follow("ended", 0), {"ended": ended})
    assert (b"".join(ended.data.values()), ended.ended) == (b"leaving with three\nend\n", True)


def test_older_lines_are_counted_for_a_late_reader() -> None:
    tail, late = Tail("h/p.0.0"), Follower()
    for _ in range(20):
        tail.add((block(LINE * 64),), tail.total, ended=False)
    deliver(tail.follow("late", 0), {"late": late})
    assert RECENT <= tail.recent_size < RECENT + PIECE
    assert late.lines + late.skipped == 20 * 64
    tail.keep_recent(0)
    none = Follower()
    deliver(tail.follow("none", 0), {"none": none})
    assert (none.data, none.skipped) == ({}, 20 * 64)


@pytest.mark.parametrize("seed", range(15))
def test_whatever_happens_each_line_is_received_once_or_counted_as_missed(seed: int) -> None:
    chance = random.Random(seed)
    tail = Tail("h/p.0.0")
    followers: dict[str, Follower] = {}
    written = 0
    for step in range(300):
        match chance.choice(["write", "write", "write", "took", "follow"]):
            case "write":
                lines = chance.randrange(1, 200)
                written += lines
                data = tuple(block(LINE) for _ in range(lines))
                deliver(tail.add(data, tail.total + lines * len(LINE), ended=False), followers)
            case "took" if followers:
                name = chance.choice(sorted(followers))
                deliver(tail.took(name, chance.randrange(followers[name].received + 1)), followers)
            case "follow" if len(followers) < 4:
                followers[f"f{step}"] = Follower()
                deliver(tail.follow(f"f{step}", 0), followers)
        for follower in followers.values():
            assert follower.lines + follower.skipped <= written
    deliver(tail.add((), tail.total, ended=True), followers)
    for follower in followers.values():
        assert follower.ended
        assert follower.position == tail.total
        assert follower.lines + follower.skipped == written


def test_chunks_of_many_procs_are_one_message_for_each_follower() -> None:
    tails, messages = [Tail(f"h/p.{rank}.0") for rank in range(3)], LogMessages()
    for tail in tails:
        tail.follow("b/all", -1)
    tails[1].follow("c/some", -1)
    for line in (b"one\n", b"two\n"):
        for tail in tails:
            assert messages.add(tail.add((block(line),), tail.total + len(line), ended=False)) == []
    pieces = {name: [(chunk.address, chunk.data) for chunk in message.chunks] for name, message in messages.take()}
    lines = [(f"h/p.{rank}.0", line) for line in (b"one\n", b"two\n") for rank in range(3)]
    assert pieces == {"b/all": lines, "c/some": [line for line in lines if line[0] == "h/p.1.0"]}
    assert messages.take() == []


def test_a_message_of_many_chunks_is_sent_when_it_is_full() -> None:
    tail, messages = Tail("h/p.0.0"), LogMessages()
    tail.follow("b/me", -1)
    for number in range(1, FULL // PIECE + 1):
        full = messages.add(tail.add((block(LINE * 64),), number * PIECE, ended=False))
        assert len(full) == (number * PIECE >= FULL)
    [(_, message)] = full
    assert len(message.chunks) == FULL // PIECE
    assert messages.take() == []
