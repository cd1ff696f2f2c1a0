"""Prefixes of frames on a link, and the actions that a link requests from its transport."""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from monarch_nb.settings import settings

T = TypeVar("T")

PREFIX = struct.Struct("<BBxxIQQQQQ")
"""kind u8, lane u8, charge u32 (KiB), incarnation u64 (sender's), to u64 (receiver's, 0 = unknown yet),
seq u64 (DATA, CHUNK: own number; else: the lowest number still held), ack u64 (next number expected),
credit u64 (KiB consumed so far)."""
PREFIX_SIZE = PREFIX.size


class PrefixKind(IntEnum):
    """The kind of a frame on a link."""

    DATA = 0  # a numbered message
    CHUNK = 1  # a numbered piece of a large body: treated as DATA, distinguished by the transport
    ACK = 2  # acknowledgement and credits only
    HELLO = 3  # the dialling side after each (re)connect; answered by RESUME
    RESUME = 4  # states the own position and requests missing frames
    PROBE = 5  # requests the peer's position; answered by STATE
    STATE = 6  # reply to PROBE, or a report of missing frames


class LinkState(IntEnum):
    """The state of the connection of a link: only UP lets frames be written."""

    UP = 0
    RESUMING = 1  # reconnected, but the peer has not yet reported missing frames: sends are kept
    DOWN = 2  # no connection: sends are kept


class Transmit(msgspec.Struct, Generic[T], frozen=True):
    """Writes these frames; `item` is None for frames without a body."""

    prefix: bytes
    item: T | None


class Deliver(msgspec.Struct, Generic[T], frozen=True):
    """Delivers the item; `Link.consumed` gets `charge` once the application has taken it."""

    item: T
    charge: int


class Acked(msgspec.Struct, Generic[T], frozen=True):
    """The peer has these items, which were sent with hold=True: their resources may be released."""

    items: Sequence[T]


class Failed(msgspec.Struct, Generic[T], frozen=True):
    """These items will never be sent again; whether the peer's old incarnation saw them is unknown."""

    reason: str
    items: Sequence[T]


class Skipped(msgspec.Struct, frozen=True):
    """The peer has given up `count` of its frames from `first` on: half-assembled chunks are to be dropped."""

    first: int
    count: int


class NewIncarnation(msgspec.Struct, frozen=True):
    """The peer has a new `incarnation`: half-assembled chunks of the old one are to be dropped."""

    incarnation: int


class Unblocked(msgspec.Struct, frozen=True):
    """Credits have returned after `blocked` was True: waiting senders may check again."""


Action = Transmit[T] | Deliver[T] | Acked[T] | Failed[T] | Skipped | NewIncarnation | Unblocked


class LinkConfig(Struct, frozen=True):
    """Limits of a link: bytes and seconds."""

    # Bytes sent and not yet consumed by the peer's application.
    window: int = field(default_factory=lambda: settings.link_credit_window)
    ack_frames: int = 64
    ack_bytes: int = 1 << 20
    tick: float = 0.02  # how often the transport calls `tick` while the link is not idle
    probe_after: float = 1.0  # time without acknowledgement before a PROBE
    probe_max: float = 10.0  # the longest pause between two unanswered PROBEs
    # Frames that the peer lacks and that were resent in vain for so long fail.
    gap_timeout: float = field(default_factory=lambda: settings.message_delivery_timeout)
    # After so long without a connection everything kept fails; None: never.
    down_timeout: float | None = field(default_factory=lambda: settings.link_down_timeout)
    buffered: int = 65536  # frames kept behind a gap
