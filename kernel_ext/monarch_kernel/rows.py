"""What ranks display, shown in the cell that caused it: equal displays once with their ranks, others side by side.

The first display of each rank in a call makes the first row, the second one the second, and so on. A row is replaced in
place when more of it comes. How much of it one cell may hold is bounded; what is over is counted, and said in a line.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from monarch_nb.mesh.log_lines import Line, Source, prefix
from monarch_nb.wire import Display
from monarch_nb.wire.display import LATER

from .display.rich import can_stand_beside, part_of, side_by_side
from .front import Bundle, Front

MOST = 64  # different displays in a cell
MOST_BYTES = 24 << 20  # of them
BESIDE = 16  # different displays in a row
BESIDE_BYTES = 8 << 20
KEPT = 64  # calls whose displays can still be replaced
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
        """Another display in its place."""
        self.display = display
        self.digest = _digest(display, self._salt)


class Row:
    """Displays that stand in one place of a cell."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.members: list[_Member] = []
        self.id = f"monarch-{secrets.token_hex(8)}"
        self.changed = True
        self.sent: float | None = None  # when, monotonic

    def groups(self) -> list[list[_Member]]:
        """Equal displays together, in the order of their first ranks."""
        found: dict[bytes, list[_Member]] = {}
        for member in sorted(self.members, key=lambda one: one.source.point):
            found.setdefault(member.digest, []).append(member)
        return list(found.values())

    def bytes(self) -> int:
        """Of its different displays."""
        return sum(group[0].display.size for group in self.groups())

    def has_room(self, member: _Member) -> bool:
        """Whether a display can stand here."""
        groups = self.groups()
        if not groups or any(group[0].digest == member.digest for group in groups):
            return True
        beside = (group[0].display for group in groups)
        if not can_stand_beside(member.display.data) or not all(can_stand_beside(one.data) for one in beside):
            return False
        return len(groups) < BESIDE and self.bytes() + member.display.size <= BESIDE_BYTES

    def bundles(self, named: bool) -> tuple[Bundle, Bundle, dict[str, Any]]:
        """What stands above it, and it itself with facts about its forms."""
        groups = self.groups()
        if not groups:
            return _NOTHING, _NOTHING, {}
        everyone = prefix([member.source for group in groups for member in group], named=named).strip()
        if len(groups) == 1:
            display = groups[0][0].display
            return {"text/plain": everyone}, {**display.data, "text/plain": display.text}, display.metadata
        captions = [prefix([member.source for member in group], named=named).strip(" []") for group in groups]
        shown = [group[0].display for group in groups]
        html = side_by_side(
            [(caption, part_of(one.data, one.metadata)) for caption, one in zip(captions, shown, strict=True)]
        )
        text = "\n".join(f"[{caption}] {one.text}" for caption, one in zip(captions, shown, strict=True))
        return (
            {"text/plain": f"{everyone} {len(groups)} different displays"},
            {"text/plain": text, "text/html": html},
            {},
        )


