"""A notebook with no line of ours but `%load_ext monarch` and `%%spmd` trains with three frameworks."""

from pathlib import Path

import nbformat
import pytest

from scripts.demo import execute
from tests.browser.lab import Desk, menu
from tests.browser.test_examples_lab import DONE, pictures
from tests.frameworks.needs import need

NOTEBOOK = Path(__file__).with_name("three_frameworks.ipynb")
VALUES = ["(2, 80, 3.0)", "(2, 40)", "(2, 20)"]
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


def check(notebook: nbformat.NotebookNode) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    for cell, value in zip(cells[1:], VALUES, strict=False):
        assert value in str(cell.outputs), cell.outputs


def test_a_notebook_trains_with_three_frameworks() -> None:
    need("lightning", "transformers", "trl")
    executed = execute(NOTEBOOK, cell_s=300)
    assert executed.error is None
    assert not executed.left_behind
    check(executed.notebook)


def test_the_notebook_is_shown_by_a_browser(desk: Desk) -> None:
    need("lightning", "transformers", "trl")
    with desk.open(NOTEBOOK) as shown:
        menu(shown, "Run", "Run All Cells")
        shown.wait_for_function(DONE, timeout=400_000)
        check(nbformat.read(desk.saved(shown, NOTEBOOK), as_version=4))
        pictures(shown, NOTEBOOK.stem)
