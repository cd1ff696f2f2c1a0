"""Prefixes of frames on a link, and the actions that a link asks of its transport."""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from monarch_nb.settings import settings

T = TypeVar("T")

PREFIX = struct.Struct("<BBxxIQQQQQ")
"""kind u8, lane u8, charge u32 (KiB), incarnation u64 (sender's), to u64 (receiver's, 0 = not known yet),
seq u64 (DATA, CHUNK: own number; else: the lowest number still held), ack u64 (next number expected),
credit u64 (KiB consumed so far)."""
PREFIX_SIZE = PREFIX.size


class PrefixKind(IntEnum):
    """The kind of a frame on a link."""

    DATA = 0  # a numbered message
    CHUNK = 1  # a numbered piece of a large body: treated as DATA, distinguished by the transport
    ACK = 2  # acknowledgement and credits only
    HELLO = 3  # the dialling side after each (re)connect; answered by RESUME
    RESUME = 4  # "this is where I stand, send what I lack"
    PROBE = 5  # "where do you stand?"; answered by STATE
    STATE = 6  # answer to PROBE, or a receiver that misses something


class LinkState(IntEnum):
    """Returns whether frames may be written now."""

    UP = 0
    RESUMING = 1  # connected again, the peer has not yet said what it lacks: sends are kept
    DOWN = 2  # no connection: sends are kept


class Transmit(msgspec.Struct, Generic[T], frozen=True):
    """Write these frames; `item` is None for frames without a body."""

    prefix: bytes
    item: T | None


class Deliver(msgspec.Struct, Generic[T], frozen=True):
    """Hand the item up; give `charge` back by `Link.consumed` once the application took it."""

    item: T
    charge: int


class Acked(msgspec.Struct, Generic[T], frozen=True):
    """The peer has these items, which were sent with hold=True: their resources may go."""

    items: Sequence[T]


class Failed(msgspec.Struct, Generic[T], frozen=True):
    """These items will never be sent again; whether the peer's old incarnation saw them is unknown."""

    reason: str
    items: Sequence[T]


class Skipped(msgspec.Struct, frozen=True):
    """The peer gave up on `count` of its frames from `first` on: drop half-assembled chunks."""

    first: int
    count: int


class NewIncarnation(msgspec.Struct, frozen=True):
    """The peer is another one now (`incarnation`): drop half-assembled chunks of the old one."""

    incarnation: int


class Unblocked(msgspec.Struct, frozen=True):
    """Credits came back after `blocked` said yes: let waiting senders look again."""


Action = Transmit[T] | Deliver[T] | Acked[T] | Failed[T] | Skipped | NewIncarnation | Unblocked


class LinkConfig(Struct, frozen=True):
    """Limits of a link: bytes and seconds."""

    # Bytes sent and not yet consumed by the peer's application.
    window: int = field(default_factory=lambda: settings.link_credit_window)
    ack_frames: int = 64
    ack_bytes: int = 1 << 20
    tick: float = 0.02  # how often the transport calls `tick` while the link is not idle
    probe_after: float = 1.0  # unacknowledged that long: ask
    probe_max: float = 10.0  # the longest pause between two unanswered questions
    # Frames the peer says it lacks, resent in vain that long, fail.
    gap_timeout: float = field(default_factory=lambda: settings.message_delivery_timeout)
    # Without connection that long, everything kept fails; None: never.
    down_timeout: float | None = field(default_factory=lambda: settings.link_down_timeout)
    buffered: int = 65536  # frames kept behind a gap
