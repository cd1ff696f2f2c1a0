"""What processes write, followed from here: their lines as they come, the last of them kept for each process."""

import codecs
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from monarch_nb.host.protocol import LogBlock, LogChunk, Tail, Took, decode
from monarch_nb.logs.marks import DISPLAY, STDERR, UNCLAIMED
from monarch_nb.logs.overwriting import UP, Rows, overwritten, shown
from monarch_nb.runtime import ActorState, runtime
from monarch_nb.settings import settings
from monarch_nb.wire import Display, Header, decode_display, harmless

if TYPE_CHECKING:
    from monarch_nb.runtime import Runtime
    from monarch_nb.transport import Parcel

LONGEST = 100_000  # characters without a line's end: more than that is broken into lines
ACKNOWLEDGED = 128 * 1024  # bytes of a process after which its agent is told that they came
FORMER = 16  # stopped meshes whose lines are kept
LIVES = 3  # of one rank, whose output is kept

logger = logging.getLogger(__name__)


class Written(NamedTuple):
    """Some whole lines that a process wrote to one stream, for one call."""

    address: str
    stream: str  # "stdout" or "stderr"
    call: str  # the outermost call that they belong to, "" for none
    level: int  # of records of `logging`, 0 for other text
    at: float  # wall clock, seconds
    text: str  # each line with its end
    display: Display | None = None  # what was displayed; `text` stands for it where only text can be shown

    @property
    def line_count(self) -> int:
        """How many lines these are."""
        return self.text.count("\n")


Listener = Callable[[str, Sequence[Written]], None]
Place = tuple[str, str, str]  # of a line: address, stream, call


class _Line:
    """The line of one stream and call that has no end yet."""

    def __init__(self) -> None:
        self.text = ""
        self.since = 0.0  # when its first character came, monotonic
        self.level = 0
        self.at = 0.0
        self._rows = Rows()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, level: int, at: float) -> str:
        """Takes more; gives the lines that are complete now."""
        if not self.text:
            self.since, self.level, self.at = time.monotonic(), level, at
        text = self.text + self._decoder.decode(data)
        cut = text.rfind("\n") + 1
        whole, rest = text[:cut], text[cut:]
        if whole and ("\r" in whole or UP in whole or not self._rows.plain):
            whole = "".join(f"{line}\n" for line in self._rows.lines(whole[:-1].split("\n")))
        if "\r" in rest:  # what a progress bar has overwritten is of no use
            left = f"\r{overwritten(rest)}" + ("\r" if rest.endswith("\r") else "")
            self._rows.up(rest.count(UP) - left.count(UP))
            rest = left
        if len(rest) > LONGEST:
            whole, rest = f"{whole}{overwritten(rest)}\n", ""
        if cut and rest:
            self.since = time.monotonic()
        self.text = rest
        return whole

    @property
    def over(self) -> bool:
        """Whether nothing of it matters to what comes."""
        return not self.text and self._rows.plain

    @property
    def shown(self) -> str:
        """What there is to see of it."""
        return harmless(shown(self.text))


class _Log:
    """The output of one process: `position` says how far it has arrived, as replies count it."""

    def __init__(self, address: str, kept: int) -> None:
        self.address = address
        self.position = 0
        self.received = 0  # bytes
        self.told = 0  # of them, to the agent
        self.ended = False
        self.skipped = 0  # lines that are in its file only
        self.blocks: deque[Written] = deque()
        self.lines: dict[tuple[str, str], _Line] = {}  # by stream and call
        self._kept = kept
        self._count = 0

    def feed(self, chunk: LogChunk, claim: Callable[[str], str]) -> list[Written]:
        """Takes a chunk; gives the lines that are complete now."""
        found = []
        offset = chunk.offset
        for block in chunk.blocks:
            data = block.data[max(0, self.received - offset) :]  # followed twice: the beginning is known
            offset += len(block.data)
            if data:
                found += self._block(block, data, claim)
        self.received = max(self.received, offset)
        self.position = max(self.position, chunk.position)
        self.ended = self.ended or chunk.ended
        self.skipped += chunk.skipped
        return found

    def _block(self, block: LogBlock, data: bytes, claim: Callable[[str], str]) -> list[Written]:
        if block.stream == DISPLAY:
            return self._displayed(block, data)
        stream = "stderr" if block.stream == STDERR else "stdout"
        call = claim(self.address) if block.call == UNCLAIMED else block.call
        if not call:  # what no call wrote goes on where the stream stands, as in a terminal
            call = next((of for (at, of), line in self.lines.items() if at == stream and line.text), "")
        line = self.lines.get((stream, call))
        if line is None:
            for known in [known for known, other in self.lines.items() if known[0] == stream and not other.text]:
                del self.lines[known]  # bars of a call before it
            line = self.lines.setdefault((stream, call), _Line())
        level, at = (line.level, line.at) if line.text else (block.level, block.at)
        whole = line.feed(data, block.level, block.at)
        if line.over:
            del self.lines[stream, call]
        return [self._keep(stream, call, level, at, whole)] if whole else []

    def _displayed(self, block: LogBlock, data: bytes) -> list[Written]:
        """What was displayed; nothing where a part of it is missing. Of it, only the text is kept."""
        display = decode_display(data)
        if display is None:
            return []
        if display.lines:
            self._keep("stdout", block.call, block.level, block.at, display.lines)
        return [Written(self.address, "stdout", block.call, block.level, block.at, display.lines, display)]

    def _keep(self, stream: str, call: str, level: int, at: float, text: str) -> Written:
        written = Written(self.address, stream, call, level, at, harmless(text))
        self.blocks.append(written)
        self._count += written.line_count
        while len(self.blocks) > 1 and self._count - self.blocks[0].line_count >= self._kept:
            self._count -= self.blocks.popleft().line_count
        return written

    def cut(self, stream: str, call: str) -> Written | None:
        """Ends an open line by force, and gives it."""
        line = self.lines.pop((stream, call), None)
        if line is None or not line.shown:
            return None
        return self._keep(stream, call, line.level, line.at, f"{line.shown}\n")


