"""Results of a mesh equal those of local tensors, or are errors: views, writes, random programs, refusals."""

import contextlib
import linecache
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import monarch_nb
from monarch_nb.config import configured
from monarch_nb.distributed import GatherWarning, Mesh
from monarch_nb.tensor.propagation import DataDependentShapeError, NoRuleError, PropagationError, ViewWriteError, rules
from monarch_nb.tensor.stream import Stream
from tests.cluster.actor_tools import spawned

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::monarch_nb.distributed.GatherWarning"),
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
]

R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLACEMENTS = (R, S0, S1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    for procs in spawned(2, "views"):
        yield Mesh.of(procs, ("data",))


@pytest.fixture(scope="module")
def grid() -> Iterator[Mesh]:
    mesh = Mesh(shape=(2, 2), mesh_dim_names=("rows", "columns"), name="grid")
    yield mesh
    mesh.stop().get(40)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def rows(mesh: Mesh, *shape: int) -> Any:
    return monarch_nb.distribute(numbers(*shape), mesh, [S0])


def test_a_view_across_a_cut_dimension_sees_later_writes(mesh: Mesh) -> None:
    t = rows(mesh, 5, 3)
    first, (a, b), part = t[0], t.split([2, 3]), t[1:4].T
    t.add_(10)
    t.mul_(2)
    expected = (numbers(5, 3) + 10) * 2
    assert torch.equal(first.full_tensor(), expected[0])
    assert torch.equal((a + 0).full_tensor(), expected[:2])
    assert b.sum().item() == expected[2:].sum().item()
    assert part.tolist() == expected[1:4].T.tolist()


def test_writes_to_views_are_seen_in_their_tensor_and_other_views(mesh: Mesh) -> None:
    t = rows(mesh, 5, 3)
    expected = numbers(5, 3)
    last, column = t[4], t[:, 1]
    for tensor in (t, expected):
        tensor[2].unsqueeze(0).expand(3, 3).zero_()
    for tensor in (t, expected):
        tensor[1:3].fill_(7.0)
        tensor[-1] = 5.0
        tensor[1:][1:][0].mul_(2.0)
    assert torch.equal(t.full_tensor(), expected)
    assert last.tolist() == expected[4].tolist()
    assert column.tolist() == expected[:, 1].tolist()


def test_a_write_to_an_expanded_tensor_counts_once_per_memory_cell(mesh: Mesh) -> None:
    def writes(t: Any, mask: Any) -> None:
        twice = t.unsqueeze(0).expand(2, 5, 3)
        twice[:, 1:][0, 0].add_(50)
        twice[:, 2:].masked_fill_(mask, -1.0)
        twice.masked_fill_(mask[:, :1], -2.0)

    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    mask[1, :, 2] = mask[0, 2, 0] = True
    for placement in PLACEMENTS:
        expected = numbers(5, 3)
        t = monarch_nb.distribute(expected, mesh, [placement])
        writes(expected, mask)
        writes(t, monarch_nb.distribute(mask, mesh))
        assert torch.equal(t.full_tensor(), expected), placement


def test_a_view_whose_tensor_is_gone_keeps_what_was_written_last(mesh: Mesh) -> None:
    t = rows(mesh, 4, 2)
    view = t[3]
    t.add_(1)
    del t
    assert view.tolist() == [7.0, 8.0]
    view.add_(1)
    assert view.tolist() == [8.0, 9.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
def test_a_view_as_another_dtype_shares_memory(mesh: Mesh, dtype: torch.dtype) -> None:
    for placement in PLACEMENTS:
        expected = numbers(5, 4)
        t = monarch_nb.distribute(expected, mesh, [placement])
        for tensor in (t, expected):
            tensor.view(dtype)[1:].bitwise_xor_(5)
        assert t.view(dtype).tolist() == expected.view(dtype).tolist(), placement


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.complex32, torch.float8_e5m2])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_process_groups_lack_are_exchanged(mesh: Mesh, dtype: torch.dtype) -> None:
    expected = torch.randint(0, 100, (4, 8), dtype=torch.int8).view(dtype)
    t = monarch_nb.distribute(expected, mesh, [S0])
    for move in (lambda t: t, lambda t: t[1], lambda t: torch.cat([t, t])):
        assert torch.equal(move(t).full_tensor().view(torch.uint8), move(expected).view(torch.uint8))


