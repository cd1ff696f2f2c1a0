"""The tensor, drawn: one sheet for two dimensions, slabs side by side for more."""

import math
from collections.abc import Sequence

from monarch_nb.shape import spans
from monarch_nb.tensor.placement.grid import Grid, Segment, grid_of
from monarch_nb.tensor.placement.kinds import Partial, Replicate
from monarch_nb.tensor.placement.picture import BlockStyle, Drawing, Label, Piece, Side, fits, looks
from monarch_nb.tensor.placement.placement import Placement
from monarch_nb.tensor.placement.words import cutters

_SIDE = 210  # of a square tensor
_WIDEST, _HIGHEST = 360.0, 240.0
_FLAT = 44.0  # height of a tensor of one dimension
_SLABS_WIDE = 440  # all slabs of a line
_BLOCK_WIDE = 30  # of a slab with room for the numbers of ranks
_MOST = 400  # pieces that are drawn; neighbours are drawn as one where there are more
_LINE = 17  # height of a line of labels
_TICKED = 8  # segments with the numbers where they begin
_SHEET = 6  # from sheet to sheet
_DEPTH = 12  # of a slab


def tensor_drawing(placement: Placement, name: str = "") -> Drawing:
    """The tensor, cut into its blocks."""
    return _Tensor(placement, name).drawing()


