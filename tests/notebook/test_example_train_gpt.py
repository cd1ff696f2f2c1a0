"""examples/train_gpt.ipynb, executed where nobody can type, with few steps: it trains, loses a process, and goes on."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def test_training_goes_on_from_its_files_after_a_process_was_killed(fresh: Notebook) -> None:
    fresh.aside("import os; os.environ.update(MONARCH_EXAMPLE_STEPS='8', MONARCH_EXAMPLE_BATCH='8')")
    example = Example("train_gpt.ipynb").run(fresh)
    assert "in step 8:" in example.text("kill")
    assert re.search(r"data=1 model=1|rank 3, on host", example.text("kill")), example.text("kill")
    assert "on from step 6" in example.text("heal")
    losses = re.search(r"loss ([\d.]+) -> ([\d.]+)", example.text("heal"))
    assert losses is not None, example.text("heal")
    assert float(losses[2]) < float(losses[1]) - 0.3
    assert example.text("write").startswith("The class statement")
