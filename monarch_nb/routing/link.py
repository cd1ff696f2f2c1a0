"""One link to one peer on one lane: numbering, acknowledgement, resending and byte credits, without any I/O.

Not thread-safe: the transport calls a link under that link's own lock. `now` is any monotonic clock in seconds.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")

PREFIX = struct.Struct("<BBxxIQQQQQ")
"""kind u8, lane u8, charge u32 (KiB), epoch u64 (sender's), to u64 (receiver's epoch, 0 = not heard of yet),
seq u64 (DATA, CHUNK: own number; else: the lowest number still held), ack u64 (next number expected),
credit u64 (KiB consumed so far)."""
PREFIX_SIZE = PREFIX.size


class PrefixKind(IntEnum):
    """What a frame on a link is."""

    DATA = 0  # a numbered message
    CHUNK = 1  # a numbered piece of a large body: treated as DATA, told apart by the transport
    ACK = 2  # acknowledgement and credits only
    HELLO = 3  # the dialling side after each (re)connect; answered by RESUME
    RESUME = 4  # "this is where I stand, send what I lack"
    PROBE = 5  # "where do you stand?"; answered by STATE
    STATE = 6  # answer to PROBE, or a receiver that misses something


class LinkState(IntEnum):
    """Whether frames may be written now."""

    UP = 0
    RESUMING = 1  # connected again, the peer has not yet said what it lacks: sends are kept
    DOWN = 2  # no connection: sends are kept


@dataclass(frozen=True, slots=True)
class Transmit(Generic[T]):
    """Write these frames; `item` is None for frames without a body."""

    prefix: bytes
    item: T | None


@dataclass(frozen=True, slots=True)
class Deliver(Generic[T]):
    """Hand the item up; give `charge` back by `Link.consumed` once the application took it."""

    item: T
    charge: int


@dataclass(frozen=True, slots=True)
class Acked(Generic[T]):
    """The peer has these items, which were sent with hold=True: their resources may go."""

    items: Sequence[T]


@dataclass(frozen=True, slots=True)
class Failed(Generic[T]):
    """These items will never be sent again; whether the peer's old life saw them is unknown."""

    reason: str
    items: Sequence[T]


@dataclass(frozen=True, slots=True)
class Skipped:
    """The peer gave up on `count` of its frames from `first` on: drop half-assembled chunks."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class NewLife:
    """The peer is another one now (`epoch`): drop half-assembled chunks of the old one."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Unblocked:
    """Credits came back after `blocked` said yes: let waiting senders look again."""


Action = Transmit[T] | Deliver[T] | Acked[T] | Failed[T] | Skipped | NewLife | Unblocked


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Limits of a link: bytes and seconds."""

    window: int = 256 << 20  # bytes sent and not yet consumed by the peer's application
    ack_frames: int = 64
    ack_bytes: int = 1 << 20
    tick: float = 0.02  # how often the transport calls `tick` while the link is not idle
    probe_after: float = 1.0  # unacknowledged that long: ask
    probe_max: float = 10.0  # the longest pause between two unanswered questions
    gap_timeout: float = 30.0  # frames the peer says it lacks, resent in vain that long, fail
    down_timeout: float | None = 60.0  # without connection that long, everything kept fails; None: never
    buffered: int = 65536  # frames kept behind a gap


class Link(Generic[T]):
    """Both directions to one peer on one lane.

    `epoch` is this object's life: non-zero and larger for each later link between the same two addresses on a lane
    (time.time_ns() does). A dialling link starts UP: data may follow the first HELLO at once.
    """

    __slots__ = ("charge", "epoch", "lane", "peer_epoch", "state")

    epoch: int
    lane: int
    peer_epoch: int  # 0 until the peer was heard
    state: LinkState

    def __init__(self, epoch: int, *, lane: int = 0, dials: bool = False, config: LinkConfig | None = None) -> None:
        raise NotImplementedError

    # the fast path

    def send(self, item: T, size: int, exempt: bool = False, kind: int = 0, hold: bool = False) -> bytes | None:
        """Number and keep `item`; the prefix to write in front of it now, or None (kept, sent when resumed).

        `size` is in bytes. `exempt` costs no credits (replies; everything on lane 1). `kind` DATA or CHUNK.
        With `hold` an Acked action names the item later. Never blocks and never refuses: ask `blocked` before.
        """
        raise NotImplementedError

    def received(self, frame0: bytes | memoryview, item: T, size: int, now: float) -> "int | list[Action[T]]":
        """Take a frame (frame0 may go on after the prefix).

        An int >= 0: deliver `item` itself, nothing else to do; the int is the charge to give to `consumed` later.
        -1: nothing to do, forget the item (duplicate, acknowledgement; nothing else keeps it).
        A list: actions to carry out in order; a Deliver may name `item` or ones kept earlier. `item` may be kept inside.
        Whatever the item needs from the sender (memfd) must be opened before this call or in the same lock section:
        any later frame may acknowledge it.
        """
        raise NotImplementedError

    def blocked(self, size: int) -> bool:
        """Whether `size` more bytes do not fit the window; if True, an Unblocked action follows when credits come."""
        raise NotImplementedError

    def consumed(self, charge: int, epoch: int) -> bytes | None:
        """The application took a message: give `charge` back to the peer life `epoch` (link.peer_epoch at receipt).

        Returns a prefix to write at once (alone) or None: the credit goes with the next frame or tick.
        """
        raise NotImplementedError

    # rare events

    def connected(self, now: float) -> "list[Action[T]]":
        """The dialled connection is there, first or again (first: call it when dialling): says HELLO."""
        raise NotImplementedError

    def disconnected(self, now: float) -> "list[Action[T]]":
        """The connection is gone (monitor event, or EHOSTUNREACH on a ROUTER): keep frames until resumed."""
        raise NotImplementedError

    def tick(self, now: float) -> "list[Action[T]]":
        """Time passes: acknowledgements, questions, time limits. Call every config.tick seconds unless `idle`."""
        raise NotImplementedError

    def give_up(self, reason: str) -> "list[Action[T]]":
        """Fail everything kept (the peer died, the link closes); the link stays usable."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether `tick` has nothing to do until the next other event."""
        raise NotImplementedError

    @property
    def unacked(self) -> int:
        """Frames kept for resending."""
        raise NotImplementedError
