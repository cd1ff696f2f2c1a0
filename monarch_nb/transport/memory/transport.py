"""A process's place on the network in memory."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from monarch_nb.transport.errors import TransportError, UnreachableError
from monarch_nb.transport.keys import Keys, KeyStep
from monarch_nb.transport.memory.network import MemoryNode
from monarch_nb.transport.memory.time import MemoryTime
from monarch_nb.transport.parcel import Parcel, missed, reason_parcel, returned, snapshot
from monarch_nb.wire import OutFrame, encode_header, host_of, parse_address
from monarch_nb.wire.header import Header, Kind

_Item = tuple[Header, Parcel]


class MemoryTransport:
    """Sends messages as `Node` does, over real links on a virtual clock. Nothing here blocks.

    `handler` gets what arrives, `on_link_failed` what of this process never will, both on the time's thread.
    """

    tcp_endpoint: str | None = None

    def __init__(
        self,
        time: MemoryTime,
        address: str,
        *,
        handler: Callable[[Header, Parcel], None],
        on_link_failed: Callable[[Header, Parcel, str], None],
    ) -> None:
        self.address = address
        self._time = time
        self._handler, self._on_link_failed = handler, on_link_failed
        self._node: MemoryNode | None = None
        self._closed = False
        self._dead: dict[str, str] = {}  # hosts and processes that cannot be reached, and why
        self._seen_peers: set[str] = set()

    @property
    def incarnation(self) -> int:
        """Which of the processes this is that have had its address: nobody has one twice here."""
        return 1

    @property
    def run_folder(self) -> Path:
        """There is none. Raises TransportError."""
        raise TransportError("a process in memory has no run folder")

    def start(self) -> None:
        """Send and receive from now on."""
        with self._time.lock:
            self._node = self._time.network.join(self.address, self._received, self._failed)
            self._time.changed()

    def close(self, linger_s: float = 1.0) -> None:
        """Leave; with `linger_s` what was sent arrives first."""
        with self._time.lock:
            if self._closed:
                return
            self._closed = True
        if linger_s > 0:
            self._time.later(0.1, self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        with self._time.lock:
            if self._node is not None and self._node.alive:
                self._time.network.kill(self.address)
                self._time.changed()

    def listen(self, bind: str, keys: Keys | None, insecure_loopback: bool = False) -> str:
        """Raises TransportError: nothing comes in from outside."""
        raise TransportError(f"a process in memory cannot listen at {bind}")

    def change_keys(self, step: KeyStep, old: Keys, new: Keys) -> None:
        """Does nothing: connections in memory have no keys."""

    # sending

    def shares_gpu(self, address: str) -> bool:
        """Never: all is in one process."""
        return False

    def snapshot(self, frames: Sequence[OutFrame]) -> Parcel:
        """Copy buffers into a parcel that may be sent many times."""
        return snapshot(frames, portable=True)

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        """Send a message from any thread. Raises TransportError when the destination is gone."""
        with self._time.lock:
            if self._closed or self._node is None or not self._node.alive:
                raise TransportError("this node is closed")
            item = (msgspec.structs.replace(header), parcel.clone())
            if header.dst == self.address:
                self._time.call_soon(lambda: self._handler(*item))
                return
            reason = self._dead.get(header.dst) or self._dead.get(host_of(header.dst))
            if reason is not None:
                raise UnreachableError(f"{header.dst} cannot be reached: {reason}")
            if not self._time.network.has_host(host_of(header.dst)):
                raise UnreachableError(f"no route from {self.address} to {header.dst} is known")
            size = parcel.nbytes
            if self._time.network.faults.bandwidth:
                size += len(encode_header(header))
            self._node.send(self._way_to(header.dst), item, size, lane=int(lane), exempt=True)
            self._time.changed()

    def _way_to(self, address: str) -> str:
        """The process to which what is for another is written."""
        return address

    def flush(self) -> None:
        """Everything leaves at once here."""

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        """Send back a message that cannot be taken to where it belongs."""
        if header.src == self.address:
            self._on_link_failed(header, parcel, reason)
        elif header.kind != Kind.RETURNED and not self._closed:
            back = (missed if header.kind == Kind.REPLY else returned)(header, self.address)
            try:
                self.send(back, reason_parcel(reason), lane=1)
            except TransportError:
                return  # there is no receiver

    def consumed(self, parcel: Parcel) -> None:
        """Credits go back as soon as a message is here."""

    # membership

    def settled(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` once what is on its way by now has come."""
        self._time.on_its_way(2 * self._time.network.faults.delay[1], lambda: function(*args))

    def learn(
        self,
        target: str,
        endpoint: str | None = None,
        run_folder: Path | None = None,
        via: str | None = None,
        *,
        keys: Keys | None = None,
        insecure_loopback: bool = False,
        incarnation: int = 0,
    ) -> None:
        """A host, or a process, is there: messages for it are sent again."""
        with self._time.lock:
            for dead in [dead for dead in self._dead if dead == target or host_of(dead) == target]:
                del self._dead[dead]

    def forget(self, target: str, reason: str, incarnation: int = 0) -> None:
        """A process, or host, is dead: what it did not acknowledge is reported as lost."""
        with self._time.lock:
            address = parse_address(target)
            target = address.host if address.is_agent else target
            self._dead[target] = reason
            if self._node is not None and self._node.alive:
                self._node.bury(target, reason)
            self._time.changed()

    def connected(self, target: str) -> bool:
        """Returns whether the connection to another process could carry a message now."""
        return self._time.network.reachable(self.address, target)

    def never_replied(self, address: str) -> bool:
        """Returns whether a process has never said a word."""
        return address not in self._seen_peers

    # receiving; under the lock

    def _received(self, src: str, item: _Item) -> None:
        self._seen_peers.add(src)
        if not self._closed:
            self._time.call_soon(lambda: self._handler(item[0], item[1]))

    def _failed(self, dst: str, reason: str, items: list[_Item]) -> None:
        for header, parcel in items:
            self._time.call_soon(partial(self._on_link_failed, header, parcel, reason))
