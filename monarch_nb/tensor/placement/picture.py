"""Drawing of a placement as coordinates, independent of the front end."""

from collections.abc import Sequence

import msgspec

from monarch_nb.tensor.placement.placement import Placement

Point = tuple[float, float]
Rgb = tuple[int, int, int]
# Okabe and Ito's colours for all kinds of colour vision ("Color Universal Design", 2008), ordered so that neighbours
# differ in lightness too; without black, and without yellow, which the light theme swallows.
_FEW: tuple[Rgb, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (122, 122, 122),
)
# Of more than these, points along matplotlib's viridis (Smith, van der Walt, Firing 2015): lightness rises evenly.
_MANY: tuple[Rgb, ...] = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (236, 220, 60))
_PALEST = 0.62  # how much white the last of the tints has
WHITE: Rgb = (255, 255, 255)
NOTHING: Rgb = (150, 150, 150)  # of a tensor that is not cut, of ranks that hold nothing


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A box of the tensor or the mesh, with its text."""

    x: float
    y: float
    w: float
    h: float
    fill: str = ""  # "" where nothing of the tensor is
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
    """Text beside the boxes; `anchor` as SVG has it."""

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
    """The colour at a coordinate: (place, size) for each dimension that cuts.

    The first dimension gives the hue, the others together how pale it is.
    """
    if not point:
        return _FEW[0]
    (at, size), *others = point
    hue = _FEW[at] if size <= len(_FEW) else _along(_MANY, at / (size - 1))
    place, count = 0, 1
    for at, size in others:
        place, count = place * size + at, count * size
    return _mixed(hue, WHITE, _PALEST * place / (count - 1)) if count > 1 else hue


def _mixed(one: Rgb, other: Rgb, share: float) -> Rgb:
    """Mixes two colours."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def ink(ground: Rgb) -> Rgb:
    """Black or white, whichever can be read on a ground: by its relative luminance (WCAG 2)."""
    linear = [(part / 255) ** 2.2 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (17, 17, 17) if luminance > 0.19 else WHITE


def _css(rgb: Rgb) -> str:
    """The colour in CSS notation."""
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _along(colours: Sequence[Rgb], share: float) -> Rgb:
    at = min(int(share * (len(colours) - 1)), len(colours) - 2)
    return _mixed(colours[at], colours[at + 1], share * (len(colours) - 1) - at)


def looks(placement: Placement) -> list[BlockStyle]:
    """Colours of each block."""
    found = []
    for number in range(len(placement.blocks)):
        ground = colour(placement.colour_point(number))
        found.append(
            BlockStyle(
                _css(ground),
                _css(ink(ground)),
                _css(_mixed(ground, (255, 255, 255), 0.35)),
                _css(_mixed(ground, (0, 0, 0), 0.3)),
            )
        )
    return found


def fits(text: str, width: float, height: float, size: float = 11) -> bool:
    """Returns whether a text fits into a box; letters are 0.58 of their size wide on average."""
    return height >= size + 1 and len(text) * size * 0.58 + 5 <= width


GONE = _css(NOTHING)
