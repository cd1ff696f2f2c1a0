"""One peer on one lane: its link, its connection, and the lock for both."""

import functools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from monarch_nb.routing.actions import (
    Action,
    Deliver,
    Failed,
    LinkConfig,
    LinkState,
    NewIncarnation,
    PrefixKind,
    Skipped,
    Transmit,
    Unblocked,
)
from monarch_nb.routing.link import Link
from monarch_nb.transport.connection import Connection, FrameSink, is_inbound
from monarch_nb.transport.errors import NotConnectedError, TransportError, UnreachableError
from monarch_nb.transport.interrupts import uninterrupted
from monarch_nb.transport.packing import SIZE, Item, Unpacker, pack_chunked, pack_local, pack_whole
from monarch_nb.transport.parcel import Parcel
from monarch_nb.transport.streams import Message, UnixStream
from monarch_nb.wire.header import Header, Kind

if TYPE_CHECKING:
    from monarch_nb.transport.links import Links

_CHUNK = int(PrefixKind.CHUNK)
_AT_ONCE = 64
_clock = time.monotonic


class RelayQueue:
    """Relayed messages that wait for the credits of the next process, in order."""

    def __init__(
        self, send: Callable[[Header, Parcel], bool], undeliverable: Callable[[Header, Parcel, str], None]
    ) -> None:
        """`send` returns False without credits, and raises TransportError if no process will ever take the message."""
        self._send, self._undeliverable = send, undeliverable
        self._waiting: deque[tuple[Header, Parcel, Callable[[], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, header: Header, parcel: Parcel, handed_on: Callable[[], None]) -> None:
        """Keeps a message; `handed_on` is called once it is written or given up."""
        self._waiting.append((header, parcel, handed_on))

    def send(self) -> None:
        """Writes messages as far as credits allow; reading thread only."""
        while self._waiting:
            header, parcel, handed_on = self._waiting[0]
            try:
                if not self._send(header, parcel):
                    return
            except TransportError as error:
                self._undeliverable(header, parcel, str(error))
            self._waiting.popleft()
            handed_on()


class Peer:
    """The state of one other process on one lane."""

    def __init__(
        self,
        owner: "Links",
        address: str,
        lane: int,
        endpoint: str,
        incarnation: int,
        *,
        portable: bool,
        config: LinkConfig,
    ) -> None:
        self.address = address
        self.lane = lane
        self.incarnation = incarnation
        self.unreachable: str | None = None  # why nothing can be sent any longer
        self._owner = owner
        self._portable = portable
        self._endings = 0  # number of times it was closed or buried
        self._link: Link[Item] = Link(self.incarnation, lane=lane, dials=bool(endpoint), config=config)
        if endpoint.startswith("tcp:"):
            self._link.disconnected(_clock())  # messages are kept until the handshake has succeeded
        self._lock = threading.Lock()
        self.connection = Connection(
            self._link,
            endpoint,
            dial=lambda: owner.dial(self),
            readable=self._read,
            keep_time=self._keep_time,
            clock=_clock,
        )
        self._busy = False
        self._unpacker = Unpacker(portable=portable, back=functools.partial(owner.give_back, address))
        self._credits = threading.Condition()
        self._relays = RelayQueue(
            lambda header, parcel: uninterrupted(self._send, self._pack(header, parcel), parcel.nbytes, False),
            lambda header, parcel, reason: owner.undeliverable(header, parcel, self.unreachable or reason),
        )

    @property
    def endpoint(self) -> str:
        """The endpoint at which this process dials the peer; "" if the peer dials."""
        return self.connection.endpoint

    @property
    def last_seen(self) -> int:
        """The incarnation of the peer's link as of its last frame; 0 before the first, or after its end."""
        return 0 if self._link.buried else self._link.peer_incarnation

    @property
    def awaits_redial(self) -> bool:
        """True if it waits for a peer that has dialled once and hung up to dial again."""
        return not self.endpoint and self._link.state is LinkState.DOWN

    @property
    def has_dialled(self) -> bool:
        """True if the peer is written to on a TCP connection that it has dialled."""
        return is_inbound(self.connection.channel)

    @property
    def up(self) -> bool:
        """True if a TCP connection is up, as far as known; connections inside a host do not report it."""
        return self.connection.over_tcp and self.unreachable is None and self._link.state is LinkState.UP

    # sending

    def send(self, header: Header, parcel: Parcel, exempt: bool) -> None:
        """Writes one message. Waits for credits, interruptibly, unless exempt."""
        items = self._pack(header, parcel)
        endings = self._endings
        while not uninterrupted(self._send, items, parcel.nbytes, exempt):
            with self._credits:
                # Notifications of returned credits follow the update of the link.
                if uninterrupted(self._blocked, parcel.nbytes):
                    self._credits.wait(0.2)
            if endings != self._endings:  # the next incarnation is not the addressee
                raise UnreachableError(f"{self.address} cannot be reached: {self.unreachable or 'it was restarted'}")

    def relay(self, header: Header, parcel: Parcel, exempt: bool, handed_on: Callable[[], None]) -> None:
        """Writes one message without waiting: keeps it while credits lack. `handed_on` is called when it is written."""
        if not exempt and (self._relays or uninterrupted(self._blocked, parcel.nbytes)):
            self._relays.append(header, parcel, handed_on)
            if self.unreachable is not None:
                self._owner.later(self._relays.send)
            return
        uninterrupted(self._send, self._pack(header, parcel), parcel.nbytes, True, not exempt)
        handed_on()

    def _pack(self, header: Header, parcel: Parcel) -> Item | list[Item]:
        inside = self.connection.inside and not self._portable
        if parcel.on_gpu and not (inside and self._owner.shares_gpu(self.address)):
            parcel = parcel.on_host(portable=not inside)
        if inside:
            lent = parcel.in_files and header.dst == self.address and header.kind != Kind.CAST
            return pack_local(header, parcel, self._owner.lend(parcel, header.dst) if lent else 0)
        if parcel.nbytes <= SIZE:
            return pack_whole(header, parcel)
        return pack_chunked(header, parcel)

    def _blocked(self, size: int) -> bool:
        with self._lock:
            self._keep_time()
            return self.unreachable is None and self._link.blocked(size)

    def _send(self, items: Item | list[Item], size: int, exempt: bool, charged: bool = False) -> bool:
        push: UnixStream | None = None
        with self._lock:
            if self.unreachable is not None:
                raise UnreachableError(f"{self.address} cannot be reached: {self.unreachable}")
            connection, link = self.connection, self._link
            channel = connection.channel or connection.open()
            if not exempt and link.blocked(size):
                return False
            first, further = (items, ()) if type(items) is Item else (items[0], items[1:])
            prefix = link.send(first, len(first.head) + size, exempt and not charged)
            if prefix is not None and channel is not None:
                push = connection.put(channel, prefix + first.head, first.frames, not exempt)
            for item in further:
                prefix = link.send(item, 0, True, _CHUNK)
                if prefix is not None and channel is not None:
                    connection.write(channel, prefix, item.frames)
            if not self._busy:
                self._keep_time()
        if push is not None:  # without the lock, so that others do not wait for the kernel
            try:
                push.push()
            except NotConnectedError:
                with self._lock:
                    self.connection.lost(push)
        return True

    def redirect(self, endpoint: str) -> None:
        """Dials the peer, whose own connection is gone."""
        uninterrupted(self._locked, self._redirect, endpoint)

    def _redirect(self, endpoint: str) -> None:
        if self.unreachable is None and not self.endpoint:
            self.connection.dial_at(endpoint)
            self.connection.open()

    def _locked(self, function: Callable[..., None], *args: str) -> None:
        with self._lock:
            function(*args)

    def bury(self, reason: str) -> None:
        """Marks the peer as ended: its unacknowledged messages fail, and nothing is sent until `revive`."""
        self._outside(uninterrupted(self._bury, reason))

    def _bury(self, reason: str) -> Sequence[Action[Item]]:
        with self._lock:
            if self.unreachable is not None:
                return ()
            self.unreachable = reason
            self._endings += 1
            self.connection.close(0)
            return [*self._link.bury(reason, _clock()), Unblocked()]

    def since(self, incarnation: int) -> None:
        """Ends links of the peer with smaller incarnations."""
        self._link.since = incarnation

    def revive(self, endpoint: str) -> None:
        """Marks the peer as alive (again), to be dialled at `endpoint`, or "" if it dials this process."""
        uninterrupted(self._revive, endpoint)
        if endpoint.startswith("tcp:"):
            self._owner.later(self.begin)

    def _revive(self, endpoint: str) -> None:
        with self._lock:
            self.unreachable = None
            if endpoint and endpoint != self.endpoint:
                self.connection.dial_at(endpoint)
            self._keep_time()

    def redial(self) -> None:
        """Dials the peer once more, with the keys known now."""
        uninterrupted(self._locked, self._redial)

    def _redial(self) -> None:
        if self.unreachable is None and self.connection.over_tcp and self.endpoint:
            self.connection.dial_at(self.endpoint)
            self.connection.reach()

    def listens(self) -> None:
        """Dials a peer for which messages wait: it has just shown that it listens."""
        uninterrupted(self._locked, self._listens)

    def _listens(self) -> None:
        if self.unreachable is None and self.connection.channel is None and self._link.unacked:
            self.connection.reach_now()

    def begin(self) -> None:
        """Dials before there are messages to send."""
        uninterrupted(self._locked, self._begin)

    def _begin(self) -> None:
        if self.unreachable is None and self.connection.channel is None:
            self.connection.reach()

    def cut(self, stream: UnixStream) -> bool:
        """Ends a connection; returns whether it was the one written to. Reader thread."""
        return uninterrupted(self._cut, stream)

    def _cut(self, stream: UnixStream) -> bool:
        with self._lock:
            if ours := self.connection.cut(stream):
                self._keep_time()
            return ours

    def _keep_time(self) -> None:
        if not self._busy:
            self._busy = True
            self._owner.mark_busy(self)

    # receiving

    def attach(self, channel: FrameSink) -> None:
        """Uses a connection that the peer has dialled, perhaps again, unless this process dials it."""
        uninterrupted(self._locked, lambda: self.connection.attach(channel, unreachable=self.unreachable is not None))

    def _read(self) -> bool:
        """Reads the connection that this process has dialled."""
        with self._lock:
            messages = self.connection.read(_AT_ONCE)
        if messages:
            self.receive(messages)
        return len(messages) == _AT_ONCE

    def receive(self, messages: Sequence[Message]) -> None:
        """Takes messages from one of the connections; reader thread only."""
        position = 0
        while position < len(messages):
            position, rest = uninterrupted(self._receive, messages, position)
            if self._unpacker.ready or self._unpacker.refused:
                self._hand_up()
            if rest:
                self._outside(rest)

    def _receive(self, messages: Sequence[Message], start: int) -> tuple[int, Sequence[Action[Item]]]:
        """Takes messages from number `start` on, up to the first that needs more than delivery."""
        unpacker, link = self._unpacker, self._link
        rest: Sequence[Action[Item]] = ()
        with self._lock:
            if self.unreachable is not None:
                return len(messages), rest
            if self.connection.channel is None and self.connection.inside:
                self.connection.reach()  # else the link would not reply
            now = _clock()
            while start < len(messages) and not rest:
                frame0, frames = messages[start]
                start += 1
                size = len(frame0)
                for frame in frames:
                    size += len(frame)
                item = Item(frame0, frames)
                try:
                    outcome = link.received(frame0, item, size, now)
                except struct.error as error:
                    unpacker.refused.append((None, f"{type(error).__name__}: {error}", 0, 0))
                    continue
                if isinstance(outcome, int):
                    if outcome >= 0:
                        unpacker.take(item, outcome, link.peer_incarnation)
                else:
                    for action in outcome:
                        if type(action) is Deliver:
                            unpacker.take(action.item, action.charge, link.peer_incarnation)
                        elif type(action) is Skipped or type(action) is NewIncarnation:
                            unpacker.broken()
                    rest = self.connection.transmit(outcome)
            if not self._busy:
                self._keep_time()
        return start, rest

    def _hand_up(self) -> None:
        unpacker, lane, arrived, endings = self._unpacker, self.lane, self._owner.arrived, self._endings
        while unpacker.ready:
            header, parcel, charge, incarnation = unpacker.ready.popleft()
            if self._endings != endings:  # by earlier messages
                continue
            parcel.lane = lane
            if charge:
                parcel.origin = (self, charge, incarnation)
            arrived(header, parcel)
        while unpacker.refused:
            refused, reason, charge, incarnation = unpacker.refused.popleft()
            self.consumed(charge, incarnation)
            if refused is None:
                self._owner.dropped(self.address, reason)
            else:
                self._owner.undeliverable(refused, Parcel(), reason)

    def consumed(self, charge: int, incarnation: int) -> None:
        """Returns the credits of a message from this peer that the application took."""
        if charge:
            uninterrupted(self._consumed, charge, incarnation)

    def _consumed(self, charge: int, incarnation: int) -> None:
        with self._lock:
            if self.unreachable is not None:
                return
            prefix = self._link.consumed(charge, incarnation)
            if prefix is not None:
                self.connection.transmit([Transmit(prefix, None)])
            if not self._busy:
                self._keep_time()

    # events

    def tick(self, now: float) -> bool:
        """Executes due actions; returns whether more will follow."""
        busy, rest = uninterrupted(self._tick, now)
        self._outside(rest)
        return busy

    def _tick(self, now: float) -> tuple[bool, Sequence[Action[Item]]]:
        with self._lock:
            if self.unreachable is not None:
                self._busy = False
                return False, ()
            if self.connection.channel is None and self._link.unacked:
                self.connection.reach()
            rest = self.connection.transmit(self._link.tick(now))
            starved = self.connection.starved(now)
            if starved is not None:
                rest += self.connection.transmit(self._link.give_up(starved))
            busy = self._busy = not self._link.idle
            return busy, rest

    def lost(self) -> None:
        """Records the loss of the connection; reader thread."""
        self._outside(uninterrupted(self._event, self._link.disconnected))

    def on_connected(self) -> None:
        """Records that the dialled connection is up, perhaps again; reader thread."""
        self._outside(uninterrupted(self._event, self._link.connected))

    def _event(self, event: Callable[[float], list[Action[Item]]]) -> Sequence[Action[Item]]:
        with self._lock:
            if self.unreachable is not None:
                return ()
            self._keep_time()
            return self.connection.transmit(event(_clock()))

    @property
    def settled(self) -> bool:
        """True if all sent messages were acknowledged."""
        return self._link.unacked == 0

    def close(self, reason: str, linger_ms: int = 0) -> None:
        """Ends sending: unacknowledged messages fail with `reason`, for all who wait."""
        self._outside(uninterrupted(self._close, reason, linger_ms))

    def _close(self, reason: str, linger_ms: int) -> Sequence[Action[Item]]:
        with self._lock:
            if self.unreachable is not None:
                return ()
            if linger_ms and self.connection.channel is not None:
                self.connection.transmit(self._link.tick(_clock()))  # sends due acknowledgements
            self.unreachable = reason
            self._endings += 1
            rest = [action for action in self._link.give_up(reason) if type(action) is not Transmit]
            self.connection.close(linger_ms)
            return [*rest, Unblocked()]

    def _outside(self, actions: Sequence[Action[Item]]) -> None:
        for action in actions:
            if type(action) is Failed:
                self._report(action.items, action.reason)
            elif type(action) is Unblocked:
                with self._credits:
                    self._credits.notify_all()
                if self._relays:
                    self._owner.later(self._relays.send)

    def _report(self, items: Sequence[Item], reason: str) -> None:
        last = None
        for item in items:
            if item.header is not None and item.header is not last:  # pieces of one message share its header
                last = item.header
                self._owner.undeliverable(last, Parcel(item.bodies, hops=item.hops), reason)
