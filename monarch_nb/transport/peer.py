"""One peer on one lane: its link, its channel, and the lock that both live under."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from monarch_nb.routing.actions import (
    Action,
    Deliver,
    Failed,
    LinkConfig,
    LinkState,
    NewLife,
    PrefixKind,
    Skipped,
    Transmit,
    Unblocked,
)
from monarch_nb.routing.link import Link
from monarch_nb.transport.channels import Channel, Dialled, Inbound
from monarch_nb.transport.chunks import SIZE, pack_chunked
from monarch_nb.transport.envelope import Item, pack_local, pack_whole
from monarch_nb.transport.errors import TransportError, UnreachableError
from monarch_nb.transport.interrupts import uninterrupted
from monarch_nb.transport.parcel import Parcel
from monarch_nb.transport.streams import Stream
from monarch_nb.transport.unpacking import Unpacker
from monarch_nb.wire.header import Header, Kind

_CHUNK = int(PrefixKind.CHUNK)
_AT_ONCE = 64
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.5  # seconds between two attempts to reach a process of this host
_STARVED_S = 5.0  # without a descriptor for a connection: what should go over it fails
_clock = time.monotonic
_Items = Sequence[Item]


class Owner(Protocol):
    """What a peer asks of the process it belongs to."""

    def dial(self, peer: "Peer") -> Dialled | Stream | None:
        """Open our connection to the peer; None when this process is closing, or nobody listens there just now."""

    def mark_busy(self, peer: "Peer") -> None:
        """Tick the peer from now on."""

    def arrived(self, header: Header, parcel: Parcel) -> None:
        """A message is complete. Called without the peer's lock, on the reader thread."""

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        """A message will never arrive, or arrived incomplete. Called without the peer's lock."""

    def lend(self, parcel: Parcel, to: str) -> int:
        """A number for the loan of the memory files in a message; 0 if they are for good."""

    def give_back(self, to: str, number: int) -> None:
        """A loan of the peer `to` is not needed any more. Any thread, also in a finalizer."""

    def dropped(self, sender: str, why: object) -> None:
        """Something arrived that makes no sense."""

    def later(self, function: Callable[[], object]) -> None:
        """Call on the reader thread."""


