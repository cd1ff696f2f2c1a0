"""Messages that say of another one that it will not be delivered, and why."""

import msgspec

from monarch_nb.transport.parcel import Parcel
from monarch_nb.wire import msgpack_decoder
from monarch_nb.wire.header import Header, Kind
from monarch_nb.wire.plain import decode_plain

__all__ = ["missed", "reason_of", "reason_parcel", "returned"]

_reasons = msgpack_decoder(tuple[str])


def reason_parcel(reason: str) -> Parcel:
    """The body of a message that comes back."""
    return Parcel([msgspec.msgpack.encode((reason,))])


def reason_of(parcel: Parcel) -> str:
    """Why a message has come back; a short text where its body does not say."""
    try:
        return decode_plain(parcel.frames[0], _reasons)[0]
    except (IndexError, msgspec.DecodeError):
        return "it was returned"


def returned(header: Header, by: str) -> Header:
    """The header of an undeliverable message on its way back; `status` is what kind it was, the body says why."""
    return msgspec.structs.replace(
        header, kind=int(Kind.RETURNED), dst=header.src, src=by, status=int(header.kind), buffers=()
    )


def missed(reply: Header, by: str) -> Header:
    """The header that reports a lost reply to who waits for it, rather than to its sender."""
    return Header(
        int(Kind.RETURNED), reply.dst, by, port=reply.port, index=reply.index, status=int(Kind.CALL), call=reply.call
    )
