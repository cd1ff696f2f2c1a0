"""Run All Cells in a real JupyterLab, for each notebook of examples/: only the intended cells raise."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser.lab import SCREENSHOTS, Desk, capture, menu, theme

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINUTES = {"train_gpt": 15}

# The numbers of the cells of code, once all have one: a cell that waits or runs has a star. A question waits for ever.
DONE = """() => {
    if (document.querySelector(".jp-Stdin")) return "a cell asks for input";
    const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map(each => each.textContent.trim());
    return prompts.every(text => /^\\[\\d+\\]:$/.test(text)) ? prompts : null;
}"""


def notebooks() -> list[object]:
    names = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
    return [pytest.param(name, id=name, marks=pytest.mark.timeout(60 * (MINUTES.get(name, 3) + 1))) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks())
def test_run_all_goes_from_top_to_bottom(desk: Desk, name: str) -> None:
    path = EXAMPLES / f"{name}.ipynb"
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    meant = [cell.id for cell in cells if "raises-exception" in cell.metadata.get("tags", ())]
    with desk.open(path) as shown:
        shown.evaluate("() => window.jupyterapp.commands.execute('editmenu:clear-all')")
        shown.wait_for_function("() => !document.querySelector('.jp-OutputArea-output')", timeout=10_000)
        menu(shown, "Run", "Run All Cells")
        prompts = shown.wait_for_function(DONE, timeout=60_000 * MINUTES.get(name, 3)).json_value()
        assert prompts == [f"[{number}]:" for number in range(1, len(cells) + 1)]
        saved = nbformat.read(desk.saved(shown, path), as_version=4)
        raised = [
            cell.id
            for cell in saved.cells
            if cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
        ]
        assert raised == meant
        pictures(shown, name)


def pictures(shown: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for scheme in ("Light", "Dark"):
        theme(shown, f"JupyterLab {scheme}")
        capture(shown, SCREENSHOTS / f"example-{name}-{scheme.lower()}.png")
    theme(shown, "JupyterLab Light")