class _Call:
    """The rows of one call on one mesh."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.last: dict[str, int] = {}  # by address, the row of its latest display
        self.times: dict[tuple[str, bytes], int] = {}  # how often a rank has displayed the same
        self.places: dict[tuple[bytes, int], Row] = {}  # where what was displayed so often stands
        self.clearing: set[str] = set()  # ranks whose next display replaces all of theirs

    def clear(self, address: str) -> None:
        """Takes away what a rank has displayed."""
        self.clearing.discard(address)
        self.last.pop(address, None)
        for key in [key for key in self.times if key[0] == address]:
            del self.times[key]
        for row in self.rows:
            left = [member for member in row.members if member.address != address]
            row.changed = row.changed or len(left) < len(row.members)
            row.members = left
        self.places = {
            place: row for place, row in self.places.items() if any(one.digest == place[0] for one in row.members)
        }

    def place(self, member: _Member, new: Callable[[], Row | None]) -> Row | None:
        """The row in which a display stands from now on; None where there is no room."""
        if member.address in self.clearing:
            self.clear(member.address)
        key = member.address, member.digest
        nth = self.times[key] = self.times.get(key, -1) + 1
        row = self.places.get((member.digest, nth))
        if row is None:
            after = self.last.get(member.address, -1) + 1
            row = next((one for one in self.rows[after:] if one.has_room(member)), None) or new()
            if row is None:
                return None
            if row not in self.rows:
                self.rows.append(row)
            self.last[member.address] = self.rows.index(row)
            self.places[member.digest, nth] = row
        row.members.append(member)
        row.changed = True
        return row


class _Over:
    """Displays for which a cell has no room."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.id = f"monarch-{secrets.token_hex(8)}"
        self.count = 0
        self.sources: dict[Source, None] = {}
        self.changed = self.sent = False


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
        known = self._named.get((line.address, display.id)) if display.id else None
        if display.update:
            if known is not None:
                self._replace(*known, display)
            return None
        member = _Member(line.address, source, display, merges)
        rows = len(call.rows)
        row = call.place(member, lambda: self._new(cell, display))
        if row is None or not self._fits(row):
            if row is not None:
                row.members.remove(member)
            self._skip(cell, source)
            return None
        if display.id:
            self._named[line.address, display.id] = row, member
        return row if len(call.rows) > rows else None

    def _call(self, cell: Any, source: Source, name: str) -> _Call:
        key = id(cell), source.uid, name
        call = self._calls.get(key) or self._calls.setdefault(key, _Call())
        self._calls.move_to_end(key)
        while len(self._calls) > KEPT:
            _, old = self._calls.popitem(last=False)
            self._named = {name: known for name, known in self._named.items() if known[0] not in old.rows}
        return call

    @staticmethod
    def _replace(row: Row, member: _Member, display: Display) -> None:
        if member in row.members:
            member.put(display)
            row.changed = True

    # -- bounds -----------------------------------------------------------------------------------------------------

    def _of_cell(self, cell: Any) -> list[Row]:
        return [row for call in self._calls.values() for row in call.rows if row.cell is cell]

    def _new(self, cell: Any, display: Display) -> Row | None:
        rows = self._of_cell(cell)
        full = sum(len(row.groups()) for row in rows) >= MOST
        return None if full or sum(row.bytes() for row in rows) + display.size > MOST_BYTES else Row(cell)

    def _fits(self, row: Row) -> bool:
        rows = self._of_cell(row.cell)
        return sum(len(one.groups()) for one in rows) <= MOST and sum(one.bytes() for one in rows) <= MOST_BYTES

    def _skip(self, cell: Any, source: Source) -> None:
        over = self._over.get((id(cell), source.uid)) or self._over.setdefault((id(cell), source.uid), _Over(cell))
        over.count += 1
        over.changed = True
        over.sources[source] = None

    # -- showing ----------------------------------------------------------------------------------------------------

    def show(self, row: Row, *, named: bool) -> None:
        """Shows a row, or what has become of it."""
        again = row.sent is not None
        row.changed, row.sent = False, time.monotonic()
        above, body, about = row.bundles(named)
        self._front.display(above, f"{row.id}-ranks", update=again, cell=row.cell)
        self._front.display(body, row.id, update=again, cell=row.cell, metadata=about)

    def show_changed(self, *, named: bool, all_of_it: bool) -> None:
        """Shows what has changed since, but no row very often; with `all_of_it` all of it."""
        due = time.monotonic() - AGAIN_SECONDS
        for row in self._changed():
            if all_of_it or (row.sent or 0.0) <= due:
                self.show(row, named=named)
        for over in self._over.values():
            if over.changed:
                over.changed = False
                where = prefix(list(over.sources), named=named)
                many = f"{over.count:,} display{'' if over.count == 1 else 's'}"
                room = f"a cell has room for {MOST}, of {MOST_BYTES >> 20} MB together"
                text = {"text/plain": f"{where}… {many} more, not shown: {room}"}
                self._front.display(text, over.id, update=over.sent, cell=over.cell)
                over.sent = True

    @property
    def waiting(self) -> bool:
        """Whether something has changed that is not shown yet."""
        return any(True for _ in self._changed())

    def _changed(self) -> Iterable[Row]:
        return [row for call in self._calls.values() for row in call.rows if row.changed and row.sent is not None]


def _digest(display: Display, salt: str) -> bytes:
    """Equal for displays that look the same."""
    data = display.data
    rich = {kind: data[kind] for kind in sorted(data) if kind != "text/plain"} or data
    return hashlib.blake2b(repr((rich, display.metadata, salt)).encode("utf-8", "replace"), digest_size=16).digest()