@pytest.mark.parametrize("change", ["tensor", "view"])
def test_views_equal_their_tensor_whatever_an_interrupt_cuts(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    issue, remaining = Stream.issue, 100

    def interrupt(stream: Stream, command: tuple[object, ...], *rest: Any) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == -1:  # before a command, or after the one before
            raise KeyboardInterrupt
        issue(stream, command, *rest)

    def write_and_read(t: Any, view: Any, other: Any) -> None:
        (t if change == "tensor" else view).add_(1)
        view + other[0]

    t = rows(mesh, 4, 2)
    write_and_read(t, t[3], t[1:])  # defines the plans
    monkeypatch.setattr(Stream, "issue", interrupt)
    for position in range(4 + (change == "view")):
        t = rows(mesh, 4, 2)
        view, other = t[3], t[1:]
        remaining = position
        with contextlib.suppress(KeyboardInterrupt):
            write_and_read(t, view, other)
        remaining = 100
        whole = t.full_tensor()
        assert torch.equal(view.full_tensor(), whole[3]), position
        assert torch.equal(other.full_tensor(), whole[1:]), position


def set_data(t: Any) -> None:
    t.data = rows(t.device_mesh, 2, 4)


@pytest.mark.parametrize("change", [torch.Tensor.t_, set_data])
def test_a_handle_has_its_tensors_shape_whatever_an_interrupt_cuts(mesh: Mesh, change: Any) -> None:
    change(rows(mesh, 4, 2))  # defines the plans
    left = -1

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_filename.endswith("tensor/handle.py"):
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            left -= "entry.number" not in text  # no call ends before this line, so that no signal is handled there
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    is_cut, line = True, 0
    while is_cut:
        line += 1
        t, left = rows(mesh, 4, 2), line
        sys.settrace(trace)
        try:
            change(t)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        is_cut = left <= 0
        assert t.shape == t.meta.shape == t.full_tensor().shape, line
    assert line > 3


def test_writes_that_would_be_lost_are_refused_with_what_to_do(mesh: Mesh) -> None:
    t = rows(mesh, 4, 2)
    view = t[3]
    with pytest.raises(ViewWriteError, match=r"test_tensor_equal\.py:\d+.*one after the other"):
        torch._foreach_add_([t[1], t[:2]], 1.0)
    with configured(tensor_gather="refuse"), pytest.raises(ViewWriteError, match=r"slice_scatter"):
        view.add_(1)


def test_a_write_through_a_view_says_what_it_costs_once(mesh: Mesh) -> None:
    t = rows(mesh, 6, 2)
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        t[2].sub_(1.0)
        t[3].sub_(1.0)
    assert [notice.category for notice in notices] == [GatherWarning]
    assert notices[0].filename == __file__
    assert "24 bytes" in str(notices[0].message)


@pytest.mark.slow
def test_gradients_of_writes_through_views_are_those_of_local_tensors(mesh: Mesh) -> None:
    def program(leaf: torch.Tensor) -> torch.Tensor:
        t = leaf * 2
        row, across = t[1], t[:, 1:]
        t.mul_(3)
        across[2].mul_(5)
        t[0].copy_(t[3].clone() * row.clone())
        return (row * row).sum() + (t * t).sum() + across[1:].sum()

    for placement in PLACEMENTS:
        for shape in ((4, 3), (5, 3)):
            local = numbers(*shape).requires_grad_()
            ours = monarch_nb.distribute(numbers(*shape), mesh, [placement]).requires_grad_()
            expected, result = program(local), program(ours)
            assert result.item() == expected.item()
            expected.backward()
            result.backward()
            assert local.grad is not None
            assert ours.grad is not None
            assert torch.equal(ours.grad.full_tensor(), local.grad), (placement, shape)


@pytest.mark.slow
def test_gradients_flow_through_selections_along_negative_dimensions(mesh: Mesh) -> None:
    for placement in (S0, S1):
        local = numbers(4, 5, 6).requires_grad_()
        ours: Any = monarch_nb.distribute(numbers(4, 5, 6), mesh, [placement]).requires_grad_()
        for x in (local, ours):
            (x.select(-1, 2).square().sum() + x.narrow(-2, 1, 3).square().sum()).backward()
        assert local.grad is not None
        assert torch.equal(ours.grad.full_tensor(), local.grad), placement


def test_elements_meet_those_of_a_smaller_index_wherever_tensors_are_cut(mesh: Mesh) -> None:
    index = torch.tensor([[0, 2, 1], [3, 0, 0], [1, 1, 2]])  # smaller than the indexed tensor in both dimensions
    for cut in (S0, S1):
        for cut_index in (S0, S1, R):
            local = numbers(5, 4).requires_grad_()
            ours: Any = monarch_nb.distribute(numbers(5, 4), mesh, [cut]).requires_grad_()
            mesh_index = monarch_nb.distribute(index, mesh, [cut_index])
            expected, result = local.gather(0, index), ours.gather(0, mesh_index)
            assert torch.equal(result.full_tensor(), expected), (cut, cut_index)
            expected.square().sum().backward()
            result.square().sum().backward()
            assert local.grad is not None
            assert torch.equal(ours.grad.full_tensor(), local.grad), (cut, cut_index)
            source = monarch_nb.distribute(numbers(3, 3), mesh, [cut])
            added = ours.detach().scatter_add(0, mesh_index, source)
            assert torch.equal(added.full_tensor(), local.detach().scatter_add(0, index, numbers(3, 3)))


def test_a_picture_without_a_batch_is_pooled_as_one_process_does(mesh: Mesh) -> None:
    for cut in (S0, S1):
        local = numbers(3, 6, 5).requires_grad_()
        ours: Any = monarch_nb.distribute(numbers(3, 6, 5), mesh, [cut]).requires_grad_()
        for x in (local, ours):
            torch.nn.functional.adaptive_avg_pool2d(x, (4, 3)).square().sum().backward()
        assert local.grad is not None
        assert torch.allclose(ours.grad.full_tensor(), local.grad), cut


def test_functions_in_the_processes_and_compiled_steps_change_what_views_show(mesh: Mesh) -> None:
    t = rows(mesh, 4, 2)
    view = t[2]
    mesh.execute(lambda part: part.add_(1.0), t)
    assert view.tolist() == [5.0, 6.0]

    @monarch_nb.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0)

    for _ in range(6):
        step(t)
    assert step.calls > 0
    assert view.tolist() == [11.0, 12.0]


