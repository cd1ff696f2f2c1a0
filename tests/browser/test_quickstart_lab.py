"""The quickstart notebook in a real JupyterLab: opened, run from its menu, and looked at."""

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.processes import MARK, left_behind
from tests.browser.lab import KERNEL_IS_IDLE, SCREENSHOTS, browser_path, lab, menu, page, theme, whole

pytestmark = [
    pytest.mark.timeout(240),
    # The browser's driver leaves its own odds and ends to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
LAST = "kill to healed"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page after Run All; nothing of it is there when the server is gone."""
    browser_path()
    mark = secrets.token_hex(8)
    with (
        lab(tmp_path_factory.mktemp("lab"), NOTEBOOK, {MARK: mark}) as address,
        page(address) as opened,
    ):
        menu(opened, "Run", "Run All Cells")
        opened.wait_for_selector(f'.jp-OutputArea-output:has-text("{LAST}")', timeout=150_000)
        opened.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
        yield opened
    assert left_behind(mark) == []


def _output(shown: Any, cell_id: str) -> Any:
    index = shown.evaluate(
        "id => window.jupyterapp.shell.currentWidget.content.widgets.findIndex(cell => cell.model.id === id)", cell_id
    )
    assert index >= 0, f"no cell {cell_id}"
    return shown.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-Cell-outputArea")


def test_run_all_goes_past_the_error_that_is_meant_to_be_there(shown: Any) -> None:
    numbers = shown.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
    assert [number.strip() for number in numbers] == [f"[{at}]:" for at in range(1, len(numbers) + 1)]


def test_the_accuracy_is_in_the_page(shown: Any) -> None:
    told = _output(shown, "result").inner_text()
    found = re.search(r"test accuracy +([\d.]+)%", told)
    assert found is not None, told
    assert float(found[1]) > 95


def test_the_failure_is_in_the_page(shown: Any) -> None:
    told = _output(shown, "kill").inner_text()
    for part in ("SupervisionError", "trainers, gpus=2", "pid ", "SIGKILL", "heal_mesh(trainers)"):
        assert part in told


def test_nothing_is_shown_twice_or_left_over(shown: Any) -> None:
    assert "⏳" not in shown.locator(".jp-Notebook").inner_text()
    warned = shown.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]')
    assert [text for text in warned.all_inner_texts() if "SupervisionError" not in text] == []


@pytest.mark.parametrize("name", THEMES)
def test_it_can_be_looked_at(shown: Any, name: str) -> None:
    theme(shown, THEMES[name])
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture: Path = SCREENSHOTS / f"quickstart-{name}.png"
    whole(shown, picture)
    assert picture.stat().st_size > 50_000
