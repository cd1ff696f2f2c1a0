"""Plain data in bytes: msgpack of a type that is known, never a pickle."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_plain(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """What a decoder makes of bytes. Raises msgspec.DecodeError, of which ValidationError is one, on anything else."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:  # which msgspec lets through
        raise msgspec.DecodeError(str(error)) from None
