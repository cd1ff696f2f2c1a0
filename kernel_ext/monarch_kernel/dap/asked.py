"""What requests of front ends need: the ranks that answer, and how it is said that they cannot. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol

from monarch_nb.debug import Stopped
from monarch_nb.debug import messages as m

Message = dict[str, Any]


class Refused(Exception):
    """A request cannot be answered; the text says why."""


class Ranks(Protocol):
    """The cluster's debugger, as far as it is needed."""

    def records(self) -> list[Stopped]:
        """All that is stopped."""

    def ask(self, records: Sequence[Stopped], command: m.Command) -> list[m.Answer]:
        """Gives a command to each; blocks for the answers."""

    def arm(self, lines: Sequence[m.BreakLine], raised: str | None, uncaught: str | None) -> None:
        """The breakpoints of all actors, in place of those before."""

    def release(self) -> None:
        """Takes all breakpoints of actors away, and lets all go on; blocks until that is so."""

    def pause(self) -> str:
        """Stops what runs at its next line; gives why nothing will."""