class Peer:
    """All that is known about one other process on one lane."""

    def __init__(
        self, owner: Owner, address: str, lane: int, endpoint: str, epoch: int, *, portable: bool, config: LinkConfig
    ) -> None:
        self.address = address
        self.lane = lane
        self.endpoint = endpoint  # where we dial it; "": it dials us
        self.local = endpoint.startswith("ipc:") and not portable  # buffers may travel in memory files
        self.over_tcp = endpoint.startswith("tcp:")
        self._inside = endpoint.startswith("ipc:")  # we dial it by a unix socket
        self.epoch = epoch
        self.gone: str | None = None  # why nothing can be sent any more
        self._owner = owner
        self._portable = portable
        self._burials = 0
        self._link: Link[Item] = Link(self.epoch, lane=lane, dials=bool(endpoint), config=config)
        if endpoint.startswith("tcp:"):
            self._link.disconnected(_clock())  # messages are kept until the handshake went well
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._theirs: Stream | None = None  # the connection inside the host that it has dialled, though we dial it too
        self._starved: tuple[float, str] | None = None  # since when no descriptor is left to dial it, and the error
        self._again_at = 0.0  # not before is it dialled again
        self._pause = _FIRST_PAUSE
        self._busy = False
        self._unpacker = Unpacker(portable=portable, back=functools.partial(owner.give_back, address))
        self._credits = threading.Condition()
        self._parked: deque[tuple[Header, Parcel, Callable[[], None]]] = deque()

    @property
    def heard(self) -> int:
        """The epoch of the peer's link as it was last heard; 0 if it never was, or its life is over."""
        return 0 if self._link.buried else self._link.peer_epoch

    @property
    def astray(self) -> bool:
        """Whether it waits for a peer to dial that did so once and has hung up."""
        return not self.endpoint and self._link.state is LinkState.DOWN

    @property
    def up(self) -> bool:
        """Whether there is a TCP connection, as far as we know; connections inside a host do not tell."""
        return self.over_tcp and self.gone is None and self._link.state is LinkState.UP

    # sending

    def send(self, header: Header, parcel: Parcel, exempt: bool) -> None:
        """Write one message. Waits for credits, interruptibly, unless exempt."""
        items = self._pack(header, parcel)
        burials = self._burials
        while not uninterrupted(self._send, items, parcel.nbytes, exempt):
            with self._credits:
                # Whoever gives credits back notifies after the link knows of them.
                if uninterrupted(self._blocked, parcel.nbytes):
                    self._credits.wait(0.2)
            if burials != self._burials:  # who comes next is not whom this was for
                raise UnreachableError(f"{self.address} cannot be reached: {self.gone or 'it was restarted'}")

    def relay(self, header: Header, parcel: Parcel, exempt: bool, handed_on: Callable[[], None]) -> None:
        """Write one message without waiting: kept here while credits lack. `handed_on` is called when it is written."""
        if not exempt and (self._parked or uninterrupted(self._blocked, parcel.nbytes)):
            self._parked.append((header, parcel, handed_on))
            if self.gone is not None:
                self._owner.later(self._unpark)
            return
        uninterrupted(self._send, self._pack(header, parcel), parcel.nbytes, True, not exempt)
        handed_on()

    def _unpark(self) -> None:
        """Write what was kept; reader thread only."""
        while self._parked:
            header, parcel, handed_on = self._parked[0]
            try:
                if not uninterrupted(self._send, self._pack(header, parcel), parcel.nbytes, False):
                    return
            except TransportError as error:
                self._owner.undeliverable(header, parcel, self.gone or str(error))
            self._parked.popleft()
            handed_on()

    def _pack(self, header: Header, parcel: Parcel) -> Item | list[Item]:
        if self.local:
            lent = parcel.in_files and header.dst == self.address and header.kind != Kind.CAST
            return pack_local(header, parcel, self._owner.lend(parcel, header.dst) if lent else 0)
        if parcel.nbytes <= SIZE:
            return pack_whole(header, parcel)
        return pack_chunked(header, parcel)

    def _blocked(self, size: int) -> bool:
        with self._lock:
            self._keep_time()
            return self.gone is None and self._link.blocked(size)

    def _send(self, items: Item | list[Item], size: int, exempt: bool, charged: bool = False) -> bool:
        with self._lock:
            if self.gone is not None:
                raise UnreachableError(f"{self.address} cannot be reached: {self.gone}")
            channel = self._channel or self._open()
            link = self._link
            if not exempt and link.blocked(size):
                return False
            first = items if type(items) is Item else items[0]  # type: ignore[index]
            prefix = link.send(first, len(first.head) + size, exempt and not charged)
            if prefix is not None and channel is not None:
                self._write(channel, prefix + first.head, first.frames)
            if first is not items:
                for item in items[1:]:  # type: ignore[index]
                    prefix = link.send(item, 0, True, _CHUNK)
                    if prefix is not None and channel is not None:
                        self._write(channel, prefix, item.frames)
            if not self._busy:
                self._keep_time()
            return True

    def redirect(self, endpoint: str) -> None:
        """It dialled us and is gone: from now on we dial it."""
        uninterrupted(self._redirect, endpoint)

    def _redirect(self, endpoint: str) -> None:
        with self._lock:
            if self.gone is None and not self.endpoint:
                self._dial_at(endpoint)
                self._open()

    def bury(self, reason: str) -> None:
        """The life of the peer is over: what it has not acknowledged fails, and nothing is sent until `revive`."""
        self._outside(uninterrupted(self._bury, reason))

    def _bury(self, reason: str) -> Sequence[Action[Item]]:
        with self._lock:
            if self.gone is not None:
                return ()
            self.gone = reason
            self._burials += 1
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close(0)
            return [*self._link.bury(reason, _clock()), Unblocked()]

    def since(self, epoch: int) -> None:
        """Links of the peer with smaller epochs are of lives that are over."""
        self._link.since = epoch

    def revive(self, endpoint: str) -> None:
        """Somebody lives at its address (again), to be dialled at `endpoint`, or "" where it dials us."""
        uninterrupted(self._revive, endpoint)
        if endpoint.startswith("tcp:"):
            self._owner.later(self.begin)

    def _revive(self, endpoint: str) -> None:
        with self._lock:
            self.gone = None
            if endpoint and endpoint != self.endpoint:
                self._dial_at(endpoint)
            self._keep_time()

    def _dial_at(self, endpoint: str) -> None:
        channel, self._channel = self._channel, None
        if isinstance(channel, Dialled):
            channel.close(0)
        self._link.dial(_clock())
        self.endpoint = endpoint
        self.over_tcp = endpoint.startswith("tcp:")
        self._inside = endpoint.startswith("ipc:")
        self.local = self._inside and not self._portable

    def begin(self) -> None:
        """Dial, before there is anything to send."""
        uninterrupted(self._begin)

    def _begin(self) -> None:
        with self._lock:
            if self.gone is None and self._channel is None:
                self._reach()

    def _open(self) -> Channel | None:
        if not self.endpoint:
            return None
        if self._inside:
            return self._open_inside()
        channel = self._owner.dial(self)
        if isinstance(channel, Dialled):
            self._channel = channel
            channel.listen(self._read)
        return channel

    def _open_inside(self) -> Channel | None:
        now = _clock()
        if now < self._again_at:
            return None
        try:
            channel = self._owner.dial(self)
        except TransportError:
            self._link.disconnected(now)
            if self._theirs is None:
                raise
            return self._answer_there(now)
        if type(channel) is not Stream:
            self._link.disconnected(now)
            self._again_at = now + self._pause
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            return self._answer_there(now)
        self._pause = _FIRST_PAUSE
        self._channel = channel
        channel.listen()
        self._transmit(self._link.connected(now))
        return channel

    def _answer_there(self, now: float) -> Channel | None:
        """Write to the connection that it has dialled: ours cannot be had, or it has no descriptor to take it."""
        if self._theirs is None or self._theirs.closed:
            return None
        self._channel = self._theirs
        self._transmit(self._link.connected(now))
        return self._channel

    def _reach(self) -> Channel | None:
        """A connection; none while no descriptors are left: what is kept fails if that lasts."""
        if self._inside and _clock() < self._again_at:
            return None
        try:
            channel = self._open()
        except TransportError as error:
            since = _clock() if self._starved is None else self._starved[0]
            self._starved = (since, str(error))
            self._keep_time()
            return None
        self._starved = None
        return channel

    def cut(self, stream: Stream) -> bool:
        """That connection is gone; whether it was ours to write to. Reader thread."""
        return uninterrupted(self._cut, stream)

    def _cut(self, stream: Stream) -> bool:
        with self._lock:
            if self._theirs is stream:
                self._theirs = None
            if self._channel is not stream:
                return False
            self._channel = None
            self._link.disconnected(_clock())
            if stream.turned_away:
                self._answer_there(_clock())
            if not self._busy:
                self._keep_time()
            return True

    def _keep_time(self) -> None:
        if not self._busy:
            self._busy = True
            self._owner.mark_busy(self)

    def _write(self, channel: Channel, frame0: bytes, frames: Sequence[Any]) -> None:
        try:
            channel.write(frame0, frames)
        except zmq.Again:  # the connection has just gone; whoever watches it will say so too
            self._link.disconnected(_clock())
            if type(channel) is Stream and self._channel is channel:
                self._channel = None
                channel.close(0)

    def _transmit(self, actions: Sequence[Action[Item]]) -> list[Action[Item]]:
        """Write what is to be written, in order; what is left is for outside the lock."""
        rest = []
        for action in actions:
            if type(action) is Transmit:
                channel = self._channel or self._reach()
                item = action.item
                if channel is None:
                    continue
                if item is None:
                    self._write(channel, action.prefix, ())
                else:
                    self._write(channel, action.prefix + item.head, item.frames)
            else:
                rest.append(action)
        return rest

    # receiving

    def attach(self, channel: Channel) -> None:
        """The peer has dialled us, perhaps again: answer there, unless we dial it."""
        uninterrupted(self._attach, channel)

    def _attach(self, channel: Channel) -> None:
        with self._lock:
            if not self.endpoint and self.gone is None:
                if isinstance(self._channel, Inbound):
                    self._channel.close(0)  # what it has not written is kept: whoever dials says first what is lacking
                self._channel = channel
            elif isinstance(self._channel, Dialled):
                self._channel.answered_elsewhere = True
            elif type(channel) is Stream:
                self._theirs = channel

    def _read(self) -> bool:
        """Read our dialled connection."""
        for _ in range(_AT_ONCE):
            with self._lock:
                channel = self._channel
                message = channel.read() if isinstance(channel, Dialled) else None
            if message is None:
                return False
            self.receive(*message)
        return True

    def receive(self, frame0: bytes, frames: Sequence[Any]) -> None:
        """Take what arrived on one of the connections; reader thread only."""
        rest = uninterrupted(self._receive, frame0, frames)
        if self._unpacker.ready or self._unpacker.refused:
            self._hand_up()
        if rest:
            self._outside(rest)

    def _receive(self, frame0: bytes, frames: Sequence[Any]) -> Sequence[Action[Item]]:
        size = len(frame0)
        for frame in frames:
            size += len(frame)
        item = Item(frame0, frames)
        rest: Sequence[Action[Item]] = ()
        unpacker = self._unpacker
        with self._lock:
            if self.gone is not None:
                return rest
            if self._channel is None and self._inside:
                self._reach()  # else the link would not answer
            outcome = self._link.received(frame0, item, size, _clock())
            if type(outcome) is int:
                if outcome >= 0:
                    unpacker.take(item, outcome, self._link.peer_epoch)
            else:
                for action in outcome:  # type: ignore[union-attr]
                    if type(action) is Deliver:
                        unpacker.take(action.item, action.charge, self._link.peer_epoch)
                    elif type(action) is Skipped or type(action) is NewLife:
                        unpacker.broken()
                rest = self._transmit(outcome)  # type: ignore[arg-type]
            if not self._busy:
                self._keep_time()
        return rest

    def _hand_up(self) -> None:
        unpacker = self._unpacker
        while unpacker.ready:
            header, parcel, charge, life = unpacker.ready.popleft()
            parcel.lane = self.lane
            if charge:
                parcel.origin = (self, charge, life)
            self._owner.arrived(header, parcel)
        while unpacker.refused:
            refused, reason, charge, life = unpacker.refused.popleft()
            self.consumed(charge, life)
            if refused is None:
                self._owner.dropped(self.address, reason)
            else:
                self._owner.undeliverable(refused, Parcel(), reason)

    def consumed(self, charge: int, epoch: int) -> None:
        """Our application took a message from this peer: its credits go back."""
        if charge:
            uninterrupted(self._consumed, charge, epoch)

    def _consumed(self, charge: int, epoch: int) -> None:
        with self._lock:
            if self.gone is not None:
                return
            prefix = self._link.consumed(charge, epoch)
            if prefix is not None:
                self._transmit([Transmit(prefix, None)])
            if not self._busy:
                self._keep_time()

    # events

    def tick(self, now: float) -> bool:
        """Carry out what is due; whether there will be more."""
        busy, rest = uninterrupted(self._tick, now)
        self._outside(rest)
        return busy

    def _tick(self, now: float) -> tuple[bool, Sequence[Action[Item]]]:
        with self._lock:
            if self.gone is not None:
                self._busy = False
                return False, ()
            if self._channel is None and self._link.unacked:
                self._reach()
            rest = self._transmit(self._link.tick(now))
            if self._starved is not None and now - self._starved[0] >= _STARVED_S:
                reason, self._starved = self._starved[1], None
                rest += self._transmit(self._link.give_up(reason))
            busy = self._busy = not self._link.idle
            return busy, rest

    def lost(self) -> None:
        """The connection is gone; reader thread."""
        self._outside(uninterrupted(self._event, self._link.disconnected))

    def found(self) -> None:
        """The dialled connection is there, perhaps again; reader thread."""
        self._outside(uninterrupted(self._event, self._link.connected))

    def _event(self, event: Callable[[float], list[Action[Item]]]) -> Sequence[Action[Item]]:
        with self._lock:
            if self.gone is not None:
                return ()
            self._keep_time()
            return self._transmit(event(_clock()))

    @property
    def settled(self) -> bool:
        """Whether everything sent was acknowledged."""
        return self._link.unacked == 0

    def close(self, reason: str, linger_ms: int = 0) -> None:
        """Nothing is sent any more: what is unacknowledged fails with `reason`, and whoever waits is told."""
        self._outside(uninterrupted(self._close, reason, linger_ms))

    def _close(self, reason: str, linger_ms: int) -> Sequence[Action[Item]]:
        with self._lock:
            if self.gone is not None:
                return ()
            if linger_ms and self._channel is not None:
                self._transmit(self._link.tick(_clock()))  # what is owed: acknowledgements
            self.gone = reason
            rest = [action for action in self._link.give_up(reason) if type(action) is not Transmit]
            if self._channel is not None:
                self._channel.close(linger_ms)
                self._channel = None
            return [*rest, Unblocked()]

    def _outside(self, actions: Sequence[Action[Item]]) -> None:
        for action in actions:
            if type(action) is Failed:
                self._report(action.items, action.reason)
            elif type(action) is Unblocked:
                with self._credits:
                    self._credits.notify_all()
                if self._parked:
                    self._owner.later(self._unpark)

    def _report(self, items: _Items, reason: str) -> None:
        last = None
        for item in items:
            if item.header is not None and item.header is not last:  # pieces of one message share its header
                last = item.header
                self._owner.undeliverable(last, Parcel(item.bodies, hops=item.hops), reason)
