"""Headers of messages that say of another one that it will not be delivered."""

import msgspec

from monarch_nb.wire.header import Header, Kind

__all__ = ["missed", "returned"]


def returned(header: Header, by: str) -> Header:
    """The header of an undeliverable message on its way back; `status` is what kind it was, the body says why."""
    return msgspec.structs.replace(
        header, kind=int(Kind.RETURNED), dst=header.src, src=by, status=int(header.kind), buffers=()
    )


def missed(reply: Header, by: str) -> Header:
    """What tells the one who waits for a reply, rather than its sender, that it will never come."""
    return Header(
        int(Kind.RETURNED), reply.dst, by, port=reply.port, index=reply.index, status=int(Kind.CALL), call=reply.call
    )
