"""The definition of an engine message: its name, request, reply and lane."""

from enum import IntEnum
from typing import Generic, TypeVar, overload

import msgspec

from monarch_nb.wire.body import Frame
from monarch_nb.wire.hosts import with_host_names
from monarch_nb.wire.plain import decode_plain, msgpack_decoder

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", covariant=True)

REPLY = "reply"  # the method of the CONTROL message that answers a request, at the port it named


class Lane(IntEnum):
    """The queue of a link that a message takes."""

    DATA = 0  # in order with calls; its sender waits while the receiver has no room
    URGENT = 1  # overtakes data, and never waits


class MalformedMessageError(ValueError):
    """The body of an engine message does not match its verb."""


class Done(msgspec.Struct, frozen=True):
    """The body of requests and replies without content."""


class Refused(msgspec.Struct, frozen=True):
    """The body of a reply with status EXCEPTION: why a request was not carried out."""

    error: str


_encoder = msgspec.msgpack.Encoder()


class Verb(Generic[Q, R]):
    """One message between engines. `request` is the struct of its body, `reply` that of the answer, or None.

    Constants of this class are in the `verbs` module of the package that owns the messages.
    """

    __slots__ = ("_replies", "_requests", "doc", "lane", "name", "reply", "request")

    @overload
    def __init__(self: "Verb[Q, None]", name: str, request: type[Q], *, doc: str, lane: Lane = ...) -> None: ...
    @overload
    def __init__(self, name: str, request: type[Q], reply: type[R], *, doc: str, lane: Lane = ...) -> None: ...
    def __init__(
        self, name: str, request: type[Q], reply: type[R] | None = None, *, doc: str, lane: Lane = Lane.URGENT
    ) -> None:
        self.name = name
        self.request = request
        self.reply = reply
        self.doc = doc  # its meaning, for the table in docs/protocol.md
        self.lane = lane
        self._requests: msgspec.msgpack.Decoder[Q] | None = None  # created at first use
        self._replies: msgspec.msgpack.Decoder[R] | None = None

    def __repr__(self) -> str:
        return f"<verb {self.name}>"

    def decode(self, body: Frame) -> Q:
        """Returns the request in a body. Raises MalformedMessageError."""
        decoder = self._requests
        if decoder is None:
            decoder = self._requests = msgpack_decoder(self.request)
        try:
            return decode_plain(body, decoder)
        except msgspec.DecodeError as error:
            raise MalformedMessageError(f"this is no {self.request.__name__} of {self.name}: {error}") from None

    def decode_reply(self, body: Frame) -> R:
        """Returns the reply in a body. Raises MalformedMessageError, and TypeError for a verb without an answer."""
        decoder = self._replies
        if decoder is None:
            if self.reply is None:
                raise TypeError(f"{self.name} is not answered")
            decoder = self._replies = msgpack_decoder(self.reply)
        try:
            return decode_plain(body, decoder)
        except msgspec.DecodeError as error:
            raise MalformedMessageError(f"this does not answer {self.name}: {error}") from None


def encode_body(body: msgspec.Struct) -> bytes:
    """Returns a request or a reply as the bytes of its frame."""
    return _encoder.encode(body)


def decode_refusal(body: Frame) -> str:
    """Returns why a request was refused."""
    try:
        return with_host_names(decode_plain(body, _refusals).error)
    except msgspec.DecodeError as error:
        return f"it was refused, and the reason cannot be read: {error}"


_refusals = msgpack_decoder(Refused)