def test_a_strided_view_of_a_view_is_refused_on_split_memory(mesh: Mesh) -> None:
    t = rows(mesh, 4, 2)
    assert t.as_strided((2,), (3,)).tolist() == [0.0, 3.0]
    with pytest.raises(PropagationError, match=r"view\.clone\(\)"):
        t[2].as_strided((2,), (1,), 0)


# -- unsupported operations, and costs ---------------------------------------------------------------------------------

DEPENDENT: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda t: t.nonzero(),
    "torch.where of a mask": lambda t: torch.where(t > 2),
    "argwhere": lambda t: t.argwhere(),
    "a boolean index": lambda t: t[t > 2],
    "masked_select": lambda t: t.masked_select(t > 2),
    "unique": lambda t: t.unique(),
    "unique rows": lambda t: t.unique(dim=0),
    "unique_consecutive": lambda t: t.unique_consecutive(),
    "bincount": lambda t: t.long().flatten().bincount(),
    "repeat_interleave": lambda t: t.repeat_interleave(t[0].long(), 1),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_data_dependent_shape_is_refused_with_line_and_remedy(mesh: Mesh, name: str) -> None:
    for placement in (R, S0):
        t = monarch_nb.distribute(numbers(4, 3), mesh, [placement])
        with pytest.raises(DataDependentShapeError, match=r"test_tensor_equal\.py:\d+[\s\S]*full_tensor\(\)"):
            DEPENDENT[name](t)
    assert t.sum().item() == 66.0


