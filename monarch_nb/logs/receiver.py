"""Received output of processes: split into lines on arrival, of which the last are stored for each process."""

import codecs
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monarch_nb.logs.lines import Listener, OpenLine, Written, mesh_of
from monarch_nb.logs.overwriting import UP, OverwrittenRows
from monarch_nb.logs.spool import DISPLAY, STDERR, UNCLAIMED
from monarch_nb.logs.verbs import TAIL, TOOK, Follow, LogBlock, LogChunk, Took
from monarch_nb.settings import settings
from monarch_nb.wire import (
    Verb,
    agent_of,
    decode_display,
    harmless,
    host_of,
    parse_address,
    proc_address,
    with_host_names,
)

ACKNOWLEDGED = 128 * 1024  # received bytes after which an acknowledgement is sent to the agent
LONGEST = 100_000  # characters without a line's end; longer text is broken into lines
_PLAIN = bytes([*b"\t\n", *range(0x20, 0x7F)])  # bytes that need no decoding and are no terminal commands
FORMER = 16  # stopped meshes whose lines are kept
INCARNATIONS = 3  # of one rank, whose output is kept

logger = logging.getLogger(__name__)


class LineBuffer:
    """The unfinished output of one stream for one call: a line without an end, or bars that may be redrawn."""

    def __init__(self) -> None:
        self._text = ""  # text without control characters; else the rows have it
        self.since = 0.0  # when its first character came, monotonic
        self.level = 0
        self.at = 0.0
        self._rows: OverwrittenRows | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, level: int, timestamp: float, now: float) -> str:
        """Adds data; returns the lines that are complete now."""
        if not self.text:
            self.since, self.level, self.at = now, level, timestamp
        text = self._decoder.decode(data)
        if self._rows is None and ("\r" in text or UP[0] in text):
            self._rows, text, self._text = OverwrittenRows(), self._text + text, ""
        if self._rows is not None:
            complete = "".join(f"{line}\n" for line in self._rows.feed(text))
            if len(self._rows.shown) > LONGEST:
                self._rows, complete = OverwrittenRows(), f"{complete}{self._rows.shown}\n"
            if complete:
                self.since = now
            if self._rows.plain:
                self._rows = None
            return complete
        text = self._text + text
        cut = text.rfind("\n") + 1
        complete, rest = text[:cut], text[cut:]
        if len(rest) > LONGEST:
            complete, rest = f"{complete}{rest}\n", ""
        if cut and rest:
            self.since = now
        self._text = rest
        return complete

    @property
    def text(self) -> str:
        """The text without its end."""
        return self._text if self._rows is None else self._rows.shown

    @property
    def over(self) -> bool:
        """True if the buffer has no effect on later data."""
        return not self._text and self._rows is None

    @property
    def overwrites(self) -> bool:
        """True for unfinished text that overwrites itself, as progress bars do."""
        return self._rows is not None and self._rows.has_bars and not self._rows.ended

    @property
    def finished(self) -> bool:
        """True for bars that the program has left, usually for good."""
        return self._rows is not None and self._rows.has_bars and self._rows.ended

    @property
    def shown(self) -> str:
        """The visible text, a line for each bar."""
        return harmless(self.text)


def _shown(stream: str, level: int, text: str) -> str:
    """Puts hosts' names into records of `logging`, errors and warnings; other output of a program stays as it is."""
    return with_host_names(text) if level or stream == "stderr" else text


