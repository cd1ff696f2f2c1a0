"""Sending engine messages of an agent, and replies to requests."""

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from monarch_nb.transport import Parcel
from monarch_nb.wire import REPLY, Lane, MalformedMessageError, Verb, encode_body
from monarch_nb.wire.header import Header, Kind, Status

log = logging.getLogger(__name__)
Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


class SendingNode(Protocol):
    """The part of a Node that an agent sends through."""

    def send(self, header: Header, parcel: Parcel, *, lane: Lane = Lane.DATA) -> None:
        """Sends a message."""


class AgentSender:
    """Sends for one process; a message that cannot be sent is logged."""

    def __init__(self, node: SendingNode, address: str) -> None:
        self._node = node
        self.address = address
        self._ports = itertools.count(1)
        self._requests: dict[int, tuple[Verb[Any, Any], Callable[[Any], None]]] = {}

    def post(self, dst: str, verb: Verb[Q, object], request: Q, *, port: int = 0) -> bool:
        """Sends one message; returns whether it was sent. Does not block."""
        header = Header(kind=Kind.CONTROL, dst=dst, src=self.address, method=verb.name, port=port)
        return self._send(header, request, verb.lane)

    def post_all(self, addresses: Iterable[str], verb: Verb[Q, object], request: Q) -> None:
        """Sends one message to each."""
        for dst in sorted(addresses):
            self.post(dst, verb, request)

    def request(self, dst: str, verb: Verb[Q, R], request: Q, on_reply: Callable[[R], None]) -> None:
        """Sends a request; `on_reply` takes the reply, if one arrives."""
        port = next(self._ports)
        self._requests[port] = (verb, on_reply)
        if not self.post(dst, verb, request, port=port):
            self._requests.pop(port, None)

    def replied(self, header: Header, body: bytes | memoryview) -> None:
        """Handles the reply to a request; ignores others. On the thread that reads."""
        verb, on_reply = self._requests.pop(header.port, (None, None))
        if verb is None or on_reply is None or header.status != Status.VALUE:
            return
        try:
            reply = verb.decode_reply(body)
        except MalformedMessageError as error:
            log.warning("the reply to %s from %s was not understood: %s", verb.name, header.src, error)
            return
        on_reply(reply)

    def answer(self, request: Header, status: Status, body: msgspec.Struct, lane: Lane) -> None:
        """Replies to a request, if it has a port."""
        if request.port:
            header = Header(kind=Kind.CONTROL, dst=request.src, src=self.address, method=REPLY, port=request.port,
                            index=request.index, status=status, call=request.call)  # fmt: skip
            self._send(header, body, lane)

    def _send(self, header: Header, body: msgspec.Struct, lane: Lane) -> bool:
        try:
            self._node.send(header, Parcel([encode_body(body)]), lane=lane)
        except Exception as error:
            log.warning("%s to %s was not sent: %s", header.method, header.dst, error)
            return False
        return True