def test_tensors_that_are_not_dense_are_refused_on_arrival_and_creation(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match=r"to_dense\(\)"):
        monarch_nb.distribute(numbers(4, 3).to_sparse(), mesh)
    with pytest.raises(PropagationError, match=r"test_tensor_equal\.py:\d+.*no dense tensor"):
        rows(mesh, 4, 3).to_sparse()


@pytest.mark.slow
def test_values_under_a_mask_are_written_in_place(mesh: Mesh) -> None:
    for placement in PLACEMENTS:
        expected = numbers(5, 3)
        t: Any = monarch_nb.distribute(expected, mesh, [placement])
        for tensor in (t, expected):
            tensor[tensor > 7] = -1.0
            tensor[tensor[:, 0] > 5] = 2.0
        assert torch.equal(t.full_tensor(), expected)


def test_gathers_are_announced_once_per_line_or_refused(mesh: Mesh) -> None:
    first, second = rows(mesh, 6, 2), rows(mesh, 6, 2)
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.cdist(first, second)
            torch.cdist(first, second * 2)
    assert [(notice.category, notice.filename) for notice in notices] == [(GatherWarning, __file__)]
    assert "bytes" in str(notices[0].message)
    with (
        configured(tensor_gather="refuse"),
        pytest.raises(NoRuleError, match=r"cdist.*test_tensor_equal\.py:\d+.*tensor_gather"),
    ):
        torch.cdist(first, second)
    with configured(tensor_gather="often"), pytest.raises(ValueError, match=r"warn.*allow.*refuse"):
        torch.cdist(first, second)
    for answer in ("allow", "tell"):  # the latter is the former name of "warn"
        with configured(tensor_gather=answer):
            assert torch.cdist(first, second).diagonal().sum().item() == 0.0


