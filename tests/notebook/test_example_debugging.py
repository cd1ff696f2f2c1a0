"""examples/debugging.ipynb, executed where nobody can type: each step has the expected result."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def example(blank: Notebook) -> Example:
    return Example("debugging.ipynb").run(blank)


def test_the_breakpoint_stops_the_one_rank_with_a_nan_loss(example: Example) -> None:
    assert "StoppedAtBreakpoint: 3 of 4 ranks have answered" in example.text("stop")
    assert "1 of 4  at Cell In[4]:30 in Trainer.learn  trainers gpus=2" in example.text("list")


def test_the_frames_show_the_bad_sample(example: Example) -> None:
    text = example.text("look")
    assert "64 NaN" in text
    assert "» p (batch.norm(dim=1) == 0).nonzero().flatten()\n[8]" in text
    assert "slice(80, 96, None)" in example.text("found")
    assert example.text("resume").strip() == "5"


def test_the_comparison_of_ranks_points_to_the_same_one(example: Example) -> None:
    compared = example.text("diff")
    assert "× gpus=2" in compared
    assert re.search(r"^ ! nan +gpus=2$", compared, re.MULTILINE)
    assert re.search(r"^ ! float32\[16×64\].* 64 NaN +gpus=2$", compared, re.MULTILINE)


def test_post_mortem_opens_the_frames_of_the_rank_that_failed(example: Example) -> None:
    assert "ValueError: the loss of step 5 is nan" in example.text("strict")
    assert "trainers gpus=2  post-mortem: ValueError" in example.text("mpm")
    assert "» p self.steps\n5" in example.text("mpm-look")


def test_after_the_repair_all_losses_are_finite(example: Example) -> None:
    assert "all finite: True" in example.text("fix")
