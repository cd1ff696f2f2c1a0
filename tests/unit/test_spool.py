"""What a proc writes, from its spool to its log file: order, marks, rotation, full disks."""

import io
import os
import random
import resource
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_nb.logs.journal import ForgivingText, Journal
from monarch_nb.logs.spool import (
    DISPLAY,
    ERR,
    OUT,
    PATIENCE_S,
    STDERR,
    STDOUT,
    TEXT,
    UNCLAIMED,
    Mark,
    Spool,
    decode_mark,
    last_lines,
)
from monarch_nb.logs.tailer import LogFile
from monarch_nb.logs.verbs import LogBlock
from monarch_nb.runtime.output.displays import displays
from monarch_nb.runtime.output.own_log import OwnLog
from monarch_nb.settings import settings


@pytest.fixture
def base(tmp_path: Path) -> str:
    for kind in (TEXT, OUT, ERR):
        (tmp_path / f"p{kind}").touch()
    return str(tmp_path / "p")


def raw(base: str, kind: str, data: bytes) -> None:
    with open(base + kind, "ab") as file:
        file.write(data)


def take(spool: Spool, **options: object) -> list[tuple[int, str, bytes]]:
    return [(block.stream, block.call, block.data) for block in spool.take(1 << 20, 0.0, **options)]  # type: ignore[arg-type]


def test_marks_survive_being_written_and_garbage_is_none() -> None:
    mark = Mark(1.5, 2, 30, "h/c:1", 10, 20, "h/c:2")
    assert decode_mark(mark.encode()[:-1]) == mark
    empty = mark._replace(call="", raw_call="")
    assert decode_mark(empty.encode()[:-1]) == empty
    for garbage in (b"", b"\x1e", b"\x1e1.5 2 30", b"\x1ex 2 3 4 5 - -", b"\x1e1 7 0 0 0 - -", b"\x1e1 1 0 -1 0 - -"):
        assert decode_mark(garbage) is None
    assert decode_mark(b"\x1e" + bytes(range(256))) is None


def test_text_and_raw_output_keep_their_order_and_calls(base: str) -> None:
    writer, spool = Journal(base), Spool(base)
    out, err = writer.texts
    call = "h/c:1"
    writer.tag_by(lambda: (call, 0), lambda: call)
    out.write("one\n")
    raw(base, OUT, b"from C\n")
    raw(base, ERR, b"C's stderr\n")
    out.write("two \x1e\n")
    call = "h/c:2"
    err.write("three\n")
    raw(base, OUT, b"more from C\n")
    position = writer.position()
    assert take(spool) == [
        (1, "h/c:1", b"one\nfrom C\n"),
        (2, "h/c:1", b"C's stderr\n"),
        (1, "h/c:1", "two \u241e\n".encode()),
        (2, "h/c:2", b"three\n"),
        (1, "h/c:2", b"more from C\n"),
    ]
    assert spool.position == position


def test_raw_output_that_nobody_claims_is_taken_after_a_moment(base: str) -> None:
    spool = Spool(base)
    raw(base, OUT, b"from C\n")
    assert spool.take(1 << 20, 100.0) == []
    assert spool.undecided
    [block] = spool.take(1 << 20, 100.0 + PATIENCE_S)
    assert (block.call, block.data) == (UNCLAIMED, b"from C\n")
    assert not spool.undecided


def test_a_mark_cut_by_a_full_disk_loses_no_text(base: str) -> None:
    raw(base, TEXT, b"before\n" + Mark(1.0, 1, 0, "c", 0, 0, "").encode()[:9] + b"after\n\x1e\x1e\xff\n")
    text = b"".join(data for _, _, data in take(Spool(base), all_of_it=True))
    assert text.startswith(b"before\n")
    assert b"after\n" in text
    assert text.endswith(b"\xff\n")


def test_a_mark_that_is_being_written_is_waited_for(base: str) -> None:
    spool, mark = Spool(base), Mark(1.0, 2, 0, "c", 0, 0, "").encode()
    raw(base, TEXT, mark[:5])
    assert take(spool) == []
    raw(base, TEXT, mark[5:] + b"text\n")
    assert take(spool) == [(2, "c", b"text\n")]


