"""The reading thread: no request is forgotten, or done too early."""

import os
import threading
from collections.abc import Iterator

import pytest

from monarch_nb.transport.reader import Reader

pytestmark = pytest.mark.timeout(60)
SECONDS = 20


@pytest.fixture
def reader() -> Iterator[Reader]:
    result = Reader("a-reader", 0.001)
    result.start()
    yield result
    result.stop()
    result.close()


@pytest.fixture
def silent() -> Iterator[list[int]]:
    """Descriptors that are never readable."""
    pipes = [os.pipe() for _ in range(2)]
    yield [read for read, _ in pipes]
    for ends in pipes:
        for end in ends:
            os.close(end)


def test_requests_during_a_repeated_poll_are_not_forgotten(reader: Reader, silent: list[int]) -> None:
    first, second = silent
    looked, inside, go_on = threading.Event(), threading.Event(), threading.Event()

    class Held:
        def tick(self, now: float) -> bool:
            reader.read_again(first)
            inside.set()
            go_on.wait(SECONDS)
            return False

    reader.watch(first, lambda: False)
    reader.watch(second, lambda: bool(looked.set()))
    reader.busy(Held())
    assert inside.wait(SECONDS)
    reader.read_again(second)
    go_on.set()
    assert looked.wait(SECONDS)


class Pipe:
    """Something to read; `log` gets its name for each byte."""

    def __init__(self, name: str, reader: Reader, log: list[str]) -> None:
        self.name, self.log, self.reader = name, log, reader
        self.end, self.start = os.pipe()
        os.set_blocking(self.end, False)

    def read(self) -> bool:
        os.read(self.end, 1)
        self.log.append(self.name)
        return False

    def close(self) -> None:
        self.reader.unwatch(self.end)
        os.close(self.end)
        os.close(self.start)


def test_work_for_quiet_times_comes_after_all_pending_reads(reader: Reader) -> None:
    log: list[str] = []
    words, news = Pipe("word", reader, log), Pipe("news", reader, log)
    done = threading.Event()

    def arrived() -> bool:
        """Reads the news first, while earlier words are unread."""
        os.read(news.end, 1)
        os.write(words.start, b"xyz")
        reader.settled(lambda: (log.append("news"), done.set()))
        return False

    reader.watch(words.end, words.read)
    reader.watch(news.end, arrived)
    os.write(news.start, b"n")
    assert done.wait(SECONDS)
    assert log == ["word", "word", "word", "news"]
    words.close()
    news.close()


def test_a_wait_for_quiet_is_bounded_where_it_never_comes(reader: Reader) -> None:
    log: list[str] = []
    endless = Pipe("word", reader, log)
    done = threading.Event()

    def read() -> bool:
        os.read(endless.end, 1)
        os.write(endless.start, b"x")
        return True

    reader.watch(endless.end, read)
    os.write(endless.start, b"x")
    reader.settled(done.set)
    assert done.wait(SECONDS)
    endless.close()


def test_pending_work_is_done_at_the_end() -> None:
    reader, done = Reader("test-reader", 0.01), threading.Event()
    reader.settled(done.set)
    reader.stop()
    reader.run_calls()
    assert done.is_set()
    reader.close()
