"""A placement as static HTML: the tensor cut into its blocks beside the mesh; pointing at one shows the other.

All of it is style sheets, no script: it works in saved notebooks and in sandboxes. Where style sheets and SVG are taken
away, as JupyterLab does in notebooks that it does not trust, an image of it shows instead.
"""

import base64
import re
from collections.abc import Collection, Sequence
from html import escape

from monarch_nb.tensor.placement import Placement
from monarch_nb.tensor.placement.picture import HIGH, WIDE, Box, Drawing, Piece, Side, mesh_drawing, tensor_drawing
from monarch_nb.tensor.placement.text import bytes_text, dimension_rows, mesh_text, title

from .html import framed, heading, table

_LINKED = 256  # blocks that are lit together with their ranks; with more, each only describes itself
_SHEET = 6  # visible pixels of a sheet behind another one
_HATCH = 8  # pixels between the lines over parts that are not reduced yet
_INK = "#858585"  # of texts in an image, which cannot use the colours of the page: legible on white and on black
_FLAT = f"""<style>text{{font:11px system-ui,sans-serif;fill:{_INK}}}.j{{font-size:10px}}
.p text{{text-anchor:middle;dominant-baseline:central}}.n rect{{fill:none;stroke:{_INK};stroke-dasharray:3 2}}
.sheet{{fill:none;stroke:{_INK}}}.hatch{{stroke:#000;stroke-opacity:.33;stroke-width:1.2;fill:none}}
.lost{{stroke:rgb(218,54,51);stroke-width:2.5;fill:none}}</style>""".replace("\n", "")
_TITLE = re.compile("<title>.*?</title>", re.DOTALL)
STYLE = """
.mnb-p .mnb-flat{display:none}.mnb-p [hidden]{display:block}
.mnb-p .mnb-pics[hidden]{display:flex;flex-wrap:wrap;gap:10px 44px;align-items:flex-start;margin:4px 0 2px}
.mnb-p svg{display:block;overflow:visible;max-width:100%;height:auto}
.mnb-p svg text{font:11px var(--jp-ui-font-family,system-ui,sans-serif);fill:currentColor;pointer-events:none}
.mnb-p svg .k{font-size:11px;opacity:.85}.mnb-p svg .j{font-size:10px;opacity:.6}
.mnb-p svg .p text{text-anchor:middle;dominant-baseline:central;font-variant-numeric:tabular-nums}
.mnb-p .x{transition:opacity .12s;opacity:calc(1 - .76*var(--mnb-dim,0)*(1 - var(--mnb-on,0)))}
.mnb-p:has(.x:hover){--mnb-dim:1}
.mnb-p .n rect{fill:none;stroke:currentColor;stroke-opacity:.4;stroke-dasharray:3 2}
.mnb-p .sheet{fill:none;stroke:currentColor;stroke-opacity:.5}
.mnb-p .hatch{stroke:#000;stroke-opacity:.33;stroke-width:1.2;fill:none;pointer-events:none}
.mnb-p .lost{stroke:rgb(218,54,51);stroke-width:2.5;fill:none;pointer-events:none}
.mnb-p .mnb-say{position:relative;min-height:19px}
.mnb-p .mnb-say span{position:absolute;left:0;opacity:var(--mnb-on,0);white-space:nowrap;pointer-events:none}
.mnb-p .mnb-say .hint{opacity:calc(.6*(1 - var(--mnb-dim,0)))}
@media print{.mnb-p .mnb-say{display:none}}
""".replace("\n", "")


def placement_html(
    placement: Placement, name: str = "", lost: Collection[int] = (), *facts: str, calls: Sequence[tuple[str, str]] = ()
) -> str:
    """Returns the placement of a tensor as HTML; `lost` ranks are marked.

    `calls` are (label, code) pairs for further displays.
    """
    linked = len(placement.blocks) <= _LINKED
    lights = (
        "".join(f".mnb-p:has(.b{block}:hover) .b{block}{{--mnb-on:1}}" for block in range(len(placement.blocks)))
        if linked
        else ""
    )
    descriptions = (
        "".join(
            f'<span class="b{block}">{escape(placement.describe(block, name))}</span>'
            for block in range(len(placement.blocks))
        )
        if linked
        else ""
    )
    hint = "point at a shard to see its ranks, or at a rank to see its shard" if linked else ""
    head = heading(
        name or "Tensor",
        title(placement),
        f"on {mesh_text(placement.labels, placement.sizes)}",
        bytes_text(placement),
        *facts,
    )
    label = f"{title(placement)}: " + "; ".join(
        f"{dimension} {does}" for dimension, _, does in dimension_rows(placement)
    )
    tensor = tensor_drawing(placement, name), label
    mesh = mesh_drawing(placement), f"the mesh {mesh_text(placement.labels, placement.sizes)}"
    lost_ranks = frozenset(lost)
    return framed(
        f"<style>{STYLE}{lights}</style>",
        head,
        f'<div class="mnb-flat">{_flat(*tensor)}{_flat(*mesh, lost_ranks)}</div>',
        f'<div class="mnb-pics" hidden="hidden">{_svg(*tensor, linked)}{_svg(*mesh, linked, lost_ranks)}</div>',
        f'<div class="mnb-say" hidden="hidden"><span class="hint">{hint}</span>{descriptions}</div>' if linked else "",
        table(("mesh", "placement", ""), dimension_rows(placement)) if placement.labels else "",
        ", ".join(f'<span class="mnb-s">{escape(text)}:</span> <code>{escape(code)}</code>' for text, code in calls),
        kind="mnb-p",
    )


