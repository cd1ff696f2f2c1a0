"""Bursts: messages sent back to back leave together, in order, and none waits for others that do not come."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from monarch_nb.transport import streams
from monarch_nb.transport.reader import APART_S, LARGEST, LONGEST_S, MOST, SINGLE_WRITES, Burst, Reader
from monarch_nb.transport.streams import UnixStream
from tests.effort import tries

pytestmark = pytest.mark.timeout(tries(60))
STEP = APART_S / 20


def row(burst: Burst, count: int, *, start: float = 0.0, size: int = 100, pauses: int = 0) -> list[bool]:
    return [burst.holds(size, start + STEP * number, pauses) for number in range(count)]


def test_first_messages_of_a_burst_leave_at_once_later_in_batches() -> None:
    burst = Burst()
    assert row(burst, SINGLE_WRITES) == [False] * SINGLE_WRITES
    assert row(burst, MOST, start=SINGLE_WRITES * STEP) == [True] * (MOST - 1) + [False]
    assert burst.count == MOST


def test_messages_that_come_one_at_a_time_never_wait() -> None:
    burst = Burst()
    assert not any(burst.holds(100, number * 2 * APART_S, 0) for number in range(50))


def test_calls_whose_answers_are_awaited_one_by_one_never_wait() -> None:
    burst = Burst()
    assert not any(burst.holds(100, number * STEP, number) for number in range(50))


@pytest.mark.parametrize("size", [LARGEST, LARGEST * 100])
def test_a_large_message_takes_along_what_waits(size: int) -> None:
    burst = Burst()
    row(burst, SINGLE_WRITES + 2)
    assert not burst.holds(size, (SINGLE_WRITES + 2) * STEP, 0)


def test_a_message_that_waited_long_takes_no_more_company() -> None:
    burst = Burst()
    row(burst, SINGLE_WRITES)
    begun = SINGLE_WRITES * STEP
    assert burst.holds(100, begun, 0)
    assert burst.holds(100, begun + LONGEST_S / 2, 0)
    assert not burst.holds(100, begun + LONGEST_S, 0)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader("test-bursts", 0.02)
    yield reader
    reader.stop()
    reader.run_calls()
    reader.close()


@contextlib.contextmanager
def sender(reader: Reader) -> Iterator[tuple[UnixStream, socket.socket]]:
    local, peer = socket.socketpair()
    peer.settimeout(10)
    with peer:
        stream = UnixStream(local, reader, lambda messages: None, lambda: None)
        yield stream, peer
        stream.close(0)


def put(stream: UnixStream, text: bytes) -> None:
    if stream.put(text, (), may_wait=True):
        stream.push()


def texts(stream: UnixStream, peer: socket.socket, count: int) -> list[bytes]:
    """The next messages on a connection, each of one frame of one byte."""
    data = b""
    while len(data) < 13 * count:
        data += peer.recv(13 * count - len(data))
    return [data[start + 12 : start + 13] for start in range(0, len(data), 13)]


def test_held_messages_leave_in_order_when_their_thread_begins_to_wait(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_clock", lambda: 7.0)
    with sender(reader) as (stream, peer):
        sent = [bytes([number]) for number in range(SINGLE_WRITES + 5)]
        for text in sent:
            put(stream, text)
        assert texts(stream, peer, SINGLE_WRITES) == sent[:SINGLE_WRITES]
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        reader.bursts.flush()
        assert texts(stream, peer, 5) == sent[SINGLE_WRITES:]


def test_a_message_that_may_not_wait_takes_along_those_before_it(reader: Reader) -> None:
    with sender(reader) as (stream, peer):
        sent = [bytes([number]) for number in range(SINGLE_WRITES + 4)]
        for text in sent[:-1]:
            put(stream, text)
        stream.write(sent[-1], ())
        assert texts(stream, peer, len(sent)) == sent


def test_the_reading_thread_writes_what_its_sender_leaves_behind(reader: Reader) -> None:
    reader.start()
    with sender(reader) as (stream, peer):
        sent = [bytes([number % 256]) for number in range(1000)]
        for text in sent:
            put(stream, text)
        assert texts(stream, peer, len(sent)) == sent


def test_a_connection_that_is_closed_writes_what_it_holds_first(reader: Reader) -> None:
    with sender(reader) as (stream, peer):
        for number in range(SINGLE_WRITES + 2):
            put(stream, bytes([number]))
        stream.close(0)
        assert len(texts(stream, peer, SINGLE_WRITES + 2)) == SINGLE_WRITES + 2
