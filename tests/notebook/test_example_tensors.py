"""examples/tensors.ipynb, executed where nobody can type: a tensor over eight processes, in view, through a death."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def test_tensors_are_shown_by_shard_and_survive_a_death(fresh: Notebook) -> None:
    example = Example("tensors.ipynb").run(fresh)
    assert "data_parallel=4   Shard(0)     cuts dimension 0: 1024 → 4 × 256" in example.text("mesh")
    for picture in ("mesh", "matmul", "both", "parts", "uneven", "lost"):  # saved, for readers without a kernel
        assert example.html(picture).count("<svg") == 2, picture
    assert example.text("equal") == "'as local PyTorch has it: True'"
    assert example.text("reduced") == "True"
    assert "hatch" in example.html("parts")
    assert "w        1024×4096 float32" in example.text("tensors")
    assert "the last cell moved" in example.text("tensors")
    assert "largest = scaled.abs().max().item()" in example.text("sync")
    assert "Send it there first: monarch.distribute" in example.text("shape")
    assert re.match(r"SupervisionError|ContentsLostError", example.text("kill"))  # of the call, or of the next one
    assert example.html("lost").count('class="lost"') == 1
    assert "healed, and equal: True" in example.text("heal")
    assert [cell.stderr for cell in example.shown.values() if cell.stderr] == []
