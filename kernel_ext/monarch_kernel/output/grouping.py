"""Lines as a cell shows them: equal lines of several ranks once, with their ranks, in few pieces of text."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from monarch_nb.logs import Line, Source, prefix

from .row import Row

MOST_PIECES = 20  # messages of one batch, where stdout and stderr take turns


class Piece(NamedTuple):
    """Text that goes to one stream of one cell."""

    cell: Any
    stream: str
    text: str


class Grouping:
    """Groups the lines of one batch. `take` puts a display where it belongs, and gives a new row if it makes one."""

    def __init__(
        self,
        *,
        cell_of: Callable[[Line], Any],
        source_of: Callable[[str], Source],
        merges: Callable[[str], bool],
        take: Callable[[Any, Line, Source, bool], Row | None] | None,
    ) -> None:
        self._cell_of = cell_of
        self._source_of = source_of
        self._merges = merges
        self._take = take  # None where displays are shown as text

    def pieces(self, lines: Iterable[Line], *, named: bool) -> list[Piece | Row]:
        """Lines in order, each group of equal ones where its first stands; between them new displays."""
        groups: dict[Any, Row | tuple[Any, Line, list[Source]]] = {}
        repeats: dict[Line, int] = {}
        places: dict[tuple[str, str], tuple[Any, Source, bool]] = {}
        for line in lines:
            place = (line.address, line.call)
            if place not in places:
                places[place] = self._cell_of(line), self._source_of(line.address), self._merges(line.address)
            cell, source, merges = places[place]
            if line.display is not None and self._take is not None:
                row = self._take(cell, line, source, merges) if cell is not None else None
                if row is not None:
                    groups[row] = row
                continue
            if line.display is not None and not line.text:
                continue
            nth = repeats[line] = repeats.get(line, -1) + 1  # equal lines of one rank stay apart
            key = (id(cell), line.stream, source.uid, line.text, nth, "" if merges else line.address)
            group = groups.setdefault(key, (cell, line, []))
            assert not isinstance(group, Row)
            group[2].append(source)
        return [
            group
            if isinstance(group, Row)
            else Piece(group[0], group[1].stream, f"{prefix(group[2], named=named)}{group[1].text}\n")
            for group in groups.values()
        ]


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of the same cell and stream as one; where these take turns all the time, all of each as one."""
    runs: list[Piece] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if last is not None and last.cell is piece.cell and last.stream == piece.stream:
            runs[-1] = last._replace(text=last.text + piece.text)
        else:
            runs.append(piece)
    if len(runs) <= MOST_PIECES:
        return runs
    whole: dict[tuple[int, str], Piece] = {}
    for piece in runs:
        key = id(piece.cell), piece.stream
        before = whole[key].text if key in whole else ""
        whole[key] = piece._replace(text=before + piece.text)
    return list(whole.values())
