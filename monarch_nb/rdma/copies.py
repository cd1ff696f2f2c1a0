"""Where a put value lies: in its owner's memory file, and in one more on each other host that asked for it."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from monarch_nb.rdma.place import Place

__all__ = ["Copies", "Location"]

A = TypeVar("A")
_Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Location:
    """A memory file: in which process of the asker's host, and by which descriptor there."""

    process: str
    pid: int
    descriptor: int


@dataclass(slots=True)
class _Copy(Generic[A]):
    location: Location | None = None  # where those who ask are told to look
    holders: set[str] = field(default_factory=set)  # more than one where somebody has waited for another in vain
    waiting: list[A] = field(default_factory=list)


class Copies(Generic[A]):
    """The owner's list for one value: the first that asks from a host fetches it for all others there. No I/O."""

    def __init__(self) -> None:
        self._by_host: dict[_Host, _Copy[A]] = {}

    def ask(self, place: Place, asker: A, *, missing: bool) -> Location | bool | None:
        """Where it lies on that host; True: the asker is to fetch it; None: another does, and the asker waits.

        `missing` says that the asker found nothing where it was told to look, or has waited in vain.
        """
        host = (place.boot, place.namespace)
        copy = self._by_host.get(host)
        if copy is None or missing:
            if copy is None:
                copy = self._by_host[host] = _Copy()
            copy.location = None
            return True
        if copy.location is None:
            copy.waiting.append(asker)
        return copy.location

    def held(self, place: Place, location: Location) -> list[A]:
        """It lies there now; those who have waited for that."""
        copy = self._by_host.setdefault((place.boot, place.namespace), _Copy())
        copy.location = location
        copy.holders.add(location.process)
        waiting, copy.waiting = copy.waiting, []
        return waiting

    def waiting(self) -> list[A]:
        """Those who wait."""
        return [asker for copy in self._by_host.values() for asker in copy.waiting]

    def holders(self) -> list[str]:
        """The processes that have a file of it."""
        return [process for copy in self._by_host.values() for process in sorted(copy.holders)]
