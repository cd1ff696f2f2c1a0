"""Displays of ranks in the cell that caused them: equal displays once with their ranks, others side by side.

The first display of each rank in a call makes the first row, the second one the second, and so on. A row is replaced in
place when it grows. The size of all rows of a cell is limited.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb.logs import Line, Source, prefix
from monarch_nb.wire import Display
from monarch_nb.wire.plain import LATER

from ..display.values import can_stand_beside, part_of, side_by_side
from ..front import Bundle, Front

MOST_COLUMNS = 16  # different displays in a row
BESIDE_BYTES = 8 << 20
_NOTHING: Bundle = {"text/plain": "", "text/html": ""}
MOST = 64  # different displays in a cell
MOST_BYTES = 24 << 20  # of them
MOST_CALLS = 64  # calls whose displays can still be replaced,
KEPT_BYTES = 2 * MOST_BYTES  # and how much they may be
AGAIN_SECONDS = 0.25  # a row that changes fast is sent so often


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


class _Call:
    """The rows of one call on one mesh."""

    def __init__(self) -> None:
        self.rows: list[DisplayRow] = []
        self.clearing: set[str] = set()  # ranks whose next display replaces all of theirs
        self._last: dict[str, int] = {}  # by address, the row of its latest display
        self._times: dict[tuple[str, bytes], int] = {}  # how often a rank has shown an equal display
        self._places: dict[tuple[bytes, int], DisplayRow] = {}  # by digest and number of equal displays

    def clear(self, address: str) -> None:
        """Removes the displays of a rank."""
        self.clearing.discard(address)
        self._last.pop(address, None)
        self._times = {key: count for key, count in self._times.items() if key[0] != address}
        for row in self.rows:
            row.drop(lambda member: member.address == address)

    def place(self, member: RankDisplay, new: Callable[[], DisplayRow | None]) -> DisplayRow | None:
        """Adds a display to its row, and returns that row; None if there is no room."""
        if member.address in self.clearing:
            self.clear(member.address)
        key = member.address, member.digest
        nth = self._times[key] = self._times.get(key, -1) + 1
        row = self._places.get((member.digest, nth))
        if row is None or not row.has(member.digest):
            after = self._last.get(member.address, -1) + 1
            row = next((row for row in self.rows[after:] if row.has_room(member)), None)
            if row is None:
                row = new()
                if row is None:
                    return None
                self.rows.append(row)
            self._places[member.digest, nth] = row
        self._last[member.address] = max(self._last.get(member.address, -1), self.rows.index(row))
        row.put(member)
        return row


class _LeftOut:
    """Displays for which a cell has no room."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.id = f"monarch-{secrets.token_hex(8)}"
        self.count = 0
        self.sources: dict[Source, None] = {}
        self.changed = False
        self.sent: float | None = None  # when, monotonic


