"""Displays of ranks reach the cell unchanged: figures, HTML, updates; with the ranks, equal displays once."""

import base64
import importlib.util
import re
from pathlib import Path

import pytest

from tests.notebook.notebook import Cell, Notebook
from tests.notebook.test_output import ranks

pytestmark = pytest.mark.timeout(120)

figures = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="SKIPPED: needs matplotlib")
PNG = b"\x89PNG\r\n"

TABLE = """
class Table:
    def __init__(self, text):
        self.text = text
    def __repr__(self):
        return f"Table({self.text!r})"
    def _repr_html_(self):
        return f"<table><tr><td>{self.text}</td></tr></table>"
"""


def data_of(cell: Cell) -> list[dict[str, str]]:
    """The final outputs of a cell, in order: streams, and displays as they were last updated."""
    outputs: list[dict[str, str]] = []
    indexes: dict[str, int] = {}
    for message in cell.messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            outputs.append({"text/plain": content["text"].rstrip("\n")})
        elif kind in ("display_data", "update_display_data"):
            display = content["transient"].get("display_id", "")
            if kind == "update_display_data":
                outputs[indexes[display]] = content["data"]
            else:
                indexes[display] = len(outputs)
                outputs.append(content["data"])
    return [item for item in outputs if item != {"text/plain": "", "text/html": ""}]


def order(cell: Cell) -> list[str]:
    """The same as text: kinds of pictures, texts without their ranks."""
    texts = ("image" if "image/png" in item else item.get("text/html") or item["text/plain"] for item in data_of(cell))
    lines = [line for text in texts for line in text.split("\n")]
    return [short for line in lines if (short := re.sub(r"\[.*?\] ?", "", line))]


@pytest.mark.slow
@figures
def test_equal_figures_of_all_ranks_are_one_image_with_their_ranks(nb: Notebook) -> None:
    cell = nb.run(
        "%%on w\nimport matplotlib.pyplot as plt\nprint('before')\nplt.plot([1, 2])\nplt.show()\nprint('after')", 60
    ).ok()
    images = [item for item in data_of(cell) if "image/png" in item]
    assert len(images) == 1
    assert base64.b64decode(images[0]["image/png"]).startswith(PNG)
    assert {"text/plain": "[gpus=0-3]"} in data_of(cell)
    assert set(order(cell)[: order(cell).index("image")]) == {"before"}
    assert order(cell)[-1] == "after"
    assert not nb.run("%%on w\nplt.get_fignums()").ok().text.endswith("1]")  # closed, as in a notebook


@pytest.mark.slow
@figures
def test_plot_backends_of_users_stay_and_children_have_none_of_ours(nb: Notebook) -> None:
    code = "import matplotlib.pyplot, os\n(matplotlib.pyplot.get_backend(), os.environ.get('MPLBACKEND'))"
    assert "module://monarch_nb" in nb.run(f"%%on w gpus=0\n{code}", 60).ok().text
    assert "None" in nb.run(f"%%on w gpus=0\n{code}", 60).ok().text
    nb.run("chosen = this_host().spawn_procs(name='chosen', env={'MPLBACKEND': 'svg'})").ok()
    assert "('svg', 'svg')" in nb.run(f"%%on chosen\n{code}", 60).ok().text
    nb.run("chosen.stop().get()").ok()


@pytest.mark.slow
@figures
def test_different_figures_stand_side_by_side_each_with_its_rank(nb: Notebook) -> None:
    cell = nb.run(
        "%%on w\nimport matplotlib.pyplot as plt\nplt.plot([rank, 2])", 60
    ).ok()  # no show(): as in a notebook
    [row] = [item for item in data_of(cell) if "<img" in item.get("text/html", "")]
    assert re.findall(r"<figcaption>(.*?)</figcaption>", row["text/html"]) == [f"gpus={rank}" for rank in range(4)]
    assert row["text/html"].count('src="data:image/png;base64,iVBOR') == 4


@pytest.mark.slow
@figures
def test_figures_that_are_values_are_shown_and_only_once(nb: Notebook) -> None:
    cell = nb.run("%%on w\nimport matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\nfigure", 60).ok()
    assert data_of(cell) == []
    assert cell.html.count("<img") == 1
    assert "<figcaption>gpus=0-3</figcaption>" in cell.html
    source = "def draw():\n    import matplotlib.pyplot as plt\n    return plt.subplots()[0]\nw.run(draw).get()"
    opened = nb.run(source, 60).ok()
    assert opened.html.count("<img") == 1
    assert data_of(opened) == []


