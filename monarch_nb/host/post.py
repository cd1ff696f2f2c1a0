"""How the agent speaks: CONTROL messages with msgspec bodies, on the urgent lane unless said otherwise."""

import logging
from collections.abc import Iterable
from typing import Protocol

import msgspec

from monarch_nb.host.protocol import Refused, encode
from monarch_nb.transport import Parcel
from monarch_nb.wire.header import Header, Kind, Status

log = logging.getLogger(__name__)

DATA = 0
URGENT = 1


class Sender(Protocol):
    """The part of a Node that the agent speaks through."""

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        """Send a message."""


class Post:
    """Sends for one process; a message that cannot be sent is logged, for there is nobody else to tell."""

    def __init__(self, node: Sender, address: str) -> None:
        self._node = node
        self.address = address

    def tell(self, dst: str, method: str, body: msgspec.Struct, *, port: int = 0, lane: int = URGENT) -> bool:
        """Send one message; says whether it went out. Only the data lane may block."""
        header = Header(kind=Kind.CONTROL, dst=dst, src=self.address, method=method, port=port)
        return self.send(header, body, lane=lane)

    def tell_all(self, addresses: Iterable[str], method: str, body: msgspec.Struct) -> None:
        """Send one message to each."""
        for dst in sorted(addresses):
            self.tell(dst, method, body)

    def answer(self, request: Header, body: msgspec.Struct) -> None:
        """Reply to a request, if it wants one."""
        if request.port:
            status = Status.EXCEPTION if isinstance(body, Refused) else Status.VALUE
            self.send(Header(kind=Kind.CONTROL, dst=request.src, src=self.address, method="reply", port=request.port,
                             index=request.index, status=status, call=request.call), body)  # fmt: skip

    def send(self, header: Header, body: msgspec.Struct, *, lane: int = URGENT) -> bool:
        """Send a message under a header of one's own."""
        try:
            self._node.send(header, Parcel([encode(body)]), lane=lane)
        except Exception as error:
            log.warning("%s to %s was not sent: %s", header.method, header.dst, error)
            return False
        return True
