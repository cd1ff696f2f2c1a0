"""A placement as a picture, in numbers: the tensor cut into its blocks, and the mesh; faces only have to draw it."""

import msgspec

from monarch_nb.tensor.placement.colours import NOTHING, colour, css, ink, mixed
from monarch_nb.tensor.placement.placement import Placement

Point = tuple[float, float]


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One box, with what is written in it; of the tensor or of the mesh."""

    x: float
    y: float
    w: float
    h: float
    fill: str = ""  # "" where nothing of the tensor is
    ink: str = ""
    text: str = ""
    blocks: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()  # of the mesh
    told: str = ""  # what it is, in words
    hatched: bool = False  # parts that are not reduced yet


class Side(msgspec.Struct, frozen=True):
    """What is seen of a block beside its front: a polygon."""

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


class Look(msgspec.Struct, frozen=True):
    """The colours of a block."""

    fill: str
    ink: str
    top: str
    side: str


def looks(placement: Placement) -> list[Look]:
    """How each block looks, by its number."""
    found = []
    for number in range(len(placement.blocks)):
        ground = colour(placement.colour_point(number))
        found.append(
            Look(
                css(ground),
                css(ink(ground)),
                css(mixed(ground, (255, 255, 255), 0.35)),
                css(mixed(ground, (0, 0, 0), 0.3)),
            )
        )
    return found


def fits(text: str, width: float, height: float, size: float = 11) -> bool:
    """Whether a line of text can be read within a box; a letter is as wide as 0.58 of its size, on average."""
    return height >= size + 1 and len(text) * size * 0.58 + 5 <= width


GONE = css(NOTHING)