def test_taken_output_frees_its_disk_space(base: str) -> None:
    spool = Spool(base)
    for _ in range(8):
        raw(base, TEXT, b"x" * (1 << 20))
        assert len(b"".join(data for _, _, data in take(spool))) == 1 << 20
    facts = os.stat(base + TEXT)
    assert facts.st_size == 8 << 20
    if spool._text.punched < 1 << 62:  # if the file system can
        assert facts.st_blocks * 512 < 4 << 20


def test_reading_the_last_lines_takes_nothing_away(base: str) -> None:
    text = b"".join(b"line %06d\n" % number for number in range(300_000))
    raw(base, TEXT, text)
    assert last_lines(base, 2, 16 * 1024) == ("line 299998", "line 299999")
    spool = Spool(base)
    assert b"".join(data for _ in range(100) for _, _, data in take(spool)) == text


def test_the_middle_of_a_figure_is_no_last_line(base: str) -> None:
    figure = b'{"data": {"image/png": "%s"}}\n' % (b"A" * 200_000)
    raw(base, TEXT, Mark(1.0, DISPLAY, 0, "", 0, 0, "").encode() + figure)
    raw(base, TEXT, Mark(1.1, STDOUT, 0, "", 0, 0, "").encode() + b"one step\n")
    assert last_lines(base, 5, 16 * 1024) == ("one step",)


