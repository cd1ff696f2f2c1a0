"""The mesh, drawn: a cell for each rank in the colour of what it holds. The last dimension runs across."""

import math
from collections.abc import Sequence

from monarch_nb.shape import spans
from monarch_nb.tensor.placement.picture import BlockStyle, Drawing, Label, Piece, fits, looks
from monarch_nb.tensor.placement.placement import Placement, size_text
from monarch_nb.tensor.placement.words import mesh_text

_MOST = 512  # cells; of more ranks, those of the last dimensions are one cell together
_FOLDED = 16  # cells in a line of a mesh of one dimension
_LINE = 17
_GROUPS_WIDE = 420


def mesh_drawing(placement: Placement) -> Drawing:
    """The ranks of the mesh, each with its block."""
    labels, sizes = list(placement.labels), list(placement.sizes)
    together = 1
    while math.prod(sizes) > _MOST and len(sizes) > 1:  # the ranks along the last dimensions share a cell
        together *= sizes.pop()
        labels.pop()
    count = math.prod(sizes)
    if count > _MOST:
        together *= math.ceil(count / _MOST)
        count = math.ceil(len(placement.block_of) / together)
        labels, sizes = [f"each cell: {together} ranks"], [count]
    columns = sizes[-1] if len(sizes) > 1 else min(count, _FOLDED)
    rows = sizes[-2] if len(sizes) > 1 else math.ceil(count / columns)
    w, h = (34, 26) if count <= 64 else (24, 18) if count <= 128 else (12, 12)
    gap = 2 if w > 12 else 1
    groups = max(1, math.ceil(count / (columns * rows)))
    wide, high = columns * (w + gap) + 14, rows * (h + gap) + (18 if groups > 1 else 6)
    in_line = max(1, min(groups, _GROUPS_WIDE // wide))
    head = _head(labels, sizes, together)
    top = len(head) * _LINE + 6
    texts = [Label(0, 11 + at * _LINE, line) for at, line in enumerate(head)]
    pieces, seen = [], looks(placement)
    for group in range(groups):
        left, above = (group % in_line) * wide, top + (group // in_line) * high
        if groups > 1:
            texts.append(Label(left, above + 10, _group(labels[:-2], sizes[:-2], group), small=True))
            above += 14
        for cell in range(columns * rows):
            index = group * columns * rows + cell
            if index < count:
                box = (left + cell % columns * (w + gap), above + cell // columns * (h + gap), w, h)
                ranks = range(index * together, min((index + 1) * together, len(placement.block_of)))
                pieces.append(_cell(placement, seen, ranks, box))
    width = max([in_line * wide - 14, *(len(line) * 6.2 for line in head)])
    return Drawing(width + 2, top + math.ceil(groups / in_line) * high, (), (), tuple(pieces), tuple(texts))


def _head(labels: Sequence[str], sizes: Sequence[int], together: int) -> list[str]:
    ways = ["▦"] * (len(labels) - 2) + (["↓", "→"] if len(labels) > 1 else ["→"] * len(labels))
    if together > 1 and len(labels) == 1 and labels[0].startswith("each"):
        return [labels[0]]
    lines = [f"{way} {label}={size}" for way, label, size in zip(ways, labels, sizes, strict=True)]
    return [*lines, f"each cell: {together} ranks"] if together > 1 else lines or ["one rank"]


def _group(labels: Sequence[str], sizes: Sequence[int], group: int) -> str:
    point = []
    for size in reversed(sizes):
        group, at = divmod(group, size)
        point.append(at)
    return mesh_text(labels, point[::-1])


def _cell(
    placement: Placement, seen: Sequence[BlockStyle], ranks: range, box: tuple[float, float, float, float]
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
    look = seen[blocks[0]]
    return Piece(
        x=x,
        y=y,
        w=w,
        h=h,
        fill=look.fill,
        ink=look.ink,
        blocks=blocks,
        ranks=tuple(ranks),
        description=description,
        text=text if fits(text, w, h) else "",
        hatched=placement.parts > 1,
    )
