"""Displays of several ranks at one place of a cell: equal ones once, others side by side."""

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from monarch_nb.logs import Source, prefix
from monarch_nb.wire import Display

from ..display.rich import can_stand_beside, part_of, side_by_side
from ..front import Bundle

MOST_COLUMNS = 16  # different displays in a row
BESIDE_BYTES = 8 << 20
_NOTHING: Bundle = {"text/plain": "", "text/html": ""}


class RankDisplay:
    """A display of one rank."""

    def __init__(self, address: str, source: Source, display: Display, merges: bool) -> None:
        self.address = address
        self.source = source
        self._salt = "" if merges else address
        self.put(display)

    def put(self, display: Display) -> None:
        """Replaces the display."""
        self.display = display
        self.size = display.size
        self.digest = _digest(display, self._salt)


class DisplayRow:
    """Displays at one place of a cell."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.id = f"monarch-{secrets.token_hex(8)}"
        self.changed = True
        self.sent: float | None = None  # when, monotonic
        self.sent_fingerprint: object = None
        self._groups: dict[bytes, list[RankDisplay]] = {}  # by digest

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def size(self) -> int:
        """Bytes of its different displays."""
        return sum(group[0].size for group in self._groups.values())

    def put(self, member: RankDisplay) -> None:
        """Adds a display."""
        self._groups.setdefault(member.digest, []).append(member)
        self.changed = True

    def drop(self, matches: Callable[[RankDisplay], bool]) -> None:
        """Removes displays."""
        for digest, group in tuple(self._groups.items()):
            remaining = [member for member in group if not matches(member)]
            if len(remaining) < len(group):
                self.changed = True
                self._groups[digest] = remaining
                if not remaining:
                    del self._groups[digest]

    def has(self, digest: bytes) -> bool:
        """Returns whether an equal display is in the row."""
        return digest in self._groups

    def has_room(self, member: RankDisplay) -> bool:
        """Returns whether the row has room for a display."""
        if not self._groups or self.has(member.digest):
            return True
        if len(self) >= MOST_COLUMNS or self.size + member.size > BESIDE_BYTES:
            return False
        beside = (group[0].display.data for group in self._groups.values())
        return can_stand_beside(member.display.data) and all(map(can_stand_beside, beside))

    def heading(self, named: bool) -> Bundle:
        """Returns the heading of the row."""
        if not self._groups:
            return _NOTHING
        label = prefix([member.source for group in self._groups.values() for member in group], named=named).strip()
        return {"text/plain": label if len(self) == 1 else f"{label} {len(self)} different displays"}

    def fingerprint(self, named: bool) -> object:
        """Returns a value that changes whenever `body` does."""
        if len(self) < 2:
            return tuple(self._groups)
        return {
            digest: prefix([member.source for member in group], named=named) for digest, group in self._groups.items()
        }

    def body(self, named: bool) -> tuple[Bundle, dict[str, object]]:
        """Returns the row as a bundle, and metadata of its forms."""
        if not self._groups:
            return _NOTHING, {}
        groups = sorted(self._groups.values(), key=lambda group: min(member.source.point for member in group))
        shown = [group[0].display for group in groups]
        if len(groups) == 1:
            return {"text/plain": shown[0].text, **shown[0].data}, shown[0].metadata
        captions = [prefix([member.source for member in group], named=named).strip(" []") for group in groups]
        parts = [
            (caption, part_of(display.data, display.metadata, caption))
            for caption, display in zip(captions, shown, strict=True)
        ]
        text = "\n".join(f"[{caption}] {display.text}" for caption, display in zip(captions, shown, strict=True))
        return {"text/plain": text, "text/html": side_by_side(parts, indented=True)}, {}


def _digest(display: Display, salt: str) -> bytes:
    """Equal for displays that look the same."""
    data = display.data
    rich = {kind: data[kind] for kind in sorted(data) if kind != "text/plain"} or data
    # HTML that draws data has a name of its own each time it is made.
    rich = {kind: form for kind, form in rich.items() if kind.startswith("application/vnd.")} or rich
    return hashlib.blake2b(repr((rich, display.metadata, salt)).encode("utf-8", "replace"), digest_size=16).digest()