class _Tensor:
    def __init__(self, placement: Placement, name: str) -> None:
        self._placement, self._name = placement, name
        self._grid = grid = _within_reason(placement)
        self._looks: list[BlockStyle] = looks(placement)
        self._solid = bool(grid.deep)
        rows = placement.shape[grid.down] if grid.down is not None else 1
        columns = placement.shape[grid.across] if grid.across is not None else 1
        slabs = len(grid.slabs)
        self._in_line = next(count for count in (8, 4, 2, 1) if count <= slabs and self._readable(count))
        self._w = self._h = _FLAT
        if grid.down is None:
            self._w = _FLAT if grid.across is None else _WIDEST
        else:
            aspect = min(4.0, max(0.25, (max(columns, 1) / max(rows, 1)) ** 0.7))
            w, h = _SIDE * math.sqrt(aspect), _SIDE / math.sqrt(aspect)
            room = (_SLABS_WIDE / self._in_line - 2 * _DEPTH) if slabs > 1 else _WIDEST
            scale = min(1.0, room / w, _HIGHEST / h)
            self._w, self._h = max(w * scale, 30.0), max(h * scale, 30.0)
        self._more = 0 if self._solid else min(2, placement.copies * placement.parts - 1)

    def _readable(self, in_line: int) -> bool:
        """Returns whether rank numbers fit into blocks with this many slabs in a line; always for one."""
        return in_line == 1 or (_SLABS_WIDE / in_line - 2 * _DEPTH) / len(self._grid.columns) >= _BLOCK_WIDE

    def drawing(self) -> Drawing:
        grid = self._grid
        labels = [Label(0, 11 + at * _LINE, text) for at, text in enumerate(self._axes())]
        ticked = 1 < len(grid.rows) <= _TICKED
        left = 8.0 + max((len(str(_begin(row))) for row in grid.rows), default=0) * 6 if ticked else 2.0
        top = len(labels) * _LINE + 4 + self._more * _SHEET
        heads = 1 < len(grid.columns) <= _TICKED
        above = (12 if heads else 0) + (_DEPTH + 15 if self._solid else 0)
        sheets: list[tuple[float, float, float, float]] = []
        sides: list[Side] = []
        pieces: list[Piece] = []
        step = self._w + (2 * _DEPTH if self._solid else 0) + 6
        for slab in range(len(grid.slabs)):
            x = left + (slab % self._in_line) * step
            y = top + above + (slab // self._in_line) * (self._h + above + 10)
            for sheet in range(self._more, 0, -1):
                sheets.append((x + sheet * _SHEET, y - sheet * _SHEET, self._w, self._h))
            columns, rows = _extents(grid.columns, x, self._w), _extents(grid.rows, y, self._h)
            if self._solid:
                text = " ".join(_span(segment) for segment in grid.slabs[slab])
                shown = text if fits(text, self._w + _DEPTH, 12, 10) else str(slab)
                labels.append(Label(x + _DEPTH, y - _DEPTH - 4, shown, small=True))
                sides += self._sides(slab, columns, rows)
            pieces += self._front(slab, columns, rows)
            if ticked and slab % self._in_line == 0:
                labels += [
                    Label(x - 5, at + 9, str(_begin(row)), "end", small=True)
                    for row, (at, _) in zip(grid.rows, rows, strict=True)
                ]
            if heads and not self._solid:
                labels += [
                    Label(at, y - 4 - self._more * _SHEET, str(_begin(column)), small=True)
                    for column, (at, _) in zip(grid.columns, columns, strict=True)
                    if self._w / len(grid.columns) >= 24 or column is grid.columns[0]
                ]
        across = left + self._in_line * step - 6 + self._more * _SHEET
        wide = max([across, *(len(label.text) * 6.2 for label in labels[: len(self._axes())])])
        high = max(piece.y + piece.h for piece in pieces) if pieces else top + above + self._h
        high = max(high, top + above + self._h)
        return Drawing(wide + 2, high + 3, tuple(sheets), tuple(sides), tuple(pieces), tuple(labels))

    def _axes(self) -> list[str]:
        """Labels of the axes, with the mesh dimensions that shard them."""
        grid, placement = self._grid, self._placement
        shown = [(dim, "↗") for dim in grid.deep]
        if grid.down is not None:
            shown.append((grid.down, "↓"))
        if grid.across is not None:
            shown.append((grid.across, "→"))
        lines = []
        for dim, way in shown:
            cut = " ".join(cutters(placement, dim))
            lines.append(f"{way} dim {dim}: {placement.shape[dim]}{f' ÷ {cut}' if cut else ''}")
        for sign, kind, count, what in (
            ("×", Replicate, placement.copies, "copies"),
            ("Σ", Partial, placement.parts, "parts"),
        ):
            if count > 1:
                along = " ".join(label for label, _, _ in placement.dims(kind))
                lines.append(f"{sign} {count} {what} along {along}")
        return lines

    def _front(
        self, slab: int, columns: Sequence[tuple[float, float]], rows: Sequence[tuple[float, float]]
    ) -> list[Piece]:
        found = []
        for row, (y, h) in enumerate(rows):
            for column, (x, w) in enumerate(columns):
                blocks = self._grid.at(slab, row, column)
                if blocks:
                    found.append(self._piece(blocks, x, y, w, h))
        return found

    def _piece(self, blocks: tuple[int, ...], x: float, y: float, w: float, h: float) -> Piece:
        placement, look = self._placement, self._looks[blocks[0]]
        ranks = [rank for block in blocks for rank in placement.blocks[block].ranks]
        text = spans(ranks).replace(",", " ")
        texts = [f"Σ {text}", "Σ"] if placement.parts > 1 else [text]
        return Piece(
            x=x,
            y=y,
            w=w,
            h=h,
            fill=look.fill,
            ink=look.ink,
            blocks=blocks,
            text=next((one for one in texts if fits(one, w, h)), ""),
            description=placement.describe(blocks[0], self._name)
            if len(blocks) == 1
            else f"{len(blocks)} shards · ranks {spans(ranks)}",
            hatched=placement.parts > 1,
        )

    def _sides(
        self, slab: int, columns: Sequence[tuple[float, float]], rows: Sequence[tuple[float, float]]
    ) -> list[Side]:
        """The top and the right of a slab."""
        found = []
        top, right = rows[0][0] - 1, columns[-1][0] + columns[-1][1] + 1
        for column, (x, w) in enumerate(columns):
            blocks = self._grid.at(slab, 0, column)
            if blocks:
                points = ((x, top), (x + w, top), (x + w + _DEPTH, top - _DEPTH), (x + _DEPTH, top - _DEPTH))
                found.append(Side(points, self._looks[blocks[0]].top, blocks))
        for row, (y, h) in enumerate(rows):
            blocks = self._grid.at(slab, row, len(columns) - 1)
            if blocks:
                points = ((right, y), (right + _DEPTH, y - _DEPTH), (right + _DEPTH, y + h - _DEPTH), (right, y + h))
                found.append(Side(points, self._looks[blocks[0]].side, blocks))
        return found


def _within_reason(placement: Placement) -> Grid:
    most = 64
    grid = grid_of(placement, most)
    while len(grid.slabs) * len(grid.rows) * len(grid.columns) > _MOST:
        most //= 2
        grid = grid_of(placement, most)
    return grid


def _begin(segment: Segment) -> int:
    return segment[0][0] if segment else 0


def _span(segment: Segment) -> str:
    return f"{segment[0][0]}:{segment[-1][1]}" if segment else "0:0"


def _extents(segments: Sequence[Segment], start: float, room: float) -> list[tuple[float, float]]:
    """Start and length of each segment by its share, with gaps."""
    total = sum(stop - begin for segment in segments for begin, stop in segment) or 1
    gap = 2.0 if room / len(segments) >= 10 else 1.0 if room / len(segments) >= 5 else 0.4
    extents, at = [], start
    for segment in segments:
        share = sum(stop - begin for begin, stop in segment) / total * room
        extents.append((round(at, 2), round(max(share - gap, 0.5), 2)))
        at += share
    return extents
