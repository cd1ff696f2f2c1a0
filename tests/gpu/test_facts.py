"""The facts of the GPU report as tests, where there is a GPU; and the frame of the report, anywhere."""

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tests.gpu.__main__ import PARTS, Outcome, facts, main, page, run_apart

pytestmark = pytest.mark.timeout(300)
FACTS = [(part, name) for part in PARTS for name in facts(part)]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: `make gpu-report` on a machine with one runs these"
)
@pytest.mark.slow
@pytest.mark.parametrize(("part", "name"), FACTS, ids=".".join)
def test_the_fact_holds(part: str, name: str, tmp_path: Path) -> None:
    outcome = run_apart(part, name, tmp_path)
    if outcome.how == "not tried":
        pytest.skip(outcome.evidence)
    assert outcome.how == "holds", outcome.evidence


def test_each_fact_says_in_a_line_what_holds() -> None:
    for part, name in FACTS:
        function = facts(part)[name]
        assert inspect.getdoc(function), f"{part}.{name}"
        assert "\n" not in str(inspect.getdoc(function)), f"{part}.{name}"
    assert {part for part, _ in FACTS} == set(PARTS)


def test_the_page_counts_outcomes_and_shows_evidence_in_its_table() -> None:
    outcomes = [
        Outcome("driver", "a", "A copy waits", "holds", "0.2 s | 3 MB\nmore", 1.0),
        Outcome("driver", "b", "A handle closes", "fails", "it did not", 2.0),
        Outcome("rdma", "c", "Rates", "not tried", "no GPU", 3.0),
    ]
    text = page(outcomes)
    assert "1 facts hold, 1 fail, 1 were not tried" in text
    assert "| A copy waits | ✓ | 0.2 s \\| 3 MB more | 1.0 |" in text
    assert "| A handle closes | ✗ **fails** | it did not | 2.0 |" in text
    assert text.index("What the driver of pretence assumes") < text.index("RDMABuffer")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_fact_is_not_tried(tmp_path: Path) -> None:
    outcome = run_apart("devices", "a_rank_gets_its_gpu", tmp_path)
    assert (outcome.how, outcome.evidence) == ("not tried", "PyTorch finds no GPU here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_page_of_the_last_run_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "gpu.md"
    path.write_text("what was seen")
    monkeypatch.setattr("sys.argv", ["gpu", "--page", str(path)])
    assert main() == 1
    assert path.read_text() == "what was seen"
    assert "There is no GPU here: torch.cuda.is_available() says so" in capsys.readouterr().out
