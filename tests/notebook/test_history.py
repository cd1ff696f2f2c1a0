"""%history in a real kernel."""

import pytest

from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

pytestmark = pytest.mark.timeout(120)


def test_what_ranks_have_used_is_kept_from_the_beginning(nb: Notebook) -> None:
    view = ViewClient(nb)
    try:
        uid = nb.run("from monarch_nb.mesh import state_of; state_of(a).uid").ok().text.strip("'")
        view.send(type="watch", topic="history", id="h1", mesh=uid)
        view.until(lambda view: bool(view.of("history")) and view.of("history")[-1]["ranks"] == 4, 40)
        newest = view.of("history")[-1]
        by_name = {measure["name"]: measure for measure in newest["measures"]}
        assert {"CPU, cores", "memory, MB"} <= by_name.keys()
        assert len(by_name["memory, MB"]["lines"]) == 4
        assert by_name["memory, MB"]["peak"].startswith(tuple("123456789"))
    finally:
        view.close()
    shown = nb.run("%history a").ok()
    assert "now (mean)" in shown.text
    assert "History of a" in shown.html


def test_without_a_mesh_it_lists_inputs_as_ever(nb: Notebook) -> None:
    nb.run("marked = 12345").ok()
    assert "marked = 12345" in nb.run("%history -l 3").ok().stdout
    assert "there is no mesh 'worksr'" in nb.run("%history worksr").stderr
