"""A new view is one object and one line of registration, also from outside the package and while the kernel runs."""

from collections.abc import Iterator

import pytest

from tests.notebook.notebook import Cell, Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(60)

CLOCKS = """
import itertools
from monarch_kernel.views import VIEWS, LiveView, Shown, register, unregister

class Clock:
    def __init__(self, name): self.name = name
    def __repr__(self): return f"the clock of {self.name}"

def ticking(watch):
    ends = []
    def tick(count):
        if not ends:
            watch.publish(ticks=count, of=watch.message["mesh"])
    tick(0), tick(1)
    return lambda: ends.append(True)

def magic(session, line):
    "Show the clock of a mesh."
    session.find(line)
    return Clock(line)

CLOCKS = LiveView(
    name="clocks", title="Clocks", feed=ticking, magic=magic,
    script=lambda: "export default {render({model, el}) {}}",
    shows={Clock: lambda clock: Shown({"of": clock.name}, clock.name)},
)
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def run_shown(notebook: Notebook, source: str) -> Cell:
    """The output of a cell in a front end with a user."""
    return notebook.finish(notebook.start(source, asks=True)).ok()


@pytest.fixture
def registered(nb: Notebook) -> Iterator[Notebook]:
    nb.run(CLOCKS).ok()
    nb.run("register(CLOCKS)").ok()
    yield nb
    nb.run("VIEWS.get('clocks') and unregister('clocks')").ok()


def test_external_views_get_a_magic_a_widget_and_a_panel_section(registered: Notebook) -> None:
    shown = run_shown(registered, "%clocks w")
    assert shown.text == "the clock of w"
    assert WIDGET in shown.result
    assert "Show the clock of a mesh." in registered.inspect("%clocks")
    view = ViewClient(registered)
    try:
        view.until(lambda view: view.of("views") != [])
        assert {"name": "clocks", "title": "Clocks"} in view.of("views")[-1]["views"]
        assert view.ask("view", name="clocks")["result"]["script"] == "export default {render({model, el}) {}}"
        view.send(type="watch", topic="clocks", id="c1", mesh="w")
        view.until(lambda view: len(view.of("clocks")) == 2)
        assert view.of("clocks")[-1] == {"type": "clocks", "id": "c1", "ticks": 1, "of": "w"}
        registered.run("unregister('clocks')").ok()
        view.until(lambda view: "clocks" not in [entry["name"] for entry in view.of("views")[-1]["views"]])
        assert not view.ask("view", name="clocks")["ok"]
    finally:
        view.close()
    assert WIDGET not in run_shown(registered, "Clock('w')").result
    assert "`%clocks` not found" in registered.run("%clocks w").stderr


@pytest.mark.parametrize("name", ["clocks", "time", "two words"])
def test_a_taken_or_invalid_view_name_is_refused_and_leaves_nothing(registered: Notebook, name: str) -> None:
    before = registered.run("len(list(VIEWS))").text
    refused = registered.run(f"from dataclasses import replace\nregister(replace(CLOCKS, name={name!r}))")
    assert refused.error is not None
    assert refused.error["ename"] == "ValueError"
    assert registered.run("len(list(VIEWS))").text == before
