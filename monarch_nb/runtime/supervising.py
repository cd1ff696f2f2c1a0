"""The interface of supervision, the row above, to the runtime; and the hook of a program for failures."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch_nb.wire import Frame, Header

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.runtime.calls import PendingCall
    from monarch_nb.runtime.cause import Cause
    from monarch_nb.runtime.context import Instance
    from monarch_nb.runtime.meshes import MeshState
    from monarch_nb.shape import Region


class Supervising(Protocol):
    """Determines causes of failures, and notifies owners."""

    def cause_of(self, kind: str, error: BaseException, text: str, actor: "ActorCell", method: str) -> "Cause":
        """Returns the cause of an actor's failure."""

    def stopped_cause(self, actor: "ActorCell", reason: str) -> "Cause":
        """Returns the cause that callers of a stopped actor get."""

    def lost_cause(self, header: Header, reason: str) -> "Cause":
        """Returns the cause for the caller of a message that could not be delivered."""

    def lost(self, header: Header, reason: str, call: "PendingCall[object]") -> BaseException:
        """Returns the error of a call whose message could not be delivered."""

    def encode(self, cause: "Cause", request: Header) -> bytes:
        """Returns the cause for which a call is refused, as bytes."""

    def reason(self, cause: "Cause") -> str:
        """Returns a cause in a few words."""

    def check(self, state: "MeshState", region: "Region", call: "PendingCall[object] | None") -> BaseException | None:
        """Returns the error that a call on a slice raises at once, if any."""

    def error(self, data: Frame, call: "PendingCall[object] | None") -> BaseException:
        """Returns the error a call raises for an encoded cause."""

    def actor_spawned(self, actor: "ActorCell") -> None:
        """Registers an actor that lives here from now on."""

    def actor_failed(self, actor: "ActorCell") -> None:
        """Handles the failure of an actor of this process."""

    def actor_ended(self, actor: "ActorCell") -> None:
        """Handles the end of an actor of this process, failed or stopped."""

    def stop_children(self, instance: "Instance") -> None:
        """Stops the meshes of an ending actor; blocks."""

    def undeliverable(self, header: Header, reason: str) -> None:
        """Handles an undelivered message without a waiter."""


FaultHook = Callable[[Any], None]  # of the program: it takes a `MeshFailure`, of a row above


def _no_hook() -> FaultHook | None:
    return None


_lookup = _no_hook


def set_hook_lookup(lookup: Callable[[], FaultHook | None]) -> None:
    """Sets `lookup`, which returns the program's current hook; None if it has not set one."""
    global _lookup
    _lookup = lookup


def fault_hook(default: FaultHook) -> FaultHook:
    """Returns the function that is called with an unhandled failure."""
    return _lookup() or default
