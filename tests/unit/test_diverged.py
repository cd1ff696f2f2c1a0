"""Which ranks differ, from checksums alone; and the checksums."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from monarch_nb.diagnosis.diverged import judge_sums
from monarch_nb.diagnosis.diverged_rank import TensorSum, checksum, tensor_sums
from monarch_nb.shape import NDSlice, Region

RANKS = Region(("gpus",), NDSlice(0, (4,), (1,)))


def sums(*values: int, replica: bool = True, part: str = "") -> list[TensorSum]:
    return [TensorSum(f"model.{index}", part, replica, value, float(value)) for index, value in enumerate(values)]


def test_the_rank_that_differs_from_the_majority_is_named() -> None:
    (finding,) = judge_sums("workers", RANKS, {0: sums(7, 8), 1: sums(7, 9), 2: sums(7, 8)})
    assert (finding.kind, finding.ranks, finding.sure) == ("diverged", (1,), True)
    assert finding.text == (
        "gpus=1 has other values than the rest in 1 of 2 tensors, first in model.1 (norm 9, elsewhere 8)"
    )


def test_without_a_majority_all_replicas_are_named() -> None:
    (finding,) = judge_sums("workers", RANKS, {0: sums(7, 8), 1: sums(7, 9)})
    assert (finding.ranks, finding.sure) == ((0, 1), True)
    assert finding.text == "gpus=0-1 have different values in 1 of 2 tensors, first in model.1 (norms 8, 9)"


@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param([sums(7, 8), sums(7, 8), sums(7, 8)], id="equal"),
        pytest.param([sums(7, 1, replica=False), sums(7, 2, replica=False), sums(7, 3, replica=False)], id="shards"),
        pytest.param([sums(1, part="S(0)@0"), sums(2, part="S(0)@1")], id="distributed shards"),
        pytest.param([sums(7), []], id="on one rank only"),
    ],
)
def test_what_need_not_be_equal_is_no_finding(evidence: Sequence[Sequence[TensorSum]]) -> None:
    assert judge_sums("workers", RANKS, dict(enumerate(evidence))) == ()


def test_modules_that_nothing_calls_replicas_are_a_suspicion() -> None:
    evidence = {rank: sums(7, 9 if rank == 3 else 8, replica=False) for rank in range(4)}
    (finding,) = judge_sums("workers", RANKS, evidence)
    assert (finding.ranks, finding.sure) == ((3,), False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_checksum_changes_with_any_element_and_their_order(dtype: torch.dtype) -> None:
    tensor = (torch.arange(40).reshape(5, 8) % 2).to(dtype)
    before = tensor.clone()
    first = checksum(tensor)
    assert torch.equal(tensor, before)
    assert first == checksum(tensor.clone()) == checksum(tensor.t().contiguous().t())
    for index in range(tensor.numel()):
        copy = tensor.clone()
        copy.view(-1)[index] = 1 - int(copy.view(-1)[index])
        assert checksum(copy) != first
    assert checksum(tensor.flip(1)) != first


def test_each_parameter_is_summed_up_once_with_its_states() -> None:
    class Holder:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.models = {"actor": nn.Linear(2, 3), "critic": nn.Linear(2, 1)}
            self.same = self.models["actor"]
            self.optimizer = torch.optim.Adam(self.same.parameters())
            self.same(torch.ones(2)).sum().backward()
            self.optimizer.step()

    entries = {entry.path: entry for entry in tensor_sums(Holder())}
    weights = {"models['actor'].weight", "models['actor'].bias", "models['critic'].weight", "models['critic'].bias"}
    states = {f"optimizer: {key} of models['actor'].{name}" for key in ("step", "exp_avg", "exp_avg_sq")
              for name in ("weight", "bias")}  # fmt: skip
    assert entries.keys() == weights | states | {"PyTorch's random numbers"}
    assert not any(entry.is_replica for entry in entries.values())
    assert [(entry.path, entry.checksum) for entry in tensor_sums(Holder())] == [
        (entry.path, entry.checksum) for entry in entries.values()
    ]
    assert entries["models['actor'].weight"].part == "float32[3, 2]"
    assert not math.isnan(entries["models['actor'].weight"].norm)
