"""The open ports of a process by number."""

import threading
from typing import TYPE_CHECKING, Protocol

from monarch_nb.wire import Header

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel


class PortHandler(Protocol):
    """What stands behind a port number in its process."""

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """A reply or a value, on the reading thread."""


class PortTable:
    """The open ports of a process by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, PortHandler] = {}

    def open(self, handler: PortHandler) -> int:
        """Gives `handler` a number."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = handler
        return number

    def close(self, number: int) -> None:
        """Later values for it are dropped."""
        self._open.pop(number, None)

    def get(self, number: int) -> PortHandler | None:
        """The handler behind a number."""
        return self._open.get(number)

    def all(self) -> list[PortHandler]:
        """A snapshot of all handlers."""
        with self._lock:
            return list(self._open.values())

    def __len__(self) -> int:
        return len(self._open)
