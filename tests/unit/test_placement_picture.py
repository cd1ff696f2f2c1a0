"""The picture of a placement: every block and rank is drawn once, to scale, bounded, and told in words."""

import base64
import itertools
import re
from html.parser import HTMLParser

import msgspec
import pytest

from monarch_kernel.display.placement import placement_html
from monarch_nb.tensor.placement import Partial, Placement, Replicate, Shard, document, place
from monarch_nb.tensor.placement.picture import WHITE, Piece, colour, ink, mesh_drawing, tensor_drawing

pytestmark = pytest.mark.timeout(60)

PLACED = {
    "rows": place((1024, 1024), "float32", 4, ("data", "model"), (4, 2), [Shard(0), Replicate()]),
    "both": place((4096, 512), "float32", 4, ("data", "model"), (4, 2), [Shard(0), Shard(1)]),
    "uneven": place((5, 7), "float32", 4, ("data", "model"), (4, 2), [Shard(0), Shard(1)]),
    "parts": place((64, 64), "float32", 4, ("data", "model"), (4, 2), [Shard(1), Partial()]),
    "cube": place((8, 512, 1024), "bfloat16", 2, ("dp", "sp", "tp"), (4, 4, 4), [Shard(0), Shard(1), Shard(2)]),
    "strided": place((64, 4), "float32", 4, ("data", "model"), (2, 2), [Shard(0, 2), Shard(0)]),
    "scalar": place((), "float32", 4, ("data",), (4,), [Replicate()]),
    "nothing": place((0, 3), "float32", 4, ("data",), (4,), [Shard(0)]),
    "vector": place((4096,), "float32", 4, ("gpus",), (16,), [Shard(0)]),
    "five": place((4, 3, 8, 2, 16), "float32", 4, ("a", "b"), (2, 4), [Shard(0), Shard(2)]),
    "one": place((4, 4), "float32", 4, (), (), []),
}
placements = pytest.mark.parametrize("placement", PLACED.values(), ids=PLACED)


def overlap(first: Piece, second: Piece) -> bool:
    across = first.x + first.w > second.x and second.x + second.w > first.x
    return across and first.y + first.h > second.y and second.y + second.h > first.y


@placements
def test_every_block_and_every_rank_is_drawn_once_within_the_picture(placement: Placement) -> None:
    tensor, mesh = tensor_drawing(placement), mesh_drawing(placement)
    drawn = [block for piece in tensor.pieces for block in piece.blocks]
    assert sorted(drawn) == [index for index, block in enumerate(placement.blocks) if 0 not in placement.shape]
    assert [rank for piece in mesh.pieces for rank in piece.ranks] == list(range(len(placement.block_of)))
    for drawing in (tensor, mesh):
        for first, second in itertools.combinations(drawing.pieces, 2):
            assert not overlap(first, second)
        for piece in drawing.pieces:
            assert min(piece.x, piece.y) >= 0
            assert piece.x + piece.w <= drawing.width
            assert piece.y + piece.h <= drawing.height


def test_pieces_are_as_large_as_their_share() -> None:
    first, *_, last = tensor_drawing(PLACED["uneven"]).pieces
    assert first.h / last.h == pytest.approx(2, rel=0.05)  # 2 rows and 1
    assert first.w / last.w == pytest.approx(4 / 3, rel=0.05)


def test_a_block_has_the_colour_of_its_ranks() -> None:
    placement = PLACED["cube"]
    of_block = {piece.blocks: piece.fill for piece in tensor_drawing(placement).pieces}
    assert len(set(of_block.values())) == 64
    for piece in mesh_drawing(placement).pieces:
        assert piece.fill == of_block[piece.blocks]


def test_a_thousand_ranks_are_all_drawn_in_few_pieces() -> None:
    placement = place((4096, 4096), "float32", 4, ("hosts", "gpus"), (512, 16), [Shard(0), Shard(1)])
    tensor, mesh = tensor_drawing(placement), mesh_drawing(placement)
    assert len(tensor.pieces) <= 400
    assert sorted(block for piece in tensor.pieces for block in piece.blocks) == list(range(512 * 16))
    assert sorted(rank for piece in mesh.pieces for rank in piece.ranks) == list(range(512 * 16))
    assert len(placement_html(placement)) < 300_000


def test_colours_can_be_told_apart_and_text_on_them_read() -> None:
    for size in (2, 4, 7, 8, 64):
        fills = [colour([(index, size)]) for index in range(size)]
        assert len(set(fills)) == size
    palest = colour([(0, 4), (3, 4)])
    assert ink(palest) != WHITE
    assert ink(colour([(0, 4)])) == WHITE


def test_ranks_with_partial_sums_are_hatched_and_empty_ones_labelled() -> None:
    assert all(piece.hatched for piece in tensor_drawing(PLACED["parts"]).pieces)
    empty = mesh_drawing(PLACED["uneven"]).pieces[-1]
    assert (empty.fill, empty.text, empty.description) == ("", "∅", "rank 7 (data=3 model=1) · 0 B: nothing of it")


@placements
def test_html_links_each_block_with_its_ranks_without_a_script(placement: Placement) -> None:
    html = placement_html(placement, "t")
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    for block in range(len(placement.blocks)):
        assert f".mnb-p:has(.b{block}:hover) .b{block}{{" in html
        drawn = len(re.findall(rf'class="p x [^"]*\bb{block}\b', html))
        assert drawn >= len(placement.blocks[block].ranks) + (0 not in placement.shape)


class SanitizedPage(HTMLParser):
    """HTML as JupyterLab sanitizes it in an untrusted notebook: no style sheets, of SVG the texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[bool] = []  # whether the content of each open element is hidden or removed
        self.images: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "img":
            self.images.append(str(attributes["src"]))
        else:
            self.open.append(tag == "style" or attributes.get("hidden") == "hidden")

    def handle_endtag(self, tag: str) -> None:
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not any(self.open):
            self.texts.append(data)


@placements
def test_without_style_sheets_and_svg_images_show_the_drawing_alone(placement: Placement) -> None:
    page = SanitizedPage(placement_html(placement, "t"))
    tensor, mesh = (base64.b64decode(image.partition(";base64,")[2]).decode() for image in page.images)
    assert tensor.count("<rect") == len(tensor_drawing(placement, "t").pieces)
    assert mesh.count("<rect") == len(mesh_drawing(placement).pieces)
    assert "<title" not in tensor + mesh
    assert not [text for text in page.texts if text.startswith(("point at", "rank "))]
    kinds = [text for text in page.texts if text.startswith(("Shard", "Replicate", "Partial"))]
    assert len(kinds) == len(placement.labels)


def test_html_says_what_the_picture_shows_and_escapes_names() -> None:
    html = placement_html(PLACED["rows"], "<b>&", [3])
    assert "<b>&lt;b&gt;&amp;</b>" in html
    assert "cuts dimension 0: 1024 → 4 × 256" in html
    assert 'aria-label="1024×1024 float32: data=4 cuts dimension 0' in html
    assert html.count('class="lost"') == 1
    assert "rank 3 (data=1 model=1) · 1.00 MB · lost" in html


@placements
def test_the_json_for_live_views_is_plain_and_bounded(placement: Placement) -> None:
    doc = msgspec.json.decode(msgspec.json.encode(document(placement, "t")))
    assert [rank for piece in doc["mesh"]["pieces"] for rank in piece["ranks"]] == list(range(len(placement.block_of)))
    assert doc["blocks"] == [placement.describe(block, "t") for block in range(len(placement.blocks))]
    assert len(doc["rows"]) == len(placement.labels)
