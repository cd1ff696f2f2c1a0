"""Displays of ranks: a bundle of forms by MIME type, as in notebooks, in one line of bytes."""

import msgspec

from monarch_nb.wire.plain import json_decoder

NOW, LATER = 1, 2  # what a display clears: what was displayed before at once, or once the next one is there


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
        """Returns its lines for logs, each with its end; none for a display that only replaces another."""
        return f"{self.text}\n" if self.text and not self.update else ""

    @property
    def size(self) -> int:
        """Bytes of its forms, about."""
        return sum(size_of(form) for form in self.data.values())


def size_of(form: object) -> int:
    """Bytes of one form, about."""
    return len(form) if isinstance(form, str) else len(_encoder.encode(form))


def encode_display(display: Display) -> bytes:
    """One line with its end, and no control character in it. Raises what cannot be encoded."""
    return _encoder.encode(display) + b"\n"


def decode_display(line: bytes) -> Display | None:
    """Decodes a line of `encode_display`; None for anything else, such as a truncated line."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = json_decoder(Display)
