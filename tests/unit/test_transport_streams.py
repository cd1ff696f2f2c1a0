"""Connections inside a host: whole messages, in order, whatever pieces the kernel takes or gives."""

import contextlib
import itertools
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_nb.transport import TransportError
from monarch_nb.transport.errors import NotConnectedError
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.streams import Message, UnixListener, UnixStream, dial
from tests.effort import tries
from tests.polling import until
from tests.unit.transport_tools import End, ends, run_folder

pytestmark = pytest.mark.timeout(tries(60))


opened: list[socket.socket] = []


class Receiver:
    """The reading end of a pair, with its messages."""

    def __init__(self, reader: Reader) -> None:
        local, peer = socket.socketpair()
        opened.extend((local, peer))
        self.got: list[tuple[bytes, list[bytes]]] = []
        self.lost = threading.Event()
        self.new = threading.Condition()
        self.peer = peer
        self.stream = UnixStream(local, reader, self._received, self.lost.set)
        self.stream.listen()

    def _received(self, messages: Sequence[Message]) -> None:
        with self.new:
            self.got += [(frame0, [bytes(frame) for frame in frames]) for frame0, frames in messages]
            self.new.notify_all()

    def wait(self, count: int) -> list[tuple[bytes, list[bytes]]]:
        with self.new:
            assert self.new.wait_for(lambda: len(self.got) >= count, 30), f"{len(self.got)} of {count}"
        return self.got


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader("test-reader", 0.02)
    reader.start()
    yield reader
    reader.stop()
    reader.run_calls()
    reader.close()
    while opened:
        opened.pop().close()


def messages(seed: int, count: int) -> list[tuple[bytes, list[bytes]]]:
    chance = random.Random(seed)
    sizes = (0, 1, 7, 100, 4000, 70_000, 300_000)
    return [
        (chance.randbytes(40), [chance.randbytes(chance.choice(sizes)) for _ in range(chance.randrange(12))])
        for _ in range(count)
    ]


def test_messages_arrive_whole_and_in_order_through_a_full_pipe(reader: Reader) -> None:
    end = Receiver(reader)
    sender = UnixStream(end.peer, reader, lambda *_: None, lambda: None)
    sender.listen()
    sent = messages(1, 200)
    for frame0, frames in sent:
        sender.write(frame0, frames)
    assert end.wait(len(sent)) == sent


def test_messages_that_come_byte_by_byte_are_put_together(reader: Reader) -> None:
    copy = Receiver(reader)
    data = bytearray()
    sent = [(b"head", [b"", b"x" * 300]), (b"h2", []), (b"h3", [b"y"] * 20)]
    local, peer = socket.socketpair()
    opened.extend((local, peer))
    sender = UnixStream(local, reader, lambda *_: None, lambda: None)
    for frame0, frames in sent:
        sender.write(frame0, frames)
    peer.settimeout(5)
    while len(data) < 4 + 24 + 304 + 4 + 8 + 2 + 4 + 21 * 8 + 22:
        data += peer.recv(65536)
    for start in range(len(data)):
        copy.peer.send(data[start : start + 1])
    assert copy.wait(3) == sent


def test_more_frames_than_the_kernel_takes_at_a_time(reader: Reader) -> None:
    end = Receiver(reader)
    sender = UnixStream(end.peer, reader, lambda *_: None, lambda: None)
    sender.listen()
    many = [str(number).encode() for number in range(5000)]
    sender.write(b"head", many)
    sender.write(b"after", [])
    assert end.wait(2) == [(b"head", many), (b"after", [])]


@pytest.mark.parametrize(
    "garbage", [b"\0" * 64, b"\xff" * 64, b"\2\0\0\0" + b"\xff" * 32], ids=["none", "many", "huge"]
)
def test_garbage_ends_the_connection_and_nothing_else(reader: Reader, garbage: bytes) -> None:
    end, healthy = Receiver(reader), Receiver(reader)
    end.peer.sendall(garbage)
    assert end.lost.wait(10)
    assert end.got == []
    sender = UnixStream(healthy.peer, reader, lambda *_: None, lambda: None)
    sender.write(b"still", [])
    assert healthy.wait(1) == [(b"still", [])]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("claim", [10**12, 1 << 40, 1 << 50, memory() + 1])
@pytest.mark.parametrize("count", [2, 9])
def test_an_impossible_size_table_ends_the_connection_and_allocates_nothing(
    reader: Reader, claim: int, count: int
) -> None:
    end, before = Receiver(reader), resident()
    end.peer.sendall(struct.pack(f"<I{count}Q", count, *[40] * (count - 1), claim) + b"x" * 100)
    assert end.lost.wait(10)
    assert end.got == []
    assert resident() - before < 64 << 20


