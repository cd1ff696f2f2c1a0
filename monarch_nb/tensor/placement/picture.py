"""Drawings of a placement, as coordinates that are independent of the front end: the tensor, the mesh, a thumbnail."""

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from monarch_nb.shape import spans
from monarch_nb.tensor.placement.placement import OwnValues, Partial, Placement, Replicate
from monarch_nb.tensor.placement.text import (
    Grid,
    Segment,
    bytes_text,
    cutters,
    dimension_rows,
    grid_of,
    mesh_text,
    title,
)
from monarch_nb.wire import size_text

Point = tuple[float, float]
Rgb = tuple[int, int, int]
# Okabe and Ito's colours for all kinds of colour vision ("Color Universal Design", 2008), ordered so that neighbours
# differ in lightness too; without black, and without yellow, which is invisible in the light theme.
_PALETTE: tuple[Rgb, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (122, 122, 122),
)
# For more, points along matplotlib's viridis (Smith, van der Walt, Firing 2015): lightness rises evenly.
_GRADIENT: tuple[Rgb, ...] = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (236, 220, 60))
_PALEST = 0.62  # share of white in the palest tint
WHITE: Rgb = (255, 255, 255)


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A box of the tensor or the mesh, with its text."""

    x: float
    y: float
    w: float
    h: float
    fill: str = ""  # "" without a part of the tensor
    ink: str = ""
    text: str = ""
    blocks: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()  # of the mesh
    description: str = ""  # shown as a tooltip and to screen readers
    hatched: bool = False  # parts that are not reduced yet


class Side(msgspec.Struct, frozen=True):
    """A side of a block, as a polygon."""

    points: tuple[Point, ...]
    fill: str
    blocks: tuple[int, ...]


class Label(msgspec.Struct, frozen=True, omit_defaults=True):
    """Text beside the boxes; `anchor` is that of SVG."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    small: bool = False


class Drawing(msgspec.Struct, frozen=True):
    """Boxes from the back to the front, in pixels."""

    width: float
    height: float
    sheets: tuple[tuple[float, float, float, float], ...]  # outlines of further copies or parts, behind
    sides: tuple[Side, ...]
    pieces: tuple[Piece, ...]
    labels: tuple[Label, ...]


class BlockStyle(msgspec.Struct, frozen=True):
    """The colours of a block."""

    fill: str
    ink: str
    top: str
    side: str


def colour(point: Sequence[tuple[int, int]]) -> Rgb:
    """Returns the colour at a coordinate: (index, size) for each sharding dimension.

    The first dimension determines the hue, the others together the paleness.
    """
    if not point:
        return _PALETTE[0]
    (index, size), *tints = point
    hue = _PALETTE[index] if size <= len(_PALETTE) else _interpolate(_GRADIENT, index / (size - 1))
    position, count = 0, 1
    for index, size in tints:
        position, count = position * size + index, count * size
    return _mix(hue, WHITE, _PALEST * position / (count - 1)) if count > 1 else hue


