"""What the parts of a runtime ask of each other and of their process: each names here what it needs, and no more."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from monarch_nb.runtime.context import Context, Home
from monarch_nb.runtime.port_table import PortTable
from monarch_nb.transport import Transport
from monarch_nb.wire import Header, Lane, Status, Verb

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel


Q = TypeVar("Q", bound=msgspec.Struct)
T = TypeVar("T")


class Feature(Generic[T]):
    """The name of a part that a process loads when it is first needed, and its type."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Messenger(Protocol):
    """Sends engine messages."""

    @property
    def address(self) -> str:
        """Of this process."""

    def tell(self, dst: str, verb: Verb[Q, Any], request: Q, *, port: int = 0) -> None:
        """Sends an engine message. Raises UnreachableError."""


class Process(Home, Protocol):
    """What ports and breakpoints ask of the process that they are in."""

    @property
    def is_worker(self) -> bool:
        """Whether a host agent has started it, to hold actors."""

    @property
    def node(self) -> Transport:
        """Its place on the network."""

    @property
    def ports(self) -> PortTable:
        """Where values arrive."""

    def context(self) -> Context:
        """The current context; the root client's outside actors."""

    def feature(self, feature: Feature[T]) -> T:
        """A feature of this process, which is loaded now if it has not been."""

    def bound(self, dst: str, frames: Sequence[Any]) -> None:
        """Raises MessageTooLargeError for a body that is too large to leave this process for an address."""

    def send(self, header: Header, parcel: "Parcel", lane: Lane = Lane.DATA) -> None:
        """Sends from any thread; blocks, interruptibly, only while the receiver's credits are used up."""

    def reply(self, request: Header, status: Status, frames: Sequence[Any]) -> None:
        """Answers a CALL, if somebody waits for the answer."""

    def failure(self, frames: Sequence[Any]) -> BaseException:
        """The error that an encoded cause of a failure stands for."""
