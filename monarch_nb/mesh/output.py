"""What processes write, followed from here: their lines as they come, the last of them kept for each process."""

import codecs
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from monarch_nb.host.protocol import LogChunk, Tail, decode
from monarch_nb.wire import Header

if TYPE_CHECKING:
    from monarch_nb.runtime import Runtime
    from monarch_nb.transport import Parcel

KEPT = 10_000  # lines of each process
LONGEST = 100_000  # characters without a line's end: more than that is broken into lines
_ENDS = re.compile(r"\r\n|\n")

Listener = Callable[[str, list[str]], None]


class _Log:
    """The output of one process: `position` bytes of it have arrived."""

    def __init__(self) -> None:
        self.position = 0
        self.lines: deque[str] = deque(maxlen=KEPT)
        self.open = ""  # what has come of the line that has no end yet
        self.since = 0.0  # when its first character came
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, offset: int, data: bytes) -> list[str]:
        """Takes bytes that start at `offset`; gives the lines that are complete now."""
        if offset > self.position:
            self._decoder.reset()
        data = data[max(0, self.position - offset) :]  # followed twice: the beginning is known
        if not data:
            return []
        self.position = max(self.position, offset) + len(data)
        *lines, rest = _ENDS.split(self.open + self._decoder.decode(data))
        if lines or not self.open:
            self.since = time.monotonic()
        if "\r" in rest:  # what a progress bar has overwritten is of no use
            rest = f"\r{overwritten(rest)}" + ("\r" if rest.endswith("\r") else "")
        if len(rest) > LONGEST:
            lines, rest = [*lines, rest], ""
        self.open = rest
        done = [overwritten(line) for line in lines]
        self.lines.extend(done)
        return done

    def cut(self) -> str:
        """Ends the open line by force, and gives it."""
        line, self.open = overwritten(self.open), ""
        if line:
            self.lines.append(line)
        return line


def overwritten(line: str) -> str:
    """What a terminal would show of a line with carriage returns in it: the text after the last one that is any."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


class Output:
    """Follows the output of processes for this one. `follow` and `drain` from any thread; listeners must be quick."""

    def __init__(self, engine: "Runtime") -> None:
        self._engine = engine
        self._arrived = threading.Condition()
        self._logs: dict[str, _Log] = {}
        self._listeners: list[Listener] = []
        engine.controls["proc.log"] = self._chunk

    def follow(self, addresses: Iterable[str]) -> None:
        """Have the output of these processes sent here, from its beginning."""
        self._ask(addresses, on=True)

    def leave(self, addresses: Iterable[str]) -> None:
        """Follow them no longer."""
        self._ask(addresses, on=False)

    def _ask(self, addresses: Iterable[str], *, on: bool) -> None:
        by_host: dict[str, list[str]] = {}
        for address in addresses:
            by_host.setdefault(address.partition("/")[0], []).append(address)
        with self._arrived:
            for address in (address for group in by_host.values() for address in group):
                if on:
                    self._logs.setdefault(address, _Log())
        for host, group in by_host.items():
            # On the urgent lane, as the request that spawned them: it comes after it.
            self._engine.control(f"{host}/agent", "agent.tail", Tail(tuple(group), on=on))

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(address, lines)` on the reading thread; the result ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _chunk(self, header: Header, parcel: "Parcel") -> None:
        chunk = decode(parcel.frames[0], LogChunk)
        with self._arrived:
            lines = self._logs.setdefault(chunk.address, _Log()).feed(chunk.offset, chunk.data)
            # Also without a full line: somebody may show how far a progress bar is. Before anybody who drains goes on.
            for listener in tuple(self._listeners):
                listener(chunk.address, lines)
            self._arrived.notify_all()

    def drain(self, positions: Mapping[str, int], timeout: float) -> bool:
        """Waits until so many bytes of each process's output have arrived. False when `timeout` seconds are over.

        Processes that are not followed are not waited for.
        """

        def there() -> bool:
            logs = self._logs
            return all(address not in logs or logs[address].position >= at for address, at in positions.items())

        with self._arrived:
            return self._arrived.wait_for(there, timeout)

    def lines(self, address: str) -> list[str]:
        """The last lines a process wrote."""
        with self._arrived:
            log = self._logs.get(address)
            return list(log.lines) if log is not None else []

    def open_lines(self) -> dict[str, tuple[str, bool, float]]:
        """Lines without an end yet, by address: the text, whether a carriage return is in it, its age in seconds."""
        now = time.monotonic()
        with self._arrived:
            return {
                address: (overwritten(log.open), "\r" in log.open, now - log.since)
                for address, log in self._logs.items()
                if log.open
            }

    def cut(self, address: str) -> str:
        """Ends a process's open line, and gives it."""
        with self._arrived:
            log = self._logs.get(address)
            return log.cut() if log is not None else ""

    def forget(self, uid: str) -> None:
        """Drop what is kept of the processes of a mesh that is gone."""
        with self._arrived:
            for address in [address for address in self._logs if address.partition("/")[2].startswith(f"{uid}.")]:
                del self._logs[address]


def output_of(engine: "Runtime") -> Output:
    """The output that this process follows; nothing is followed until somebody asks for it."""
    known = getattr(engine.controls.get("proc.log"), "__self__", None)
    return known if isinstance(known, Output) else Output(engine)