def test_a_large_log_file_is_rotated_and_the_oldest_removed(tmp_path: Path) -> None:
    before = settings.runtime()
    settings.configure({"log_file_size": 4096, "log_file_count": 3})
    try:
        file = LogFile(tmp_path / "w.log")
    finally:
        settings.replace(before)
    lines = [b"%04d%s\n" % (number, b"." * 95) for number in range(200)]
    for line in lines:
        assert file.write(line)
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.log", "w.log.1", "w.log.2"]
    content = b"".join((tmp_path / name).read_bytes() for name in ("w.log.2", "w.log.1", "w.log"))
    assert all((tmp_path / name).stat().st_size <= 4096 for name in ("w.log.2", "w.log.1", "w.log"))
    assert content == b"".join(lines[-len(content) // 100 :])
    assert len(content) > 2 * 4000


def test_a_full_disk_is_noted_in_the_file_later(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    path.symlink_to("/dev/full")
    file = LogFile(path)
    assert not file.write(b"lost\n")
    assert "No space left" in file.error
    path.unlink()
    file.close()
    assert file.write(b"kept\n")
    assert path.read_text() == "[output is missing here: No space left on device]\nkept\n"


def test_a_deleted_log_file_is_created_again_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "w.log"
    file = LogFile(path)
    file.write(b"one\n")
    path.unlink()
    assert file.write(b"two\n")
    assert path.read_text() == "two\n"
    shutil.rmtree(path.parent)
    assert file.write(b"three\n")
    assert path.read_text() == "three\n"
    file.close()


def test_journals_on_a_full_disk_neither_raise_nor_lose_later_text(base: str, tmp_path: Path) -> None:
    os.unlink(base + TEXT)
    os.symlink("/dev/full", base + TEXT)
    writer = Journal(base)
    writer.texts[0].write("lost\n")
    writer.texts[1].write("lost too\n")
    assert writer.position() == 0
    with open(tmp_path / "later", "wb", buffering=0) as file:
        os.dup2(file.fileno(), writer.texts[0].buffer.fileno())
        writer.texts[0].write("kept\n")
        writer.texts[0].flush()
    assert b"No space left" in (tmp_path / "later").read_bytes()
    assert (tmp_path / "later").read_bytes().endswith(b"kept\n")
    assert isinstance(writer.texts[0], io.TextIOWrapper)


@pytest.mark.parametrize("buffered", [16, 8192])
def test_lost_output_is_said_once_when_there_is_room_again(tmp_path: Path, buffered: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "log", "wb", buffering=0) as raw:
        text = ForgivingText(io.BufferedWriter(raw, buffered), "utf-8", line_buffering=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            for _ in range(20):
                print("some output", file=text)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print("more", file=text)
        text.detach().detach()  # type: ignore[attr-defined]
    assert (tmp_path / "log").read_text() == "some output\n[output was lost here: File too large]\nmore\n"


def test_a_constantly_writing_thread_keeps_no_other_from_writing(base: str) -> None:
    out = Journal(base).texts[0]
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            out.write("over and over\n")

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for number in range(200):
            out.write(f"turn {number}\n")
    finally:
        stop.set()
        flooding.join()
    spool, text = Spool(base), b""
    while spool.backlog:
        text += b"".join(data for _, _, data in take(spool))
    lines = text.splitlines()
    assert [line for line in lines if line.startswith(b"turn")] == [b"turn %d" % number for number in range(200)]
    assert set(lines) == {b"over and over", *(b"turn %d" % number for number in range(200))}


class RecordingJournal:
    """A journal that records its calls."""

    texts = (sys.stdout, sys.stderr)

    def __init__(self) -> None:
        self.marks = 0
        self.offset = 0

    def tag_by(self, tag: Callable[[], tuple[str, int]], sole: Callable[[], str]) -> None:
        self.tag, self.sole = tag, sole

    def display(self, line: bytes, tag: tuple[str, int]) -> bool:
        return True

    def mark(self) -> None:
        self.marks += 1

    def position(self) -> int:
        return self.offset


def test_output_belongs_to_the_running_call_or_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "write_to", lambda journal: None)  # this process keeps printing
    running = ""
    log, journal = OwnLog(lambda: running), RecordingJournal()
    log.begin("c:0")
    assert (log.tag(), log.position()) == (("", 0), 0), "nobody keeps it"
    log.keep(journal)
    assert journal.tag() == ("", 0)
    log.begin("c:1")
    assert (journal.tag()[0], journal.sole()) == ("c:1", "c:1")
    log.begin("c:2")
    assert (journal.tag()[0], journal.sole()) == ("", "")
    running = "c:2"
    assert journal.tag()[0] == "c:2"
    log.end("c:1")
    assert journal.sole() == "c:2"
    log.end("c:2")
    assert journal.sole() == ""
    journal.offset = 7
    assert log.position() == 7


@pytest.mark.parametrize("seed", range(20))
def test_nothing_written_is_lost_and_output_precedes_its_reply(base: str, seed: int) -> None:
    chance = random.Random(seed)
    writer, spool = Journal(base), Spool(base)
    call = "c:0"
    writer.tag_by(lambda: (call, 0), lambda: call)
    python: dict[int, bytes] = {STDOUT: b"", STDERR: b""}  # what was written, by stream
    raw_text: dict[int, bytes] = {STDOUT: b"", STDERR: b""}
    by_call: dict[str, bytes] = {}
    blocks: list[LogBlock] = []
    replies: list[tuple[int, dict[int, int]]] = []  # positions, and how much of each stream was written before

    for step in range(200):
        match chance.choice(["print", "print", "raw", "take", "call", "reply"]):
            case "print":
                stream = chance.choice([STDOUT, STDERR])
                text = f"{stream} python {step}".ljust(chance.choice([1, 100, 70_000]), ".") + "\n"
                writer.texts[stream - 1].write(text)
                python[stream] += text.encode()
                by_call[call] = by_call.get(call, b"") + text.encode()
            case "raw":
                stream = chance.choice([STDOUT, STDERR])
                data = f"{stream} raw {step}\n".encode()
                raw(base, OUT if stream == STDOUT else ERR, data)
                raw_text[stream] += data
            case "take":
                blocks += spool.take(chance.choice([1, 1000, 1 << 20]), 0.0)
            case "call":
                writer.mark()  # as the end of a call does
                call = f"c:{step}"
            case "reply":
                written = {stream: len(python[stream]) + len(raw_text[stream]) for stream in python}
                replies.append((writer.position(), written))
        for position, before in replies:
            if spool.position >= position:
                for stream, count in before.items():
                    assert sum(len(block.data) for block in blocks if block.stream == stream) >= count
    writer.position()
    while block := spool.take(1 << 20, 0.0, all_of_it=True):
        blocks += block
    for stream in (STDOUT, STDERR):
        lines = b"".join(block.data for block in blocks if block.stream == stream).splitlines(keepends=True)
        assert b"".join(line for line in lines if b" raw " not in line) == python[stream]
        assert b"".join(line for line in lines if b" raw " in line) == raw_text[stream]
    for name, text in by_call.items():
        of_call = b"".join(block.data for block in blocks if block.call == name).splitlines(keepends=True)
        assert sorted(line for line in of_call if b" raw " not in line) == sorted(text.splitlines(keepends=True))
