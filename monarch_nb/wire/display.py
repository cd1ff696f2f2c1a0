"""Displays of ranks: a bundle of forms by MIME type, as in notebooks, in one line of bytes."""

import msgspec

from monarch_nb.wire.plain import json_decoder

NOW, LATER = 1, 2  # when a display clears earlier ones: at once, or when the next one arrives


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


_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = json_decoder(Display)
