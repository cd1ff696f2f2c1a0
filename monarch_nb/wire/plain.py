"""Plain data in bytes: msgpack and JSON of known types, never a pickle.

All decoders of structs are created here. msgspec (0.22) marks a struct as known before it has read the fields, to
support structs that contain themselves. A second thread that meets the struct in that moment reads missing data, and
the process ends with SIGSEGV. So one thread at a time makes structs known.
"""

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_knowing = threading.RLock()  # a signal handler may decode, too


def _begin_anew() -> None:
    global _knowing
    _knowing = threading.RLock()  # the thread that held it may not be in the fork


os.register_at_fork(after_in_child=_begin_anew)


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Returns a decoder of msgpack for a type; any thread may make and use one."""
    with _knowing:
        return msgspec.msgpack.Decoder(kind)


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Returns a decoder of JSON for a type; any thread may make and use one."""
    with _knowing:
        return msgspec.json.Decoder(kind)


def converted(value: object, kind: type[T]) -> T:
    """Converts dicts, lists and the like to a type. Raises msgspec.ValidationError."""
    with _knowing:
        return msgspec.convert(value, kind)


def decode_plain(data: bytes | bytearray | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decodes bytes. Raises msgspec.DecodeError, or its subclass ValidationError, on other bytes."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:  # not caught by msgspec
        raise msgspec.DecodeError(str(error)) from None
