"""What ranks display, shown in the cell that caused it: equal displays once with their ranks, others side by side.

The first display of each rank in a call makes the first row, the second one the second, and so on. A row is replaced in
place when more of it comes. How much of it one cell may hold is bounded; what is over is counted, and said in a line.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb.logs import Line, Source, prefix
from monarch_nb.wire import Display
from monarch_nb.wire.display import LATER

from ..display.rich import can_stand_beside, part_of, side_by_side
from ..front import Bundle, Front

MOST = 64  # different displays in a cell
MOST_BYTES = 24 << 20  # of them
BESIDE = 16  # different displays in a row
BESIDE_BYTES = 8 << 20
KEPT = 64  # calls whose displays can still be replaced,
KEPT_BYTES = 2 * MOST_BYTES  # and how much they may be
AGAIN_SECONDS = 0.25  # a row that changes fast is sent so often
_NOTHING: Bundle = {"text/plain": "", "text/html": ""}


class _Member:
    """One display of one rank."""

    def __init__(self, address: str, source: Source, display: Display, merges: bool) -> None:
        self.address = address
        self.source = source
        self._salt = "" if merges else address
        self.put(display)

    def put(self, display: Display) -> None:
        """Something else is displayed there."""
        self.display = display
        self.size = display.size
        self.digest = _digest(display, self._salt)


class Row:
    """Displays that stand in one place of a cell."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.id = f"monarch-{secrets.token_hex(8)}"
        self.changed = True
        self.sent: float | None = None  # when, monotonic
        self.sent_look: Any = None
        self._groups: dict[bytes, list[_Member]] = {}  # by digest

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def size(self) -> int:
        """Bytes of its different displays."""
        return sum(group[0].size for group in self._groups.values())

    def put(self, member: _Member) -> None:
        """One more."""
        self._groups.setdefault(member.digest, []).append(member)
        self.changed = True

    def drop(self, gone: Callable[[_Member], bool]) -> None:
        """Those go."""
        for digest, group in tuple(self._groups.items()):
            left = [member for member in group if not gone(member)]
            if len(left) < len(group):
                self.changed = True
                self._groups[digest] = left
                if not left:
                    del self._groups[digest]

    def has(self, digest: bytes) -> bool:
        """Whether a display that looks so stands here."""
        return digest in self._groups

    def has_room(self, member: _Member) -> bool:
        """Whether a display can stand here."""
        if not self._groups or self.has(member.digest):
            return True
        if len(self) >= BESIDE or self.size + member.size > BESIDE_BYTES:
            return False
        beside = (group[0].display.data for group in self._groups.values())
        return can_stand_beside(member.display.data) and all(map(can_stand_beside, beside))

    def above(self, named: bool) -> Bundle:
        """What stands above it."""
        if not self._groups:
            return _NOTHING
        where = prefix([member.source for group in self._groups.values() for member in group], named=named).strip()
        return {"text/plain": where if len(self) == 1 else f"{where} {len(self)} different displays"}

    def look(self, named: bool) -> object:
        """Equal while `body` is."""
        if len(self) < 2:
            return tuple(self._groups)
        return {
            digest: prefix([member.source for member in group], named=named) for digest, group in self._groups.items()
        }

    def body(self, named: bool) -> tuple[Bundle, dict[str, Any]]:
        """It itself, and facts about its forms."""
        if not self._groups:
            return _NOTHING, {}
        groups = sorted(self._groups.values(), key=lambda group: min(member.source.point for member in group))
        shown = [group[0].display for group in groups]
        if len(groups) == 1:
            return {"text/plain": shown[0].text, **shown[0].data}, shown[0].metadata
        captions = [prefix([member.source for member in group], named=named).strip(" []") for group in groups]
        parts = [
            (caption, part_of(display.data, display.metadata)) for caption, display in zip(captions, shown, strict=True)
        ]
        text = "\n".join(f"[{caption}] {display.text}" for caption, display in zip(captions, shown, strict=True))
        return {"text/plain": text, "text/html": side_by_side(parts, indented=True)}, {}


class _Call:
    """The rows of one call on one mesh."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.clearing: set[str] = set()  # ranks whose next display replaces all of theirs
        self._last: dict[str, int] = {}  # by address, the row of its latest display
        self._times: dict[tuple[str, bytes], int] = {}  # how often a rank has displayed the same
        self._places: dict[tuple[bytes, int], Row] = {}  # where what was displayed so often stands

    def clear(self, address: str) -> None:
        """Takes away what a rank has displayed."""
        self.clearing.discard(address)
        self._last.pop(address, None)
        self._times = {key: count for key, count in self._times.items() if key[0] != address}
        for row in self.rows:
            row.drop(lambda member: member.address == address)

    def place(self, member: _Member, new: Callable[[], Row | None]) -> Row | None:
        """Puts a display into the row in which it is to stand; None where there is no room."""
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


class _Over:
    """Displays for which a cell has no room."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.id = f"monarch-{secrets.token_hex(8)}"
        self.count = 0
        self.sources: dict[Source, None] = {}
        self.changed = False
        self.sent: float | None = None  # when, monotonic


