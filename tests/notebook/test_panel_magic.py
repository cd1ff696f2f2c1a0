"""%panel in a real kernel."""

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(60)
VIEW = "application/vnd.jupyter.widget-view+json"


def test_the_panel_is_a_widget_and_a_table_of_meshes(nb: Notebook) -> None:
    cell = nb.run("%panel").ok()
    assert cell.text.splitlines()[0].split()[:3] == ["mesh", "kind", "shape"]
    assert "gpus=4" in cell.text
    assert "<table" in cell.html
    assert VIEW not in cell.result  # nobody looks while it runs

    def view() -> object:
        return nb.finish(nb.start("%panel", asks=True)).ok().result[VIEW]

    assert view() == view()  # the same one, as it is now


def test_the_panel_takes_no_arguments_and_says_what_to_do(nb: Notebook) -> None:
    assert "%panel takes no arguments" in nb.run("%panel w").stderr


def test_without_ipython_it_is_a_value_that_shows_itself(nb: Notebook) -> None:
    shown = nb.run("import monarch_kernel\nmonarch_kernel.panel()._repr_html_()").ok().text
    assert "gpus=4" in shown
