"""examples/weight_sync.ipynb, executed where nobody can type: the policy learns, by weights that nobody sends."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def test_the_policy_of_the_example_learns(fresh: Notebook) -> None:
    example = Example("weight_sync.ipynb").run(fresh)
    text = example.text("train")
    rewards = re.search(r"reward (-[\d.]+) -> (-[\d.]+), version 151, the last game by \[150, 150\]", text)
    assert rewards is not None, text
    assert float(rewards[2]) > -0.2 > float(rewards[1])
    assert example.text("columns") == "(True, True)"
    assert "cross-memory" in example.text("routes")