def _corrected(table: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Operations for which rules of PyTorch before 2.13 were wrong."""
    x = table.detach().requires_grad_()
    normal = torch.nn.functional.layer_norm(x, (4,), weight, weight)
    picked = x[index]
    (normal.sum() + (picked * 3).sum()).backward()  # the gradient of an index puts into it
    written = table.detach().clone()
    written[index] = table[:3] * 2
    copied = table.index_copy(1, index, table[:, :3])
    extremes = [*table.max(0), *table.min(1, keepdim=True), *table.max(-1)]
    return [*extremes, normal, x.grad, written, copied]  # type: ignore[list-item]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("index_placement", [R, S0], ids=str)
def test_rules_for_older_versions_of_pytorch_are_right(
    mesh: Mesh, placement: Placement, index_placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_RULES", rules._RULES | rules._BEFORE_2_13)
    monkeypatch.setattr(mesh.stream.propagator, "_plans", {})
    table = (numbers(5, 4) * 7) % 11
    index, weight = torch.tensor([3, 0, 2]), torch.tensor([1.0, -2.0, 0.5, 3.0])
    expected = _corrected(table, index, weight)
    inputs = zip((table, index, weight), (placement, index_placement, index_placement), strict=True)
    results = _corrected(*(monarch_nb.distribute(tensor, mesh, [cut]) for tensor, cut in inputs))
    for tensor, result in zip(expected, results, strict=True):
        assert torch.allclose(tensor, result.full_tensor(), atol=1e-5)  # type: ignore[attr-defined]


def test_the_largest_of_all_ranks_is_nan_where_one_has_that(mesh: Mesh) -> None:
    for row in range(4):
        values = numbers(4, 3)
        values[row, 1] = torch.nan
        t = monarch_nb.distribute(values, mesh, [S0])
        for reduced in (torch.amax, torch.amin, lambda x, dim: torch.linalg.vector_norm(x, torch.inf, dim)):
            assert torch.equal(reduced(t, 0).full_tensor().isnan(), torch.tensor([False, True, False])), row  # type: ignore[operator]


def test_sums_over_ranks_count_what_is_true_once(mesh: Mesh) -> None:
    expected = numbers(4, 4)
    t = monarch_nb.distribute(expected, mesh, [S1])
    assert (t > 2).any(1).sum().item() == 4
    assert torch.equal((t > 2).any(1).full_tensor().int(), torch.ones(4, dtype=torch.int32))


def test_integers_that_become_partial_sums_stay_what_they_are(mesh: Mesh) -> None:
    t = monarch_nb.distribute(numbers(5).long(), mesh, [R]).redistribute([Partial()])
    assert t.tolist() == [0, 1, 2, 3, 4]
    counts = (rows(mesh, 5, 3) > 4).sum(0)
    counts.clamp_(max=2)
    assert counts.tolist() == [2, 2, 2]


def test_norms_of_any_order_are_right_and_add_as_numbers(mesh: Mesh) -> None:
    expected = numbers(4, 4)
    t = monarch_nb.distribute(expected, mesh, [S1])
    for order in (3, 1, 0.5, 4, -1, 0, torch.inf, -torch.inf):
        torch.testing.assert_close(
            torch.linalg.vector_norm(t, order, 1).full_tensor(), torch.linalg.vector_norm(expected, order, 1)
        )
    for norm in (lambda x: -x.norm(dim=1), lambda x: x.norm(dim=1) + x.norm(dim=1), lambda x: x.norm(dim=1).sum()):
        torch.testing.assert_close(norm(t).full_tensor(), norm(expected))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("placements", [(S0, S0, R), (S0, R, S0), (S1, R, S0), (Partial(), S0, R)], ids=str)
def test_losses_with_weights_and_ignored_targets_equal_local_ones(
    mesh: Mesh, placements: tuple[Placement, ...], reduction: str
) -> None:
    torch.manual_seed(3)
    local = torch.randn(5, 4), torch.randint(0, 4, (5,)), torch.rand(4) + 0.5
    scores, classes, weights = (
        monarch_nb.distribute(tensor, mesh, [placement]) for tensor, placement in zip(local, placements, strict=True)
    )

    def outcome(scores: Any, classes: Any, weights: Any, ignored: int) -> list[Any]:
        scores = scores.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(scores, classes, weights, ignore_index=ignored, reduction=reduction)
        loss.sum().backward()
        return [loss.detach(), scores.grad]

    for ignored in (-100, int(local[1][0])):
        for result, expected in zip(outcome(scores, classes, weights, ignored), outcome(*local, ignored), strict=True):
            torch.testing.assert_close(result.full_tensor(), expected)


@pytest.mark.parametrize("placement", [[S1], [S0], [R]])
def test_a_write_through_a_view_may_read_the_tensor_itself(mesh: Mesh, placement: Any) -> None:
    t, expected = monarch_nb.distribute(numbers(1, 2, 2), mesh, placement), numbers(1, 2, 2)
    for tensor in (t, expected):
        view = tensor.view(tensor.shape)  # on ranks with strides of its own along dimensions of size 1
        view.add_(tensor, alpha=0.5)
    assert torch.equal(t.full_tensor(), expected)


def test_a_gradient_whose_ranks_have_broken_rows_is_gathered(mesh: Mesh) -> None:
    t = monarch_nb.distribute(numbers(6, 4), mesh, [R]).requires_grad_()
    grad = monarch_nb.distribute(numbers(2, 12), mesh, [S1])
    torch.autograd.backward([t.flatten(-2, -1).reshape(-1, 12)], [grad])
    assert torch.equal(t.grad.full_tensor(), numbers(6, 4))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dim", [0, -1])
def test_a_fill_at_indices_has_gradients_of_tensor_and_value(mesh: Mesh, placement: Any, dim: int) -> None:
    actual, expected = [], []
    for move, grads in ((lambda t, p: monarch_nb.distribute(t, mesh, [p]), actual), (lambda t, _: t.clone(), expected)):
        t, value = move(numbers(4, 3), placement).requires_grad_(), move(torch.tensor(2.5), R).requires_grad_()
        index = move(torch.tensor([2, 0, 2]), R)
        filled = t.index_fill(dim, index, value)
        (t * 2).index_fill_(dim, index, value).mul(filled).sum().backward()
        grads += [filled, t.grad, value.grad]
    for result, target in zip(actual, expected, strict=True):
        assert torch.equal(result.full_tensor(), target)


def test_a_tensor_is_split_at_indices_of_a_tensor(mesh: Mesh) -> None:
    indices = torch.tensor([1, 3])
    for argument in (indices, monarch_nb.distribute(indices, mesh, [R])):
        parts = rows(mesh, 5, 3).tensor_split(argument)
        assert [part.tolist() for part in parts] == [part.tolist() for part in numbers(5, 3).tensor_split(indices)]


def test_a_kernel_with_strides_of_its_own_is_viewed_as_planned(mesh: Mesh) -> None:
    weight, rows_of, gradient = torch.randn(2, 4, 4), torch.rand(1, 4), torch.randn(4, 1, 2)

    def gradient_of(weight: Any, x: Any, gradient: Any) -> Any:
        x = x.detach().requires_grad_()
        torch.autograd.backward([(x @ weight).logit(0.1).swapaxes(0, -1)], [gradient])
        return x.grad

    expected = gradient_of(weight, rows_of, gradient)
    for _ in range(2):  # as it is run first, and from then on
        sharded = [monarch_nb.distribute(tensor, mesh, [R]) for tensor in (weight, rows_of)]
        result = gradient_of(*sharded, monarch_nb.distribute(gradient, mesh, [S0]))
        assert torch.allclose(result.full_tensor(), expected, atol=1e-5)


def test_another_thread_goes_backward_by_itself(mesh: Mesh) -> None:
    threads: list[int] = []
    weight: Any = rows(mesh, 4, 2).requires_grad_()
    weight.register_hook(lambda grad: threads.append(threading.get_ident()))
    losses = [(weight * weight).sum() for _ in range(3)]

    def work() -> None:
        losses[0].backward()
        torch.autograd.backward(losses[1])
        torch.autograd.grad(losses[2], weight)
        threads.append(threading.get_ident())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(threads) == 4
    assert len(set(threads)) == 1
    assert torch.equal(weight.grad.full_tensor(), numbers(4, 2) * 4)


# Each changes the shape of a tensor in place, whose memory another one shows.
def _base_with_a_view(x: Any, w: Any) -> Any:
    part = x[1:]
    x.t_()
    return part * w[1:]


def _view_that_is_written_to(x: Any, w: Any) -> Any:
    same = x.view(3, 3)
    same.transpose_(0, 1)
    same.mul_(w)
    return x * w


def _two_views(x: Any, w: Any) -> Any:
    first, second = x[1:], x[:2]
    first.t_()
    second.t_()
    return (first * w[1:].t()).sum() + (second * w[1:].t()).sum()


def _base_after_a_view_is_gone(x: Any, w: Any) -> Any:
    assert x[0].shape == (3,)
    x.t_()
    x.mul_(w)
    return x.unsqueeze_(0) * w


def _view_that_nobody_writes_to(x: Any, w: Any) -> Any:
    part = x[1:]
    part.t_().unsqueeze_(0)
    return part * w[1:].t()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    ("program", "goes"),
    [
        (_base_with_a_view, False),
        (_view_that_is_written_to, False),
        (_two_views, False),
        (_base_after_a_view_is_gone, True),
        (_view_that_nobody_writes_to, True),
    ],
)
def test_changing_a_shape_in_place_keeps_gradients_right_or_is_refused(
    mesh: Mesh, program: Callable[[Any, Any], Any], goes: bool, placement: Any
) -> None:
    weights = numbers(3, 3).flip(0) + 1
    local, tensor = numbers(3, 3).requires_grad_(), monarch_nb.distribute(numbers(3, 3), mesh, [placement])
    spread = monarch_nb.distribute(weights, mesh, [R])
    expected = program(local * 1, weights)
    with torch.no_grad():  # without gradients there is no way back that could be lost
        assert torch.equal(program(tensor * 1, spread).full_tensor(), expected.detach())
    tensor.requires_grad_()
    if not goes:
        with pytest.raises(PropagationError, match=r"test_tensor_equal\.py:.*Make a new tensor"):
            program(tensor * 1, spread)
        return
    result = program(tensor * 1, spread)
    assert torch.equal(result.full_tensor(), expected.detach())
    expected.sum().backward()
    result.sum().backward()
    assert torch.equal(tensor.grad.full_tensor(), local.grad)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_write_that_reads_overlapping_memory_is_refused_as_by_torch(mesh: Mesh, placement: Any) -> None:
    writes: list[Callable[[Any], Any]] = [
        lambda t: t[1:].add_(t[:-1]),
        lambda t: t[:1, ::3].copy_(t[:1, :1]),
        lambda t: t.T[:, 1:].mul_(t[:-1].T),
        lambda t: t.sub_(t[0]),
        lambda t: t[0].copy_(t[0, 1]),
        lambda t: t[0, :1].copy_(t[0, 0]),
        lambda t: t[2:].view(-1).view(3, 3)[1:].lerp_(t[2:4], 0.5),
    ]
    tensor = monarch_nb.distribute(numbers(5, 3), mesh, [placement])
    for write in writes:
        for target in (numbers(5, 3), tensor):
            with pytest.raises(RuntimeError, match="single memory location"):
                write(target)
    local = numbers(5, 3)
    for both in (local, tensor):
        both[1:3].add_(both[3:])
        both[1:].mul_(both[1:])
        both[:, 0].add_(both[:, 1])  # in turn: between each other, and at no address in common
        both.sub_(both[0].clone())
    assert torch.equal(tensor.full_tensor(), local)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_write_that_depends_on_the_order_of_elements_is_refused(mesh: Mesh, placement: Any) -> None:
    tensor = monarch_nb.distribute(numbers(3, 3), mesh, [placement])
    rows = monarch_nb.distribute(torch.tensor([1, 2]), mesh, [R])
    writes: list[Callable[[Any], Any]] = [
        lambda t: t[-3:, :].sub_(t.diagonal()),
        lambda t: t.mul_(t.diagonal()[:, None]),
        lambda t: t[1:, :2].copy_(t[:-1, :2]),
        lambda t: t[:, :2].index_add_(0, rows, t[:-1, :2]),
    ]
    for write in writes:
        with pytest.raises(ViewWriteError, match=r"depends on the order.*clone\(\)"):
            write(tensor)
    local = numbers(3, 3)
    for both in (local, tensor):
        both[:, :-1] = both[:, 1:]  # forwards: each element is read before it is written
        both[:-1, :2].copy_(both[1:, :2])
        both.copy_(both.diagonal())
        both.sub_(both.diagonal().clone())
    assert torch.equal(tensor.full_tensor(), local)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_an_expanded_tensor_may_be_copied_onto_itself_only(mesh: Mesh, placement: Any) -> None:
    local, tensor = numbers(5, 3), monarch_nb.distribute(numbers(5, 3), mesh, [placement])
    for source in (local, tensor):
        expanded = source[:, None].expand(5, 2, 3)
        expanded.copy_(expanded)
        expanded[1:].copy_(source[1:, None].expand(4, 2, 3))
        source[:1, 0] = source[0, 0]
        source[2, :] = source[2, 1]
        with pytest.raises(RuntimeError, match="single memory location"):
            expanded.copy_(expanded.clone())
    assert torch.equal(tensor.full_tensor(), local)
