"""Messages between engines: their definition (name, request, reply and lane), and their handlers in a process."""

import logging
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Generic, TypeVar, overload

import msgspec

from monarch_nb.wire.address import with_host_names
from monarch_nb.wire.body import Frame
from monarch_nb.wire.header import Header, Status
from monarch_nb.wire.plain import decode_plain, msgpack_decoder
from monarch_nb.wire.texts import text_of

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", covariant=True)
A = TypeVar("A")

logger = logging.getLogger(__name__)

REPLY = "reply"  # the method of the CONTROL message that answers a request, at the port it named
_encoder = msgspec.msgpack.Encoder()


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


_refusals = msgpack_decoder(Refused)


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


Answer = Callable[[Header, Status, msgspec.Struct, Lane], None]  # sends the reply to a request


class VerbTakenError(ValueError):
    """A verb has a handler in this process already."""


class Asker(Generic[A]):
    """The sender of a request, which is answered from any thread: now or later, once or not at all."""

    __slots__ = ("_answer", "header", "lane")

    def __init__(self, header: Header, answer: Answer) -> None:
        self.header = header
        self.lane = Lane.URGENT  # of the reply: that of the verb
        self._answer = answer

    @property
    def src(self) -> str:
        """The address of the process that asks."""
        return self.header.src

    @property
    def waits(self) -> bool:
        """True if an answer is awaited."""
        return self.header.port != 0

    def reply(self, reply: A) -> None:
        """Answers the request, if an answer is awaited."""
        if self.header.port and isinstance(reply, msgspec.Struct):
            self._answer(self.header, Status.VALUE, reply, self.lane)

    def refuse(self, reason: str) -> None:
        """Reports why the request is not carried out, if an answer is awaited."""
        if self.header.port:
            self._answer(self.header, Status.EXCEPTION, Refused(reason), self.lane)


Handler = Callable[[Q, Asker[A]], A | None]
_Handled = tuple[Verb[Any, Any], Handler[Any, Any]]


class Handlers:
    """The verbs that one process handles. `owner` is its name in refusals: "host agents", "processes"."""

    def __init__(self, owner: str, answer: Answer) -> None:
        self._owner = owner
        self._answer = answer
        self._handlers: dict[str, _Handled] = {}
        self.closed = False  # further errors result from leaving, and are not logged

    def handle(self, verb: Verb[Q, A], function: Handler[Q, A]) -> None:
        """Handles a verb by `function(request, asker)`, which is called on the reading thread and must not block.

        Its result is the reply; with None the request has been, or will be, answered by `asker.reply`.
        Raises VerbTakenError if the verb has a handler.
        """
        entry = (verb, function)
        if self._handlers.setdefault(verb.name, entry) is not entry:
            raise VerbTakenError(
                f"{verb.name} has a handler already, {self._handlers[verb.name][1]!r}: release it first"
            )

    def release(self, verb: Verb[Q, A]) -> None:
        """Removes the handler of a verb."""
        self._handlers.pop(verb.name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._handlers

    def take(self, header: Header, body: Frame) -> None:
        """Passes one message to its handler. Raises nothing: errors are logged, and sent to the requester."""
        asker: Asker[object] = Asker(header, self._answer)
        try:
            entry = self._handlers.get(header.method)
            if entry is None:
                asker.refuse(f"{self._owner} know no {header.method!r}")
                return
            verb, function = entry
            asker.lane = verb.lane
            reply = function(verb.decode(body), asker)
            if reply is not None:
                asker.reply(reply)
        except Exception as error:
            self._failed(header, asker, error)

    def _failed(self, header: Header, asker: Asker[object], error: Exception) -> None:
        if self.closed:
            return
        if isinstance(error, MalformedMessageError):
            logger.warning("a message from %s was not understood: %s", header.src, error)
        else:
            logger.error("%s from %s", header.method, header.src, exc_info=error)
        try:
            asker.refuse(f"{type(error).__name__}: {text_of(error)}")
        except Exception:
            logger.debug("no reply could be sent to %s", header.src, exc_info=True)