class ProcessLog:
    """Collects the chunks of one process; stores its last `capacity` lines.

    `claim` returns the call of output whose process has not named it.
    """

    __slots__ = ("_acknowledged", "_blocks", "_claim", "_count", "_kept", "_lines", "_position", "address", "ended",
                 "file", "received", "skipped")  # fmt: skip

    def __init__(self, address: str, capacity: int, claim: Callable[[str], str], file: str = "") -> None:
        self.address = address
        self.file = file  # path of the whole output on its host
        self.received = 0  # bytes
        self.skipped = 0  # lines that only the file has
        self.ended = False
        # With their numbers of lines; created with the first block, since many processes never write.
        self._blocks: deque[tuple[Written, int]] | None = None
        self._position = 0  # in the numbering of replies
        self._acknowledged = 0
        self._lines: dict[tuple[str, str], LineBuffer] | None = None  # without an end, by stream and call
        self._kept = capacity
        self._count = 0  # of the stored lines
        self._claim = claim

    @property
    def _open(self) -> dict[tuple[str, str], LineBuffer]:
        lines = self._lines
        if lines is None:
            lines = self._lines = {}
        return lines

    @property
    def is_open(self) -> bool:
        """True if there is a line without an end."""
        return bool(self._lines) and any(line.text for line in self._open.values())

    def reached(self, position: int) -> bool:
        """Returns whether all output before a position has arrived."""
        return self.ended or self._position >= position

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers that change whenever output arrives."""
        return self.received, self._position

    def acknowledge(self) -> int:
        """Returns the number of bytes to acknowledge to the agent, 0 while none are due."""
        if self.received - self._acknowledged < ACKNOWLEDGED:
            return 0
        self._acknowledged = self.received
        return self.received

    def feed(self, chunk: LogChunk, now: float) -> list[Written]:
        """Adds a chunk; returns the lines that are complete now. `now` is monotonic."""
        lines = []
        offset = chunk.offset
        for block in chunk.blocks:
            data = block.data[max(0, self.received - offset) :]  # followed twice: the beginning has arrived already
            offset += len(block.data)
            if data:
                lines += self._block(block, data, now)
        self.received = max(self.received, offset)
        self._position = max(self._position, chunk.position)
        self.ended = self.ended or chunk.ended
        self.skipped += chunk.skipped
        return lines

    def _block(self, block: LogBlock, data: bytes, now: float) -> list[Written]:
        if block.stream == DISPLAY:
            return self._displayed(block, data)
        stream = "stderr" if block.stream == STDERR else "stdout"
        call = self._claim(self.address) if block.call == UNCLAIMED else block.call
        if not call:  # output of no call continues the stream's present line, as in a terminal
            call = next((owner for (name, owner), line in self._open.items() if name == stream and line.text), "")
        line = self._open.get((stream, call))
        if line is None:
            for key in [key for key, buffer in self._open.items() if key[0] == stream and not buffer.text]:
                del self._open[key]  # bars of a call before it
            if data.endswith(b"\n") and not data.translate(None, _PLAIN):  # most output
                text = _shown(stream, block.level, str(data, "ascii"))
                return [self._keep(Written(self.address, stream, call, block.level, block.at, text))]
            line = self._open.setdefault((stream, call), LineBuffer())
        level, timestamp = (line.level, line.at) if line.text else (block.level, block.at)
        complete = line.feed(data, block.level, block.at, now)
        if line.over:
            del self._open[stream, call]
        return [self._keep_lines(stream, call, level, timestamp, complete)] if complete else []

    def _displayed(self, block: LogBlock, data: bytes) -> list[Written]:
        """Adds a display; ignores it if a part is missing. Stores its text only."""
        display = decode_display(data)
        if display is None:
            return []
        if display.lines:
            self._keep_lines("stdout", block.call, block.level, block.at, display.lines)
        return [Written(self.address, "stdout", block.call, block.level, block.at, display.lines, display)]

    def _keep_lines(self, stream: str, call: str, level: int, timestamp: float, text: str) -> Written:
        return self._keep(Written(self.address, stream, call, level, timestamp, _shown(stream, level, harmless(text))))

    def _keep(self, written: Written) -> Written:
        blocks = self._blocks = self._blocks or deque()
        count = written.line_count
        blocks.append((written, count))
        self._count += count
        while len(blocks) > 1 and self._count - blocks[0][1] >= self._kept:
            self._count -= blocks.popleft()[1]
        return written

    def open_lines(self, now: float) -> list[OpenLine]:
        """Returns the lines without an end."""
        return [
            OpenLine(self.address, stream, call, line.shown, line.overwrites, now - line.since, line.finished)
            for (stream, call), line in (self._lines or {}).items()
            if line.text
        ]

    def cut(self, stream: str, call: str) -> Written | None:
        """Ends an open line by force, and returns it."""
        line = self._open.pop((stream, call), None)
        if line is None or not line.shown:
            return None
        return self._keep_lines(stream, call, line.level, line.at, f"{line.shown}\n")

    def written(self) -> list[Written]:
        """Returns the last lines, in order of arrival; of lines without an end the present text."""
        rest = [
            Written(self.address, stream, call, line.level, line.at, _shown(stream, line.level, f"{line.shown}\n"))
            for (stream, call), line in (self._lines or {}).items()
            if line.shown
        ]
        return [*(written for written, _ in self._blocks or ()), *rest]


class Drain:
    """The wait for some positions. Times are monotonic.

    It lasts while some of the missing output arrives within each `silence` seconds, and no longer than `limit`.
    Processes whose output is not followed are not waited for.
    """

    def __init__(self, positions: Mapping[str, int], now: float, *, silence: float, limit: float) -> None:
        self._positions = positions
        self._silence = silence
        self._end = now + limit
        self._progress: dict[str, tuple[int, int]] = {}
        self._progress_at = now

    def patience(self, logs: Mapping[str, ProcessLog], now: float) -> float | None:
        """Returns the most seconds to wait for more: 0 when it is given up, None when all has arrived."""
        missing = {
            address: logs[address].progress
            for address, position in self._positions.items()
            if address in logs and not logs[address].reached(position)
        }
        if not missing:
            return None
        if missing != self._progress:
            self._progress, self._progress_at = missing, now
        return max(0.0, min(self._progress_at + self._silence, self._end) - now)


class LogReceiver:
    """Follows the output of processes. Methods from any thread; listeners must be quick.

    `send` takes an agent's address, a verb and its request; `claim` returns the call of output whose process did not
    know it.
    """

    def __init__(self, send: Callable[[str, Verb[Any, Any], Any], None], claim: Callable[[str], str]) -> None:
        self._send = send
        self._claim = claim
        self._arrived = threading.Condition()
        self._logs: dict[str, ProcessLog] = {}
        self._unfinished: set[str] = set()  # processes with lines without an end: few of many
        self._listeners: list[Listener] = []
        self._former: deque[str] = deque()
        self._catching_up: set[str] = set()  # processes whose next chunk is output from before this one followed

    def follow(self, address: str, file: str = "") -> None:
        """Requests the output of a process, from its beginning; `file` is its path on the host of the process."""
        with self._arrived:
            self._log(address).file = file
        # On the urgent lane, as the request that spawned the process, so that it arrives after that.
        self._send(agent_of(host_of(address)), TAIL, Follow((address,)))

    def catch_up(self, addresses: Iterable[str]) -> None:
        """Stores what these processes wrote before they were followed, without showing it as new."""
        with self._arrived:
            self._catching_up.update(addresses)

    def await_past(self, addresses: Iterable[str], limit: float) -> None:
        """Blocks until the earlier output of these processes has arrived, `limit` seconds at most."""
        awaited = set(addresses)
        with self._arrived:
            self._arrived.wait_for(lambda: not awaited & self._catching_up, limit)
            self._catching_up -= awaited

    def _log(self, address: str) -> ProcessLog:
        log = self._logs.get(address)
        if log is None:
            log = self._logs[address] = ProcessLog(address, settings.log_kept_lines, self._claim)
            host, _, mesh, rank, incarnation = parse_address(address)
            if mesh:  # of each rank only the latest incarnations are kept
                self._logs.pop(proc_address(host, mesh, rank, incarnation - INCARNATIONS), None)
        return log

    def _note(self, log: ProcessLog) -> None:
        (self._unfinished.add if log.is_open else self._unfinished.discard)(log.address)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(address, lines)` on the reading thread; the result ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def still(self) -> threading.Condition:
        """Returns a lock that prevents arrivals: for callers that read the present lines and listen from then on."""
        return self._arrived

    def take(self, chunks: Iterable[LogChunk], agent: str) -> None:
        """Adds chunks from an agent (reading thread)."""
        acknowledged: dict[str, int] = {}
        with self._arrived:
            for chunk in chunks:
                log = self._log(chunk.address)
                lines = log.feed(chunk, time.monotonic())
                self._note(log)
                # Also without a full line, for displays of progress bars. Before waiting drains continue.
                if chunk.address in self._catching_up:
                    self._catching_up.discard(chunk.address)
                else:
                    self._notify(chunk.address, lines)
                if received := log.acknowledge():
                    acknowledged[chunk.address] = received
            self._arrived.notify_all()
        if acknowledged:
            self._send(agent, TOOK, Took(acknowledged))

    def _notify(self, address: str, lines: Sequence[Written]) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(address, lines)
            except Exception:  # one failing listener must not stop the others
                logger.exception("a listener to output failed")

    def drain(self, positions: Mapping[str, int], *, silence: float, limit: float) -> bool:
        """Waits, as long as `Drain` allows, until all output has reached these positions; returns whether it has."""
        drain = Drain(positions, time.monotonic(), silence=silence, limit=limit)
        with self._arrived:
            while patience := drain.patience(self._logs, time.monotonic()):
                self._arrived.wait(patience)
            return patience is None

    def written(self, address: str) -> list[Written]:
        """Returns the last lines of a process, in order of arrival; of lines without an end the present text."""
        with self._arrived:
            log = self._logs.get(address)
            return [] if log is None else log.written()

    def addresses(self, uid: str) -> list[str]:
        """Returns the followed processes of a mesh, in all their incarnations."""
        with self._arrived:
            return [address for address in self._logs if mesh_of(address) == uid]

    def file(self, address: str) -> str:
        """Returns the path of a process's log on its host; "" if unknown."""
        log = self._logs.get(address)
        return "" if log is None else log.file

    def skipped(self) -> dict[str, int]:
        """Returns the numbers of lines, by process, that only the log files have."""
        return {address: log.skipped for address, log in tuple(self._logs.items()) if log.skipped}

    def open_lines(self) -> list[OpenLine]:
        """Returns the lines without an end."""
        now = time.monotonic()
        with self._arrived:
            logs = [self._logs[address] for address in self._unfinished if address in self._logs]
            return [line for log in logs for line in log.open_lines(now)]

    def cut(self, line: OpenLine) -> None:
        """Ends an open line: listeners receive it as it is."""
        with self._arrived:
            log = self._logs.get(line.address)
            written = log.cut(line.stream, line.call) if log is not None else None
            if log is not None:
                self._note(log)
            if written is not None:
                self._notify(line.address, [written])

    def cut_stale(self, age: float, *, progress: bool = False) -> None:
        """Ends lines that have been open for `age` seconds; with `progress` progress bars too."""
        for line in self.open_lines():
            if line.age >= age and (progress or not line.overwrites):
                self.cut(line)

    def cut_finished(self) -> None:
        """Ends bars that the program has left: further output is shown below them."""
        for line in sorted(self.open_lines(), key=lambda line: line.address):
            if line.finished:
                self.cut(line)

    def forget(self, uid: str) -> None:
        """Marks a mesh as ended: its lines are removed once a few more meshes have ended."""
        with self._arrived:
            if uid not in self._former:
                self._former.append(uid)
            while len(self._former) > FORMER:
                old = self._former.popleft()
                for address in [address for address in self._logs if mesh_of(address) == old]:
                    del self._logs[address]
                    self._unfinished.discard(address)
