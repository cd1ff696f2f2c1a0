"""Colours of blocks by their coordinate: told apart without colour vision, on light and dark, and by grey in print."""

from collections.abc import Sequence

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
    return mixed(hue, WHITE, _PALEST * place / (count - 1)) if count > 1 else hue


def mixed(one: Rgb, other: Rgb, share: float) -> Rgb:
    """One colour with a share of another."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def ink(ground: Rgb) -> Rgb:
    """Black or white, whichever can be read on a ground: by its relative luminance (WCAG 2)."""
    linear = [(part / 255) ** 2.2 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (17, 17, 17) if luminance > 0.19 else WHITE


def css(rgb: Rgb) -> str:
    """As style sheets have it."""
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _along(colours: Sequence[Rgb], share: float) -> Rgb:
    at = min(int(share * (len(colours) - 1)), len(colours) - 2)
    return mixed(colours[at], colours[at + 1], share * (len(colours) - 1) - at)
