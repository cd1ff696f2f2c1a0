"""One link to one peer on one lane: numbering, acknowledgement, resending and byte credits, without any I/O.

Not thread-safe: the transport calls a link under that link's own lock. `now` is any monotonic clock in seconds.

Numbers of one link object never restart, so no acknowledgement can be mistaken for an older one. Frames that will never
be sent again lie below the lowest number held, which every frame without a message contains: the peer skips to it.
Frames name both incarnations (`incarnation`, `to`): a restarted peer cannot take frames meant for its former
incarnation. Only those written before its first frame name none, and are rewritten only on an unbroken connection.
"""

from collections import deque
from typing import Generic

from monarch_nb.routing.actions import (
    PREFIX,
    Acked,
    Action,
    Deliver,
    Failed,
    LinkConfig,
    LinkState,
    NewIncarnation,
    PrefixKind,
    Skipped,
    T,
    Transmit,
    Unblocked,
)

_pack = PREFIX.pack
_unpack_from = PREFIX.unpack_from
BROKEN_EARLY = "the connection broke before the peer's first answer"
_LEAST_RESENT = 8  # resends before giving up: where many frames are lost, few PROBEs are answered in time
_UP, _RESUMING, _DOWN = LinkState
_DATA, _CHUNK, _ACK, _HELLO, _RESUME, _PROBE, _STATE = (int(kind) for kind in PrefixKind)