def test_a_claim_takes_memory_only_as_its_bytes_come(reader: Reader) -> None:
    end, before = Receiver(reader), resident()
    half = memory() // 2
    end.peer.sendall(struct.pack("<I2Q", 2, 4, half) + b"head" + b"x" * 600_000)
    second = Receiver(reader)
    second.peer.sendall(struct.pack("<IQ", 1, 5) + b"after")
    assert second.wait(1) == [(b"after", [])]
    assert resident() - before < 64 << 20
    assert not end.lost.is_set()
    end.peer.close()
    assert end.lost.wait(10)


@pytest.mark.fuzz
@settings(max_examples=tries(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), positions=st.lists(st.integers(0, 400), max_size=5))
def test_any_bytes_are_messages_or_end_the_connection(reader: Reader, data: bytes, positions: list[int]) -> None:
    end = Receiver(reader)
    cuts = [0, *sorted(min(position, len(data)) for position in positions), len(data)]
    with contextlib.suppress(OSError):  # it hangs up on nonsense
        for start, stop in itertools.pairwise(cuts):
            end.peer.sendall(data[start:stop])
    end.peer.close()
    assert end.lost.wait(10)
    assert sum(4 + 8 + len(frame0) + sum(8 + len(frame) for frame in frames) for frame0, frames in end.got) <= len(data)
    end.stream.close(0)


@pytest.mark.fuzz
@settings(max_examples=tries(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(st.tuples(st.binary(max_size=60), st.lists(st.binary(max_size=300), max_size=9)), max_size=6),
       positions=st.lists(st.integers(0, 3000), max_size=8))  # fmt: skip
def test_messages_cut_anywhere_arrive_whole(
    reader: Reader, sent: list[tuple[bytes, list[bytes]]], positions: list[int]
) -> None:
    end = Receiver(reader)
    data = b"".join(
        struct.pack(f"<I{1 + len(frames)}Q", 1 + len(frames), len(frame0), *map(len, frames))
        + frame0
        + b"".join(frames)
        for frame0, frames in sent
    )
    cuts = [0, *sorted(min(position, len(data)) for position in positions), len(data)]
    for start, stop in itertools.pairwise(cuts):
        end.peer.sendall(data[start:stop])
    assert end.wait(len(sent)) == sent
    end.stream.close(0)
    end.peer.close()


def test_a_write_to_who_is_gone_says_so(reader: Reader) -> None:
    end = Receiver(reader)
    end.peer.close()
    assert end.lost.wait(10)
    with pytest.raises(NotConnectedError):
        end.stream.write(b"x", [])


def test_nobody_listens_no_connection() -> None:
    with run_folder() as folder:
        assert dial(str(folder / "nobody"), b"me") is None


def test_the_socket_of_a_dead_process_is_taken_over(reader: Reader) -> None:
    with run_folder() as folder:
        path = str(folder / "name")
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(path)
        dead.close()
        accepted: list[socket.socket] = []
        door = UnixListener(path, 8, reader, accepted.append)
        with pytest.raises(TransportError, match="another process listens there"):
            UnixListener(path, 8, reader, accepted.append)
        caller = dial(path, b"me")
        assert caller is not None
        until(lambda: len(accepted) == 2)  # the second door has knocked, too
        for connection in (caller, *accepted):
            connection.close()
        door.close()


def test_messages_sent_before_anybody_listens_arrive_in_order() -> None:
    with run_folder() as folder:
        a = End("h/a", folder)
        with ends(a):
            for number in range(50):
                a.send("h/late", str(number).encode())
            late = End("h/late", folder)
            with ends(late):
                assert [late.get()[1] for _ in range(50)] == [[str(number).encode()] for number in range(50)]


def test_a_cut_inside_a_host_loses_nothing_and_repeats_nothing() -> None:
    """Only a bug or a debugger cuts a unix socket; links survive it."""
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            a.send("h/b", b"first")
            b.get()
            until(lambda: a.node._links.settled)  # it knows its peer: nothing is in doubt
            for number in range(400):
                a.send("h/b", str(number).encode() * 50)
                if number % 50 == 25:
                    for end in (a, b):
                        for stream in list(end.node._links._inside):
                            with contextlib.suppress(OSError):  # its other end was shut down before
                                stream._socket.shutdown(socket.SHUT_RDWR)
            assert [b.get()[1] for _ in range(400)] == [[str(number).encode() * 50] for number in range(400)]
            assert b.inbox.empty()


def test_processes_of_one_host_need_no_threads_of_libzmq() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            a.send("h/b", b"x")
            b.get()
            assert a.node._links._context is None
            assert b.node._links._context is None


def test_a_peer_refused_for_lack_of_descriptors_learns_so(tmp_path: Path, reader: Reader) -> None:
    idle = Reader("idle-reader", 0.02)  # nobody answers the door
    door = UnixListener(str(tmp_path / "door"), 5, idle, lambda connection: None)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(tmp_path / "door"))
        door._turn_away()  # what a knock does where accept() finds no descriptor
        notice = caller.recv(100)
        assert caller.recv(100) == b""
    door.close()
    listener = Receiver(reader)
    assert not listener.stream.turned_away
    listener.peer.sendall(notice)
    assert listener.lost.wait(5)
    assert listener.stream.turned_away
