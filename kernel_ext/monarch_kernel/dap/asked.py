"""Types that requests of front ends use: the ranks that answer, and the error where they cannot. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol

from monarch_nb.debug import Stopped
from monarch_nb.debug import messages as m

Message = dict[str, Any]


class RequestRefused(Exception):
    """A request cannot be answered; the text says why."""


class RankDebugger(Protocol):
    """The cluster's debugger, as far as it is needed."""

    def records(self) -> list[Stopped]:
        """All stopped threads."""

    def ask(self, records: Sequence[Stopped], command: m.Command) -> list[m.CommandAnswer]:
        """Sends a command to each record; blocks for the answers."""

    def arm(self, lines: Sequence[m.BreakLine], raised: str | None, uncaught: str | None) -> None:
        """The breakpoints of all actors, in place of those before."""

    def release(self) -> None:
        """Removes all breakpoints of actors and resumes all ranks; blocks until that is done."""

    def pause(self) -> str:
        """Stops what runs at its next line; gives why nothing will."""
