"""What was sent on a link: numbers, frames kept until they are acknowledged, and byte credits."""

from collections import deque

from monarch_nb.routing.actions import (
    PREFIX,
    Acked,
    Action,
    Failed,
    LinkConfig,
    LinkState,
    PrefixKind,
    T,
    Transmit,
    Unblocked,
)
from monarch_nb.routing.incoming import Incoming

__all__ = ["Outgoing"]

_pack = PREFIX.pack
_UP = LinkState.UP
_DATA, _ACK, _RESUME = (int(kind) for kind in (PrefixKind.DATA, PrefixKind.ACK, PrefixKind.RESUME))


class Outgoing(Incoming[T]):
    """The sending half of a link; its frames carry along what the receiving half has to say."""

    __slots__ = (
        "_base",
        "_forgiven",
        "_free",
        "_granted",
        "_holds",
        "_kept",
        "_next",
        "_spent",
        "_wanted",
        "_window",
        "incarnation",
        "lane",
        "peer_incarnation",
        "state",
    )

    def __init__(self, incarnation: int, lane: int, state: LinkState, config: LinkConfig) -> None:
        super().__init__(config)
        self.incarnation = incarnation
        self.lane = lane
        self.peer_incarnation = 0  # 0 until the peer has sent a frame
        self.state = state
        self._kept: deque[tuple[T, int, int]] = deque()  # (item, charge, kind) of numbers _base.._next-1
        self._holds: list[tuple[int, T]] = []  # (number, item) of kept ones to be named in Acked: seldom any
        self._base = 0
        self._next = 0
        self._window = max(1, config.window >> 10)
        self._spent = 0  # charges ever, KiB
        self._granted = 0  # given back by this incarnation of the peer
        self._forgiven = 0  # never to be given back: failed, or gone with a former incarnation
        self._free = lane != 0
        self._wanted = False

    def send(self, item: T, size: int, exempt: bool = False, kind: int = _DATA, hold: bool = False) -> bytes | None:
        """Number and keep `item`; the prefix to write in front of it now, or None (kept, sent when resumed).

        `size` is in bytes. `exempt` costs no credits (replies; everything on lane 1). `kind` DATA or CHUNK.
        With `hold` an Acked action names the item later. Never blocks and never refuses: ask `blocked` before.
        """
        charge = 0 if exempt or self._free else (size + 1023) >> 10 or 1
        seq = self._next
        self._next = seq + 1
        self._kept.append((item, charge, kind))
        if hold:
            self._holds.append((seq, item))
        self._spent += charge
        if self.state is not _UP:
            return None
        self._owed = self._owed_bytes = self._owed_credit = 0
        return _pack(kind, self.lane, charge, self.incarnation, self.peer_incarnation, seq, self._expect, self._credit)

    def blocked(self, size: int) -> bool:
        """Whether `size` more bytes do not fit the window; if True, an Unblocked action follows when credits come."""
        if self._free:
            return False
        used = self._spent - self._forgiven - self._granted
        if used < 0:
            self._forgiven += used  # given up, yet it came back: counts once
        if used <= 0 or used + ((size + 1023) >> 10 or 1) <= self._window:
            return False
        self._wanted = True
        return True

    def consumed(self, charge: int, incarnation: int) -> bytes | None:
        """The application took a message: give `charge` back to the peer, if it still has that incarnation.

        Returns a prefix to write at once (alone) or None: the credit goes with the next frame or tick.
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
        return len(self._kept)

    def _say(self, kind: int) -> Transmit[T]:
        """A frame without a body: where we stand."""
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
        for seq, (item, charge, kind) in enumerate(self._kept, self._base):
            if seq >= limit:
                break
            actions.append(Transmit(_pack(kind, lane, charge, incarnation, to, seq, expect, credit), item))

    def _fail(self, reason: str, limit: int, actions: list[Action[T]], charges: bool = True) -> None:
        """Numbers below `limit` will never be sent again; the peer is asked to skip them."""
        items = []
        while self._base < limit:
            item, charge, _ = self._kept.popleft()
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
        """What was to be named of the numbers below `limit`; it is held no more."""
        held = self._holds
        count = 0
        while count < len(held) and held[count][0] < limit:
            count += 1
        released = [item for _, item in held[:count]]
        del held[:count]
        return released

    def _give_up(self, reason: str, actions: list[Action[T]]) -> None:
        self._fail(reason, self._next, actions)
        self._forgiven = self._spent - self._granted  # nobody shall wait for credits that may never come
        self._unblock(actions)

    def _unblock(self, actions: list[Action[T]]) -> None:
        if self._wanted:
            self._wanted = False
            actions.append(Unblocked())

    def _take_ack(self, ack: int, credit: int, actions: list[Action[T]]) -> None:
        if self._base < ack <= self._next:
            for _ in range(ack - self._base):
                self._kept.popleft()
            self._base = ack
            released = self._release(ack)
            if released:
                actions.append(Acked(released))
        if credit > self._granted:
            self._granted = credit
            self._unblock(actions)
