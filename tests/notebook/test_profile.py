"""%%prof in a real kernel: the cell runs as usual, and its samples are shown, also where it fails."""

import pytest

from tests.notebook.notebook import Cell, Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)


def test_the_cell_runs_here_and_the_profile_is_its_result(nb: Notebook) -> None:
    shown = nb.run("%%prof a\nseen = a.work.call(0.3).get()\nlen(seen)").ok()
    assert [display["text/plain"] for display in shown.displays if display["text/plain"] == "4"] == ["4"]
    assert shown.text.startswith("profile of a: ")
    assert "Worker.work" in shown.text
    assert "mnb-flame" in shown.html
    assert "Worker.work" in shown.html
    assert "<script" not in shown.html
    assert nb.run("(len(seen), type(_).__name__)").ok().text == "(4, 'Profile')"


def test_the_panel_lists_profiles_newest_first(nb: Notebook) -> None:
    nb.run("%%prof a\na.work.call(0.05).get()").ok()
    view = ViewClient(nb)
    try:
        view.until(
            lambda view: {"name": "profiles", "title": "Profiles"} in (view.of("views") or [{"views": []}])[-1]["views"]
        )
        view.send(type="watch", topic="profiles", id="p1")
        view.until(lambda view: bool(view.of("profiles")))
        before = view.of("profiles")[-1]["profiles"]
        assert before[0]["title"].startswith("a · ")
        assert "mnb-flame" in before[0]["html"]
        again = nb.run("%%prof a gpus=0\na.work.call(0.05).get()").ok()
        nb.run("_").ok()  # shown twice, it is one
        view.until(lambda view: view.of("profiles")[-1]["profiles"][0]["html"] == again.html)
        assert len(view.of("profiles")[-1]["profiles"]) == min(4, len(before) + 1)
    finally:
        view.close()


def test_the_underscore_has_the_profile_beside_loops_and_functions_named_so(nb: Notebook) -> None:
    nb.run("for _ in range(5): pass").ok()
    nb.run("%%prof a\nfor _ in range(2):\n    a.work.call(0.05).get()").ok()
    assert nb.run("type(_).__name__").ok().text == "'Profile'"
    nb.run("_ = str.upper").ok()
    nb.run("%%prof a\na.work.call(0.05).get();").ok()
    assert nb.run("_('text')").ok().text == "'TEXT'"
    nb.run("del _").ok()


def test_a_failing_cell_shows_its_samples_and_its_own_error(nb: Notebook) -> None:
    shown = nb.run("%%prof a gpus=0-1\na.work.call(0.2).get()\n1 / 0")
    assert shown.error is not None
    assert shown.error["ename"] == "ZeroDivisionError"
    assert any("profile of a: " in display["text/plain"] for display in shown.displays)


def test_stop_shows_what_was_sampled_until_then(nb: Notebook) -> None:
    request = nb.start("%%prof a\nprint('begun', flush=True)\na.work.call(30).get()")
    cell = nb.until(request, Cell(), "begun")
    nb.interrupt()
    shown = nb.finish(request)
    assert shown.error is not None
    assert shown.error["ename"] == "KeyboardInterrupt"
    assert any("profile of a: " in display["text/plain"] for display in (*cell.displays, *shown.displays))
    nb.run("%interrupt a").ok()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("", "which mesh"),
        ("nobody", "there is no mesh 'nobody'"),
        ("a --hz 0", "--hz is the number of samples a second"),
        ("a --hz often", "--hz"),
        ("a --slow", "%%prof knows no option --slow"),
        ("a gpus=9", "gpus"),
    ],
)
def test_a_senseless_line_is_refused_with_a_way_out(nb: Notebook, line: str, error: str) -> None:
    assert error in nb.run(f"%%prof {line}\n1").stderr.removeprefix("UsageError: ")


def test_a_cell_with_await_is_told_the_other_form(nb: Notebook) -> None:
    assert "with monarch.profile(NAME)" in nb.run("%%prof a\nawait a.work.call(0.1)").stderr
