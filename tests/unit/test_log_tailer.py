"""From a proc's files to its log file and its followers: the agent's thread, with files but without processes."""

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.logs.spool import ERR, OUT, TEXT, Mark
from monarch_nb.logs.tailer import WINDOW, LogTailer
from monarch_nb.logs.verbs import PROC_LOG, LogChunk, LogChunks
from monarch_nb.wire import Verb

pytestmark = pytest.mark.timeout(30)

ADDRESS = "h/p.0.0"


class Host:
    """A host's folder and the thread that tails its spools; what it sends to subscribers is recorded."""

    address = "h/agent"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "spool").mkdir()
        self.base = folder / "spool" / "p.0.0"
        for kind in (TEXT, OUT, ERR):
            Path(f"{self.base}{kind}").touch()
        self.chunks: queue.Queue[LogChunk] = queue.Queue()
        self.messages: queue.Queue[LogChunks] = queue.Queue()
        self.reachable = True
        post: Any = self
        self.tailer = LogTailer(post, folder)
        self.log_file = Path(self.tailer.begin(ADDRESS, str(self.base), "workers"))

    def post(self, dst: str, verb: Verb[LogChunks, None], body: LogChunks) -> bool:
        assert (dst, verb) == ("h/c", PROC_LOG)
        reachable = self.reachable
        for chunk in body.chunks:
            self.chunks.put(chunk)
        self.messages.put(body)
        return reachable

    def write(self, data: bytes) -> None:
        with open(f"{self.base}{TEXT}", "ab") as file:
            file.write(data)

    def until(self, complete: Callable[[list[LogChunk]], bool]) -> list[LogChunk]:
        chunks: list[LogChunk] = []
        while not complete(chunks):
            chunks.append(self.chunks.get(timeout=20))
        return chunks


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def text(chunks: list[LogChunk]) -> bytes:
    return b"".join(chunk.data for chunk in chunks)


def test_output_goes_to_the_log_file_and_to_followers(host: Host) -> None:
    host.tailer.follow(ADDRESS, "h/c", 0)
    host.write(Mark(1.0, 2, logging.WARNING, "c:1", 0, 0, "").encode() + b"careful\n")
    chunks = host.until(lambda chunks: bool(text(chunks)))
    assert [(block.stream, block.level, block.call) for block in chunks[-1].blocks] == [(2, logging.WARNING, "c:1")]
    host.write(b"last\n")
    host.tailer.ended(ADDRESS)
    chunks = host.until(lambda chunks: bool(chunks) and chunks[-1].ended)
    assert text(chunks) == b"last\n"
    assert host.log_file.read_text() == "careful\nlast\n"
    assert list((host.folder / "spool").iterdir()) == [], "files of sent output are deleted"


def test_following_may_begin_later_and_in_the_middle(host: Host) -> None:
    host.write(b"leaving with three\n")
    host.tailer.ended(ADDRESS)
    host.tailer.follow(ADDRESS, "h/c", 0)
    host.until(lambda chunks: bool(chunks) and chunks[-1].ended)
    host.tailer.follow(ADDRESS, "h/c", 8)
    [chunk] = host.until(lambda chunks: bool(chunks))
    assert (chunk.offset, chunk.data, chunk.ended) == (8, b"with three\n", True)


def test_pieces_are_small_and_idle_readers_get_a_window_of_them(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_nb.logs.tailer.BEHIND_S", 0.05)
    host.tailer.follow(ADDRESS, "h/c", 0)
    host.write((b"x" * 1000 + b"\n") * 2000)
    host.tailer.ended(ADDRESS)
    chunks = host.until(lambda chunks: bool(chunks) and chunks[-1].ended)
    assert max(len(chunk.data) for chunk in chunks) <= 2 * 64 * 1024
    assert len(text(chunks)) < WINDOW + 4 * 64 * 1024
    assert text(chunks).count(b"\n") + sum(chunk.skipped for chunk in chunks) == 2000
    assert host.log_file.read_text() == ("x" * 1000 + "\n") * 2000


def test_an_acknowledging_follower_gets_everything(host: Host) -> None:
    host.tailer.follow(ADDRESS, "h/c", 0)
    host.write((b"x" * 1000 + b"\n") * 2000)
    chunks: list[LogChunk] = []
    while len(text(chunks)) < 2000 * 1001:
        chunks.append(host.chunks.get(timeout=20))
        assert chunks[-1].offset == len(text(chunks[:-1]))
        host.tailer.took(ADDRESS, "h/c", len(text(chunks)))
    assert text(chunks) == (b"x" * 1000 + b"\n") * 2000


def test_an_unwritable_log_file_is_reported_once_in_the_output(host: Host) -> None:
    host.log_file.parent.mkdir()
    host.log_file.symlink_to("/dev/full")
    host.tailer.follow(ADDRESS, "h/c", 0)
    host.write(b"one\n")
    first = text(host.until(lambda chunks: b"not kept" in text(chunks)))
    assert first.startswith(b"one\n[")
    assert b"No space left" in first
    host.write(b"two\n")
    assert text(host.until(lambda chunks: b"two" in text(chunks))) == b"two\n"


def test_an_unreachable_follower_is_dropped(host: Host) -> None:
    host.reachable = False
    host.tailer.follow(ADDRESS, "h/c", 0)
    host.write(b"one\n")
    host.messages.get(timeout=20)
    host.chunks.queue.clear()  # one chunk or two
    host.tailer.ended(ADDRESS)
    host.reachable = True
    host.tailer.follow(ADDRESS, "h/c", 0)
    chunks = host.until(lambda chunks: bool(chunks) and chunks[-1].ended)
    assert text(chunks) == b"one\n", "once, to the follower that came back"


def test_an_unreachable_follower_is_dropped_from_all_procs_of_a_message(host: Host) -> None:
    second = "h/p.1.0"
    for kind in (TEXT, OUT, ERR):
        Path(f"{host.folder}/spool/p.1.0{kind}").touch()
    host.tailer.begin(second, f"{host.folder}/spool/p.1.0", "workers")
    host.reachable = False
    gate = threading.Event()
    host.tailer._ask(lambda: gate.wait(10) and None)  # both requests are found by one round
    host.tailer.follow(ADDRESS, "h/c", 0)
    host.tailer.follow(second, "h/c", 0)
    gate.set()
    assert [chunk.address for chunk in host.messages.get(timeout=20).chunks] == [ADDRESS, second]
    host.reachable = True
    host.tailer.ended(ADDRESS)
    host.tailer.ended(second)
    host.tailer.begin("h/p.2.0", f"{host.folder}/spool/p.1.0", "workers")
    host.tailer.follow("h/p.2.0", "h/c", -1)
    host.tailer.follow("h/p.2.0", "h/c", 0)
    assert host.messages.get(timeout=20).chunks[0].address == "h/p.2.0", "nothing of the other procs came before"
