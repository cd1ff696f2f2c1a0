"""The transport of a process on the network in memory."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from monarch_nb.transport.errors import TransportError, UnreachableError
from monarch_nb.transport.keys import Keys, KeyStep
from monarch_nb.transport.memory.clock import MemoryTime
from monarch_nb.transport.memory.network import MemoryNode
from monarch_nb.transport.parcel import Parcel, missed, reason_parcel, returned, snapshot
from monarch_nb.wire import OutFrame, encode_header, host_of, parse_address
from monarch_nb.wire.header import Header, Kind

_Item = tuple[Header, Parcel]


class MemoryTransport:
    """Sends messages as `Node` does, over real links on a virtual clock. Nothing here blocks.

    `handler` gets received messages, `on_link_failed` lost messages of this process, both on the time's thread.
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
        self._dead: dict[str, str] = {}  # unreachable hosts and processes, with the reason
        self._seen_peers: set[str] = set()

    @property
    def incarnation(self) -> int:
        """The number of this process among those at its address: always the first here."""
        return 1

    @property
    def run_folder(self) -> Path:
        """Raises TransportError: there is none."""
        raise TransportError("a process in memory has no run folder")

    def start(self) -> None:
        """Sends and receives from now on."""
        with self._time.lock:
            self._node = self._time.network.join(self.address, self._received, self._failed)
            self._time.changed()

    def close(self, linger_s: float = 1.0) -> None:
        """Leaves the network; with `linger_s` sent messages arrive first."""
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
        """Raises TransportError, since nothing arrives from outside."""
        raise TransportError(f"a process in memory cannot listen at {bind}")

    def change_keys(self, step: KeyStep, old: Keys, new: Keys) -> None:
        """Does nothing: connections in memory have no keys."""

    # sending

    def shares_gpu(self, address: str) -> bool:
        """Returns False, since all is in one process."""
        return False

    def snapshot(self, frames: Sequence[OutFrame]) -> Parcel:
        """Copies buffers into a parcel that may be sent many times."""
        return snapshot(frames, portable=True)

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        """Sends a message from any thread. Raises TransportError when the destination is gone."""
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
        """Returns the process to which messages for another are written."""
        return address

    def flush(self) -> None:
        """Does nothing: every message leaves at once here."""

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        """Returns a message that cannot be received to its sender."""
        if header.src == self.address:
            self._on_link_failed(header, parcel, reason)
        elif header.kind != Kind.RETURNED and not self._closed:
            back = (missed if header.kind == Kind.REPLY else returned)(header, self.address)
            try:
                self.send(back, reason_parcel(reason), lane=1)
            except TransportError:
                return  # there is no receiver

    def consumed(self, parcel: Parcel) -> None:
        """Does nothing: credits return as soon as a message arrives."""

    # membership

    def settled(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function(*args)` once messages in flight have arrived."""
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
        """Records that a host, or a process, is reachable: messages for it are sent again."""
        with self._time.lock:
            for dead in [dead for dead in self._dead if dead == target or host_of(dead) == target]:
                del self._dead[dead]

    def forget(self, target: str, reason: str, incarnation: int = 0) -> None:
        """Records the end of a process, or host: its unacknowledged messages are reported as lost."""
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
        """Returns whether a process has never sent a message."""
        return address not in self._seen_peers

    # receiving; under the lock

    def _received(self, src: str, item: _Item) -> None:
        self._seen_peers.add(src)
        if not self._closed:
            self._time.call_soon(lambda: self._handler(item[0], item[1]))

    def _failed(self, dst: str, reason: str, items: list[_Item]) -> None:
        for header, parcel in items:
            self._time.call_soon(partial(self._on_link_failed, header, parcel, reason))
