"""The displays of many ranks, as a cell shows them."""

from typing import Any

import pytest

from monarch_kernel.output import rows as module
from monarch_kernel.output.rows import DisplayRows
from monarch_nb.logs.lines import Line, Source
from monarch_nb.wire import Display
from monarch_nb.wire.plain import LATER, NOW


class Page:
    """The front end: the outputs of the cell, in order."""

    def __init__(self) -> None:
        self.outputs: dict[str, dict[str, Any]] = {}
        self.display_ids: list[str] = []

    def display(
        self, bundle: dict[str, Any], display_id: str, *, update: bool, cell: Any, metadata: Any = None
    ) -> None:
        assert update == (display_id in self.outputs)
        self.outputs[display_id] = bundle
        self.display_ids.append(display_id)

    @property
    def texts(self) -> list[str]:
        texts = (row.get("text/html") or row.get("image/png") or row["text/plain"] for row in self.outputs.values())
        return [text for text in texts if text]


class Cell:
    def __init__(self) -> None:
        self.page = Page()
        self.rows = DisplayRows(self.page)  # type: ignore[arg-type]
        self.parent = object()

    def take(self, rank: int, display: Display, call: str = "c:1") -> None:
        line = Line(f"h/p.{rank}.0", display.text, call=call, display=display)
        row = self.rows.take(self.parent, line, Source("p", "w", ("gpus",), (rank,)))
        if row is not None:
            self.rows.show(row, named=False)

    def settle(self) -> list[str]:
        self.rows.show_changed(named=False, all_of_it=True)
        return self.page.texts


@pytest.fixture
def cell() -> Cell:
    return Cell()


def html(text: str, **options: Any) -> Display:
    return Display(f"<{text}>", {"text/html": text}, **options)


def png(text: str) -> Display:
    return Display("<picture>", {"image/png": text})


def test_equal_displays_are_one_with_all_ranks_and_sent_once(cell: Cell) -> None:
    for rank in range(8):
        cell.take(rank, png("same"))
    assert cell.settle() == ["[gpus=0-7]", "same"]
    assert len(cell.page.display_ids) == 3  # the ranks, the picture, and the ranks that came later


def test_different_displays_stand_side_by_side_in_the_order_of_ranks(cell: Cell) -> None:
    for rank in (2, 0, 3, 1):
        cell.take(rank, html(f"<b>{rank % 2}</b>"))
    label, figures = cell.settle()
    assert label == "[gpus=0-3] 2 different displays"
    assert "<figcaption>gpus=0,2</figcaption><b>0</b>" in figures
    assert figures.index("gpus=0,2") < figures.index("gpus=1,3")


def test_the_nth_display_of_each_rank_is_in_the_nth_row(cell: Cell) -> None:
    for rank in range(2):
        cell.take(rank, html("first"))
        cell.take(rank, html(f"second {rank}"))
        cell.take(rank, html("first"))
    texts = cell.settle()
    assert [text for text in texts if "figure" not in text] == [
        *("[gpus=0-1]", "first"),
        "[gpus=0-1] 2 different displays",
        *("[gpus=0-1]", "first"),
    ]


def test_a_rank_that_displays_more_keeps_no_others_apart(cell: Cell) -> None:
    cell.take(0, html("extra"))
    for rank in range(4):
        cell.take(rank, html("loss"))
    assert sum(text.count("loss") for text in cell.settle()) == 1


def test_forms_that_only_a_front_end_can_draw_stand_by_themselves(cell: Cell) -> None:
    for rank in range(2):
        cell.take(rank, Display("plot", {"application/vnd.some.chart+json": {"rank": rank}, "text/plain": "plot"}))
    cell.settle()
    charts = [row for row in cell.page.outputs.values() if "application/vnd.some.chart+json" in row]
    assert [row["application/vnd.some.chart+json"]["rank"] for row in charts] == [0, 1]


def test_equal_data_that_is_drawn_under_different_names_is_one_display(cell: Cell) -> None:
    for rank in range(2):
        html_of_it = f'<div id="{rank}"><script></script></div>'
        cell.take(rank, Display("plot", {"application/vnd.some.chart+json": {"x": [1]}, "text/html": html_of_it}))
    assert cell.settle()[0] == "[gpus=0-1]"


def test_scripts_are_not_put_among_others(cell: Cell) -> None:
    for rank in range(2):
        cell.take(rank, html(f"<SCRIPT>{rank}</SCRIPT>"))
    assert cell.settle() == ["[gpus=0]", "<SCRIPT>0</SCRIPT>", "[gpus=1]", "<SCRIPT>1</SCRIPT>"]


def test_an_update_replaces_what_that_rank_displayed(cell: Cell) -> None:
    for rank in range(2):
        cell.take(rank, html("0 %", id=f"id-of-{rank}"))
    cell.take(1, html("50 %", id="id-of-1", update=True))
    assert "50 %" in cell.settle()[1]
    for rank in range(2):
        cell.take(rank, html("100 %", id=f"id-of-{rank}", update=True), call="c:2")  # a later call
    cell.take(0, html("lost", id="unknown", update=True))
    assert cell.settle() == ["[gpus=0-1]", "100 %"]


def test_a_loop_that_clears_and_displays_is_shown_in_one_place(cell: Cell) -> None:
    for number in range(5):
        for rank in range(2):
            cell.take(rank, Display(clear=LATER))
            cell.take(rank, html(f"step {number}"))
    assert cell.settle() == ["[gpus=0-1]", "step 4"]
    cell.take(0, Display(clear=NOW))
    assert cell.settle() == ["[gpus=1]", "step 4"]
    cell.take(1, Display(clear=NOW))
    assert cell.settle() == []


def test_a_cell_is_bounded_and_says_what_it_does_not_show(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(module.MOST + 10):
        cell.take(0, html(f"number {number}"))
    texts = cell.settle()
    assert sum("number" in text for text in texts) == module.MOST
    assert (
        texts[-1] == f"[gpus=0] … 10 more displays are not shown: a cell has room for {module.MOST}, of 24 MB together"
    )
    second_cell = Cell()
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    for number in range(3):
        second_cell.take(0, html(f"{number}" * 400))
    assert "1 more display is not shown" in second_cell.settle()[-1]


def test_a_change_that_follows_at_once_waits_a_moment(cell: Cell) -> None:
    cell.take(0, html("same"))
    cell.take(1, html("same"))
    assert cell.rows.waiting
    cell.rows.show_changed(named=False, all_of_it=False)
    assert cell.page.texts == ["[gpus=0]", "same"]
    assert cell.settle() == ["[gpus=0-1]", "same"]
    assert not cell.rows.waiting
