"""A call whose `.get()` was forgotten does not swallow its error."""

import pytest

from tests.notebook.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(120)

MISSING = "Nobody waited for this call: `.get()` is missing."


def shown_by(nb: Notebook, source: str) -> Cell:
    """A cell that is done, with all output up to the complete notice of a forgotten call."""
    request = nb.start(source)
    cell = nb.finish(request).ok()
    while MISSING not in cell.stderr or "ZeroDivisionError" not in cell.stderr:
        cell.stderr += nb.next_message(request, "stream")["text"]
    return cell


@pytest.mark.parametrize(
    "source",
    ["a.divide.call(0);", "a.divide.call(0)\nNone", "kept = a.divide.call(0)\nkept = None", "a.fail_late.call()"],
)
def test_the_error_of_a_call_that_nobody_waits_for_is_shown(nb: Notebook, source: str) -> None:
    cell = shown_by(nb, source)
    assert cell.stderr.count(MISSING) == 1
    assert "a." in cell.stderr
    assert "failed on 4 of 4 ranks" in cell.stderr
    assert "return 1 / x" in cell.stderr
    assert "monarch_nb" not in cell.stderr


def test_a_future_in_a_variable_is_not_forgotten(nb: Notebook) -> None:
    cell = nb.run("kept = a.fail_late.call()\nlisted = [a.fail_late.call()]\nkept").ok()
    assert cell.text == "<Future pending: 0 of 4 ranks have answered a.fail_late()>"
    nb.run("a.pid.call().get()").ok()
    shown = shown_by(nb, "a.divide.call(0);")
    assert shown.stderr.count(MISSING) == 1
    assert "a.divide" in shown.stderr
    assert nb.run("kept").ok().text == "<Future failed: ZeroDivisionError: division by zero>"
    assert "ZeroDivisionError" in nb.run("listed.pop().get()").traceback
    assert nb.run("kept + 1").traceback.endswith("TypeError: a Future cannot be used with +: `.get()` is missing")
