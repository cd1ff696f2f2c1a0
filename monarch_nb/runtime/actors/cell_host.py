"""What an actor asks of its process."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch_nb.runtime.actors.failures import Failures
from monarch_nb.runtime.actors.life import Hosting
from monarch_nb.runtime.cancelled import CancelledCalls
from monarch_nb.runtime.context import Home

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.runtime.output.own_log import OwnLog
    from monarch_nb.transport import Clock, Parcel


class CellHost(Hosting, Home, Protocol):
    """What an actor asks of its process."""

    @property
    def clock(self) -> "Clock":
        """Its time."""

    @property
    def log(self) -> "OwnLog":
        """Its output."""

    @property
    def failures(self) -> Failures:
        """What has failed there."""

    @property
    def cancelled(self) -> CancelledCalls:
        """Calls that are not to be run."""

    @property
    def run_in_actor(self) -> Callable[..., Any]:
        """Runs a cell's source on an actor."""

    def arm(self, cell: "ActorCell", cls: type) -> None:
        """An actor is about to be constructed: a debugger may have breakpoints in it."""

    def bound(self, dst: str, frames: Sequence[Any]) -> None:
        """Raises MessageTooLargeError for a body that is too large to leave this process for an address."""

    def await_setup(self) -> None:
        """Blocks an actor's first breath until the set-up is done."""

    def decode_spawn(self, parcel: "Parcel") -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        """The class and the arguments a SPAWN message carries."""

    def watch_gap(self, cell: "ActorCell") -> None:
        """A message came before its predecessor."""
