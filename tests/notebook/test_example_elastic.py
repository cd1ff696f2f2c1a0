"""examples/elastic.ipynb, executed where nobody can type, with few steps: hosts go and come, and the losses stay."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]


def test_losses_are_those_of_an_undisturbed_run(fresh: Notebook) -> None:
    fresh.aside("import os; os.environ.update(MONARCH_EXAMPLE_STEPS='120')")
    example = Example("elastic.ipynb").run(fresh)
    assert "about to be taken away (SIGTERM)" in example.text("notice")
    assert "'fleet' {hosts=2}: hosts=1 removed" in example.text("notice")
    assert "'fleet' {hosts=1}: hosts=1 removed" in example.text("kill")
    assert "2 hosts more" in example.text("grow")
    fresh.run("from itertools import groupby").ok()
    shown = fresh.run("[ranks for ranks, _ in groupby(ranks for _, ranks in history)], len(history)").ok().text
    assert shown == "([3, 2, 1, 3], 120)"
    match = re.search(r"largest difference of a loss +([\d.]+)", example.text("compare"))
    assert match is not None, example.text("compare")
    assert float(match[1]) < 0.01