class DisplayRows:
    """All rows of a kernel. One thread at a time."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._calls: OrderedDict[tuple[int, str, str], _Call] = OrderedDict()
        self._by_id: dict[tuple[str, str], tuple[DisplayRow, RankDisplay]] = {}  # by address and display id
        self._left_out: dict[tuple[int, str], _LeftOut] = {}

    def take(self, cell: object, line: Line, source: Source, *, merges: bool = True) -> DisplayRow | None:
        """Adds a display of a rank; returns its row if that is new and has to be shown now.

        Equal displays of several ranks meet if `merges`.
        """
        display = line.display
        assert display is not None
        call = self._call(cell, source, line.call)
        if display.clear:
            if display.clear == LATER:
                call.clearing.add(line.address)
            else:
                call.clear(line.address)
            return None
        replaced = self._by_id.get((line.address, display.id)) if display.id else None
        if display.update:
            if replaced is not None:
                self._replace(*replaced, display)
            return None
        member = RankDisplay(line.address, source, display, merges)
        rows = len(call.rows)
        row = call.place(member, lambda: DisplayRow(cell) if self._has_room(cell, display.size) else None)
        if row is None or not self._has_room(cell):
            if row is not None:
                row.drop(lambda entry: entry is member)
            self._skip(cell, source)
            return None
        if display.id:
            self._by_id[line.address, display.id] = row, member
        return row if len(call.rows) > rows else None

    def _call(self, cell: object, source: Source, name: str) -> _Call:
        key = id(cell), source.uid, name
        call = self._calls.get(key) or self._calls.setdefault(key, _Call())
        self._calls.move_to_end(key)
        while len(self._calls) > 1 and (len(self._calls) > MOST_CALLS or self._size() > KEPT_BYTES):
            _, old = self._calls.popitem(last=False)
            self._by_id = {name: entry for name, entry in self._by_id.items() if entry[0] not in old.rows}
        return call

    def _size(self) -> int:
        return sum(row.size for call in self._calls.values() for row in call.rows)

    @staticmethod
    def _replace(row: DisplayRow, member: RankDisplay, display: Display) -> None:
        row.drop(lambda entry: entry is member)
        member.put(display)
        row.put(member)

    # -- bounds -----------------------------------------------------------------------------------------------------

    def _has_room(self, cell: object, more: int = -1) -> bool:
        """Returns whether a cell is within its limit, or, given a number of bytes, has room for such a display."""
        rows = [row for call in self._calls.values() for row in call.rows if row.cell is cell]
        return sum(map(len, rows)) + (more >= 0) <= MOST and sum(row.size for row in rows) + max(0, more) <= MOST_BYTES

    def _skip(self, cell: object, source: Source) -> None:
        key = id(cell), source.uid
        left_out = self._left_out.get(key) or self._left_out.setdefault(key, _LeftOut(cell))
        while len(self._left_out) > MOST_CALLS:
            del self._left_out[next(iter(self._left_out))]
        left_out.count += 1
        left_out.changed = True
        left_out.sources[source] = None

    # -- showing ----------------------------------------------------------------------------------------------------

    def show(self, row: DisplayRow, *, named: bool) -> None:
        """Shows a row, or updates it."""
        update = row.sent is not None
        row.changed, row.sent = False, time.monotonic()
        fingerprint = row.fingerprint(named)
        self._front.display(row.heading(named), f"{row.id}-ranks", update=update, cell=row.cell)
        if not update or fingerprint != row.sent_fingerprint:  # unchanged if one more rank has an equal display
            body, about = row.body(named)
            self._front.display(body, row.id, update=update, cell=row.cell, metadata=about)
        row.sent_fingerprint = fingerprint

    def show_changed(self, *, named: bool, all_of_it: bool) -> None:
        """Shows changed rows, each of them at a limited rate; with `all_of_it` all changed rows."""
        due = time.monotonic() - AGAIN_SECONDS
        for row in self._changed():
            if all_of_it or (row.sent or 0.0) <= due:
                self.show(row, named=named)
        for left_out in self._left_out.values():
            if left_out.changed and (all_of_it or (left_out.sent or 0.0) <= due):
                update = left_out.sent is not None
                left_out.changed, left_out.sent = False, time.monotonic()
                label = prefix(list(left_out.sources), named=named)
                displays = f"{left_out.count:,} more display{' is' if left_out.count == 1 else 's are'}"
                room = f"a cell has room for {MOST}, of {MOST_BYTES >> 20} MB together"
                text = {"text/plain": f"{label}… {displays} not shown: {room}"}
                self._front.display(text, left_out.id, update=update, cell=left_out.cell)

    @property
    def waiting(self) -> bool:
        """True if changes are not shown yet."""
        return bool(self._changed()) or any(left_out.changed for left_out in self._left_out.values())

    def _changed(self) -> Sequence[DisplayRow]:
        return [row for call in self._calls.values() for row in call.rows if row.changed and row.sent is not None]
