"""examples/finetune.ipynb, executed where nobody can type: a bad sample is found, and training resumes after it."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def example(blank: Notebook) -> Example:
    for package in ("transformers", "accelerate", "peft"):
        pytest.importorskip(package, reason=f"NOT TESTED HERE: the example needs {package}")
    return Example("finetune.ipynb").run(blank)


def test_the_error_and_its_frames_show_the_bad_sample(example: Example) -> None:
    assert "'NoneType' object has no attribute 'strip'" in example.text("tune")
    assert "failed on 1 of 2 ranks of spmd: gpus=1" in example.text("tune")
    assert "'answer': None" in example.text("look")
    assert "» p index\n491" in example.text("look")


def test_training_resumes_from_the_checkpoint(example: Example) -> None:
    assert "resumes from tuned/checkpoint-20" in example.text("resume")
    assert "now at step 100" in example.text("resume")


def test_fine_tuning_lowers_the_loss_of_unseen_questions(example: Example) -> None:
    loss = re.search(r"loss ([\d.]+) of the base, ([\d.]+) fine-tuned", example.text("unseen"))
    assert loss is not None, example.text("unseen")
    assert float(loss[2]) < float(loss[1]) - 0.3


def test_the_script_trains_and_saves_its_adapter(example: Example) -> None:
    assert "'train_loss'" in example.text("torchrun")
