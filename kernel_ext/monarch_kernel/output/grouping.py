"""Lines as a cell shows them: equal lines of several ranks once, with their ranks, in few pieces of text."""

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from monarch_nb.logs import Bar, Line, Source, prefix
from monarch_nb.wire import counted

from ..display.html import folded, framed, table
from ..front import Bundle, Front
from .pacing import LAST
from .rows import DisplayRow

MOST_PIECES = 20  # messages of one batch, where stdout and stderr take turns
LINES = 1000  # lines behind the fold, of all ranks together
FEWEST = 10  # lines of each rank, however many ranks there are
LINES_BELOW = 8  # lines in sight below the fold
FILES = 16
MOST_FOLDS = 64  # folds that may still grow
Texts = Callable[[Iterable[Line]], str]


class TextPiece(NamedTuple):
    """Text that goes to one stream of one cell."""

    cell: Any
    stream: str
    text: str


class Grouping:
    """Groups the lines of one batch. `take` adds a display to a row, and returns the row if it is a new one."""

    def __init__(
        self,
        *,
        cell_of: Callable[[Line], object],
        source_of: Callable[[str], Source],
        merges: Callable[[str], bool],
        take: Callable[[object, Line, Source, bool], DisplayRow | None] | None,
    ) -> None:
        self._cell_of = cell_of
        self._source_of = source_of
        self._merges = merges
        self._take = take  # None where displays are shown as text

    def pieces(self, lines: Iterable[Line], *, named: bool) -> list[TextPiece | DisplayRow]:
        """Lines in order, each group of equal ones at the place of its first, with new displays between them.

        Bars of several ranks are equal if their progress is, whatever their times are.
        """
        groups: dict[object, DisplayRow | tuple[object, Line, list[Source]]] = {}
        repeats: dict[tuple[str, str, str, Bar | str], int] = {}
        targets: dict[tuple[str, str], tuple[object, Source, bool]] = {}
        for line in lines:
            origin = (line.address, line.call)
            if origin not in targets:
                targets[origin] = self._cell_of(line), self._source_of(line.address), self._merges(line.address)
            cell, source, merges = targets[origin]
            if line.display is not None and self._take is not None:
                row = self._take(cell, line, source, merges) if cell is not None else None
                if row is not None:
                    groups[row] = row
                continue
            if line.display is not None and not line.text:
                continue
            content = Bar.read(line.text) or line.text
            of_rank = (line.address, line.call, line.stream, content)
            nth = repeats[of_rank] = repeats.get(of_rank, -1) + 1  # equal lines of one rank stay apart
            key = (id(cell), line.stream, source.uid, content, nth, "" if merges else line.address)
            group = groups.setdefault(key, (cell, line, []))
            assert not isinstance(group, DisplayRow)
            group[2].append(source)
        return [
            group
            if isinstance(group, DisplayRow)
            else TextPiece(group[0], group[1].stream, f"{prefix(group[2], named=named)}{group[1].text}\n")
            for group in groups.values()
        ]


def merge_pieces(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    """Adjacent pieces of one cell and stream as one piece; if there are too many, one piece for each of these."""
    runs: list[TextPiece] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if last is not None and last.cell is piece.cell and last.stream == piece.stream:
            runs[-1] = last._replace(text=last.text + piece.text)
        else:
            runs.append(piece)
    if len(runs) <= MOST_PIECES:
        return runs
    by_stream: dict[tuple[int, str], TextPiece] = {}
    for piece in runs:
        key = id(piece.cell), piece.stream
        before = by_stream[key].text if key in by_stream else ""
        by_stream[key] = piece._replace(text=before + piece.text)
    return list(by_stream.values())


class _Fold:
    """The lines of one mesh that one cell does not show."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.id = f"monarch-{secrets.token_hex(8)}"
        self.shown = False
        self.count = 0
        self.files: dict[Source, str] = {}
        self._last: dict[Source, deque[tuple[float, Line]]] = {}

    def add(self, source: Source, path: str, count: int, last: Iterable[tuple[float, Line]]) -> None:
        """Adds lines of a rank."""
        self.count += count
        self.files[source] = path
        self._last.setdefault(source, deque(maxlen=LAST)).extend(last)

    def _lines(self, of_each: int) -> list[Line]:
        """Returns the last lines of each rank, in the order of time."""
        timed = [line for last in self._last.values() for line in list(last)[-of_each:]]
        return [line for _, line in sorted(timed, key=lambda line: line[0])]

    def _below(self) -> list[Line]:
        """Visible lines below: the last one of each rank, or a few if there is one rank."""
        if len(self._last) == 1:
            return self._lines(LINES_BELOW)
        ends = [last[-1][1] for _, last in sorted(self._last.items()) if last]
        return ends[:LINES_BELOW]

    def bundle(self, texts: Texts, named: bool) -> Bundle:
        """As text and as HTML."""
        sources = sorted(self.files)
        first = sources[0]
        label = prefix(sources, named=named)
        count = f"{counted(self.count, 'more line')}"
        files = [path for source in sources if (path := self.files[source])]
        many = f"the log files ({files[0]} …) have" if len(files) > 1 else f"{files[0]} has" if files else "no file has"
        text = f"{label}… {count} not shown here: %logs {first.name} shows the last of them, {many} all"
        below = texts(self._below())
        lines = self._lines(max(FEWEST, LINES // len(sources)))
        rows = [
            (prefix([source], named=named).strip(" []") or first.name, self.files[source]) for source in sources[:FILES]
        ]
        if len(sources) > FILES:
            rows.append(("…", f"{len(sources) - FILES} more: .logs().files has them"))
        shown = f", the last {len(lines):,} here" if len(lines) < self.count else ""
        html = framed(
            '<div style="padding-left:var(--jp-code-padding,0)">',  # as the lines above it
            folded(f"{label}… {count}{shown}", texts(lines)),
            f"<pre>{escape(below)}</pre>",
            f"<details><summary>All of them are in the log files: %logs {escape(first.name)}</summary>"
            f"{table(('rank', 'file'), rows, mono=(1,))}</details></div>",
        )
        return {"text/plain": f"{text}\n{below}".rstrip("\n"), "text/html": html}


class Folds:
    """The folds of all cells; each is replaced in place when it grows. One thread at a time."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._folds: OrderedDict[tuple[int, str], _Fold] = OrderedDict()
        self._grown: dict[tuple[int, str], _Fold] = {}

    def add(self, cell: object, source: Source, path: str, count: int, last: Iterable[tuple[float, Line]]) -> None:
        """Adds lines of a rank: their number, and the last of them with their times; its log file has all."""
        key = id(cell), source.uid
        fold = self._folds.get(key) or self._folds.setdefault(key, _Fold(cell))
        self._folds.move_to_end(key)
        while len(self._folds) > MOST_FOLDS:
            self._folds.popitem(last=False)
        fold.add(source, path, count, last)
        self._grown[key] = fold

    def show(self, texts: Texts, *, named: bool) -> None:
        """Shows the folds that have grown; `texts` makes text of lines."""
        grown, self._grown = self._grown, {}
        for fold in grown.values():
            self._front.display(fold.bundle(texts, named), fold.id, update=fold.shown, cell=fold.cell)
            fold.shown = True
