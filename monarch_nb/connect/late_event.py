"""An event that is cheap while nobody waits for it: of ten thousand hosts hardly any is waited for."""

import threading

_making = threading.Lock()


class LateEvent:
    """Like `threading.Event`, whose waiting room is made when somebody comes to wait."""

    __slots__ = ("_is_set", "_room")

    def __init__(self) -> None:
        self._is_set = False
        self._room: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened; whoever waits goes on."""
        with _making:
            self._is_set = True
            room = self._room
        if room is not None:
            room.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it has happened, or for so many seconds; whether it has."""
        with _making:
            if self._is_set:
                return True
            room = self._room = self._room or threading.Event()
        return room.wait(timeout)
