"""Lines of processes on arrival, of which the last are stored for each process."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monarch_nb.logs.process_log import ProcessLog
from monarch_nb.logs.sources import mesh_of
from monarch_nb.logs.verbs import TAIL, TOOK, Follow, LogChunk, Took
from monarch_nb.logs.written import Listener, OpenLine, Written
from monarch_nb.settings import settings
from monarch_nb.wire import Verb, agent_of, host_of, parse_address, proc_address

FORMER = 16  # stopped meshes whose lines are kept
INCARNATIONS = 3  # of one rank, whose output is kept

logger = logging.getLogger(__name__)


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
