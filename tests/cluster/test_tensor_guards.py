"""Where plain DTensor is wrong without a word, or has no answer: ours is right, or refuses and says what to write."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# What plain DTensor does: "wrong" without a word, or "raises".
WRONG = (
    "mse_loss on uneven rows",
    "smooth_l1_loss on uneven rows",
    "huber_loss on uneven rows",
    "binary_cross_entropy on uneven rows",
    "binary_cross_entropy_with_logits on uneven rows",
    "soft_margin_loss on uneven rows",
    "gradient of binary_cross_entropy on even rows",
    "conv1d with a weight cut by rows",
    "conv1d with both cut by rows",
    "conv1d cut along its length",
    "one minus a sum of parts",
    "cosine_embedding_loss cut by columns",
)
RAISES = (
    "rows of a vocabulary that is cut, used twice",
    "rms_norm cut along what is normed",
    "cross_entropy on uneven rows",
    "16-bit whole numbers cut and put together",
    "an operation without a rule",
    "uneven rows flattened",
)


@pytest.fixture(scope="module")
def found() -> Any:
    command = [sys.executable, "-m", "tests.cluster.tensor_guards"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", WRONG)
def test_what_plain_dtensor_gets_wrong_without_a_word_is_right(found: Any, name: str) -> None:
    plain, ours = found["results"][name]
    assert (plain, ours) == ("wrong", "right")


@pytest.mark.parametrize("name", RAISES)
def test_what_plain_dtensor_has_no_answer_for_is_right(found: Any, name: str) -> None:
    plain, ours = found["results"][name]
    assert plain.startswith("raises")
    assert ours == "right"


def test_a_write_that_plain_dtensor_loses_is_refused_with_what_to_write(found: Any) -> None:
    plain, ours = found["results"]["a write through rows of a tensor cut by rows"]
    assert plain == "wrong"
    assert ours.startswith("raises ViewWriteError")


def test_classes_that_are_cut_are_right_with_and_without_us(found: Any) -> None:
    assert found["results"]["cross_entropy cut along the classes"] == ["right", "right"]
