"""The notebooks of examples/ as they are committed: with outputs, small, and free of names of one machine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.examples import KINDS, MOST, static
from scripts.site import stories

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATHS = re.compile(r"/(?:home|root|Users|work|workspace|mnt|opt|srv)/|/tmp/(?!monarch\b)|site-packages")
DURATION = re.compile(r"takes .*(second|minute)")


@pytest.fixture(params=sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def notebook(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = EXAMPLES / request.param
    assert path.stat().st_size <= MOST, f"{path.name} is too large to be carried by everybody"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", ())]


def test_a_notebook_says_at_its_top_how_long_it_takes(notebook: dict[str, Any]) -> None:
    assert DURATION.search("".join(notebook["cells"][0]["source"]))


def test_a_notebook_ran_in_order_and_only_intended_cells_raised(notebook: dict[str, Any]) -> None:
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    raised = {cell["id"] for cell in code if any(output["output_type"] == "error" for output in cell["outputs"])}
    assert raised == {cell["id"] for cell in code if "raises-exception" in cell["metadata"].get("tags", ())}


def test_outputs_of_a_notebook_are_static_and_name_no_path(notebook: dict[str, Any]) -> None:
    entries = outputs(notebook)
    assert entries
    assert {mime for output in entries for mime in output.get("data", {})} <= set(KINDS)
    texts = [text for output in entries for text in (json.dumps({**output, "data": without_pictures(output)}),)]
    assert [match[0] for text in texts for match in PATHS.finditer(text)] == []


def without_pictures(output: dict[str, Any]) -> dict[str, Any]:
    return {mime: data for mime, data in output.get("data", {}).items() if mime != "image/png"}


def test_the_page_of_a_notebook_shows_its_pictures_and_its_texts() -> None:
    page = stories.text("quickstart")
    assert "test accuracy" in page
    assert "SupervisionError" in page
    built = stories.with_pictures("quickstart", page)
    assert 'id="output-' not in built
    assert built.count("data:image/png;base64,") == 2
    assert '<div class="mnb"' in built


def test_machine_names_and_paths_are_replaced_and_widgets_left_out() -> None:
    put = {"/home/me/monarch-nb": "~/monarch-nb", "node7": "workstation"}
    output = {
        "output_type": "display_data",
        "metadata": {"x": 1},
        "data": {"text/plain": "node7 at /home/me/monarch-nb/a.py", "application/vnd.jupyter.widget-view+json": {}},
    }
    result = static(output, put)
    assert result is not None
    assert result["data"] == {"text/plain": "workstation at ~/monarch-nb/a.py"}
    assert static({"output_type": "display_data", "data": {"text/plain": " ", "text/html": ""}}, put) is None
