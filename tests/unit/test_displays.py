"""Displays of a process: the forms of objects, the way through its spool, and the bounds."""

import base64
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.logs.journal import Journal
from monarch_nb.logs.spool import DISPLAY, ERR, OUT, TEXT, Spool, last_lines, plain
from monarch_nb.runtime.output import displays as module
from monarch_nb.runtime.output.displays import BURST, MOST, Displays, forms_of
from monarch_nb.wire import Display, decode_display, encode_display

PNG = b"\x89PNG\r\n\x1a\n"


class Table:
    def __init__(self, text: str = "cell") -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Table({self.text})"

    def _repr_html_(self) -> str:
        return f"<table><tr><td>{self.text}</td></tr></table>"


class Own:
    """A process with a real journal; its displays are read from its spool."""

    def __init__(self, folder: Path) -> None:
        self.base = str(folder / "p")
        for kind in (TEXT, OUT, ERR):
            Path(self.base + kind).touch()
        self.journal = Journal(self.base)
        self.displays = Displays()
        self.displays.write_to(self)
        self.spool = Spool(self.base)
        self.call = "h/c:1"
        self.journal.tag_by(self.tag, lambda: "")

    def tag(self) -> tuple[str, int]:
        return self.call, 0

    def display(self, line: bytes, call: str | None = None) -> bool:
        return self.journal.display(line, (self.call if call is None else call, 0))

    def show(self, value: Any, **options: Any) -> None:
        forms = forms_of(value)
        self.displays.publish(forms.data, forms.metadata, **options)

    def take_displays(self) -> list[Display]:
        blocks = self.spool.take(1 << 30, 0.0)
        return [display for block in blocks if block.stream == DISPLAY and (display := decode_display(block.data))]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    return Own(tmp_path)


def test_objects_have_the_forms_that_their_methods_give() -> None:
    class Bundle:
        def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Any:
            return {"text/html": "<i>x</i>", "image/png": PNG}, {"image/png": {"width": 3}}

    assert forms_of(Table()).data == {"text/html": Table()._repr_html_(), "text/plain": "Table(cell)"}
    bundle = forms_of(Bundle())
    assert bundle.data["image/png"] == base64.b64encode(PNG).decode()
    assert bundle.metadata == {"image/png": {"width": 3}}
    assert not forms_of(3).rich
    assert not forms_of(Table).rich  # the class itself
    assert set(forms_of(Table(), exclude=("text/html",)).data) == {"text/plain"}


def test_no_object_can_make_displaying_it_fail(capsys: pytest.CaptureFixture[str]) -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise ValueError("no text")

        def _repr_html_(self) -> str:
            raise RuntimeError("no html")

    class Closed(Hostile):
        def __getattribute__(self, name: str) -> Any:
            raise OSError(name)

    assert forms_of(Closed()).data == {"text/plain": "<Closed: its repr raised ValueError: no text>"}
    assert forms_of(Hostile()).data == {"text/plain": "<Hostile: its repr raised ValueError: no text>"}
    assert "Hostile._repr_html_ raised RuntimeError: no html" in capsys.readouterr().err


def test_forms_are_such_as_a_front_end_takes() -> None:
    class Odd:
        def _repr_mimebundle_(self, **_: object) -> Any:
            return {"text/html": 5, 3: "x", "image/png": b"\x00", "application/json": [1], "text/latex": None}

    class Wrong:
        def _repr_mimebundle_(self, **_: object) -> Any:
            return 5

        def _repr_html_(self) -> Any:
            return 6

    data = forms_of(Odd()).data
    del data["text/plain"]
    assert data == {"text/html": "5", "3": "x", "image/png": "AA==", "application/json": [1]}
    assert forms_of(Wrong()).data["text/html"] == "6"


def test_widgets_whose_state_lives_in_the_process_are_shown_as_text() -> None:
    class Slider:
        def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
            return {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Slider()"}

    assert forms_of(Slider()).data == {"text/plain": "Slider()"}


def test_a_display_stands_between_the_lines_around_it_with_its_call(own: Own) -> None:
    out = own.journal.texts[0]
    out.write("before\n")
    own.show(Table("one"))
    own.show(Table("two"))
    out.write("after\n")
    position = own.journal.position()
    blocks = own.spool.take(1 << 20, 0.0)
    assert [block.stream for block in blocks] == [1, DISPLAY, DISPLAY, 1]
    assert {block.call for block in blocks} == {"h/c:1"}
    assert b"".join(map(plain, blocks)) == b"before\nTable(one)\nTable(two)\nafter\n"
    assert own.spool.position == position
    assert last_lines(own.base, 3, 1 << 20) == ("Table(one)", "Table(two)", "after")


def test_a_large_display_comes_whole_and_an_unfinished_one_waits(own: Own, tmp_path: Path) -> None:
    own.show(Table("x" * 1_000_000))
    [display] = own.take_displays()
    assert len(display.data["text/html"]) > 1_000_000
    line = encode_display(Display("half", {"text/html": "y" * 200_000}))
    own.display(line[:100_000])
    assert own.take_displays() == []
    own.journal.texts[0].write("after\n")  # the writer was interrupted: the rest never comes
    assert [plain(block) for block in own.spool.take(1 << 30, 0.0)] == [b"", b"after\n"]


def test_a_display_that_is_too_large_becomes_text_that_says_so(own: Own, capsys: pytest.CaptureFixture[str]) -> None:
    own.show(Table("x" * (MOST + 1)), id="")
    assert own.take_displays() == []
    assert "are not shown: a display may have 4 MB" in capsys.readouterr().out


def test_more_than_the_bound_within_a_moment_goes_as_text(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE", 0)
    picture = {"image/png": "x" * (MOST - 1000), "text/plain": "picture"}
    for _ in range(10):
        own.displays.publish(picture, {})
    displays = own.take_displays()
    assert len(displays) == 10
    assert sum(display.size for display in displays if len(display.data) > 1) <= BURST
    assert "not shown" in displays[-1].data["text/plain"]


def test_the_latest_of_too_frequent_updates_is_there_in_the_end(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE", 0)
    own.show(Table("first"), id="live")
    for number in range(60):
        forms = {"text/html": f"{number} " + "x" * 1_000_000, "text/plain": "bar"}
        own.displays.publish(forms, {}, id="live", update=True)
    before = own.take_displays()
    assert sum(display.size for display in before) <= BURST
    own.call = "h/c:2"  # a display belongs to the call that displayed it
    own.displays.flush()
    [block] = own.spool.take(1 << 30, 0.0)
    last = decode_display(block.data)
    assert last is not None
    assert (block.call, last.update, last.id) == ("h/c:1", True, "live")
    assert last.data["text/html"].startswith("59 ")


def test_garbage_is_no_display() -> None:
    for line in (b"", b"{", b'{"text": 1}', b"\xff\n", b"[]", encode_display(Display("x"))[:-3]):
        assert decode_display(line) is None
