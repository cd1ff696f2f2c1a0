"""%timeline and %%timeline in a real kernel."""

import json
from pathlib import Path

import pytest

from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)


def test_the_cell_runs_here_and_its_timeline_is_shown(nb: Notebook) -> None:
    shown = nb.run("%%timeline a\nseen = a.work.call(0.3).get()\nlen(seen)").ok()
    assert [display["text/plain"] for display in shown.displays if display["text/plain"] == "4"] == ["4"]
    assert shown.text.startswith("timeline of a: ")
    assert "a.work  Cell In[" in shown.text
    assert 'class="mnb-tl"' in shown.html
    assert "sent at " in shown.html
    assert "<script" not in shown.html
    assert nb.run("(len(seen), type(_).__name__, bool(_.ended))").ok().text == "(4, 'Timeline', True)"


def test_a_recording_goes_on_over_cells_until_it_is_stopped(nb: Notebook, tmp_path: Path) -> None:
    assert "recording" in nb.run("%timeline a gpus=0-1").ok().text
    nb.run("a.work.call(0.05).get()").ok()
    nb.run("again = %timeline a gpus=0-1").ok()
    assert nb.run("(again.ended, len(again.calls), len(again.region))").ok().text == "(0.0, 1, 2)"
    file = tmp_path / "of a.json"
    shown = nb.run(f"%timeline --stop --save '{file}'").ok()
    assert "recording" not in shown.text
    assert f"wrote {file}" in shown.stdout
    assert any(event["name"] == "work" for event in json.loads(file.read_text())["traceEvents"])


def test_a_failing_cell_shows_its_timeline_and_its_own_error(nb: Notebook) -> None:
    shown = nb.run("%%timeline a\na.work.call(0.05).get()\n1 / 0")
    assert shown.error is not None
    assert shown.error["ename"] == "ZeroDivisionError"
    assert any("timeline of a: " in display["text/plain"] for display in shown.displays)


def test_mistakes_say_what_to_write(nb: Notebook) -> None:
    assert "nothing was recorded of nosuch yet" in nb.run("%timeline nosuch --stop").stderr
    assert "there is no mesh 'nosuch'" in nb.run("%timeline nosuch").stderr
    assert "%%timeline takes the name of a mesh" in nb.run("%%timeline\n1").stderr
    nb.run("%timeline a").ok()
    assert "written as .json" in nb.run("%timeline --stop --save x.png").stderr


def test_a_front_end_watches_zooms_stops_and_saves(nb: Notebook) -> None:
    view = ViewClient(nb)
    try:
        view.send(type="watch", topic="timeline", id="t0", key="nosuch")
        view.until(lambda view: bool(view.of("timeline")))
        assert view.of("timeline")[-1]["svg"] == ""
        uid = nb.run("from monarch_nb.mesh import state_of; state_of(a).uid").ok().text.strip("'")
        key, again = (view.ask("timeline", do="begin", mesh=uid, ranks=[0, 1])["result"]["key"] for _ in range(2))
        assert again == key
        nb.run("a.work.call(0.2).get()").ok()
        view.send(type="watch", topic="timeline", id="t1", key=key, width=300)
        view.until(lambda view: 'data-n="work"' in view.of("timeline")[-1]["svg"])
        newest = view.of("timeline")[-1]
        assert newest["recording"]
        assert 'width="300"' in newest["svg"]
        view.send(type="watch", topic="timeline", id="t2", key=key, begin=0.0, end=0.001)
        view.until(lambda view: view.of("timeline")[-1]["end"] == 0.001)
        assert 'data-n="work"' not in view.of("timeline")[-1]["svg"]
        assert "is complete" in view.ask("timeline", do="stop", key=key)["result"]["text"]
        text = view.ask("timeline", do="save", key=key)["result"]["text"]
        assert "ui.perfetto.dev" in text
        Path(text.removeprefix("wrote ").partition(":")[0]).unlink()  # it is beside the notebook
        assert "not kept any more" in view.ask("timeline", do="stop", key="nosuch")["error"]
    finally:
        view.close()
