"""What is sent to workers together, and what is told of it."""

from collections.abc import Iterable
from typing import Any, Protocol, cast

from monarch_nb.runtime import Future
from monarch_nb.tensor.origin import Place

# A command, and the line that issued it. The object of an `OBJECT` command stands in it until it is sent.
Item = tuple[tuple[Any, ...], "Place | Sites | None"]


class Batch:
    """Commands that were sent together, from the first operation's number on, and where each was issued."""

    def __init__(self, first: int, places: list[Place | None], nbytes: int, future: Future[Any]) -> None:
        self.first, self.places, self.nbytes, self.future = first, places, nbytes, future


class Sites(tuple[Place | None, ...]):
    """Where the operations were issued that one command runs again."""

    __slots__ = ()


class Watcher(Protocol):
    """Sees what is issued, at the moment it is."""

    def issued(self, command: tuple[Any, ...], where: Place | None) -> None:
        """A command."""

    def asked(self, what: str, where: Place | None) -> None:
        """The program waits for the workers."""


class Group(Protocol):
    """The process group that a stream's operations run in, as the stream needs it."""

    @property
    def over(self) -> int:
        """The generation that is now, if it has been ended: what is sent to it would not run. -1 while it goes on."""

    def regroup(self, over: int) -> None:
        """Goes on to the generation after `over`. Blocks. Raises DeviceMeshError where processes are missing."""

    def revive(self, stream: Any) -> None:
        """Has a lost stream go on, if the mesh has been healed. Blocks. Raises ContentsLostError if not."""


def flat(places: Iterable[Place | Sites | None]) -> list[Place | None]:
    """Where each operation was issued."""
    found: list[Place | None] = []
    for one in places:
        if type(one) is Sites:
            found += one
        else:
            found.append(cast("Place | None", one))
    return found
