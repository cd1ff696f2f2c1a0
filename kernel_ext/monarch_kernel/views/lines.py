"""The log lines that one view watches."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from monarch_nb.logs import MeshLogs, Written
from monarch_nb.runtime import Runtime, proc_state_of
from monarch_nb.wire import parse_address

from .bundle import bundled
from .channel import Message
from .displays import LogView
from .live import LiveView, Shown
from .meshes import options_of

SEND_S = 0.1
MOST = 2000  # lines of one message
FIRST = 500
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

Line = tuple[int, float, str, str]  # index of the rank, when, level, text


class LineFeed:
    """Sends stored lines, then new ones, for a `watch` message. Ends with `close`."""

    def __init__(self, runtime: Runtime, send: Callable[[Message], None], watch: Message) -> None:
        self._runtime = runtime
        self._send = send
        self._id = watch.get("id")
        self._text = str(watch.get("text") or "").lower()
        self._level = LEVELS.get(str(watch.get("level") or "").lower(), 0)
        state = runtime.meshes.get(str(watch.get("mesh")))
        if state is None:
            raise LookupError(f"there is no mesh {watch.get('mesh')!r}")
        self._procs = proc_state_of(state)
        indices = watch.get("ranks")
        bases = list(state.region.ranks())
        self._index = {base: index for index, base in enumerate(bases) if indices is None or index in indices}
        self._waiting: deque[Line] = deque(maxlen=MOST)
        self._skipped = 0
        self._lock = threading.Lock()
        self._planned = False
        self._closed = False
        receiver = runtime.part(MeshLogs).receiver
        self._stop = receiver.listen(self._wrote)
        first: list[Line] = []
        for base, index in self._index.items():
            first += self._lines(index, receiver.written(self._procs.address(base)))
        first.sort(key=lambda line: line[1])
        most = int(watch.get("lines") or FIRST)
        send({"type": "logs", "id": self._id, "reset": True, "lines": first[-most:]})

    def close(self) -> None:
        """Stops sending."""
        self._closed = True
        self._stop()

    def _lines(self, index: int, written: Iterable[Written]) -> Iterator[Line]:
        """Lines that match the view's filter."""
        for block in written:
            if block.level < self._level:
                continue
            level = next((name for name, number in LEVELS.items() if number >= block.level), "critical")
            for text in block.lines:
                if not self._text or self._text in text.lower():
                    yield index, round(block.at, 3), level if block.level else "", text

    def _wrote(self, address: str, written: Sequence[Written]) -> None:  # reading thread
        uid, rank, _ = parse_address(address).place
        if uid != self._procs.uid or not written:
            return
        index = self._index.get(rank)
        if index is None:
            return
        with self._lock:
            for line in self._lines(index, written):
                self._skipped += len(self._waiting) == MOST
                self._waiting.append(line)
            if self._planned or not self._waiting:
                return
            self._planned = True
        self._runtime.later(SEND_S, self._send_lines)

    def _send_lines(self) -> None:
        with self._lock:
            lines, skipped = list(self._waiting), self._skipped
            self._waiting.clear()
            self._skipped, self._planned = 0, False
        if not self._closed:
            more = {"skipped": skipped} if skipped else {}
            self._send({"type": "logs", "id": self._id, "lines": lines, **more})


LOGS = LiveView(
    name="logs",
    **bundled("logs"),
    feed=lambda watch: LineFeed(watch.runtime, watch.send, watch.message).close,
    shows={LogView: lambda view: Shown({**options_of(view.mesh), "lines": view.lines})},
)
