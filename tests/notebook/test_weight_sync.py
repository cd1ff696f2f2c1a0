"""examples/weight_sync.ipynb, executed where nobody can type: the policy learns, by weights that nobody sends."""

import re
from pathlib import Path

import pytest

from tests.effort import AS_LATER

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "weight_sync.ipynb"
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def test_the_policy_learns_and_nothing_is_left_behind() -> None:
    from scripts.demo import execute  # here: Jupyter's libraries take seconds, and collecting tests must not

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
    rewards = re.search(r"reward (-[\d.]+) -> (-[\d.]+), version 151, the last game by \[150, 150\]", shown["train"])
    assert rewards is not None, shown["train"]
    assert float(rewards[2]) > -0.2 > float(rewards[1])
    assert shown["columns"] == "(True, True)"
    assert "cross-memory" in shown["routes"]
