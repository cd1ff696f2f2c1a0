"""Plain data in bytes: msgpack and JSON of types that are known, never a pickle.

Whoever decodes structs makes the decoder here. msgspec (0.22) notes that it knows a struct before it has looked at the
fields, for the sake of structs that hold themselves. A second thread that meets the struct in that moment reads what is
not there yet, and the process ends with SIGSEGV. So one thread at a time gets to know structs.
"""

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_knowing = threading.RLock()  # a signal handler may decode, too


def _begin_anew() -> None:
    global _knowing
    _knowing = threading.RLock()  # the thread that had it may not be in the fork


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
    """Dicts, lists and the like as a type. Raises msgspec.ValidationError."""
    with _knowing:
        return msgspec.convert(value, kind)


def decode_plain(data: bytes | bytearray | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decodes bytes. Raises msgspec.DecodeError, of which ValidationError is one, on anything else."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:  # which msgspec lets through
        raise msgspec.DecodeError(str(error)) from None