def test_displays_of_an_endpoint_stand_between_its_printed_lines(nb: Notebook) -> None:
    show = "def show(text):\n    print('before')\n    display(Table(text))\n    print('after')\n"
    nb.run(TABLE + show).ok()
    for number in range(3):
        cell = nb.run(f"w.slice(gpus=0).run(show, {number}).get()\nprint('next')").ok()
        lines = order(cell)
        table = lines.index(f"<table><tr><td>{number}</td></tr></table>")
        assert set(lines[:table]) == {"before"}
        assert set(lines[table + 1 : -1]) == {"after"}
        assert lines[-1] == "next"
        assert data_of(nb.run("None")) == []  # nothing lands in the next cell
    assert "Table(2)" in nb.run("w.logs().text").ok().text


def test_values_with_rich_forms_are_shown_so_equal_ones_once(nb: Notebook) -> None:
    cell = nb.run(f"%%on w\n{TABLE}\nTable(rank // 2)").ok()
    assert re.findall(r"<figcaption>(.*?)</figcaption>", cell.html) == ["gpus=0-1", "gpus=2-3"]
    assert "<td>1</td>" in cell.html
    nb.run(TABLE)
    assert "<td>7</td>" in nb.run("w.run(Table, 7).get()").ok().html


def test_displays_of_child_processes_of_a_rank_arrive_too(nb: Notebook) -> None:
    source = """
def nested():
    from monarch.actor import this_host
    inner = this_host().spawn_procs(name="inner")
    inner.run(lambda: display(Table("within"))).get(30)
    inner.stop().get(30)
"""
    nb.run(TABLE + source).ok()
    cell = nb.run("w.slice(gpus=slice(0, 2)).run(nested).get()").ok()
    label, table = data_of(cell)
    assert label["text/plain"] in ("[gpus=0-1]", "[w gpus=0-1]")  # named beside other meshes, as the inner one is
    assert table == {"text/plain": "Table('within')", "text/html": "<table><tr><td>within</td></tr></table>"}


def test_late_displays_go_to_the_cell_that_made_the_call(nb: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    nb.run(f"{TABLE}\ndef late():\n    while not os.path.exists({str(gate)!r}):\n        time.sleep(0.01)\n"
           "    display(Table('late'))\n").ok()  # fmt: skip
    request = nb.start("pending = w.run(late)")
    nb.finish(request).ok()
    gate.touch()
    while "text/html" not in (content := nb.next_message(request, "display_data"))["data"]:
        pass
    assert "late" in content["data"]["text/html"]
    assert data_of(nb.run("pending.get();").ok()) == []


def test_displays_are_updated_and_cleared_in_place(nb: Notebook) -> None:
    source = """
from IPython.display import HTML, clear_output, display as shown, update_display
def live():
    handle = shown(HTML("start"), display_id=True)
    for step in range(5):
        handle.update(HTML(f"step {step}"))
    update_display(HTML("end"), display_id=handle.display_id)
def loop():
    for step in range(5):
        clear_output(wait=True)
        display(HTML(f"round {step}"))
"""
    nb.run(source).ok()
    assert order(nb.run("w.run(live).get()").ok()) == ["end"]
    assert order(nb.run("w.run(loop).get()").ok()) == ["round 4"]


def test_bars_for_notebooks_and_widgets_break_nothing_on_ranks(nb: Notebook) -> None:
    pytest.importorskip("tqdm")
    source = """
def bars():
    from tqdm.notebook import tqdm, trange
    total = sum(tqdm(range(3))) + sum(trange(4))
    import ipywidgets
    display(ipywidgets.IntSlider(value=5))
    return total
"""
    nb.run(source).ok()
    cell = nb.run("w.run(bars).get().values()", 60).ok()
    assert cell.text == "[9, 9, 9, 9]"
    assert "100%" in cell.stderr
    assert "IntSlider(value=5)" in cell.stdout


def test_displays_that_are_too_large_become_a_line(nb: Notebook) -> None:
    cell = nb.run("w.run(lambda: display({'image/png': 'x' * 5_000_000, 'text/plain': 'pic'}, raw=True)).get()").ok()
    assert ranks(cell.stdout, "pic (4.8 MB are not shown: a display may have 4 MB)") == [0, 1, 2, 3]
    assert cell.shown == []


def test_a_front_end_that_captures_gets_displays_too(nb: Notebook) -> None:
    nb.run(TABLE).ok()
    assert data_of(nb.run("%%capture captured\nw.run(lambda: display(Table(1))).get()").ok()) == []
    assert "<td>1</td>" in nb.run("[one.data.get('text/html') for one in captured.outputs]").ok().text
