"""The open ports of a process by number."""

import threading
from typing import TYPE_CHECKING, Protocol

from monarch_nb.wire import Header

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel


class PortHandler(Protocol):
    """The receiver behind a port number."""

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """A reply or a value, on the reading thread."""


class PortTable:
    """The open ports of a process by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, PortHandler] = {}
        self._of: dict[str, dict[int, PortHandler]] = {}  # by the process that is to answer, of those that say which

    def open(self, handler: PortHandler, of: str = "") -> int:
        """Gives `handler` a number; `of` is the one process that is to answer."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = handler
            if of:
                self._of.setdefault(of, {})[number] = handler
        return number

    def close(self, number: int, of: str = "") -> None:
        """Later values for it are dropped; `of` as it was opened."""
        self._open.pop(number, None)
        if of:
            with self._lock:
                mine = self._of.get(of, {})
                mine.pop(number, None)
                if not mine:
                    self._of.pop(of, None)

    def get(self, number: int) -> PortHandler | None:
        """The handler behind a number."""
        return self._open.get(number)

    def of(self, process: str) -> list[PortHandler]:
        """A snapshot of those that one process is to answer."""
        with self._lock:
            return list(self._of.get(process, {}).values())

    def __len__(self) -> int:
        return len(self._open)
