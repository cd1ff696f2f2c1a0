"""Where messages and bad news of the network go: what the parts of a node ask of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from monarch_nb.transport.parcel import Parcel
from monarch_nb.wire.header import Header

if TYPE_CHECKING:
    from monarch_nb.transport.channels import Dialled
    from monarch_nb.transport.peer import Peer
    from monarch_nb.transport.streams import Stream

__all__ = ["PeerOwner", "Sink"]


class _Receiver(Protocol):
    """Takes what peers receive."""

    def arrived(self, header: Header, parcel: Parcel) -> None:
        """A message is complete. Called without the peer's lock, on the reading thread."""

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        """A message will never arrive, or arrived incomplete. Called without the peer's lock."""

    def lend(self, parcel: Parcel, to: str) -> int:
        """A number for the loan of the memory files in a message; 0 if they are for good."""

    def give_back(self, to: str, number: int) -> None:
        """A loan of the peer `to` is not needed any more. Any thread, also in a finalizer."""

    def dropped(self, sender: str, why: object) -> None:
        """Something arrived that makes no sense."""


class Sink(_Receiver, Protocol):
    """What the links of a process ask of its node."""

    def stranger(self, address: str) -> None:
        """A process on this machine is spoken to for the first time."""


class PeerOwner(_Receiver, Protocol):
    """What a peer asks of the process it belongs to."""

    def dial(self, peer: "Peer") -> "Dialled | Stream | None":
        """Open our connection to the peer; None when this process is closing, or nobody listens there just now."""

    def mark_busy(self, peer: "Peer") -> None:
        """Tick the peer from now on."""

    def later(self, function: Callable[[], object]) -> None:
        """Call on the reading thread."""
