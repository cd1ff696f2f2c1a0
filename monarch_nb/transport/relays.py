"""Messages on their way through this process that wait for the credits of the next one."""

from collections import deque
from collections.abc import Callable

from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.parcel import Parcel
from monarch_nb.wire.header import Header

__all__ = ["RelayQueue"]


class RelayQueue:
    """What is to be passed on to one peer, in order."""

    def __init__(
        self, send: Callable[[Header, Parcel], bool], undeliverable: Callable[[Header, Parcel, str], None]
    ) -> None:
        """`send` is False where credits lack, and raises TransportError where nobody will ever take it."""
        self._send, self._undeliverable = send, undeliverable
        self._waiting: deque[tuple[Header, Parcel, Callable[[], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, header: Header, parcel: Parcel, handed_on: Callable[[], None]) -> None:
        """Keep a message; `handed_on` is called once it is written, or given up."""
        self._waiting.append((header, parcel, handed_on))

    def send(self) -> None:
        """Write what can be written; reading thread only."""
        while self._waiting:
            header, parcel, handed_on = self._waiting[0]
            try:
                if not self._send(header, parcel):
                    return
            except TransportError as error:
                self._undeliverable(header, parcel, str(error))
            self._waiting.popleft()
            handed_on()
