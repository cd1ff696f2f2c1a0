"""examples/grpo.ipynb, executed where nobody can type, with few steps: the reward rises, and a generator is healed."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]


def test_the_reward_rises_while_a_generator_is_killed_and_healed(fresh: Notebook) -> None:
    fresh.aside("import os; os.environ.update(MONARCH_EXAMPLE_STEPS='60')")
    example = Example("grpo.ipynb").run(fresh)
    assert "signal 9 (SIGKILL)" in example.text("kill")
    gap = re.search(r"killed at version (\d+), back at version (\d+)", example.text("heal"))
    assert gap is not None, example.text("heal")
    assert 20 <= int(gap[1]) < int(gap[2]), "the learner has gone on meanwhile"
    reward = re.search(r"reward ([\d.]+) at first, ([\d.]+) at last", example.html("picture"))
    assert reward is not None, example.html("picture")
    assert float(reward[2]) > float(reward[1]) + 0.1
    assert "version 61: " in example.text("result")
