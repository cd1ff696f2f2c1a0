"""Which NaN was the first, from what each rank recorded."""

from dataclasses import replace
from typing import Any

import torch

from monarch_nb.diagnosis.nonfinite import judge_values
from monarch_nb.diagnosis.nonfinite_rank import NonFinite, WatchMode
from monarch_nb.shape import NDSlice, Region

RANKS = Region(["gpus"], NDSlice(0, [4], [1]))
LOG = NonFinite(
    "aten.log.default", 3, 0, (2, 4), "float32", "finite", False, "Net.head", "/lab/train.py:41", "step", 2, 10.0
)
FOLLOWS = replace(LOG, operation="aten.add.Tensor", given="nan", at=5.0)
OVERFLOW = replace(LOG, operation="aten.exp.default", nans=0, infinities=8, module="", at=9.0)


def test_nothing_seen_is_no_finding() -> None:
    assert judge_values("workers", RANKS, {0: (None, None), 3: (None, None)}.items()) == ()


def test_ranks_that_got_a_nan_from_another_are_not_named() -> None:
    (finding,) = judge_values("workers", RANKS, {0: (FOLLOWS, None), 2: (LOG, None), 3: (FOLLOWS, None)}.items())
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == ("nonfinite", (2,), "/lab/train.py:41", True)
    assert finding.text == (
        "gpus=2: in call 2 of step() aten.log.default gave 3 NaN in float32[2×4] in Net.head (train.py:41), "
        "from finite inputs"
    )


def test_ranks_with_the_same_nan_are_one_finding() -> None:
    sqrt = replace(LOG, operation="aten.sqrt.default", at=11.0)
    findings = judge_values("workers", RANKS, {0: (sqrt, None), 1: (LOG, None), 2: (LOG, None)}.items())
    assert [finding.ranks for finding in findings] == [(1, 2), (0,)]


def test_a_nan_of_data_says_so() -> None:
    (finding,) = judge_values("workers", RANKS, {1: (FOLLOWS, None)}.items())
    assert "its inputs had NaN already" in finding.text


def test_the_infinity_that_a_nan_comes_from_is_named() -> None:
    nan = replace(LOG, operation="aten.sub.Tensor", given="inf", backward=True)
    (finding,) = judge_values("workers", RANKS, {1: (nan, OVERFLOW)}.items())
    assert finding.text.endswith(
        "in the backward of Net.head (train.py:41), from inputs with infinities, the first from aten.exp.default "
        "(train.py:41)"
    )


def test_infinities_alone_are_a_suspicion() -> None:
    (finding,) = judge_values("workers", RANKS, {0: (None, OVERFLOW), 1: (None, replace(OVERFLOW, at=99.0))}.items())
    assert (finding.ranks, finding.sure) == ((0, 1), False)
    assert "gave 8 infinite numbers" in finding.text


class Recorder(WatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_functions_are_compiled_as_usual_while_operations_are_watched() -> None:
    before = torch.compile(lambda x: torch.sin(x) * 2, backend="aot_eager", fullgraph=True)
    within = torch.compile(lambda x: torch.cos(x) * 3, backend="aot_eager", fullgraph=True)
    x = torch.zeros(4)
    before(x)
    with Recorder() as recorder:
        assert before(x).tolist() == [0.0] * 4
        assert within(x).tolist() == [3.0] * 4
        x.exp()
    assert "aten.exp.default" in recorder.operations
