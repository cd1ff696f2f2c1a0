"""examples/data_loading.ipynb, executed where nobody can type: a query's rows train a model on two ranks."""

import re
from pathlib import Path

import pytest

from tests.effort import AS_LATER

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "data_loading.ipynb"
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def test_a_query_trains_a_model_and_a_run_that_was_broken_off_goes_on() -> None:
    from scripts.demo import execute  # here: Jupyter's libraries take seconds, and collecting tests must not

    pytest.importorskip("duckdb", reason="NOT TESTED HERE: the example asks DuckDB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", AS_LATER)  # as a user's kernel would be
        executed = execute(NOTEBOOK)
    assert executed.error is None, executed.error
    assert executed.left_behind == []
    shown = {
        cell.id: "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)
        for cell in executed.notebook.cells
        if cell.cell_type == "code"
    }
    found = re.search(r"takes (\d\.\d) minutes, (\d\.\d) for each km, and (\d\.\d) for each mm", shown["found"])
    assert found is not None, shown["found"]
    assert all(abs(float(got) - true) < 0.4 for got, true in zip(found.groups(), (2, 4, 1.5), strict=True)), found[0]
    assert "<Feed, step" in shown["pass"]
    assert shown["half"].startswith("({'rows': 9000}, ")
    assert shown["half"].endswith(", True)")
