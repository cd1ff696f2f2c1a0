"""One peer on one lane: its link, its channel, and the lock that both live under."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_nb.routing.actions import (
    PREFIX_SIZE,
    Action,
    Deliver,
    Failed,
    LinkConfig,
    PrefixKind,
    Transmit,
    Unblocked,
)
from monarch_nb.routing.link import Link
from monarch_nb.transport import envelope
from monarch_nb.transport.channels import Channel
from monarch_nb.transport.envelope import Item
from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.interrupts import uninterrupted
from monarch_nb.transport.parcel import Parcel
from monarch_nb.wire.header import Header

_CHUNK = int(PrefixKind.CHUNK)
_REFUSED = object()
_clock = time.monotonic


class Owner(Protocol):
    """What a peer asks of its node."""

    def open_channel(self, peer: "Peer") -> Channel | None:
        """The way to write to the peer, or None if there is none now."""

    def mark_busy(self, peer: "Peer") -> None:
        """Tick the peer from now on."""

    def arrived(self, peer: "Peer", header: Header, parcel: Parcel) -> None:
        """A message is complete. Called without the peer's lock, on the reader thread."""

    def link_failed(self, peer: "Peer", items: Sequence[Item], reason: str) -> None:
        """These messages will never arrive. Called without the peer's lock."""

    def dropped(self, peer: "Peer", why: BaseException) -> None:
        """A message could not be understood."""


class Peer:
    """All that is known about one other process on one lane."""

    def __init__(self, owner: Owner, address: str, lane: int, *, dials: bool, local: bool, config: LinkConfig) -> None:
        self.address = address
        self.lane = lane
        self.dials = dials  # we connect to it; else it connects to us
        self.local = local  # on this host: buffers may travel in memory files
        self.epoch = time.time_ns()
        self.gone: str | None = None  # why nothing can be sent any more
        self.inbound: tuple[Any, bytes] | None = None  # (ROUTER, routing id) of the peer's own connection
        self._owner = owner
        self._link: Link[Item] = Link(self.epoch, lane=lane, dials=dials, config=config)
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._busy = False
        self._credits = threading.Condition()
        self._parked: list[Callable[[], None]] = []

    # sending

    def send(self, item: Item, size: int, exempt: bool, patient: bool) -> None:
        """Write one message. Waits for credits, interruptibly, if `patient`; else goes over the limit."""
        while not uninterrupted(self._send, item, size, exempt or not patient):
            with self._credits:
                # The reader notifies after the link was told: look again under its lock, then wait a little.
                if self._still_blocked(size):
                    self._credits.wait(0.2)

    def _still_blocked(self, size: int) -> bool:
        return uninterrupted(self._blocked, size)

    def _blocked(self, size: int) -> bool:
        with self._lock:
            return self.gone is None and self._link.blocked(size)

    def _send(self, item: Item, size: int, exempt: bool) -> bool:
        with self._lock:
            if self.gone is not None:
                raise TransportError(f"{self.address} cannot be reached: {self.gone}")
            channel = self._channel or self._open()
            link = self._link
            if not exempt and link.blocked(size):
                self._keep_time()
                return False
            prefix = link.send(item, size, exempt)
            if prefix is not None and channel is not None:
                channel.write(prefix + item.head, item.frames)
            if not self._busy:
                self._keep_time()
            return True

    def _open(self) -> Channel | None:
        channel = self._owner.open_channel(self)
        if channel is not None:
            self._channel = channel
            if self.dials:
                self._transmit(self._link.connected(_clock()))
        return channel

    def _keep_time(self) -> None:
        if not self._busy:
            self._busy = True
            self._owner.mark_busy(self)

    def _transmit(self, actions: Sequence[Action[Item]]) -> list[Action[Item]]:
        """Write what is to be written, in order; what is left is for outside the lock."""
        rest = []
        for action in actions:
            if type(action) is Transmit:
                channel = self._channel or self._open()
                if channel is None:
                    continue
                item = action.item
                if item is None:
                    channel.write(action.prefix, ())
                else:
                    channel.write(action.prefix + item.head, item.frames)
            else:
                rest.append(action)
        return rest

    # receiving

    def receive(self, frame0: bytes, frames: Sequence[Any]) -> None:
        """Take what arrived on one of the connections; reader thread only."""
        uninterrupted(self._receive, frame0, frames)

    def _receive(self, frame0: bytes, frames: Sequence[Any]) -> None:
        size = len(frame0) + (sum(map(len, frames)) if frames else 0)
        item = Item(frame0, frames)
        messages: list[tuple[Header, Parcel]] = []
        rest: list[Action[Item]] = []
        with self._lock:
            outcome = self._link.received(frame0, item, size, _clock())
            if type(outcome) is int:
                if outcome >= 0:
                    self._unpack(item, outcome, messages)
            else:
                assert isinstance(outcome, list)
                for action in outcome:
                    if type(action) is Deliver:
                        self._unpack(action.item, action.charge, messages)
                rest = self._transmit(outcome)
            if not self._busy:
                self._keep_time()
        for header, parcel in messages:
            self._owner.arrived(self, header, parcel)
        if rest:
            self._outside(rest)

    def _unpack(self, item: Item, charge: int, messages: list[tuple[Header, Parcel]]) -> None:
        try:
            header, parcel = envelope.unpack(item.head, PREFIX_SIZE, item.frames)
        except Exception as error:
            self._owner.dropped(self, error)
            self._link.consumed(charge, self._link.peer_epoch)
            return
        if charge:
            parcel.origin = (self, charge, self._link.peer_epoch)
        messages.append((header, parcel))

    def consumed(self, charge: int, epoch: int) -> None:
        """Our application took a message from this peer: its credits go back."""
        uninterrupted(self._consumed, charge, epoch)

    def _consumed(self, charge: int, epoch: int) -> None:
        with self._lock:
            prefix = self._link.consumed(charge, epoch)
            if prefix is not None and self.gone is None:
                self._transmit([Transmit(prefix, None)])
            if not self._busy:
                self._keep_time()

    # events

    def tick(self, now: float) -> bool:
        """Carry out what is due; whether there will be more."""
        return uninterrupted(self._tick, now)

    def _tick(self, now: float) -> bool:
        with self._lock:
            if self.gone is not None:
                return False
            rest = self._transmit(self._link.tick(now))
            self._busy = not self._link.idle
            busy = self._busy
        if rest:
            self._outside(rest)
        return busy

    def lost(self) -> None:
        """The connection is gone; reader thread."""
        uninterrupted(self._event, self._link.disconnected)

    def found(self) -> None:
        """The connection is there again; reader thread."""
        uninterrupted(self._event, self._link.connected)

    def _event(self, event: Callable[[float], list[Action[Item]]]) -> None:
        with self._lock:
            if self.gone is not None:
                return
            rest = self._transmit(event(_clock()))
            self._keep_time()
        self._outside(rest)

    def close(self, reason: str) -> None:
        """Nothing is sent any more: what is unacknowledged fails with `reason`, whoever waits is told."""
        uninterrupted(self._close, reason)

    def _close(self, reason: str) -> None:
        with self._lock:
            if self.gone is not None:
                return
            self.gone = reason
            rest = [action for action in self._link.give_up(reason) if type(action) is not Transmit]
            if self._channel is not None:
                self._channel.close()
                self._channel = None
        self._outside([*rest, Unblocked()])

    def _outside(self, actions: Sequence[Action[Item]]) -> None:
        for action in actions:
            if type(action) is Failed:
                self._owner.link_failed(self, action.items, action.reason)
            elif type(action) is Unblocked:
                with self._credits:
                    self._credits.notify_all()
