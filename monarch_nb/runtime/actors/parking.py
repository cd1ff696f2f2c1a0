"""Messages for actors that are not here: not yet, or not any more."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from monarch_nb.settings import settings
from monarch_nb.wire import Header

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

    Message = tuple[Header, Parcel]

REMEMBERED = 10_000  # ends of actors that are told to late callers by their own cause

Place = tuple[str, int]  # actor mesh, rank


class Parking:
    """Keeps early messages until their actor is spawned, and the causes with which late ones are refused."""

    def __init__(self, later: Callable[[float, Callable[[], object]], None]) -> None:
        self._later = later
        self._lock = threading.Lock()
        self._parked: dict[Place, list[Message]] = {}
        self._ends: OrderedDict[tuple[str, int, int], object] = OrderedDict()

    def ended(self, mesh: str, rank: int, incarnation: int, cause: object) -> None:
        """An actor is gone, for this reason."""
        with self._lock:
            self._ends[mesh, rank, incarnation] = cause
            while len(self._ends) > REMEMBERED:
                self._ends.popitem(last=False)

    def end_of(self, mesh: str, rank: int, incarnation: int) -> object:
        """Why that actor is gone; None if that is not known."""
        return self._ends.get((mesh, rank, incarnation))

    def ends_of(self, meshes: Collection[str]) -> list[tuple[str, int, int, object]]:
        """Mesh, rank, incarnation and cause of all known ends in these meshes, the oldest first."""
        with self._lock:
            return [(*which, cause) for which, cause in self._ends.items() if which[0] in meshes]

    def park(self, message: "Message", here: Callable[[], bool], give_up: Callable[["Message"], None]) -> bool:
        """Keeps a message for an actor to come; False if it is `here` by now. After a while it is given up."""
        place = (message[0].mesh, message[0].rank)
        with self._lock:
            if here():
                return False
            self._parked.setdefault(place, []).append(message)

        def expire() -> None:
            if self._take(place, message):
                give_up(message)

        # The actor's spawn may travel another way.
        self._later(settings.message_delivery_timeout, expire)
        return True

    def unpark(self, place: Place, arrive: Callable[[], None]) -> "list[Message]":
        """The actor is here, as `arrive` makes known; what waited for it, in order."""
        with self._lock:
            arrive()
            return self._parked.pop(place, [])

    def _take(self, place: Place, message: "Message") -> bool:
        with self._lock:
            parked = self._parked.get(place, [])
            for number, waiting in enumerate(parked):
                if waiting is message:
                    del parked[number]
                    if not parked:
                        del self._parked[place]
                    return True
        return False
