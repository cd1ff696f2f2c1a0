"""The results of an operation on sharded tensors, and its costs, computed without data or workers."""

import contextlib
import os
import pickle
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_nb.tensor.propagation import (
    Call,
    DataDependentShapeError,
    LocalStep,
    MeshLayout,
    Meta,
    PropagationError,
    Propagator,
    Redistribute,
    Write,
    sharded,
)
from monarch_nb.tensor.propagation.world import World, imagining

aten = torch.ops.aten
LINE = MeshLayout((2,), ("data",))
ROWS, COLUMNS, WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)


def meta(*shape: int, placed: tuple[object, ...] = WHOLE, dtype: torch.dtype = torch.float32) -> Meta:
    return Meta.of(LINE, shape, dtype, placed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def propagator() -> Propagator:
    return Propagator(LINE)


def test_equal_metas_are_one_object_and_stay_so_through_a_pickle() -> None:
    first = meta(4, 2, placed=ROWS)
    assert meta(4, 2, placed=ROWS) is first
    assert pickle.loads(pickle.dumps(first)) is first
    assert meta(4, 2, placed=COLUMNS) is not first
    for placement in (_NormPartial(3), _StridedShard(0, split_factor=2), Partial("max")):
        value = meta(4, 2, placed=(placement,))
        assert pickle.loads(pickle.dumps(value)) is value


def test_a_product_of_rows_stays_sharded_and_costs_nothing(propagator: Propagator) -> None:
    plan, tensors, _ = propagator.plan(aten.mm.default, (meta(6, 4, placed=ROWS), meta(4, 8)))
    assert plan.made == (meta(6, 8, placed=ROWS),)
    assert plan.collectives == ()
    assert len(tensors) == 2


def test_gathered_bytes_are_counted_by_mesh_dimension(propagator: Propagator) -> None:
    plan, _, _ = propagator.plan(aten.mm.default, (meta(6, 4, placed=ROWS), meta(4, 8, placed=COLUMNS)))
    assert [(c.dim, c.nbytes) for c in plan.collectives] == [("data", 3 * 4 * 4)]


def test_the_second_time_finds_the_plan_whatever_the_float(propagator: Propagator) -> None:
    rows = meta(6, 4, placed=ROWS)
    plan, _, scalars = propagator.plan(aten.mul.Tensor, (rows, 2.5))
    again, _, second = propagator.plan(aten.mul.Tensor, (rows, 3.5))
    assert again is plan
    assert (scalars, second) == ([2.5], [3.5])


def test_true_and_one_are_different_arguments(propagator: Propagator) -> None:
    rows = meta(6, 4, placed=ROWS)
    kept, _, _ = propagator.plan(aten.sum.dim_IntList, (rows, [1], True))
    dropped, _, _ = propagator.plan(aten.sum.dim_IntList, (rows, [1], False))
    assert (kept.made[0].shape, dropped.made[0].shape) == ((6, 1), (6,))


def test_a_number_that_decides_the_shape_is_part_of_the_key(propagator: Propagator) -> None:
    short, _, _ = propagator.plan(aten.arange.default, (4.0,))
    long, _, _ = propagator.plan(aten.arange.default, (9.0,))
    assert (short.made[0].shape, long.made[0].shape) == ((4,), (9,))


def test_an_in_place_change_makes_no_tensor_and_returns_its_argument(propagator: Propagator) -> None:
    plan, tensors, _ = propagator.plan(aten.add_.Tensor, (meta(6, 4, placed=ROWS), 1.0))
    assert (plan.made, plan.writes) == ((), (0,))
    assert plan.build([], tensors) is tensors[0]


def test_lists_are_flattened_and_returned_as_lists(propagator: Propagator) -> None:
    rows = meta(6, 4, placed=ROWS)
    plan, tensors, _ = propagator.plan(aten._foreach_mul.Scalar, ([rows, rows], 2.0))
    assert len(tensors) == len(plan.made) == 2
    assert plan.build(["a", "b"], tensors) == ["a", "b"]


def test_a_view_shares_memory_along_whole_dimensions_and_copies_sharded_ones(propagator: Propagator) -> None:
    rows = meta(6, 4, placed=ROWS)
    along, _, _ = propagator.plan(aten.select.int, (rows, 1, 0))
    across, _, _ = propagator.plan(aten.select.int, (rows, 0, 0))
    assert along.views == across.views == ((0, 0),)
    assert (along.made[0].copied, across.made[0].copied) == (False, True)


def test_a_write_to_a_copied_view_gathers_the_tensor_under_it(propagator: Propagator) -> None:
    rows = meta(6, 4, placed=ROWS)
    plan, _, _ = propagator.plan(aten.slice.Tensor, (rows, 0, 2, 4))
    back = propagator.putting_back(rows, ((plan.number, 0),), plan.made[0])
    assert propagator.putting_back(rows, ((plan.number, 0),), plan.made[0]) is back
    assert (back.writes, back.made) == ((0,), ())
    assert isinstance(back.program.steps[0], Redistribute)
    assert back.program.steps[-1] == Write(target=0, source=back.program.registers - 1)


def test_a_mean_over_shards_is_one_sum_divided_once(propagator: Propagator) -> None:
    for rows in (6, 5):
        inputs = meta(rows, 4, placed=ROWS)
        plan, _, _ = propagator.plan(aten.mse_loss.default, (inputs, inputs))
        assert plan.made[0].placements == (Partial(),)
        assert plan.collectives == ()


def test_a_mean_of_means_of_unequal_shards_is_not_taken(propagator: Propagator) -> None:
    even, _, _ = propagator.plan(aten.mean.default, (meta(6, 4, placed=ROWS),))
    uneven, _, _ = propagator.plan(aten.mean.default, (meta(5, 4, placed=ROWS),))
    assert even.made == uneven.made == (meta(),)
    assert [c.nbytes for c in even.collectives] == [4]


@pytest.mark.parametrize("name", ["nll_loss_forward", "nll_loss_backward"])
def test_a_loss_of_cut_rows_is_one_kernel_on_each_rank(propagator: Propagator, name: str) -> None:
    rows, target, unit = meta(8, 5, placed=ROWS), meta(8, placed=ROWS, dtype=torch.int64), meta()
    arguments = (rows, target, None, 1, -100) if name.endswith("forward") else (unit, rows, target, None, 1, -100, unit)
    plan, *_ = propagator.plan(getattr(torch.ops.aten, name).default, arguments)
    kernels = {step.operation for step in plan.program.steps if isinstance(step, LocalStep)}
    counting = {"aten.ne.Scalar", "aten.sum.default"}  # of the targets, beside the kernel
    assert kernels == {f"aten.{name}.default", "aten.div.Tensor", *(counting if name.endswith("forward") else ())}
    assert not plan.notices


def test_rows_of_a_sharded_vocabulary_are_added_up_at_once(propagator: Propagator) -> None:
    table, tokens = meta(16, 8, placed=ROWS), meta(3, 2, dtype=torch.int64)
    plan, _, _ = propagator.plan(aten.embedding.default, (table, tokens))
    assert plan.made == (meta(3, 2, 8),)
    assert [type(step) for step in plan.program.steps] == [Call, Redistribute]


@pytest.mark.parametrize("scaled", [True, False])
def test_rows_are_counted_among_the_indices_of_all_ranks(propagator: Propagator, scaled: bool) -> None:
    arguments = (meta(6, 8, placed=ROWS), meta(6, placed=ROWS, dtype=torch.int64), 16, -1, scaled)
    plan, _, _ = propagator.plan(aten.embedding_dense_backward.default, arguments)
    assert plan.made[0].placements == (WHOLE if scaled else (Partial(),))


def test_complex_numbers_are_not_multiplied_by_a_process_group(propagator: Propagator) -> None:
    complex_rows, rows = (meta(6, placed=ROWS, dtype=dtype) for dtype in (torch.complex64, torch.float32))
    plans = [propagator.plan(aten.prod.default, (values,))[0] for values in (complex_rows, rows)]
    assert [plan.made[0].placements for plan in plans] == [WHOLE, (Partial("product"),)]


def test_an_operation_without_a_rule_gathers_and_names_the_cost(propagator: Propagator) -> None:
    plan, _, _ = propagator.plan(aten.searchsorted.Tensor, (meta(6, placed=ROWS), meta(6)))
    assert plan.made == (meta(6, dtype=torch.int64),)
    assert [notice.operation for notice in plan.notices] == ["aten.searchsorted.Tensor"]
    assert "24 bytes" in plan.notices[0].text


def test_a_gathered_change_in_place_is_written_back(propagator: Propagator) -> None:
    rows = meta(6, 4, placed=ROWS)
    plan, _, _ = propagator.plan(aten.put_.default, (rows, meta(2, dtype=torch.int64), meta(2)))
    assert plan.program.steps[-1] == Write(target=0, source=plan.program.registers - 1)


def test_shapes_that_do_not_match_raise_what_local_tensors_raise(propagator: Propagator) -> None:
    with pytest.raises(RuntimeError, match="same reduction dim") as caught:
        propagator.plan(aten.mm.default, (meta(6, 4, placed=ROWS), meta(5, 8)))
    assert not isinstance(caught.value, PropagationError)


def test_a_value_dependent_shape_is_refused_with_the_remedy(propagator: Propagator) -> None:
    with pytest.raises(DataDependentShapeError, match=r"full_tensor\(\)"):
        propagator.plan(aten.nonzero.default, (meta(6, 4, placed=ROWS),))


def test_local_tensors_among_sharded_ones_are_refused_by_name(propagator: Propagator) -> None:
    with pytest.raises(PropagationError, match=r"monarch\.distribute"):
        propagator.plan(aten.add.Tensor, (meta(2), torch.zeros(2)))


def test_ranks_with_different_shards_draw_different_numbers(propagator: Propagator) -> None:
    sharded, _, _ = propagator.plan(aten.uniform_.default, (meta(6, 4, placed=ROWS),))
    replica, _, _ = propagator.plan(aten.uniform_.default, (meta(6, 4),))
    fixed, _, _ = propagator.plan(aten.neg.default, (meta(6, 4),))
    assert [plan.program.seeded for plan in (sharded, replica, fixed)] == [(0,), (), None]


def test_propagation_leaves_the_processes_own_group_alone(propagator: Propagator) -> None:
    assert not dist.is_initialized()
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        plan, _, _ = Propagator(LINE).plan(aten.sum.default, (meta(6, 4, placed=ROWS),))
        assert isinstance(plan.made[0].placements[0], Partial)
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    plan, _, _ = propagator.plan(aten.cumsum.default, (meta(6, 8, placed=COLUMNS), 1))
    assert [collective.kind for collective in plan.collectives] == ["all_gather_into_tensor"]


def test_a_view_of_a_copied_view_is_a_copy_too() -> None:
    plane = Propagator(MeshLayout((2, 2), ("data", "model")))
    for shards in ((Shard(0), Shard(1)), (Shard(1), Shard(0))):
        for shape in ((5, 2), (4, 2)):
            part = Meta.of(plane.layout, shape, torch.float32, shards, copied=True)
            for func, args in (
                (aten.view.default, ([10 if shape[0] == 5 else 8],)),
                (aten.unsqueeze.default, (0,)),
                (aten.expand.default, ([3, *shape],)),
                (aten.select.int, (0, 1)),
                (aten.t.default, ()),
            ):
                plan, _, _ = plane.plan(func, (part, *args))
                assert [result.copied for result in plan.made] == [True], (func, shards, shape)


@pytest.mark.slow
def test_remembered_ways_between_placements_equal_those_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = MeshLayout((2, 2), ("data", "model"))

    def planned() -> list[object]:
        propagator = Propagator(plane)
        heads = (Shard(0), Shard(1))  # of attention, on batches: as one dimension, strided shards
        left, right = (
            propagator.plan(aten._unsafe_view.default, (Meta.of(plane, shape, torch.float32, heads), flat))[0].made[0]
            for shape, flat in (((8, 4, 12, 8), [32, 12, 8]), ((8, 4, 8, 12), [32, 8, 12]))
        )
        product, _, _ = propagator.plan(aten.bmm.default, (left, right))  # type: ignore[arg-type]
        return [left, right, product.program, product.made]

    remembered = planned()
    planner = _redistribute.DTensorRedistributePlanner
    monkeypatch.setattr(planner, "get_next_state", planner.get_next_state.__wrapped__)
    assert planned() == remembered
    assert "_S(0, 4)" in str(remembered)  # a strided shard


@pytest.mark.parametrize(
    ("func", "front", "back"),
    [
        (aten.cumsum.default, (meta(4, 6, placed=COLUMNS), 1), (meta(4, 6, placed=COLUMNS), -1)),
        (aten.sum.dim_IntList, (meta(4, 6, placed=ROWS), [0, 1]), (meta(4, 6, placed=ROWS), [-2, -1])),
        (aten.transpose.int, (meta(4, 6, 2, placed=ROWS), 0, 2), (meta(4, 6, 2, placed=ROWS), -3, -1)),
        (aten.unsqueeze.default, (meta(4, 6, placed=ROWS), 2), (meta(4, 6, placed=ROWS), -1)),
        (aten.stack.default, ([meta(4, placed=ROWS)] * 2, 1), ([meta(4, placed=ROWS)] * 2, -1)),
        (aten.cat.default, ([meta(0), meta(4, 6, placed=ROWS)], 0), ([meta(0), meta(4, 6, placed=ROWS)], -2)),
        (aten.diag_embed.default, (meta(4, placed=ROWS), 0, 0, 1), (meta(4, placed=ROWS), 0, -2, -1)),
        (aten.diagonal.default, (meta(4, 6, placed=ROWS), 1, 0, 1), (meta(4, 6, placed=ROWS), 1, -2, -1)),
        (aten.select.int, (meta(4, 6, placed=ROWS), 0, 3), (meta(4, 6, placed=ROWS), -2, -1)),
        (aten.slice.Tensor, (meta(4, 6, placed=ROWS), 1, 4, 6), (meta(4, 6, placed=ROWS), -1, -2, 1 << 60)),
        (aten.select_backward.default, (meta(6), (4, 6), 0, 3), (meta(6), (4, 6), -2, -1)),
        (aten.slice_backward.default, (meta(2, 6), (4, 6), 0, 2, 4, 1), (meta(2, 6), (4, 6), -2, -2, 4, 1)),
        (aten.unfold_backward.default, (meta(3, 2), (6,), 0, 2, 2), (meta(3, 2), (6,), -1, 2, 2)),
        (aten.cumsum.default, (meta(), 0), (meta(), -1)),
        (aten.amax.default, (meta(), [0]), (meta(), [-1])),
    ],
)
def test_negative_dimensions_find_the_plan_of_positive_ones(
    propagator: Propagator, func: torch._ops.OpOverload, front: tuple[object, ...], back: tuple[object, ...]
) -> None:
    assert propagator.plan(func, back)[0] is propagator.plan(func, front)[0]


def test_an_out_of_range_dimension_is_refused_as_it_was_written(propagator: Propagator) -> None:
    with pytest.raises(IndexError, match="got -3"):
        propagator.plan(aten.cumsum.default, (meta(4, 6, placed=ROWS), -3))
    with pytest.raises(IndexError, match="index -5 out of range"):
        propagator.plan(aten.select.int, (meta(4, 6, placed=ROWS), 0, -5))


SPACE = MeshLayout((2, 2, 2), ("data", "model", "expert"))


def test_rules_that_would_try_too_much_are_skipped_and_noted() -> None:
    heads = (Shard(0), Shard(1), Replicate())  # of attention, on batches: as one dimension, strided shards
    propagator = Propagator(SPACE)
    left, right = (
        propagator.plan(aten._unsafe_view.default, (Meta.of(SPACE, shape, torch.float32, heads), flat))[0].made[0]
        for shape, flat in (((8, 4, 12, 8), [32, 12, 8]), ((8, 4, 8, 12), [32, 8, 12]))
    )
    plan, _, _ = propagator.plan(aten.bmm.default, (left, right))
    assert all(placement.is_replicate() for placement in plan.made[0].placements)
    assert "would try 2197 combinations of placements" in plan.notices[0].text
    sum_, _, _ = propagator.plan(aten.add.Tensor, (left, left))
    assert (sum_.made[0].placements, sum_.collectives) == (left.placements, ())


def test_rules_are_bounded_where_plans_are_made_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = MeshLayout((2, 2), ("data", "model"))
    first, second = (Meta.of(plane, (6, 4, 4), torch.float32, (Shard(0), Shard(1))) for _ in range(2))
    free, _, _ = Propagator(plane).plan(aten.bmm.default, (first, second))
    assert not free.notices
    monkeypatch.setattr(sharded, "_MAX_COSTS", 100)
    plan, _, _ = Propagator(plane).plan(aten.bmm.default, (first, second))
    assert "would try 81 combinations" in plan.notices[0].text
    world = World(plane)
    with imagining():
        assert world.fake(first).bmm(world.fake(second)).placements == free.made[0].placements


def test_lists_whose_tensors_are_placed_alike_stay_so_whatever_the_rules(propagator: Propagator) -> None:
    for placed in (ROWS, COLUMNS, (_StridedShard(0, split_factor=2),)):
        lists = [[meta(8, 4, placed=placed), meta(4, 4, placed=ROWS)]] * 2
        plan, _, _ = propagator.plan(aten._foreach_add.List, lists)
        assert plan.made == tuple(lists[0])
        assert plan.collectives == ()
    norms, _, _ = propagator.plan(aten._foreach_norm.Scalar, (lists[0], 2))
    assert [norm.shape for norm in norms.made] == [(), ()]


@pytest.mark.parametrize(
    ("shape", "placed", "view", "fits"),
    [
        ((2, 12), Shard(1), (24,), True),
        ((24,), _StridedShard(0, split_factor=2), (6, 4), False),  # a rank would have one and a half rows, twice
        ((24,), _StridedShard(0, split_factor=2), (2, 12), True),
        ((24, 5), _StridedShard(0, split_factor=2), (2, 12, 5), True),
        ((24,), _StridedShard(0, split_factor=3), (3, 2, 4), True),
        ((24,), _StridedShard(0, split_factor=3), (2, 12), False),
    ],
)
def test_a_view_keeps_the_elements_of_each_rank_in_order(
    shape: tuple[int, ...], placed: Any, view: tuple[int, ...], fits: bool
) -> None:
    line = MeshLayout((2,), ("rank",))
    plan, _, _ = Propagator(line).plan(aten.view.default, (Meta.of(line, shape, torch.float32, (placed,)), list(view)))
    assert fits == (not plan.made[0].is_replicated)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_the_gradient_of_an_empty_mean_loss_has_a_plan(propagator: Propagator, loss: str) -> None:
    beta = [] if loss == "mse_loss" else [1.0]
    backward = getattr(aten, f"{loss}_backward").default
    for values in (meta(0, 2, placed=ROWS), meta(0, 2), meta(4, 2)):
        plan, _, _ = propagator.plan(backward, (meta(), values, values, 1, *beta))
        assert [result.shape for result in plan.made] == [values.shape]


def test_a_write_to_overlapping_elements_is_refused_before_it_is_sent(propagator: Propagator) -> None:
    for placed in (ROWS, WHOLE):
        plan, _, _ = propagator.plan(aten.expand.default, (meta(4, 1, placed=placed), [4, 3]))
        (spread,) = plan.made
        for func, more in ((aten.mul_.Tensor, (0.5,)), (aten.copy_.default, (meta(),)), (aten.normal_.default, ())):
            state = torch.get_rng_state()
            with pytest.raises(RuntimeError, match="single memory location"):
                propagator.plan(func, (spread, *more))
            assert torch.equal(torch.get_rng_state(), state)
        plan, _, _ = propagator.plan(aten.fill_.Scalar, (spread, 0.5))
        assert plan.writes == (0,)


def test_kernels_that_refuse_empty_shards_get_whole_tensors() -> None:
    four = Propagator(MeshLayout((4,), ("data",)))
    full, short = (Meta.of(four.layout, (rows, 5), torch.float32, ROWS) for rows in (4, 3))  # the last has no row
    assert [four.plan(aten.min.default, (part,))[0].made[0].placements for part in (full, short)] == [
        (Partial("min"),),
        WHOLE,
    ]
    assert four.plan(aten.sum.default, (short,))[0].made[0].placements == (Partial(),)
    single = Meta.of(four.layout, (5, 1), torch.float32, ROWS)
    assert four.plan(aten.squeeze_copy.default, (single,))[0].made[0].placements == WHOLE  # the third has one row
    shapes = ((aten.native_dropout.default, (0.5, True)), (aten.pixel_unshuffle.default, (2,)))
    for func, options in shapes:  # whose kernels return nothing in another dtype, or shape
        images = [Meta.of(four.layout, (rows, 3, 4, 6), torch.float32, ROWS) for rows in (4, 5)]
        assert [four.plan(func, (part, *options))[0].made[0].placements for part in images] == [ROWS, WHOLE]


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_statistics_are_written_however_its_input_is_cut(propagator: Propagator, training: bool) -> None:
    """Its schema does not say that it changes them."""
    for placed in (WHOLE, ROWS, COLUMNS):
        arguments = (meta(6, 4, 2, placed=placed), None, None, meta(4), meta(4), training, 0.1, 1e-5)
        plan, _, _ = propagator.plan(aten.native_batch_norm.default, arguments)
        assert plan.writes == ((1, 2) if training else ())


def test_ctrl_c_during_planning_comes_later_and_leaves_pytorch_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    propagator, pressed = Propagator(LINE), []
    enter = sharded.bounded.__wrapped__  # type: ignore[attr-defined]

    def press() -> object:
        pressed.append(os.kill(os.getpid(), signal.SIGINT))
        return contextlib.contextmanager(enter)()

    monkeypatch.setattr(sharded, "bounded", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            propagator.plan(aten.mm.default, (meta(6, 4, placed=ROWS), meta(4, 8)))
    finally:
        signal.signal(signal.SIGINT, before)
        monkeypatch.undo()
    assert len(pressed) == 1
    assert torch.randn(3).device.type == "cpu"
    plan, _, _ = propagator.plan(aten.mm.default, (meta(6, 4, placed=ROWS), meta(4, 8)))
    assert plan.made == (meta(6, 8, placed=ROWS),)
