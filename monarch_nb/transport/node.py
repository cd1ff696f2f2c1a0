"""Node: the one place through which a process sends and receives messages."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from monarch_nb.routing.actions import LinkConfig
from monarch_nb.transport import interrupts, sockets
from monarch_nb.transport.channels import Channel, Dialled
from monarch_nb.transport.envelope import Item, pack_local
from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.parcel import Parcel, snapshot
from monarch_nb.transport.peer import Peer
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.shared import available
from monarch_nb.wire.header import Header, Kind

log = logging.getLogger("monarch_nb.transport")
_EXEMPT = frozenset({Kind.REPLY, Kind.FOLDED, Kind.CONTROL, Kind.RETURNED})  # waiting for credits here could deadlock
_AT_ONCE = 256  # messages read before timers and calls are looked at

Handler = Callable[[Header, Parcel], None]
LinkFailed = Callable[[Header, Parcel, str], None]


class Node:
    """A process's address on the network.

    `handler` and `on_link_failed` are called on the reader thread (the latter also from `forget` and `close`), must be
    quick and run no user code. All methods may be called from any thread.
    """

    def __init__(
        self,
        address: str,
        *,
        run_folders: Mapping[str, Path],
        agent: str | None = None,
        handler: Handler,
        on_link_failed: LinkFailed,
        config: LinkConfig | None = None,
    ) -> None:
        self.address = address
        self.host, self.name = address.split("/", 1)
        self._folders = {host: Path(folder) for host, folder in run_folders.items()}
        self._agent = agent if agent != address else None
        self._handler = handler
        self._on_link_failed = on_link_failed
        self._config = config or LinkConfig()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._routes: dict[tuple[str, int], Peer] = {}
        self._by_id: dict[bytes, Peer] = {}
        self._gone: dict[str, str] = {}
        self._lock = threading.RLock()
        self._reader = Reader(f"monarch-nb-{self.name}", self._config.tick)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._listening: list[zmq.Socket[bytes]] = []
        self._portable = not available()
        self._pid = os.getpid()
        self.garbage = 0  # messages dropped because they could not be understood
        self._closed = False

    # life

    def start(self) -> None:
        """Bind and start to read. Raises TransportError or TrustError."""
        self._context = sockets.new_context()
        folder = self._folders.get(self.host)
        if folder is not None:
            self._listen(sockets.listen_ipc(self._context, folder, self.name))
        self._reader.start()

    def _listen(self, router: "zmq.Socket[bytes]") -> None:
        self._listening.append(router)
        self._reader.watch(router.FD, lambda: self._read_router(router))
        self._reader.look_again(router.FD)

    def close(self, linger_s: float = 1.0) -> None:
        """Stop; waits up to `linger_s` seconds for what is queued to leave this process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers.values())
        self._reader.stop()
        for peer in peers:
            peer.close("this process closed its connections")
        for router in self._listening:
            router.close()
        if self._context is not None:
            self._context.destroy(linger=int(linger_s * 1000))
        self._reader.close()

    # sending

    def snapshot(self, frames: Sequence[Any]) -> Parcel:
        """Copy buffers (frame 0 is the pickle stream) into a parcel that may be sent many times."""
        return snapshot(frames, portable=self._portable)

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        """Hand a message to the network. Blocks while the receiver is behind by more than its window; Ctrl-C ends that.

        Raises TransportError when the destination is gone or nobody knows a way to it.
        """
        if interrupts.inside():  # a finalizer that cut into another send: it must not come in between
            self._reader.soon(self.send, header, parcel.clone())
            return
        dst = header.dst
        if dst == self.address:
            self._reader.soon(self._handler, header, parcel.clone())
            return
        peer = self._routes.get((dst, lane)) or self._route(dst, lane)
        item = pack_local(header, parcel)
        exempt = lane != 0 or header.kind in _EXEMPT
        patient = exempt or threading.get_ident() != self._reader.ident
        peer.send(item, len(item.head) + parcel.nbytes, exempt, patient)

    def consumed(self, parcel: Parcel) -> None:
        """The application took this message: its sender may send more."""
        origin, parcel.origin = parcel.origin, None
        if origin is not None:
            peer, charge, epoch = origin
            peer.consumed(charge, epoch)

    # membership

    def learn(self, host: str, endpoint: str | None = None, run_folder: Path | None = None) -> None:
        """From now on `host` is reached there."""
        with self._lock:
            if run_folder is not None:
                self._folders[host] = Path(run_folder)
            self._routes.clear()

    def forget(self, address: str, reason: str) -> None:
        """The process is dead: close its links; what it did not acknowledge is reported with `reason`."""
        with self._lock:
            self._gone[address] = reason
            peers = [peer for peer in self._peers.values() if peer.address == address]
            for peer in peers:
                del self._peers[peer.address, peer.lane]
            self._routes.clear()
            self._by_id = {key: peer for key, peer in self._by_id.items() if peer not in peers}
        for peer in peers:
            peer.close(reason)

    def _route(self, dst: str, lane: int) -> Peer:
        with self._lock:
            if self._closed:
                raise TransportError("this process has closed its connections")
            if dst in self._gone:
                raise TransportError(f"{dst} cannot be reached: {self._gone[dst]}")
            hop = dst if dst.split("/", 1)[0] in self._folders else self._agent
            if hop is None:
                raise TransportError(f"no way to {dst} is known here")
            peer = self._peer(hop, lane)
            self._routes[dst, lane] = peer
            return peer

    def _peer(self, address: str, lane: int) -> Peer:
        with self._lock:
            peer = self._peers.get((address, lane))
            if peer is None:
                peer = Peer(self, address, lane, dials=True, local=True, config=self._config)
                self._peers[address, lane] = peer
            return peer

    # what a peer asks

    def open_channel(self, peer: Peer) -> Channel | None:
        """Dial."""
        if self._context is None or self._closed:
            return None
        host, name = peer.address.split("/", 1)
        endpoint = sockets.ipc_endpoint(self._folders[host], name)
        return Dialled(sockets.dial(self._context, endpoint, f"{self.address}|{peer.lane}|{peer.epoch:x}"))

    def mark_busy(self, peer: Peer) -> None:
        """Tick it."""
        self._reader.busy(peer)

    def arrived(self, peer: Peer, header: Header, parcel: Parcel) -> None:
        """A whole message."""
        self._handler(header, parcel)

    def link_failed(self, peer: Peer, items: Sequence[Item], reason: str) -> None:
        """Messages that never arrive."""
        for item in items:
            if item.header is not None:
                self._on_link_failed(item.header, Parcel(item.bodies, hops=item.hops), reason)

    def dropped(self, peer: Peer | None, why: BaseException | str) -> None:
        """Count and say it, but never more than the log can bear."""
        self.garbage += 1
        if self.garbage & (self.garbage - 1) == 0:  # the 1st, 2nd, 4th, 8th...
            sender = peer.address if peer else "an unknown process"
            log.warning(
                "monarch_nb: dropped a message from %s that makes no sense (%s; %d so far)", sender, why, self.garbage
            )

    # reading

    def _read_router(self, router: "zmq.Socket[bytes]") -> bool:
        for _ in range(_AT_ONCE):
            parts = sockets.read(router)
            if parts is None:
                return False
            routing_id, frame0, frames = parts
            peer = self._by_id.get(routing_id) or self._incoming(routing_id)
            if peer is None:
                continue
            try:
                peer.receive(frame0, frames)
            except Exception as error:
                self.dropped(peer, error)
        return True

    def _incoming(self, routing_id: bytes) -> Peer | None:
        try:
            address, lane, _epoch = routing_id.decode().split("|")
            address.index("/")
            peer = self._peer(address, int(lane))
        except ValueError:
            self.dropped(None, "no address")
            return None
        self._by_id[routing_id] = peer
        return peer
