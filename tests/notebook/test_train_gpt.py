"""examples/train_gpt.ipynb, executed where nobody can type, with few steps: it trains, loses a process, and goes on."""

import re
from pathlib import Path

import pytest

from tests.effort import AS_LATER

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.ipynb"
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_training_goes_on_from_its_files_after_a_process_was_killed() -> None:
    from scripts.demo import execute  # here: Jupyter's libraries take seconds, and collecting tests must not

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", AS_LATER)  # as a user's kernel would be
        patch.setenv("MONARCH_EXAMPLE_STEPS", "8")
        executed = execute(NOTEBOOK)
    assert executed.error is None, executed.error
    assert executed.left_behind == []
    shown = {
        cell.id: "".join(out.get("text", "") for out in cell.outputs)
        for cell in executed.notebook.cells
        if cell.cell_type == "code"
    }
    assert "in step 8:" in shown["kill"]
    assert re.search(r"data=1 model=1|rank 3, on host", shown["kill"]), shown["kill"]
    assert "on from step 6" in shown["heal"]
    losses = re.search(r"loss ([\d.]+) -> ([\d.]+)", shown["heal"])
    assert losses is not None, shown["heal"]
    assert float(losses[2]) < float(losses[1]) - 0.3
    assert shown["write"].startswith("The class statement")