def _mix(first: Rgb, second: Rgb, share: float) -> Rgb:
    """Mixes two colours."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def ink(ground: Rgb) -> Rgb:
    """Returns black or white, whichever is readable on a ground, by its relative luminance (WCAG 2)."""
    linear = [(part / 255) ** 2.2 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (17, 17, 17) if luminance > 0.19 else WHITE


def _css(rgb: Rgb) -> str:
    """Returns the colour in CSS notation."""
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _interpolate(colours: Sequence[Rgb], share: float) -> Rgb:
    index = min(int(share * (len(colours) - 1)), len(colours) - 2)
    return _mix(colours[index], colours[index + 1], share * (len(colours) - 1) - index)


def block_styles(placement: Placement) -> list[BlockStyle]:
    """Returns the colours of each block."""
    styles = []
    for number in range(len(placement.blocks)):
        ground = colour(placement.colour_point(number))
        styles.append(
            BlockStyle(
                _css(ground),
                _css(ink(ground)),
                _css(_mix(ground, (255, 255, 255), 0.35)),
                _css(_mix(ground, (0, 0, 0), 0.3)),
            )
        )
    return styles


def fits(text: str, width: float, height: float, size: float = 11) -> bool:
    """Returns whether a text fits into a box; letters are 0.58 of their size wide on average."""
    return height >= size + 1 and len(text) * size * 0.58 + 5 <= width


# -- the mesh: a cell for each rank in the colour of its block; the last dimension runs across ------------------------

_MOST_CELLS = 512  # cells; with more ranks, those along the last dimensions share a cell
_FOLDED = 16  # cells in a line of a mesh of one dimension
_LINE = 17  # height of a line of labels
_GROUPS_WIDE = 420


def mesh_drawing(placement: Placement) -> Drawing:
    """Returns the ranks of the mesh, each with its block."""
    labels, sizes = list(placement.labels), list(placement.sizes)
    per_cell = 1
    while math.prod(sizes) > _MOST_CELLS and len(sizes) > 1:  # the ranks along the last dimensions share a cell
        per_cell *= sizes.pop()
        labels.pop()
    count = math.prod(sizes)
    if count > _MOST_CELLS:
        per_cell *= math.ceil(count / _MOST_CELLS)
        count = math.ceil(len(placement.block_of) / per_cell)
        labels, sizes = [f"each cell: {per_cell} ranks"], [count]
    columns = sizes[-1] if len(sizes) > 1 else min(count, _FOLDED)
    rows = sizes[-2] if len(sizes) > 1 else math.ceil(count / columns)
    w, h = (34, 26) if count <= 64 else (24, 18) if count <= 128 else (12, 12)
    gap = 2 if w > 12 else 1
    groups = max(1, math.ceil(count / (columns * rows)))
    wide, high = columns * (w + gap) + 14, rows * (h + gap) + (18 if groups > 1 else 6)
    in_line = max(1, min(groups, _GROUPS_WIDE // wide))
    head = _head(labels, sizes, per_cell)
    top = len(head) * _LINE + 6
    texts = [Label(0, 11 + number * _LINE, line) for number, line in enumerate(head)]
    pieces, styles = [], block_styles(placement)
    for group in range(groups):
        left, above = (group % in_line) * wide, top + (group // in_line) * high
        if groups > 1:
            texts.append(Label(left, above + 10, _group(labels[:-2], sizes[:-2], group), small=True))
            above += 14
        for cell in range(columns * rows):
            index = group * columns * rows + cell
            if index < count:
                box = (left + cell % columns * (w + gap), above + cell // columns * (h + gap), w, h)
                ranks = range(index * per_cell, min((index + 1) * per_cell, len(placement.block_of)))
                pieces.append(_rank_cell(placement, styles, ranks, box))
    width = max([in_line * wide - 14, *(len(line) * 6.2 for line in head)])
    return Drawing(width + 2, top + math.ceil(groups / in_line) * high, (), (), tuple(pieces), tuple(texts))


def _head(labels: Sequence[str], sizes: Sequence[int], per_cell: int) -> list[str]:
    arrows = ["▦"] * (len(labels) - 2) + (["↓", "→"] if len(labels) > 1 else ["→"] * len(labels))
    if per_cell > 1 and len(labels) == 1 and labels[0].startswith("each"):
        return [labels[0]]
    lines = [f"{arrow} {label}={size}" for arrow, label, size in zip(arrows, labels, sizes, strict=True)]
    return [*lines, f"each cell: {per_cell} ranks"] if per_cell > 1 else lines or ["one rank"]


def _group(labels: Sequence[str], sizes: Sequence[int], group: int) -> str:
    point = []
    for size in reversed(sizes):
        group, index = divmod(group, size)
        point.append(index)
    return mesh_text(labels, point[::-1])


def _rank_cell(
    placement: Placement, styles: Sequence[BlockStyle], ranks: range, box: tuple[float, float, float, float]
) -> Piece:
    blocks = tuple(dict.fromkeys(placement.block_of[rank] for rank in ranks if placement.block_of[rank] >= 0))
    x, y, w, h = box
    description = f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
    if len(ranks) == 1:
        description += f" ({mesh_text(placement.labels, placement.point(ranks[0]))})"
    description += f" · {size_text(sum(map(placement.bytes_on, ranks)))}"
    text = str(ranks[0])
    if not blocks:
        return Piece(
            x=x,
            y=y,
            w=w,
            h=h,
            text="∅" if fits("∅", w, h) else "",
            ranks=tuple(ranks),
            description=f"{description}: nothing of it",
        )
    style = styles[blocks[0]]
    return Piece(
        x=x,
        y=y,
        w=w,
        h=h,
        fill=style.fill,
        ink=style.ink,
        blocks=blocks,
        ranks=tuple(ranks),
        description=description,
        text=text if fits(text, w, h) else "",
        hatched=placement.parts > 1,
    )


# -- the tensor: one sheet for two dimensions, slabs side by side for more ---------------------------------------------

_SIDE = 210  # of a square tensor
_WIDEST, _HIGHEST = 360.0, 240.0
_FLAT = 44.0  # height of a tensor of one dimension
_SLABS_WIDE = 440  # all slabs of a line
_BLOCK_WIDE = 30  # of a slab with room for the numbers of ranks
_MOST_PIECES = 400  # pieces that are drawn; more are merged with their neighbours
_TICKED = 8  # segments with labels of their start
_SHEET = 6  # distance between sheets
_DEPTH = 12  # of a slab


def tensor_drawing(placement: Placement, name: str = "") -> Drawing:
    """Returns the tensor, divided into its blocks."""
    return _Tensor(placement, name).drawing()


class _Tensor:
    def __init__(self, placement: Placement, name: str) -> None:
        self._placement, self._name = placement, name
        self._grid = grid = _limited_grid(placement)
        self._styles: list[BlockStyle] = block_styles(placement)
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
        labels = [Label(0, 11 + line * _LINE, text) for line, text in enumerate(self._axes())]
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
                    Label(x - 5, row_y + 9, str(_begin(row)), "end", small=True)
                    for row, (row_y, _) in zip(grid.rows, rows, strict=True)
                ]
            if heads and not self._solid:
                labels += [
                    Label(column_x, y - 4 - self._more * _SHEET, str(_begin(column)), small=True)
                    for column, (column_x, _) in zip(grid.columns, columns, strict=True)
                    if self._w / len(grid.columns) >= 24 or column is grid.columns[0]
                ]
        across = left + self._in_line * step - 6 + self._more * _SHEET
        wide = max([across, *(len(label.text) * 6.2 for label in labels[: len(self._axes())])])
        high = max(piece.y + piece.h for piece in pieces) if pieces else top + above + self._h
        high = max(high, top + above + self._h)
        return Drawing(wide + 2, high + 3, tuple(sheets), tuple(sides), tuple(pieces), tuple(labels))

    def _axes(self) -> list[str]:
        """Returns labels of the axes, with the mesh dimensions that shard them."""
        grid, placement = self._grid, self._placement
        axes = [(dim, "↗") for dim in grid.deep]
        if grid.down is not None:
            axes.append((grid.down, "↓"))
        if grid.across is not None:
            axes.append((grid.across, "→"))
        lines = []
        for dim, arrow in axes:
            cut = " ".join(cutters(placement, dim))
            lines.append(f"{arrow} dim {dim}: {placement.shape[dim]}{f' ÷ {cut}' if cut else ''}")
        for sign, dims, count, noun in (
            (
                "×",
                placement.dims(Replicate),
                placement.copies,
                "own values" if any(placement.dims(OwnValues)) else "copies",
            ),
            ("Σ", placement.dims(Partial), placement.parts, "parts"),
        ):
            if count > 1:
                along = " ".join(label for label, _, _ in dims)
                lines.append(f"{sign} {count} {noun} along {along}")
        return lines

    def _front(
        self, slab: int, columns: Sequence[tuple[float, float]], rows: Sequence[tuple[float, float]]
    ) -> list[Piece]:
        pieces = []
        for row, (y, h) in enumerate(rows):
            for column, (x, w) in enumerate(columns):
                blocks = self._grid.at(slab, row, column)
                if blocks:
                    pieces.append(self._piece(blocks, x, y, w, h))
        return pieces

    def _piece(self, blocks: tuple[int, ...], x: float, y: float, w: float, h: float) -> Piece:
        placement, style = self._placement, self._styles[blocks[0]]
        ranks = [rank for block in blocks for rank in placement.blocks[block].ranks]
        text = spans(ranks).replace(",", " ")
        texts = [f"Σ {text}", "Σ"] if placement.parts > 1 else [text]
        return Piece(
            x=x,
            y=y,
            w=w,
            h=h,
            fill=style.fill,
            ink=style.ink,
            blocks=blocks,
            text=next((label for label in texts if fits(label, w, h)), ""),
            description=placement.describe(blocks[0], self._name)
            if len(blocks) == 1
            else f"{len(blocks)} shards · ranks {spans(ranks)}",
            hatched=placement.parts > 1,
        )

    def _sides(
        self, slab: int, columns: Sequence[tuple[float, float]], rows: Sequence[tuple[float, float]]
    ) -> list[Side]:
        """Returns the top and the right of a slab."""
        sides = []
        top, right = rows[0][0] - 1, columns[-1][0] + columns[-1][1] + 1
        for column, (x, w) in enumerate(columns):
            blocks = self._grid.at(slab, 0, column)
            if blocks:
                points = ((x, top), (x + w, top), (x + w + _DEPTH, top - _DEPTH), (x + _DEPTH, top - _DEPTH))
                sides.append(Side(points, self._styles[blocks[0]].top, blocks))
        for row, (y, h) in enumerate(rows):
            blocks = self._grid.at(slab, row, len(columns) - 1)
            if blocks:
                points = ((right, y), (right + _DEPTH, y - _DEPTH), (right + _DEPTH, y + h - _DEPTH), (right, y + h))
                sides.append(Side(points, self._styles[blocks[0]].side, blocks))
        return sides


def _limited_grid(placement: Placement) -> Grid:
    limit = 64
    grid = grid_of(placement, limit)
    while len(grid.slabs) * len(grid.rows) * len(grid.columns) > _MOST_PIECES:
        limit //= 2
        grid = grid_of(placement, limit)
    return grid


def _begin(segment: Segment) -> int:
    return segment[0][0] if segment else 0


def _span(segment: Segment) -> str:
    return f"{segment[0][0]}:{segment[-1][1]}" if segment else "0:0"


def _extents(segments: Sequence[Segment], start: float, room: float) -> list[tuple[float, float]]:
    """Returns start and length of each segment by its share, with gaps."""
    total = sum(stop - begin for segment in segments for begin, stop in segment) or 1
    gap = 2.0 if room / len(segments) >= 10 else 1.0 if room / len(segments) >= 5 else 0.4
    extents, position = [], start
    for segment in segments:
        share = sum(stop - begin for begin, stop in segment) / total * room
        extents.append((round(position, 2), round(max(share - gap, 0.5), 2)))
        position += share
    return extents


WIDE, HIGH = 36, 18
_EACH_WAY = 8  # boxes

Box = tuple[float, float, float, float, str]  # x, y, width, height, colour


@lru_cache(maxsize=1024)
def thumbnail(placement: Placement) -> tuple[Box, ...]:
    """Returns boxes within WIDE by HIGH pixels, all of the same size; slabs are side by side."""
    grid = grid_of(placement, _EACH_WAY, dims=2)
    styles = block_styles(placement)
    slabs = range(min(len(grid.slabs), _EACH_WAY))
    columns = [(slab, column) for slab in slabs for column in range(len(grid.columns))][: 2 * _EACH_WAY]
    w, h = WIDE / len(columns), HIGH / len(grid.rows)
    boxes: list[Box] = []
    for row in range(len(grid.rows)):
        for index, (slab, column) in enumerate(columns):
            blocks = grid.at(slab, row, column)
            if blocks:
                box = (round(index * w, 1), round(row * h, 1), round(w - 1, 1), round(h - 1, 1))
                boxes.append((*box, styles[blocks[0]].fill))
    return tuple(boxes)


_DESCRIBED = 1024  # blocks that are described in words


def document(placement: Placement, name: str = "") -> dict[str, object]:
    """Returns drawings and texts of a placement; docs/protocol.md has the fields."""
    descriptions = [placement.describe(block, name) for block in range(min(len(placement.blocks), _DESCRIBED))]
    result: dict[str, object] = msgspec.to_builtins(
        {
            "name": name or "Tensor",
            "title": title(placement),
            "mesh_text": mesh_text(placement.labels, placement.sizes),
            "bytes": bytes_text(placement),
            "rows": dimension_rows(placement),
            "blocks": descriptions,
            "tensor": tensor_drawing(placement, name),
            "mesh": mesh_drawing(placement),
        }
    )
    return result
