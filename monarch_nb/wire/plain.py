"""Plain data in bytes: msgpack and JSON of known types, never a pickle; and displays of ranks, in one line of JSON.

All decoders of structs are created here. msgspec (0.22) marks a struct as known before it has read the fields, to
support structs that contain themselves. A second thread that meets the struct in that moment reads missing data, and
the process ends with SIGSEGV. So one thread at a time makes structs known.
"""

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

NOW, LATER = 1, 2  # when a display clears earlier ones: at once, or when the next one arrives
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


class Display(msgspec.Struct, eq=False, omit_defaults=True):
    """Something displayed. `data` and `metadata` are by MIME type, images in base64; `text` stands for it elsewhere.

    With an `id` it can be replaced by another one that has `update` set. One with `clear` shows nothing.
    """

    text: str = ""
    data: dict[str, object] = {}
    metadata: dict[str, object] = {}
    id: str = ""
    update: bool = False
    clear: int = 0

    @property
    def lines(self) -> str:
        """Its lines for logs, each with its end; none for a display that only replaces another."""
        return f"{self.text}\n" if self.text and not self.update else ""

    @property
    def size(self) -> int:
        """The bytes of its forms, approximately."""
        return sum(size_of(form) for form in self.data.values())


_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = json_decoder(Display)


def size_of(form: object) -> int:
    """Returns the bytes of one form, approximately."""
    return len(form) if isinstance(form, str) else len(_encoder.encode(form))


def encode_display(display: Display) -> bytes:
    """Returns one line with its end, without other control characters. Raises errors of the encoding."""
    return _encoder.encode(display) + b"\n"


def decode_display(line: bytes) -> Display | None:
    """Decodes a line of `encode_display`; None for any other line, such as a truncated one."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