class Output:
    """Follows the output of processes for this one. `follow` and `drain` from any thread; listeners must be quick."""

    def __init__(self, engine: "Runtime") -> None:
        self._engine = engine
        self._arrived = threading.Condition()
        self._logs: dict[str, _Log] = {}
        self._listeners: list[Listener] = []
        self._former: deque[str] = deque()
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
                    self._log(address)
        for host, group in by_host.items():
            # On the urgent lane, as the request that spawned them: it comes after it.
            self._engine.control(f"{host}/agent", "agent.tail", Tail(tuple(group), on=on))

    def _log(self, address: str) -> _Log:
        log = self._logs.get(address)
        if log is None:
            log = self._logs.setdefault(address, _Log(address, settings.get("log_kept_lines")))
            place, _, life = address.rpartition(".")
            if life.isdigit():  # of a rank that is healed again and again the latest lives are kept
                self._logs.pop(f"{place}.{int(life) - LIVES}", None)
        return log

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(address, lines)` on the reading thread; the result ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def still(self) -> threading.Condition:
        """While it is held nothing arrives: for whoever looks at what there is and listens from then on."""
        return self._arrived

    def _chunk(self, header: Header, parcel: "Parcel") -> None:
        chunk = decode(parcel.frames[0], LogChunk)
        with self._arrived:
            log = self._log(chunk.address)
            found = log.feed(chunk, self._claim)
            # Also without a full line: somebody may show how far a progress bar is. Before anybody who drains goes on.
            self._tell(chunk.address, found)
            self._arrived.notify_all()
            due = log.received - log.told >= ACKNOWLEDGED
            if due:
                log.told = log.received
        if due:
            self._engine.control(header.src, "agent.took", Took({chunk.address: log.received}))

    def _tell(self, address: str, found: Sequence[Written]) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(address, found)
            except Exception:  # whoever shows it must not keep others from hearing of it
                logger.exception("a listener to output failed")

    def _claim(self, address: str) -> str:
        """The only call of this process that waits for an answer of another, "" if there are none or several."""
        _, _, place = address.partition("/")
        uid, _, rest = place.partition(".")
        rank = int(rest.partition(".")[0] or 0)
        found = ""
        for call in tuple(self._engine.calls.values()):
            state = self._engine.meshes.get(call.mesh)
            procs = state.procs.uid if isinstance(state, ActorState) else call.mesh
            if procs == uid and rank in call.missing_ranks():
                if found:
                    return ""
                found = call.call
        return found

    def drain(self, positions: Mapping[str, int], timeout: float) -> bool:
        """Waits until the output of each process has arrived that far. False when `timeout` seconds are over.

        Processes that are not followed are not waited for.
        """

        def there() -> bool:
            logs = self._logs
            return all(
                address not in logs or logs[address].ended or logs[address].position >= at
                for address, at in positions.items()
            )

        with self._arrived:
            return self._arrived.wait_for(there, timeout)

    def written(self, address: str) -> list[Written]:
        """The last lines of a process, in the order in which they came; of those without an end what there is."""
        with self._arrived:
            log = self._logs.get(address)
            if log is None:
                return []
            rest = [
                Written(address, stream, call, line.level, line.at, f"{line.shown}\n")
                for (stream, call), line in log.lines.items()
                if line.shown
            ]
            return [*log.blocks, *rest]

    def addresses(self, uid: str) -> list[str]:
        """The processes of a mesh, in all their lives, that are followed."""
        with self._arrived:
            return [address for address in self._logs if address.partition("/")[2].startswith(f"{uid}.")]

    def skipped(self) -> dict[str, int]:
        """How many lines of which processes never came here: they are in their log files."""
        return {address: log.skipped for address, log in tuple(self._logs.items()) if log.skipped}

    def open_lines(self) -> dict[Place, tuple[str, bool, float]]:
        """Lines without an end yet: the text, whether a carriage return is in it, its age in seconds."""
        now = time.monotonic()
        with self._arrived:
            return {
                (log.address, stream, call): (line.shown, "\r" in line.text, now - line.since)
                for log in self._logs.values()
                if log.lines
                for (stream, call), line in log.lines.items()
                if line.text
            }

    def cut(self, place: Place) -> None:
        """Ends an open line: listeners get it as it is."""
        address, stream, call = place
        with self._arrived:
            log = self._logs.get(address)
            line = log.cut(stream, call) if log is not None else None
            if line is not None:
                self._tell(address, [line])

    def forget(self, uid: str) -> None:
        """A mesh is gone: what is kept of it goes too, once a few others are gone as well."""
        with self._arrived:
            if uid not in self._former:
                self._former.append(uid)
            while len(self._former) > FORMER:
                old = self._former.popleft()
                for address in [one for one in self._logs if one.partition("/")[2].startswith(f"{old}.")]:
                    del self._logs[address]


def output_of(engine: "Runtime") -> Output:
    """The output that this process follows; nothing is followed until somebody asks for it."""
    known = getattr(engine.controls.get("proc.log"), "__self__", None)
    return known if isinstance(known, Output) else Output(engine)


def listen_to_logs(listener: Listener) -> Callable[[], None]:
    """Calls `listener(address, lines)` for all that processes spawned from here write; the result ends that.

    On the engine's reading thread: it must be quick, and must not call the engine. `lines` are `Written`, each of them
    one line or many, in the order in which a process wrote them; it is empty where only an open line has grown.
    """
    return output_of(runtime()).listen(listener)
