"""The spool of a proc: its format, its reader, and the last output in it as text, for reports of the end of a proc.

A spool is three files that a proc writes and its agent reads. One contains Python's output, with marks that describe
the text after them: its stream, its call, its time. A display is a line of its own with a mark before it. The others
contain raw output: of C code and child processes on descriptors 1 and 2. A mark also has the sizes of those two files
when it was made, so that all three are read in the order in which they were written.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from monarch_nb.host.linux import punch_hole
from monarch_nb.logs.overwriting import left_of
from monarch_nb.logs.verbs import LogBlock
from monarch_nb.wire import decode_display

SIGN = b"\x1e"  # begins a mark; never in the text, see `clean`
LONGEST_MARK = 400  # bytes of a mark, at most
TEXT, OUT, ERR = ".txt", ".out", ".err"  # suffixes of the files: Python's text, raw stdout, raw stderr
STDOUT, STDERR = 1, 2
DISPLAY = 3  # no text, but one line of a display: see monarch_nb.wire.plain
NO_CALL = "-"
UNCLAIMED = "?"  # the call of raw output whose proc did not know the call

CHUNK = 64 * 1024
PATIENCE_S = 0.15  # for which raw output waits until the proc names its call
_LONGEST_DISPLAY = 16 << 20  # bytes
_TOGETHER_S = 0.2  # writes within it are one block
PUNCH_EVERY = 1 << 20  # bytes; the disk space of taken output is freed in pieces of this size
TAIL_SIZE = 64 * 1024  # bytes that stay, for the last lines of a proc that dies


class Mark(NamedTuple):
    """Describes the text that follows, and how much raw output was there before it."""

    at: float  # wall clock, seconds
    stream: int
    level: int  # of the record of `logging`, 0 for other text
    call: str  # the call that wrote the text, "" for none
    out: int  # bytes of raw stdout written before
    err: int  # and of raw stderr
    raw_call: str  # the call of the raw output since the mark before, "" for none

    def encode(self) -> bytes:
        """Returns the mark as a line of its own."""
        words = (
            f"{self.at:.3f}",
            self.stream,
            self.level,
            self.out,
            self.err,
            self.call or NO_CALL,
            self.raw_call or NO_CALL,
        )
        return SIGN + " ".join(map(str, words)).encode("ascii", "replace") + b"\n"


BEGIN = Mark(0.0, STDOUT, 0, "", 0, 0, "")


def decode_mark(line: bytes) -> Mark | None:
    """Returns the mark of a line without its end; None for any other line, such as one that a full disk has cut off."""
    words = line[1:].decode("ascii", "replace").split(" ")
    try:
        timestamp, stream, level, out, err, call, raw_call = ("" if word == NO_CALL else word for word in words)
        mark = Mark(float(timestamp), int(stream), int(level), call, int(out), int(err), raw_call)
    except ValueError:
        return None
    return mark if mark.stream in (STDOUT, STDERR, DISPLAY) and mark.out >= 0 and mark.err >= 0 else None


def clean(text: str) -> str:
    """Returns the text without characters that begin a mark."""
    return text.replace("\x1e", "\u241e") if "\x1e" in text else text


class SpoolFile(Struct):
    """A file of a spool: the position of reading, and the end of the freed disk space."""

    path: str
    at: int = 0
    punched: int = 0
    fd: int = -1

    def size(self) -> int:
        """Returns its present size in bytes; 0 if it does not exist (yet)."""
        if self.fd < 0:
            try:
                self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return 0
        return os.fstat(self.fd).st_size

    def read(self, start: int, limit: int) -> bytes:
        """Returns data from `start` on."""
        size = min(limit, self.size() - start)
        return os.pread(self.fd, size, start) if size > 0 else b""

    def give_back(self) -> None:
        """Frees the disk space of output that was taken, except the last bytes."""
        if self.at - self.punched > PUNCH_EVERY:
            until = self.at - TAIL_SIZE
            if punch_hole(self.fd, self.punched, until - self.punched):
                self.punched = until
            else:
                self.punched = 1 << 62  # not supported here: the files grow while their proc lives

    def close(self) -> None:
        """Closes the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Spool:
    """The reader of one proc's spool, which frees the disk space of what it has taken.

    With `tail` it reads only about that many bytes at the end of each file, and leaves the files as they are.
    """

    def __init__(self, base: str, tail: int = 0) -> None:
        self._text, self._out, self._err = (SpoolFile(base + kind) for kind in (TEXT, OUT, ERR))
        self._files = (self._text, self._out, self._err)
        self._consumes = not tail
        if tail:
            for file in self._files:
                file.at = max(0, file.size() - tail)
        self._mark: Mark = self._mark_before(self._text.at) if tail else BEGIN
        self._unclaimed_since: float | None = None

    def _mark_before(self, position: int) -> Mark:
        """Returns the mark of the text at a position, which may lie within a display."""
        data, begin = b"", position
        while begin > 0 and position - begin < _LONGEST_DISPLAY:
            size = min(CHUNK, begin)
            begin -= size
            data = self._text.read(begin, size) + data
            while (sign := data.rfind(SIGN)) >= 0:
                mark = decode_mark(data[sign:].partition(b"\n")[0])
                if mark is not None:
                    return mark
                data = data[:sign]
        return BEGIN

    @property
    def position(self) -> int:
        """The position up to which the text was read, with all raw output before it."""
        waits = self._out.at < self._mark.out or self._err.at < self._mark.err
        return self._text.at - waits

    @property
    def backlog(self) -> int:
        """Bytes that were written and not yet taken."""
        return sum(max(0, file.size() - file.at) for file in self._files)

    @property
    def undecided(self) -> bool:
        """True while raw output waits for the proc to name its call."""
        return self._unclaimed_since is not None

    def take(self, limit: int, now: float, *, all_of_it: bool = False) -> list[LogBlock]:
        """Returns the next blocks, about `limit` bytes; `now` is wall clock. With `all_of_it` nothing is waited for."""
        blocks: list[LogBlock] = []
        for stream, level, timestamp, call, data in self._pieces(now, all_of_it):
            last = blocks[-1] if blocks else None
            same = last and (last.stream, last.level, last.call) == (stream, level, call) and stream != DISPLAY
            if last and same and timestamp - last.at < _TOGETHER_S:
                blocks[-1] = LogBlock(stream, level, last.at, call, last.data + data)
            else:
                blocks.append(LogBlock(stream, level, timestamp, call, data))
            limit -= len(data)
            if limit <= 0:
                break
        if self._consumes:
            for file in self._files:
                file.give_back()
        return blocks

    def _pieces(self, now: float, all_of_it: bool) -> Iterator[tuple[int, int, float, str, bytes]]:
        buffer = b""
        while True:
            yield from self._raw(self._mark.out, self._mark.err, self._mark.at, self._mark.raw_call)
            if not buffer:
                buffer = self._text.read(self._text.at, CHUNK)
                if not buffer:
                    break
            if buffer[:1] == SIGN:
                end = buffer.find(b"\n", 0, LONGEST_MARK)
                if end < 0 and len(buffer) < LONGEST_MARK and not all_of_it:
                    again = self._text.read(self._text.at, CHUNK)
                    if len(again) == len(buffer):
                        break  # incomplete yet
                    buffer = again
                    continue
                mark = decode_mark(buffer[:end]) if end > 0 else None
                self._mark = mark or self._mark
                length = end + 1 if mark else 1
            elif self._mark.stream == DISPLAY:
                buffer = self._display(all_of_it)
                if not buffer:
                    break  # incomplete yet
                length = len(buffer)
            else:
                end = buffer.find(SIGN)
                length = len(buffer) if end < 0 else end
            text = b"" if buffer[:1] == SIGN else buffer[:length]
            self._text.at += length
            buffer = buffer[length:]
            if text:
                yield self._mark.stream, self._mark.level, self._mark.at or now, self._mark.call, text
        sizes = self._out.size(), self._err.size()
        if sizes[0] <= self._out.at and sizes[1] <= self._err.at:
            self._unclaimed_since = None
            return
        if self._unclaimed_since is None:
            self._unclaimed_since = now
        if all_of_it or not 0 <= now - self._unclaimed_since < PATIENCE_S:
            yield from self._raw(*sizes, now, UNCLAIMED)
            self._unclaimed_since = None

    def _display(self, all_of_it: bool) -> bytes:
        """Returns the whole display at the present position; empty while its end is missing."""
        size = CHUNK
        while True:
            data = self._text.read(self._text.at, size)
            ends = [end for end in (data.find(b"\n") + 1, data.find(SIGN)) if end > 0]
            if ends:
                return data[: min(ends)]
            if len(data) < size or size >= _LONGEST_DISPLAY:
                return data if all_of_it or size >= _LONGEST_DISPLAY else b""
            size *= 4

    def _raw(self, out: int, err: int, timestamp: float, call: str) -> Iterator[tuple[int, int, float, str, bytes]]:
        for stream, file, until in ((STDOUT, self._out, out), (STDERR, self._err, err)):
            while file.at < until:
                data = file.read(file.at, min(CHUNK, until - file.at))
                if not data:
                    break
                file.at += len(data)
                yield stream, 0, timestamp, call, data

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Deletes the files."""
        self.close()
        for file in self._files:
            with contextlib.suppress(OSError):
                os.unlink(file.path)


def plain(block: LogBlock) -> bytes:
    """Returns a block as text: for a display its text form."""
    if block.stream != DISPLAY:
        return block.data
    display = decode_display(block.data)
    return display.lines.encode("utf-8", "replace") if display is not None else b""


def last_lines(base: str, count: int, most: int) -> tuple[str, ...]:
    """Returns the last lines that a proc wrote, of at most `most` bytes; empty if they cannot be read."""
    text, stream = b"", STDOUT
    spool = Spool(base, most)
    try:
        for block in spool.take(4 * most, 0.0, all_of_it=True):
            broken = block.stream != stream and text and not text.endswith(b"\n")
            text, stream = text + (b"\n" if broken else b"") + plain(block), block.stream
    except OSError:
        pass
    finally:
        spool.close()
    lines = text.decode("utf-8", "replace").removesuffix("\n").split("\n") if text else []
    return tuple(left_of(lines)[-count:])


def spool_size(base: str) -> int:
    """Returns the bytes of a proc's output in its spool, taken or not; 0 if unknown."""
    spool = Spool(base)
    try:
        return spool.backlog
    except OSError:
        return 0
    finally:
        spool.close()