class Link(Generic[T]):
    """Both directions to one peer on one lane.

    `incarnation` is non-zero and larger for each later link between the same two addresses on a lane
    (time.time_ns() does). A dialling link starts UP: data may follow the first HELLO at once. A link made for an
    incoming connection is DOWN until the first frame was passed to `received`.
    """

    __slots__ = (
        "_ack_bytes",
        "_ack_frames",
        "_answered_at",
        "_base",
        "_buffer",
        "_config",
        "_credit",
        "_dials",
        "_doubt",
        "_down_since",
        "_expect",
        "_forgiven",
        "_free",
        "_gap",
        "_gap_at",
        "_gap_base",
        "_gap_since",
        "_gap_wait",
        "_granted",
        "_greeted",
        "_holds",
        "_is_blocked",
        "_next",
        "_owed",
        "_owed_bytes",
        "_owed_credit",
        "_probe_wait",
        "_probed",
        "_probed_at",
        "_probed_base",
        "_resent",
        "_spent",
        "_unacknowledged",
        "_window",
        "buried",
        "incarnation",
        "lane",
        "peer_incarnation",
        "since",
        "state",
    )

    def __init__(
        self, incarnation: int, *, lane: int = 0, dials: bool = False, config: LinkConfig | None = None
    ) -> None:
        config = config or LinkConfig()
        self._config = config
        self.incarnation = incarnation
        self.lane = lane
        self.peer_incarnation = 0  # 0 until the peer has sent a frame
        self.state: LinkState = _UP if dials else _DOWN
        self.since = 0  # links with smaller incarnations have ended, by reports of others
        self.buried = False  # that incarnation has ended; the frames kept were never written to it
        # received frames: those in order, early ones, and acknowledgements and credits owed to the sender
        self._expect = 0
        self._buffer: dict[int, tuple[T, int]] = {}  # (item, charge) behind a gap
        self._credit = 0  # consumed by our application, KiB
        self._owed = 0  # frames not yet acknowledged
        self._owed_bytes = 0
        self._owed_credit = 0
        self._ack_frames = config.ack_frames
        self._ack_bytes = config.ack_bytes
        # sent frames: those kept until they are acknowledged, and byte credits
        self._unacknowledged: deque[tuple[T, int, int]] = deque()  # (item, charge, kind) of numbers _base.._next-1
        self._holds: list[tuple[int, T]] = []  # (number, item) of items to be named in Acked: rarely any
        self._base = 0
        self._next = 0
        self._window = max(1, config.window >> 10)
        self._spent = 0  # all charges, KiB
        self._granted = 0  # credits returned by this incarnation of the peer
        self._forgiven = 0  # charges that will not return: failed, or of a former incarnation
        self._free = lane != 0
        self._is_blocked = False
        self._dials = dials
        self._greeted = False
        self._doubt = 0  # frames written before the peer's incarnation was known, on a broken connection
        # time
        self._probed_base = -1  # the base when it had last not moved
        self._probed_at = 0.0
        self._probe_wait = config.probe_after
        self._probed = -1  # numbers below were written before the open PROBE; -1: no PROBE is open
        self._gap = -1
        self._gap_at = 0.0
        self._gap_wait = config.tick
        self._gap_base = -1  # the base when the peer reported it missing
        self._gap_since = 0.0
        self._resent = 0  # number of resends since then
        self._down_since: float | None = None
        self._answered_at = float("-inf")

    # the fast path

    def received(self, frame0: bytes | memoryview, item: T, size: int, now: float) -> int | list[Action[T]]:
        """Takes a frame (frame0 may continue after the prefix); struct.error if it is too short.

        An int >= 0: `item` itself is to be delivered, nothing else; the int is the charge for `consumed` later.
        -1: nothing to do, the item is to be dropped (a duplicate, or no message). A list: actions to execute in order;
        a Deliver may name `item` or an earlier one, and the link may keep `item`. Resources of the item from the sender
        (memfd) must be open before this call or before the lock is released: any later frame may acknowledge it.
        """
        kind, _, charge, incarnation, to, seq, ack, credit = _unpack_from(frame0)
        if (
            kind > _CHUNK
            or seq != self._expect
            or incarnation != self.peer_incarnation
            or to != self.incarnation
            or self._buffer
            or self._is_blocked
            or self.state is not _UP
        ):
            return self._received(kind, charge, incarnation, to, seq, ack, credit, item, size, now) or -1
        base = self._base
        if ack > base:
            if ack > self._next or self._holds:
                return self._received(kind, charge, incarnation, to, seq, ack, credit, item, size, now) or -1
            self._base = ack
            popleft = self._unacknowledged.popleft
            popleft()
            for _ in range(base + 1, ack):
                popleft()
        if credit > self._granted:
            self._granted = credit
        self._expect = seq + 1
        self._owed += 1
        self._owed_bytes += size
        if self._owed >= self._ack_frames or self._owed_bytes >= self._ack_bytes:
            return [Deliver(item, charge), self._say(_ACK)]
        return int(charge)

    # rare events

    def connected(self, now: float) -> list[Action[T]]:
        """Records that the dialled connection is open: says HELLO. The first call is due when dialling begins."""
        if self.state is _UP and self._greeted:
            return []  # the first connection, already greeted
        self._greeted = True
        if self.state is not _UP:
            self.state = _RESUMING
        self._probed_at, self._probe_wait = now, self._config.probe_after
        return [self._say(_HELLO)]

    def disconnected(self, now: float) -> list[Action[T]]:
        """Records a lost connection (monitor event, or EHOSTUNREACH on a ROUTER): frames are kept until resumed."""
        if self.state is _UP:
            self._down_since = now
            if not self.peer_incarnation:
                self._doubt = self._next
        self.state = _DOWN
        self._probed = -1
        return []

    def bury(self, reason: str, now: float) -> list[Action[T]]:
        """Records the end of the peer: kept frames fail, and further frames are for its next incarnation."""
        actions: list[Action[T]] = []
        self.disconnected(now)
        self._give_up(reason, actions)
        self.buried = True
        return actions

    def dial(self, now: float) -> None:
        """Makes this side dial from now on; the link is down until `connected`."""
        self._dials = True
        self.disconnected(now)

    def tick(self, now: float) -> list[Action[T]]:
        """Checks times: acknowledgements, PROBEs, limits. To be called every config.tick seconds unless `idle`."""
        config = self._config
        actions: list[Action[T]] = []
        if self.state is _UP:
            if self._unacknowledged or self._is_blocked:
                if self._probed_base != self._base:
                    self._probed_base, self._probed_at, self._probe_wait = self._base, now, config.probe_after
                elif now - self._probed_at >= self._probe_wait:
                    self._probed_at, self._probe_wait = now, min(2 * self._probe_wait, config.probe_max)
                    self._probed = self._next
                    actions.append(self._say(_PROBE))
            if self._buffer:
                if self._gap != self._expect:
                    self._gap, self._gap_at, self._gap_wait = self._expect, now, config.tick
                elif now - self._gap_at >= self._gap_wait:
                    self._gap_at, self._gap_wait = now, min(2 * self._gap_wait, config.probe_max)
                    actions.append(self._say(_STATE))
            if self._owed or self._owed_credit:
                actions.append(self._say(_ACK))
        elif self.state is _RESUMING:
            if now - self._probed_at >= self._probe_wait:
                self._probed_at, self._probe_wait = now, min(2 * self._probe_wait, config.probe_max)
                actions.append(self._say(_HELLO))
        elif (self._unacknowledged or self._is_blocked) and config.down_timeout is not None:
            if self._down_since is None:
                self._down_since = now
            elif now - self._down_since >= config.down_timeout:
                self._down_since = now  # the time for later frames starts anew
                self._give_up(f"no connection for {config.down_timeout:g} s", actions)
        return actions

    def give_up(self, reason: str) -> list[Action[T]]:
        """Fails everything kept (the peer died, the link closes); the link stays usable."""
        actions: list[Action[T]] = []
        self._give_up(reason, actions)
        return actions

    @property
    def idle(self) -> bool:
        """True if `tick` has nothing to do until the next other event."""
        if self.state is not _UP:
            return self.state is _DOWN and not self._unacknowledged and not self._is_blocked
        return not (self._unacknowledged or self._buffer or self._owed or self._owed_credit or self._is_blocked)

    # implementation

    def _received(
        self,
        kind: int,
        charge: int,
        incarnation: int,
        to: int,
        seq: int,
        ack: int,
        credit: int,
        item: T,
        size: int,
        now: float,
    ) -> list[Action[T]]:
        actions: list[Action[T]] = []
        if incarnation < self.peer_incarnation or incarnation < self.since:
            return actions  # a former incarnation of the peer
        if incarnation > self.peer_incarnation:
            self._meet(incarnation, actions)
        self.buried = False
        if to != self.incarnation and to:
            # Meant for a former link object at this address: report this one, but not once per frame in flight.
            if now - self._answered_at >= self._config.tick:
                self._answered_at = now
                self._answer(_STATE, actions)
            return actions
        if to:
            self._take_ack(ack, credit, actions)
        if self._doubt:
            if not self._dials or self.state is not _DOWN:  # else it is a late frame of the broken connection
                self._fail(BROKEN_EARLY, self._doubt, actions)
            self._doubt = 0
        if kind > _CHUNK:
            self._skip_to(seq, actions)
            self._control(kind, ack, now, actions)
        else:
            self._take(seq, item, charge, size, actions)
            if self.state is _UP:
                if self._owed >= self._ack_frames or self._owed_bytes >= self._ack_bytes:
                    actions.append(self._say(_ACK))
            elif not self._dials and now - self._answered_at >= self._config.tick:
                self._answered_at = now
                actions.append(self._say(_PROBE))  # the peer lives after all: its STATE reports missing frames
        return actions

    def _meet(self, incarnation: int, actions: list[Action[T]]) -> None:
        """Handles the first frame of an incarnation of the peer."""
        former, self.peer_incarnation = self.peer_incarnation, incarnation
        if former:
            self._expect = self._credit = self._owed = self._owed_bytes = self._owed_credit = 0
            self._buffer.clear()
            actions.append(NewIncarnation(incarnation))
            if not self.buried:
                self._fail("the peer was restarted", self._next, actions, charges=False)
            self._granted, self._forgiven = 0, self._spent - sum(charge for _, charge, _ in self._unacknowledged)
            self._unblock(actions)
        if not self._dials and self.state is not _UP:
            self._rise(actions)
        if former and self._base:
            self._answer(_RESUME, actions)

    def _control(self, kind: int, ack: int, now: float, actions: list[Action[T]]) -> None:
        resumed = self.state is not _UP and kind in (_HELLO, _RESUME, _STATE)
        if resumed and self._dials and self.state is _DOWN:
            resumed = False  # a frame that was in flight when the connection broke
        if kind in (_HELLO, _PROBE):
            self._answer(_RESUME if kind == _HELLO else _STATE, actions)
        elif ack < self._base and (kind == _STATE or resumed):
            self._answer(_RESUME, actions)  # it waits for frames that will never arrive
        if resumed:
            self._rise(actions)
        elif kind == _HELLO:
            self._resend(self._next, now, actions)
        elif kind == _STATE and self.state is _UP:
            # Frames written after our PROBE may still be in flight.
            limit = self._next if self._probed < 0 else self._probed
            self._probed = -1
            self._probed_base = -1  # it answers: the pauses between PROBEs restart short
            self._resend(limit, now, actions)

    def _answer(self, kind: int, actions: list[Action[T]]) -> None:
        if not (self._dials and self.state is _DOWN):
            actions.append(self._say(kind))

    def _rise(self, actions: list[Action[T]]) -> None:
        self.state = _UP
        self._down_since = None
        self._probed_base = -1
        self._write(self._next, actions)

    def _resend(self, limit: int, now: float, actions: list[Action[T]]) -> None:
        """Resends frames that the peer lacks, or gives up those that were resent in vain for too long."""
        if not self._unacknowledged:
            return
        if self._gap_base != self._base:
            self._gap_base, self._gap_since, self._resent = self._base, now, 0
        elif now - self._gap_since >= self._config.gap_timeout and self._resent >= _LEAST_RESENT:
            self._fail(f"it was lost, and sending it again failed for {self._config.gap_timeout:g} s", limit, actions)
            return
        self._resent += 1
        self._write(limit, actions)

    # sent frames

    def send(self, item: T, size: int, exempt: bool = False, kind: int = _DATA, hold: bool = False) -> bytes | None:
        """Numbers and keeps `item`; returns the prefix to write in front of it now, or None (kept, sent when resumed).

        `size` is in bytes. `exempt` costs no credits (replies; everything on lane 1). `kind` DATA or CHUNK.
        With `hold` an Acked action names the item later. Never blocks and never refuses: call `blocked` before.
        """
        charge = 0 if exempt or self._free else (size + 1023) >> 10 or 1
        seq = self._next
        self._next = seq + 1
        self._unacknowledged.append((item, charge, kind))
        if hold:
            self._holds.append((seq, item))
        self._spent += charge
        if self.state is not _UP:
            return None
        self._owed = self._owed_bytes = self._owed_credit = 0
        return _pack(kind, self.lane, charge, self.incarnation, self.peer_incarnation, seq, self._expect, self._credit)

    def blocked(self, size: int) -> bool:
        """Returns whether `size` more bytes exceed the window; if True, an Unblocked action follows with credits."""
        if self._free:
            return False
        used = self._spent - self._forgiven - self._granted
        if used < 0:
            self._forgiven += used  # given up, but returned: counts once
        if used <= 0 or used + ((size + 1023) >> 10 or 1) <= self._window:
            return False
        self._is_blocked = True
        return True

    def consumed(self, charge: int, incarnation: int) -> bytes | None:
        """Returns `charge` of a message that the application took to the peer, if it still has that incarnation.

        The result is a prefix to write at once (alone) or None: the credit goes with the next frame or tick.
        """
        if not charge or incarnation != self.peer_incarnation:
            return None
        self._credit += charge
        self._owed_credit += charge
        if self._owed_credit << 4 < self._window or self.state is not _UP:
            return None
        return self._say(_ACK).prefix

    @property
    def unacked(self) -> int:
        """Frames kept for resending."""
        return len(self._unacknowledged)

    def _say(self, kind: int) -> Transmit[T]:
        """Returns a frame without a body, which states the own position."""
        self._owed = self._owed_bytes = self._owed_credit = 0
        prefix = _pack(
            kind, self.lane, 0, self.incarnation, self.peer_incarnation, self._base, self._expect, self._credit
        )
        return Transmit(prefix, None)

    def _write(self, limit: int, actions: list[Action[T]]) -> None:
        lane, incarnation, to, expect, credit = (
            self.lane,
            self.incarnation,
            self.peer_incarnation,
            self._expect,
            self._credit,
        )
        for seq, (item, charge, kind) in enumerate(self._unacknowledged, self._base):
            if seq >= limit:
                break
            actions.append(Transmit(_pack(kind, lane, charge, incarnation, to, seq, expect, credit), item))

    def _fail(self, reason: str, limit: int, actions: list[Action[T]], charges: bool = True) -> None:
        """Gives up the frames with numbers below `limit`; the peer is asked to skip them."""
        items = []
        while self._base < limit:
            item, charge, _ = self._unacknowledged.popleft()
            self._base += 1
            items.append(item)
            if charges:
                self._forgiven += charge
        self._release(limit)
        if not items:
            return
        actions.append(Failed(reason, items))
        if charges and self.state is _UP:
            actions.append(self._say(_RESUME))
        self._unblock(actions)

    def _release(self, limit: int) -> list[T]:
        """Removes and returns the held items with numbers below `limit`."""
        holds = self._holds
        count = 0
        while count < len(holds) and holds[count][0] < limit:
            count += 1
        released = [item for _, item in holds[:count]]
        del holds[:count]
        return released

    def _give_up(self, reason: str, actions: list[Action[T]]) -> None:
        self._fail(reason, self._next, actions)
        self._forgiven = self._spent - self._granted  # so that no sender waits for credits that may never return
        self._unblock(actions)

    def _unblock(self, actions: list[Action[T]]) -> None:
        if self._is_blocked:
            self._is_blocked = False
            actions.append(Unblocked())

    def _take_ack(self, ack: int, credit: int, actions: list[Action[T]]) -> None:
        if self._base < ack <= self._next:
            for _ in range(ack - self._base):
                self._unacknowledged.popleft()
            self._base = ack
            released = self._release(ack)
            if released:
                actions.append(Acked(released))
        if credit > self._granted:
            self._granted = credit
            self._unblock(actions)

    # received frames

    def _take(self, seq: int, item: T, charge: int, size: int, actions: list[Action[T]]) -> None:
        self._owed += 1
        self._owed_bytes += size
        if seq == self._expect:
            self._expect = seq + 1
            actions.append(Deliver(item, charge))
            self._drain(actions)
        elif seq > self._expect and len(self._buffer) < self._config.buffered:
            self._buffer.setdefault(seq, (item, charge))

    def _drain(self, actions: list[Action[T]]) -> None:
        buffer = self._buffer
        while buffer and (entry := buffer.pop(self._expect, None)) is not None:
            self._expect += 1
            actions.append(Deliver(*entry))

    def _skip_to(self, base: int, actions: list[Action[T]]) -> None:
        """Gives up missing frames below `base`, which the peer no longer holds."""
        if base <= self._expect:
            return
        actions.append(Skipped(self._expect, base - self._expect))
        for seq in [seq for seq in self._buffer if seq < base]:
            del self._buffer[seq]
        self._expect = base
        self._drain(actions)