def _flat(drawing: Drawing, label: str, lost: frozenset[int] = frozenset()) -> str:
    """Returns the picture as an image of its own."""
    svg = _TITLE.sub("", _svg(drawing, "", False, lost)).replace(">", f">{_FLAT}", 1)
    image = _image(svg, drawing.width, drawing.height, label)
    return f'<span style="display:inline-block;vertical-align:top;margin:4px 44px 4px 0">{image}</span>'


def _image(svg: str, width: float, height: float, alt: str = "") -> str:
    """Returns an SVG for front ends that remove SVG, as an image."""
    drawn = base64.b64encode(svg.encode()).decode("ascii")
    attributes = f'width="{_n(width)}" height="{_n(height)}" alt="{escape(alt)}" style="vertical-align:middle"'
    return f'<img {attributes} src="data:image/svg+xml;base64,{drawn}">'


def _svg(drawing: Drawing, label: str, linked: bool, lost: frozenset[int] = frozenset()) -> str:
    parts = [
        f'<path class="sheet" d="M{_n(x)} {_n(y + _SHEET)}v-{_SHEET}h{_n(w)}v{_n(h)}h-{_SHEET}"/>'
        for x, y, w, h in drawing.sheets
    ]
    parts += [_side(side, linked) for side in drawing.sides]
    parts += [_piece(piece, linked, lost) for piece in drawing.pieces]
    for text in drawing.labels:
        style, anchor = "j" if text.small else "k", f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
        parts.append(f'<text class="{style}" x="{_n(text.x)}" y="{_n(text.y)}"{anchor}>{escape(text.text)}</text>')
    width, height = _n(drawing.width), _n(drawing.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _piece(piece: Piece, linked: bool, lost: frozenset[int]) -> str:
    x, y, w, h = piece.x, piece.y, piece.w, piece.h
    rounded = 3 if min(w, h) > 10 else 1 if min(w, h) > 4 else 0
    fill = f' fill="{piece.fill}"' if piece.fill else ""
    box = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"{fill}/>'
    if rounded:
        box = box.replace("/>", f' rx="{rounded}"/>')
    ink = f' style="fill:{piece.ink}"' if piece.ink else ""
    text = f'<text x="{_n(x + w / 2)}" y="{_n(y + h / 2 + 0.5)}"{ink}>{escape(piece.text)}</text>' if piece.text else ""
    hatch = f'<path class="hatch" d="{_hatched(x, y, w, h)}"/>' if piece.hatched else ""
    cross = (
        f'<path class="lost" d="M{_n(x)} {_n(y)}l{_n(w)} {_n(h)}m0 -{_n(h)}l-{_n(w)} {_n(h)}"/>'
        if lost.intersection(piece.ranks)
        else ""
    )
    title = piece.description + (" · lost" if cross else "")
    return f'<g class="p {_classes(piece.blocks, linked)}">{box}{hatch}{text}{cross}<title>{escape(title)}</title></g>'


def _side(side: Side, linked: bool) -> str:
    path = "L".join(f"{_n(x)} {_n(y)}" for x, y in side.points)
    return f'<path class="{_classes(side.blocks, linked)}" fill="{side.fill}" d="M{path}z"/>'


def _classes(blocks: Sequence[int], linked: bool) -> str:
    if not blocks:
        return "n"
    return " ".join(["x", *(f"b{block}" for block in blocks)]) if linked else "y"


def _hatched(x: float, y: float, w: float, h: float) -> str:
    """Lines from the lower left to the upper right, within a box."""
    lines, position = [], _HATCH / 2
    while position < w + h:
        x1, y1 = (x, y + position) if position <= h else (x + position - h, y + h)
        x2, y2 = (x + position, y) if position <= w else (x + w, y + position - w)
        lines.append(f"M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}")
        position += _HATCH
    return "".join(lines)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def small(boxes: Sequence[Box]) -> str:
    """Returns the small picture of a table."""
    drawn = "".join(
        f'<path fill="{fill}" d="M{_n(x)} {_n(y)}h{_n(max(w, 1))}v{_n(max(h, 1))}h-{_n(max(w, 1))}z"/>'
        for x, y, w, h, fill in boxes
    )
    return _image(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}">{drawn}</svg>', WIDE, HIGH)
