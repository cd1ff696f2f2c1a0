"""%notify in a real kernel: the messages to a page with the panel when cells and calls end."""

from collections.abc import Iterator

import pytest

from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def view(nb: Notebook) -> Iterator[ViewClient]:
    client = ViewClient(nb)
    client.watch()
    client.until(lambda view: bool(view.of("snapshot")))
    yield client
    client.close()
    nb.run("%notify off").ok()


def test_ends_of_long_cells_are_sent_once_asked_for(nb: Notebook, view: ViewClient) -> None:
    nb.run("%notify 1h").ok()
    nb.run("import time; time.sleep(0.3)").ok()  # too short
    assert "cells of more than 200ms will be notified" in nb.run("%notify 200ms").ok().stdout
    nb.run("time.sleep(0.31)").ok()
    nb.run("time.sleep(0.3); 1 / 0")
    nb.run("%notify off").ok()
    nb.run("time.sleep(0.3)").ok()
    nb.run("%notify 1h").ok()
    view.until(lambda view: len(view.of("notify")) == 3)
    *slow, well, wrong = view.of("ended")
    assert (well["asked"], well["error"], wrong["error"]) == (True, "", "ZeroDivisionError: division by zero")
    assert well["what"].startswith("In[")
    assert 0.31 <= well["seconds"] < 30
    assert len(slow) <= 1  # the cell of `%notify 200ms` itself, on a slow machine


def test_the_end_of_a_call_in_a_variable_is_sent(nb: Notebook, view: ViewClient) -> None:
    nb.run("call = a.work.call(0.2)\nbad = a.divide.call(0)").ok()
    assert nb.complete("%notify ca") == ["call"] or "call" in nb.complete("%notify ca")
    nb.run("%notify call\n%notify bad").ok()
    view.until(lambda view: len(view.of("ended")) == 2)
    ended = {message["what"]: message["error"] for message in view.of("ended")}
    assert ended["call"] == ""
    assert "ZeroDivisionError" in ended["bad"]


def test_what_is_no_duration_and_no_future_is_refused(nb: Notebook) -> None:
    assert "'soon' is no duration and no future: write %notify 10m" in nb.run("%notify soon").stderr
