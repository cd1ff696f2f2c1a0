"""examples/debugging.ipynb, executed where nobody can type: the story holds, step by step."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.effort import AS_LATER

if TYPE_CHECKING:
    from scripts.demo import Executed

ANSI = re.compile(r"\x1b\[[0-9;]*m")
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "debugging.ipynb"
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def executed() -> "Executed":
    from scripts.demo import execute  # here: Jupyter's libraries take seconds, and collecting tests must not

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", AS_LATER)  # as a user's kernel would be
        return execute(NOTEBOOK)


def shown(executed: "Executed", cell_id: str) -> str:
    """All that a cell has shown, as text."""
    outputs = next(cell.outputs for cell in executed.notebook.cells if cell.id == cell_id)
    parts = [
        out.get("text") or (out.get("data") or {}).get("text/plain") or "\n".join(out.get("traceback", ()))
        for out in outputs
    ]
    return ANSI.sub("", "\n".join(parts))


def test_it_runs_from_top_to_bottom_and_leaves_nothing_behind(executed: "Executed") -> None:
    assert executed.error is None, executed.error
    assert executed.left_behind == []


def test_the_breakpoint_stops_the_one_rank_whose_loss_is_not_a_number(executed: "Executed") -> None:
    assert "StoppedAtBreakpoint: 3 of 4 ranks have answered" in shown(executed, "stop")
    assert "1 of 4  at Cell In[4]:30 in Trainer.learn  trainers gpus=2" in shown(executed, "list")


def test_its_frames_show_the_bad_sample(executed: "Executed") -> None:
    looked = shown(executed, "look")
    assert "64 NaN" in looked
    assert "» p (batch.norm(dim=1) == 0).nonzero().flatten()\n[8]" in looked
    assert "slice(80, 96, None)" in shown(executed, "found")
    assert shown(executed, "resume").strip() == "5"


def test_the_comparison_of_ranks_points_to_the_same_one(executed: "Executed") -> None:
    compared = shown(executed, "diff")
    assert "× gpus=2" in compared
    assert re.search(r"^ ! nan +gpus=2$", compared, re.MULTILINE)
    assert re.search(r"^ ! float32\[16×64\].* 64 NaN +gpus=2$", compared, re.MULTILINE)


def test_post_mortem_opens_the_frames_of_the_rank_that_failed(executed: "Executed") -> None:
    assert "ValueError: the loss of step 5 is nan" in shown(executed, "strict")
    assert "trainers gpus=2  post-mortem: ValueError" in shown(executed, "mpm")
    assert "» p self.steps\n5" in shown(executed, "mpm-look")


def test_after_the_repair_all_losses_are_finite(executed: "Executed") -> None:
    assert "all finite: True" in shown(executed, "fix")


def test_the_notebook_is_committed_without_outputs() -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    ran = [c.id for c in notebook.cells if c.cell_type == "code" and (c.outputs or c.execution_count is not None)]
    assert ran == []
