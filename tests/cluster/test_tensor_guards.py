"""Cases that plain DTensor gets silently wrong or cannot do: ours is right, or its error names the remedy."""

import pytest

from monarch_nb.actor import current_rank
from tests.cluster import tensor_guards
from tests.cluster.actor_tools import spawned

pytestmark = pytest.mark.timeout(120)
Outcomes = dict[str, tuple[str, str]]

# What plain DTensor does: "wrong" without a word, or "raises". A newer PyTorch may have become right.
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


def compare(store: str) -> Outcomes:
    return tensor_guards.outcomes(current_rank().rank, store)


@pytest.fixture(scope="module")
def outcomes(born_for_tensors: None, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    for procs in spawned(2, "guards"):
        first, _ = procs.run(compare, str(tmp_path_factory.mktemp("guards") / "store")).get(100).values()
    return first


@pytest.mark.parametrize("name", WRONG)
def test_results_that_plain_dtensor_silently_gets_wrong_are_right(outcomes: Outcomes, name: str) -> None:
    plain, ours = outcomes[name]
    assert plain in ("wrong", "right")
    assert ours == "right"


@pytest.mark.parametrize("name", RAISES)
def test_operations_that_plain_dtensor_cannot_do_are_right(outcomes: Outcomes, name: str) -> None:
    plain, ours = outcomes[name]
    assert plain.startswith(("raises", "right"))
    assert ours == "right"


def test_plain_dtensor_loses_a_write_through_rows(outcomes: Outcomes) -> None:
    plain, _ = outcomes["a write through rows of a tensor cut by rows"]  # of handles: test_tensor_equal.py
    assert plain in ("wrong", "right")


def test_classes_that_are_cut_are_right_with_and_without_us(outcomes: Outcomes) -> None:
    assert outcomes["cross_entropy cut along the classes"] == ("right", "right")
