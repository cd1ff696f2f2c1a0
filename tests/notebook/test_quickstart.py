"""The quickstart notebook, executed as `make demo` does."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from scripts.demo import Executed

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def executed() -> "Executed":
    from scripts.demo import execute  # here: Jupyter's libraries take seconds, and collecting tests must not

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MONARCH_NB_PRELOAD", raising=False)  # as a user's kernel would be
        return execute(NOTEBOOK)


def _by_id(executed: "Executed", cell_id: str) -> list[dict]:
    return next(cell.outputs for cell in executed.notebook.cells if cell.id == cell_id)


@pytest.mark.timeout(180)
def test_it_runs_from_top_to_bottom(executed: "Executed") -> None:
    assert executed.error is None, executed.error


@pytest.mark.timeout(180)
def test_it_ends_above_95_percent_of_test_accuracy(executed: "Executed") -> None:
    assert executed.summary()["accuracy"] > 0.95


@pytest.mark.timeout(180)
def test_the_failure_names_mesh_rank_host_signal_and_the_way_out(executed: "Executed") -> None:
    errors = executed.outputs("error")
    assert [error.ename for error in errors] == ["SupervisionError"]
    told = ANSI.sub("", "\n".join(errors[0].traceback))
    assert re.search(r"mesh +trainers, gpus=2", told)
    assert re.search(r"host +\w+, pid \d+", told)
    assert "signal 9 (SIGKILL)" in told
    assert "heal_mesh(trainers)" in told
    assert "monarch_nb" not in told  # the engine's own frames are nobody's business
    assert told.count("SIGKILL") <= 3, "told once"


@pytest.mark.timeout(180)
def test_one_process_is_new_after_the_heal_and_three_are_the_same(executed: "Executed") -> None:
    before, after = (
        [int(pid) for pid in re.findall(r": (\d+)$", out["data"]["text/plain"], re.MULTILINE)]
        for cell in ("spawn", "heal")
        for out in _by_id(executed, cell)
        if out.output_type == "execute_result"
    )
    assert len(before) == len(after) == 4
    assert [rank for rank in range(4) if before[rank] != after[rank]] == [2]
    assert executed.summary()["healed_ms"] > 0


@pytest.mark.timeout(180)
def test_no_process_stays_behind(executed: "Executed") -> None:
    assert executed.left_behind == []


@pytest.mark.timeout(180)
def test_nothing_is_shown_that_would_not_look_right_in_a_saved_notebook(executed: "Executed", tmp_path: Path) -> None:
    assert [out.text for out in executed.outputs("stream") if out.name == "stderr"] == []
    from scripts.demo import save

    _, page = save(executed, tmp_path)
    assert "test accuracy" in page.read_text(encoding="utf-8")


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    ran = [c["id"] for c in cells if c["cell_type"] == "code" and (c["outputs"] or c["execution_count"] is not None)]
    assert ran == []
