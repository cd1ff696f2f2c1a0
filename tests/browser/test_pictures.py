"""Drawings of the documentation are complete in a browser."""

import pytest

from tests.browser.lab import ROOT, browser, browser_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
OUTSIDE = """() => {
    const {x, y, width, height} = document.querySelector("svg").viewBox.baseVal;
    const out = (box) => box.x < x || box.y < y || box.x + box.width > x + width || box.y + box.height > y + height;
    return [...document.querySelectorAll("text")].filter((text) => out(text.getBBox())).map((text) => text.textContent);
}"""


def test_no_text_of_a_drawing_is_cut_off_at_its_edge() -> None:
    browser_path()
    drawings = sorted((ROOT / "docs" / "images").glob("*.svg"))
    assert drawings
    with browser() as by:
        shown = by.new_page()
        for drawing in drawings:
            shown.set_content(drawing.read_text())
            assert shown.evaluate(OUTSIDE) == [], drawing.name
