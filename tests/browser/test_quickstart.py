"""The quickstart notebook in a real JupyterLab: opened, run from its menu, looked at and saved. Without a browser it is
executed as `make demo` does, and what it reached is looked at all the same."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.lab import KERNEL_IS_IDLE, SCREENSHOTS, Desk, browser_is_there, capture, menu, theme
from tests.effort import AS_LATER

if TYPE_CHECKING:
    from scripts.demo import Executed

pytestmark = [
    pytest.mark.slow,  # tests/notebook/test_example_quickstart.py runs it in a kernel alone
    pytest.mark.timeout(240),
]
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
LAST = "kill to healed"
ALL_NUMBERED = """() => [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].every(
    prompt => /\\[\\d+\\]:/.test(prompt.textContent))"""


@pytest.fixture(scope="module")
def shown(desk: Desk) -> Iterator[Any]:
    """The page after Run All."""
    with desk.open(NOTEBOOK) as page:
        menu(page, "Run", "Run All Cells")
        page.wait_for_selector(f'.jp-OutputArea-output:has-text("{LAST}")', timeout=150_000)
        page.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
        page.wait_for_function(ALL_NUMBERED, timeout=60_000)  # replies come another way than the kernel's state
        yield page


@pytest.fixture(scope="module")
def executed(request: pytest.FixtureRequest) -> "Executed":
    """The notebook as JupyterLab has executed and saved it."""
    from scripts.demo import Executed, execute  # here: Jupyter's libraries take seconds, and collecting tests must not

    if browser_is_there():
        import nbformat

        page, desk = request.getfixturevalue("shown"), request.getfixturevalue("desk")
        return Executed(nbformat.read(desk.saved(page, NOTEBOOK), as_version=4), None, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", AS_LATER)  # as a user's kernel would be
        result = execute(NOTEBOOK)
    assert result.error is None, result.error
    assert result.left_behind == []
    return result


def _output(shown: Any, cell_id: str) -> Any:
    index = shown.evaluate(
        "id => window.jupyterapp.shell.currentWidget.content.widgets.findIndex(cell => cell.model.id === id)", cell_id
    )
    assert index >= 0, f"no cell {cell_id}"
    return shown.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-Cell-outputArea")


def test_run_all_continues_after_the_error_that_is_intended(shown: Any) -> None:
    numbers = shown.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
    assert [number.strip() for number in numbers] == [f"[{index}]:" for index in range(1, len(numbers) + 1)]


def test_the_accuracy_is_in_the_page(shown: Any) -> None:
    text = _output(shown, "result").inner_text()
    match = re.search(r"test accuracy +([\d.]+)%", text)
    assert match is not None, text
    assert float(match[1]) > 95


def test_the_failure_is_in_the_page(shown: Any) -> None:
    text = _output(shown, "kill").inner_text()
    for part in ("SupervisionError", "trainers, gpus=2", "pid ", "SIGKILL", "heal_mesh(trainers)"):
        assert part in text


def test_nothing_is_shown_twice_or_left_over(shown: Any) -> None:
    assert "⏳" not in shown.locator(".jp-Notebook").inner_text()
    warned = shown.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]')
    assert [text for text in warned.all_inner_texts() if "SupervisionError" not in text] == []


@pytest.mark.parametrize("name", THEMES)
def test_it_can_be_looked_at(shown: Any, name: str) -> None:
    theme(shown, THEMES[name])
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture: Path = SCREENSHOTS / f"quickstart-{name}.png"
    capture(shown, picture)
    assert picture.stat().st_size > 50_000


def test_every_output_looks_right_in_a_saved_notebook(executed: "Executed", tmp_path: Path) -> None:
    assert [out.text for out in executed.outputs("stream") if out.name == "stderr"] == []
    from scripts.demo import save

    _, page = save(executed, tmp_path)
    assert "test accuracy" in page.read_text(encoding="utf-8")
