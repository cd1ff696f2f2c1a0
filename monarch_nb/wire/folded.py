"""Several replies in one message, folded by a host agent and unfolded by the caller.

Small replies that are equal, byte for byte, are in it once, however many ranks have sent them: the cost of a cast of a
large mesh for its caller grows with the number of different replies, not of ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from monarch_nb.wire.body import InFrame, in_memory
from monarch_nb.wire.header import Header, Kind, Status
from monarch_nb.wire.plain import decode_plain, msgpack_decoder

F = TypeVar("F", bound=InFrame, covariant=True)
_SAME = 1024  # bytes up to which replies are compared
_MOST = 1 << 24  # ranks


class _Part(msgspec.Struct, array_like=True):
    places: list[tuple[int, int]]  # first index and length of each stretch
    status: int
    frames: int
    logs: list[tuple[str, int]]  # the position of the output of each process with any


class Folded(NamedTuple, Generic[F]):
    """One reply of all ranks at these indices."""

    places: Sequence[range]
    header: Header  # of the first reply
    frames: Sequence[F]
    logs: tuple[tuple[str, int], ...]  # the position of the output of each process with any

    @classmethod
    def of(cls, reply: Header, frames: Sequence[F]) -> "Folded[F]":
        """Returns the reply of one rank."""
        logs = ((reply.src, reply.log),) if reply.log else ()
        return cls((range(reply.index, reply.index + 1),), reply, frames, logs)


def fold(replies: Iterable[Folded[F]]) -> list[bytes | F]:
    """Returns the body of a FOLDED message that contains these replies."""
    parts: list[_Part] = []
    spans: list[list[range]] = []
    frames: list[F] = []
    alike: dict[tuple[int, bytes], int] = {}
    for indices, header, body, logs in replies:
        key = _key(header, body)
        index = None if key is None else alike.get(key)
        if index is not None:
            spans[index].extend(indices)
            parts[index].logs.extend(logs)
            continue
        if key is not None:
            alike[key] = len(parts)
        parts.append(_Part([], header.status, len(body), list(logs)))
        spans.append(list(indices))
        frames.extend(body)
    for part, ranges in zip(parts, spans, strict=True):
        part.places = [(span.start, len(span)) for span in _joined(ranges)]
    return [msgspec.msgpack.encode(parts), *frames]


def _key(header: Header, body: Sequence[InFrame]) -> tuple[int, bytes] | None:
    """Returns the key that equal replies share; None for a reply that is not folded.

    A reply with memory of its own beside its pickle would share that with the others.
    """
    if len(body) != 1 or header.status == Status.FAILURE or (first := memoryview(in_memory(body[0]))).nbytes > _SAME:
        return None
    return header.status, bytes(first)


def _joined(spans: list[range]) -> Iterator[range]:
    spans.sort(key=lambda span: span.start)
    start, stop = spans[0].start, spans[0].stop
    for span in spans[1:]:
        if span.start != stop:
            yield range(start, stop)
            start = span.start
        stop = span.stop
    yield range(start, stop)


_decoder = msgpack_decoder(list[_Part])


def unfold(header: Header, frames: Sequence[F]) -> list[Folded[F]]:
    """Returns the replies in a FOLDED message. Raises msgspec.DecodeError on any other message."""
    replies: list[Folded[F]] = []
    position = 1
    parts = decode_plain(in_memory(frames[0]), _decoder) if frames else []
    if any(part.frames < 0 for part in parts) or sum(part.frames for part in parts) != len(frames) - 1:
        raise msgspec.ValidationError("other frames than the replies name")
    for part in parts:
        counts = [count for _, count in part.places]
        if min(counts, default=0) < 1 or sum(counts) > _MOST or min(part.places)[0] < 0:
            raise msgspec.ValidationError("a reply without a place, or of more ranks than there can be")
        indices = [range(first, first + count) for first, count in part.places]
        logs = tuple(part.logs)
        src, log = logs[0] if logs else (header.src, 0)
        reply = Header(
            Kind.REPLY,
            header.dst,
            src,
            port=header.port,
            index=indices[0].start,
            status=part.status,
            call=header.call,
            log=log,
        )
        replies.append(Folded(indices, reply, list(frames[position : position + part.frames]), logs))
        position += part.frames
    return replies


def unfold_each(header: Header, frames: Sequence[F]) -> Iterator[tuple[Header, list[F]]]:
    """Yields the replies one by one. Raises msgspec.DecodeError on any other message, before the first."""
    for folded in unfold(header, frames):
        for index in (index for span in folded.places for index in span):
            yield msgspec.structs.replace(folded.header, index=index), list(folded.frames)
