"""What the runtime asks of supervision, the layer above it."""

from typing import Any, Protocol

from monarch_nb.runtime.calls import PendingCall
from monarch_nb.runtime.context import Instance
from monarch_nb.runtime.life import ActorLife
from monarch_nb.wire import Header


class Supervising(Protocol):
    """What the runtime asks of the layer above: causes of failures, and telling owners."""

    def cause_of(self, kind: str, error: BaseException, text: str, cell: ActorLife, method: str) -> Any:
        """The cause of an actor's failure."""

    def stopped_cause(self, cell: ActorLife, reason: str) -> Any:
        """What callers of a stopped actor are told."""

    def lost_cause(self, header: Header, reason: str) -> Any:
        """What the caller is told of a message that could not be delivered."""

    def lost(self, header: Header, reason: str, call: PendingCall) -> BaseException:
        """The error of a call whose message could not be delivered."""

    def encode(self, cause: Any, request: Header) -> bytes:
        """The cause for which a call is refused, as bytes."""

    def reason(self, cause: Any) -> str:
        """A cause in a few words."""

    def check(self, state: Any, region: Any, call: PendingCall | None) -> BaseException | None:
        """What a call on a slice must raise at once."""

    def error(self, data: Any, call: PendingCall | None) -> BaseException:
        """The error a call raises for an encoded cause."""

    def actor_failed(self, cell: ActorLife) -> None:
        """An actor of this process has failed."""

    def cell_ended(self, cell: ActorLife) -> None:
        """An actor of this process is gone, failed or stopped."""

    def stop_children(self, instance: Instance) -> None:
        """Stops what an ending actor owns; blocks."""

    def undeliverable(self, header: Header, reason: str) -> None:
        """A message nobody waits for could not be delivered."""
