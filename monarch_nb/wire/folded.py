"""Several replies in one message: how a host agent folds them, and how the caller opens them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from monarch_nb.wire.header import Header, Kind
from monarch_nb.wire.plain import decode_plain


class _Part(msgspec.Struct, array_like=True):
    index: int
    status: int
    src: str
    log: int
    frames: int


_decoder = msgspec.msgpack.Decoder(list[_Part])


def fold(replies: Iterable[tuple[Header, Sequence[Any]]]) -> list[Any]:
    """The body of a FOLDED message that holds these replies."""
    parts: list[_Part] = []
    frames: list[Any] = []
    for header, body in replies:
        parts.append(_Part(header.index, header.status, header.src, header.log, len(body)))
        frames.extend(body)
    return [msgspec.msgpack.encode(parts), *frames]


def unfold(header: Header, frames: Sequence[Any]) -> list[tuple[Header, list[Any]]]:
    """The replies in a FOLDED message. Raises msgspec.DecodeError on anything else."""
    replies = []
    at = 1
    parts = decode_plain(frames[0], _decoder) if frames else []
    if any(part.frames < 0 for part in parts) or sum(part.frames for part in parts) != len(frames) - 1:
        raise msgspec.ValidationError("other frames than the replies name")
    for part in parts:
        reply = Header(
            Kind.REPLY,
            header.dst,
            part.src,
            port=header.port,
            index=part.index,
            status=part.status,
            call=header.call,
            log=part.log,
        )
        replies.append((reply, list(frames[at : at + part.frames])))
        at += part.frames
    return replies
