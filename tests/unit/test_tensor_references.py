"""Which tensors may have new memory: those whose memory nothing else shows; and which have contents after a heal."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from monarch_nb.tensor.propagation import MeshLayout, Meta
from monarch_nb.tensor.references import UNSENT, HeldObjects, LogicalMemory, Reference, StepWrites
from monarch_nb.tensor.replicas import ShardTransfer, StreamContents, contents_of, transfers

pytestmark = pytest.mark.timeout(60)


def test_a_tensor_is_unaliased_before_and_after_a_view_is_held() -> None:
    stream: Any = object()
    objects = HeldObjects({}, print)
    tensor, view, third = (objects.hold(stream, None, None) for _ in range(3))  # type: ignore[arg-type]
    assert objects.is_alone(tensor)
    tensor.memory = view.memory = LogicalMemory()
    third.memory = LogicalMemory()
    assert [objects.is_alone(reference) for reference in (tensor, view, third)] == [False, False, True]
    del view
    assert objects.is_alone(tensor)
    assert isinstance(third, Reference)


def test_a_new_rank_receives_each_part_from_one_that_holds_it() -> None:
    both, rows, full = frozenset({0, 1}), frozenset({0}), frozenset[int]()
    groups = [(full, (1, 2)), (rows, (3,)), (both, (4,))]
    assert transfers((2, 3), [4], groups) == ([ShardTransfer(3, 4, (1, 2, 3))], {4: 4})
    moves, missing = transfers((2, 3), [0, 4], groups)  # of two, no rank serves both
    assert (moves, missing) == ([ShardTransfer(1, 0, (1, 2, 3)), ShardTransfer(3, 4, (1, 2, 3))], {4: 0})
    assert transfers((2, 3), [3, 4, 5], groups) == (
        [ShardTransfer(0, 3, (1, 2)), ShardTransfer(1, 4, (1, 2)), ShardTransfer(2, 5, (1, 2))],
        {3: 3, 4: 3},
    )
    assert transfers((2,), [0, 1], groups[:2]) == ([], dict.fromkeys((1, 2, 3), 0))


def test_contents_are_lost_with_an_unfinished_write() -> None:
    stream: Any = object()
    objects = HeldObjects({}, print)
    layout = MeshLayout((2,), ("rank",), "cpu")
    meta = Meta.of(layout, (4,), torch.float32, (Replicate(),))
    base, view, early, late, unmade, by_step = (objects.hold(stream, meta, None) for _ in range(6))
    base.memory = view.memory = LogicalMemory()
    base.writes.written, early.writes.written, late.writes.written = 7, 6, UNSENT
    step = StepWrites([by_step.number])
    step.written = 9
    objects.steps.add(step)
    numbers = [reference.number for reference in (base, view, early, late, by_step)]
    contents = contents_of(objects, layout, 7, {0: numbers}, "a process died")
    assert contents == StreamContents((early.number,), (ShardTransfer(0, 1, (early.number,)),))
    assert set(objects.lost) == {reference.number for reference in (base, view, late, unmade, by_step)}
    assert contents_of(objects, layout, 10, {0: numbers}, "a process died").kept == (early.number,)  # still lost
