"""Interfaces of a network and of time. Sockets and threads implement them, and so does the memory network."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from monarch_nb.transport.parcel import Parcel
from monarch_nb.wire import OutFrame
from monarch_nb.wire.header import Header

if TYPE_CHECKING:
    from monarch_nb.transport.keys import Keys, KeyStep


class Clock(Protocol):
    """The time on which decisions depend, and what is done later. Functions that it runs must not block."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Run `function` once, `seconds` from now."""

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Run `function` each `seconds` for as long as it returns True."""

    def close(self) -> None:
        """Forget everything that was to be done later."""


class Transport(Protocol):
    """One process on a network. Messages and losses are reported to the functions that it was constructed with."""

    @property
    def address(self) -> str:
        """The address of this process."""

    @property
    def incarnation(self) -> int:
        """Which of the processes this is that have had its address, one after the other; later ones are larger."""

    @property
    def tcp_endpoint(self) -> str | None:
        """The endpoint at which other machines reach it, if it listens for them."""

    @property
    def run_folder(self) -> Path:
        """The folder of this process on its host."""

    def start(self) -> None:
        """Send and receive from now on."""

    def close(self, linger_s: float = 1.0) -> None:
        """Leave; blocks up to `linger_s` seconds until what was sent is acknowledged."""

    def listen(self, bind: str, keys: "Keys | None", insecure_loopback: bool = False) -> str:
        """Listen for other machines from now on; the endpoint. Raises TransportError where that cannot be had."""

    def change_keys(self, step: "KeyStep", old: "Keys", new: "Keys") -> None:
        """Takes one step of a change of the keys by which other machines are reached."""

    def shares_gpu(self, address: str) -> bool:
        """Returns whether a process sees the GPUs that this one sees, so that files of a GPU can go there."""

    def snapshot(self, frames: Sequence[OutFrame]) -> Parcel:
        """Copy buffers into a parcel that may be sent many times."""

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        """Send a message from any thread. Blocks, interruptibly, while the receiver is behind by its window.

        Raises TransportError when the destination is gone or nobody knows a way to it.
        """

    def flush(self) -> None:
        """Let what waits to leave together with what comes after it leave now."""

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        """Send back a message that cannot be taken to where it belongs."""

    def consumed(self, parcel: Parcel) -> None:
        """The application took this message: its sender may send more."""

    def settled(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` once what has come by now has been read."""

    def learn(
        self,
        target: str,
        endpoint: str | None = None,
        run_folder: Path | None = None,
        via: str | None = None,
        *,
        keys: "Keys | None" = None,
        insecure_loopback: bool = False,
        incarnation: int = 0,
    ) -> None:
        """A host, or a process, is there, and is reached in this way."""

    def forget(self, target: str, reason: str, incarnation: int = 0) -> None:
        """A process, or host, is dead: what it did not acknowledge is reported as lost."""

    def connected(self, target: str) -> bool:
        """Returns whether the connection to another machine's process stands."""

    def never_replied(self, address: str) -> bool:
        """Returns whether a process was written to and has never replied: it may not exist."""