class Rows:
    """All of a kernel. One thread at a time."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._calls: OrderedDict[tuple[int, str, str], _Call] = OrderedDict()
        self._named: dict[tuple[str, str], tuple[Row, _Member]] = {}  # by address and display id
        self._over: dict[tuple[int, str], _Over] = {}

    def take(self, cell: Any, line: Line, source: Source, *, merges: bool = True) -> Row | None:
        """Something a rank has displayed: a new row that is to be shown now, if it makes one.

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
        replaced = self._named.get((line.address, display.id)) if display.id else None
        if display.update:
            if replaced is not None:
                self._replace(*replaced, display)
            return None
        member = _Member(line.address, source, display, merges)
        rows = len(call.rows)
        row = call.place(member, lambda: Row(cell) if self._has_room(cell, display.size) else None)
        if row is None or not self._has_room(cell):
            if row is not None:
                row.drop(lambda other: other is member)
            self._skip(cell, source)
            return None
        if display.id:
            self._named[line.address, display.id] = row, member
        return row if len(call.rows) > rows else None

    def _call(self, cell: Any, source: Source, name: str) -> _Call:
        key = id(cell), source.uid, name
        call = self._calls.get(key) or self._calls.setdefault(key, _Call())
        self._calls.move_to_end(key)
        while len(self._calls) > 1 and (len(self._calls) > KEPT or self._size() > KEPT_BYTES):
            _, old = self._calls.popitem(last=False)
            self._named = {name: place for name, place in self._named.items() if place[0] not in old.rows}
        return call

    def _size(self) -> int:
        return sum(row.size for call in self._calls.values() for row in call.rows)

    @staticmethod
    def _replace(row: Row, member: _Member, display: Display) -> None:
        row.drop(lambda other: other is member)
        member.put(display)
        row.put(member)

    # -- bounds -----------------------------------------------------------------------------------------------------

    def _has_room(self, cell: Any, more: int = -1) -> bool:
        """Whether a cell holds no more than it may; or, with a number of bytes, may hold one more display of them."""
        rows = [row for call in self._calls.values() for row in call.rows if row.cell is cell]
        return sum(map(len, rows)) + (more >= 0) <= MOST and sum(row.size for row in rows) + max(0, more) <= MOST_BYTES

    def _skip(self, cell: Any, source: Source) -> None:
        key = id(cell), source.uid
        over = self._over.get(key) or self._over.setdefault(key, _Over(cell))
        while len(self._over) > KEPT:
            del self._over[next(iter(self._over))]
        over.count += 1
        over.changed = True
        over.sources[source] = None

    # -- showing ----------------------------------------------------------------------------------------------------

    def show(self, row: Row, *, named: bool) -> None:
        """Shows a row, or what has become of it."""
        again = row.sent is not None
        row.changed, row.sent = False, time.monotonic()
        look = row.look(named)
        self._front.display(row.above(named), f"{row.id}-ranks", update=again, cell=row.cell)
        if not again or look != row.sent_look:  # not again for one more rank that displays the same
            body, about = row.body(named)
            self._front.display(body, row.id, update=again, cell=row.cell, metadata=about)
        row.sent_look = look

    def show_changed(self, *, named: bool, all_of_it: bool) -> None:
        """Shows what has changed since, but no row very often; with `all_of_it` all of it."""
        due = time.monotonic() - AGAIN_SECONDS
        for row in self._changed():
            if all_of_it or (row.sent or 0.0) <= due:
                self.show(row, named=named)
        for over in self._over.values():
            if over.changed and (all_of_it or (over.sent or 0.0) <= due):
                again = over.sent is not None
                over.changed, over.sent = False, time.monotonic()
                where = prefix(list(over.sources), named=named)
                many = f"{over.count:,} more display{' is' if over.count == 1 else 's are'}"
                room = f"a cell has room for {MOST}, of {MOST_BYTES >> 20} MB together"
                text = {"text/plain": f"{where}… {many} not shown: {room}"}
                self._front.display(text, over.id, update=again, cell=over.cell)

    @property
    def waiting(self) -> bool:
        """Whether something has changed that is not shown yet."""
        return bool(self._changed()) or any(over.changed for over in self._over.values())

    def _changed(self) -> Sequence[Row]:
        return [row for call in self._calls.values() for row in call.rows if row.changed and row.sent is not None]


def _digest(display: Display, salt: str) -> bytes:
    """Equal for displays that look the same."""
    data = display.data
    rich = {kind: data[kind] for kind in sorted(data) if kind != "text/plain"} or data
    # HTML that draws data has a name of its own each time it is made.
    rich = {kind: form for kind, form in rich.items() if kind.startswith("application/vnd.")} or rich
    return hashlib.blake2b(repr((rich, display.metadata, salt)).encode("utf-8", "replace"), digest_size=16).digest()
