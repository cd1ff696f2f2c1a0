"""Tables of one process: its actors, its calls that wait, and the meshes that it knows."""

import threading
from typing import TYPE_CHECKING, Protocol

from monarch_nb.runtime.actors.cell import ActorCell
from monarch_nb.runtime.calls import PendingCall
from monarch_nb.runtime.meshes import MeshState
from monarch_nb.runtime.stored_answers import StoredAnswers
from monarch_nb.wire import Header, host_of, parse_address

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

_making = threading.Lock()


class ByteCounts:
    """Bytes of messages and transfers that have left and reached this process. Threads count without a lock."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received = self.sent = 0


class ProcessTables:
    """The tables that the parts of a runtime, supervision and meshes share."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host = host_of(address)
        self.root = f"{address}#"  # the stream of code outside actors
        self.calls: dict[str, PendingCall[object]] = {}  # calls that wait for answers, by id
        self.cells: dict[tuple[str, int], ActorCell] = {}  # the actors here, by mesh and rank
        self.meshes: dict[str, MeshState] = {}  # owned here or referred to, by uid
        self.away: set[str] = set()  # processes that have detached from meshes which live here
        self.orphans: set[str] = set()  # calls of such a process before it left, if it has returned
        self._stored_answers: StoredAnswers | None = None
        self.traffic = ByteCounts()
        self.closed = False  # this process has left the cluster

    @property
    def stored_answers(self) -> "StoredAnswers":
        """Stored answers that a controller may not have read."""
        if self._stored_answers is None:
            with _making:
                self._stored_answers = self._stored_answers or StoredAnswers()
        return self._stored_answers


class PortHandler(Protocol):
    """The receiver behind a port number."""

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Handles a reply or a value, on the reading thread."""


class PortTable:
    """The open ports of a process by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, PortHandler] = {}
        self._by_process: dict[str, dict[int, PortHandler]] = {}  # handlers that one process is to answer

    def open(self, handler: PortHandler, of: str = "") -> int:
        """Assigns a number to `handler`; `of` is the one process that is to answer."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = handler
            if of:
                self._by_process.setdefault(of, {})[number] = handler
        return number

    def close(self, number: int, of: str = "") -> None:
        """Closes a port: later values for it are dropped; `of` as in `open`."""
        self._open.pop(number, None)
        if of:
            with self._lock:
                handlers = self._by_process.get(of, {})
                handlers.pop(number, None)
                if not handlers:
                    self._by_process.pop(of, None)

    def get(self, number: int) -> PortHandler | None:
        """Returns the handler behind a number."""
        return self._open.get(number)

    def of(self, process: str) -> list[PortHandler]:
        """Returns a snapshot of the handlers that one process is to answer."""
        with self._lock:
            return list(self._by_process.get(process, {}).values())

    def __len__(self) -> int:
        return len(self._open)


TO_THE_END = 1 << 62  # the position of a process that has ended: the end of its output


class LogPositions(dict[str, int]):
    """Output positions by address; each reply of a process that keeps its output sets one. Thread-safe."""

    def ended(self, address: str) -> None:
        """Handles the end of a process: its last output is awaited, too."""
        self[address] = TO_THE_END

    def take(self) -> dict[str, int]:
        """Removes and returns the positions since the last call."""
        positions: dict[str, int] = {}
        for _ in range(len(self)):
            try:
                address, position = self.popitem()
            except KeyError:  # another thread takes them as well
                break
            positions[address] = max(position, positions.get(address, 0))
        return positions

    def forget(self, uid: str) -> None:
        """Forgets the positions of the processes of a mesh."""
        for address in tuple(self):
            if parse_address(address).mesh == uid:
                self.pop(address, None)
