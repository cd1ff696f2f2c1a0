"""Usual models, trained on four processes, equal those of one; and operations of other devices that they need."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

import monarch_nb
from monarch_nb.actor import this_host
from monarch_nb.distributed import GatherWarning, Mesh, MeshTensor, Plan, load, save
from monarch_nb.tensor.propagation import PropagationError
from tests.models import modules
from tests.models.page import PAGE, read
from tests.models.training import PARALLEL, compare
from tests.models.zoo import MODELS

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::monarch_nb.distributed.GatherWarning")]

R = Replicate()
DAILY = {("llama", "data + tensor")}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    procs = this_host().spawn_procs(per_host={"data": 2, "model": 2}, name="models")
    yield Mesh.of(procs)
    procs.stop().get(30)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        pytest.param(name, parallel, marks=() if (name, parallel) in DAILY else pytest.mark.slow)
        for name in MODELS
        for parallel in PARALLEL
    ],
)
def test_three_steps_of_training_are_those_of_one_process(mesh: Mesh, name: str, parallel: str) -> None:
    outcome = compare(MODELS[name], mesh, parallel)
    assert outcome.is_equal(), outcome


def test_the_page_claims_equal_training_for_every_model() -> None:
    assert read(PAGE.read_text()) == {name: [True] * len(PARALLEL) for name in MODELS}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_every_pytorch_module_gives_the_same_on_a_mesh(mesh: Mesh) -> None:
    wrong: dict[tuple[str, str, bool, str | None], str] = {}
    tried = set()
    for name, kind, sample, training in modules.samples():
        for spec in (None, "data"):
            try:
                difference = modules.compare(mesh, kind, sample, training, spec)
            except Exception as error:
                difference = f"{type(error).__name__}: {error}"
            tried.add(name)
            if difference:
                wrong[name, sample.desc, training, spec] = difference
    assert wrong == {}
    assert len(tried) > 100


# -- operations that other devices have --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integer_histograms_work_though_the_cpu_kernel_takes_floats_only(mesh: Mesh, dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 9, (6, 7), generator=torch.Generator().manual_seed(1)).to(dtype)
    sharded = monarch_nb.distribute(numbers, mesh, ["data", None])
    for bins, low, high in ((9, 0, 8), (4, 2, 6), (5, 0, 0), (3, 4, 4)):
        counted = torch.histc(sharded, bins, low, high)
        assert counted.dtype == dtype
        assert counted.tolist() == torch.histc(numbers.double(), bins, low, high).tolist(), (bins, low, high)


def test_wider_and_grouped_matrix_products_equal_local_ones(mesh: Mesh) -> None:
    torch.manual_seed(1)
    first, second = torch.randn(8, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    wide = torch.mm(
        monarch_nb.distribute(first, mesh, ["data", None]), monarch_nb.distribute(second, mesh), out_dtype=torch.float32
    )
    torch.testing.assert_close(wide.full_tensor(), first.float() @ second.float())  # type: ignore[attr-defined]
    rows, weights = torch.randn(12, 8), torch.randn(3, 8, 16)
    ends = torch.tensor([5, 5, 12], dtype=torch.int32)
    for spec in ([None, None, None], [None, None, "model"], [None, "model", None]):
        leaves = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        functional.grouped_mm(*leaves, offs=ends).square().sum().backward()
        sharded = monarch_nb.distribute(rows, mesh), monarch_nb.distribute(weights, mesh, spec)
        for tensor in sharded:
            tensor.requires_grad_()
        product = functional.grouped_mm(*sharded, offs=monarch_nb.distribute(ends, mesh))
        product.square().sum().backward()
        for leaf, tensor in zip(leaves, sharded, strict=True):
            torch.testing.assert_close(tensor.grad.full_tensor(), leaf.grad, atol=1e-4, rtol=1e-4)


def test_operations_of_other_devices_are_refused_by_name_when_issued(mesh: Mesh) -> None:
    stats = torch.ops.aten.batch_norm_stats
    with pytest.raises(PropagationError, match=r"batch_norm_stats.default \(at .*test_tensor_models.py.* no kernel"):
        stats(mesh.zeros(4, 3), 1e-5)
    assert mesh.ones(3).sum().item() == 3


def test_operations_of_other_devices_run_by_their_registered_decomposition(mesh: Mesh) -> None:
    library = torch.library.Library("monarch_test", "DEF")
    library.define("doubled_plus(Tensor x, float y) -> Tensor")
    library.impl("doubled_plus", lambda x, y: x * 2 + y, "XLA")
    operation: Any = torch.ops.monarch_test.doubled_plus.default
    x = monarch_nb.distribute(torch.arange(6.0), mesh, ["data"])
    with pytest.raises(PropagationError, match="no kernel for it on cpu"):
        operation(x, 1.0)
    torch._decomp.register_decomposition(operation)(lambda x, y: x * 2 + y)
    assert operation(x, 1.0).tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert operation(x, 2.0).tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert operation(x, 2.0).placements == (Shard(0), R)


def test_an_empty_one_dimensional_tensor_concatenates_with_any_shape(mesh: Mesh) -> None:
    tensor = torch.randn(4, 3, 2)
    empty = torch.tensor([], device=mesh.device)
    for spec in (None, ["data", None, None], ["data", "model", None]):
        keys = monarch_nb.distribute(tensor, mesh, spec)
        joined = torch.cat([empty, keys], dim=-2)
        assert torch.equal(joined.full_tensor(), tensor)  # type: ignore[attr-defined]
        assert joined.placements == keys.placements  # type: ignore[attr-defined]
    wide = torch.cat([empty.double(), keys], dim=1)
    assert wide.dtype == torch.float64
    assert torch.equal(wide.full_tensor(), tensor.double())  # type: ignore[attr-defined]


def test_losses_of_sequences_take_lengths_as_lists_and_as_sharded_tensors(mesh: Mesh) -> None:
    torch.manual_seed(1)
    odds, words = torch.randn(10, 4, 5).log_softmax(-1), torch.randint(1, 5, (4, 6))
    lengths = [10, 9, 8, 10], [6, 3, 2, 5]
    local = odds.clone().requires_grad_()
    functional.ctc_loss(local, words, *lengths).backward()
    for own in (lengths, [monarch_nb.distribute(torch.tensor(values), mesh) for values in lengths]):
        sharded = monarch_nb.distribute(odds, mesh, [None, "data", None]).requires_grad_()
        functional.ctc_loss(sharded, monarch_nb.distribute(words, mesh, ["data", None]), *own).backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), local.grad)  # type: ignore[union-attr]


def test_norms_of_groups_and_gradients_of_pools_keep_a_batch_cut(mesh: Mesh) -> None:
    torch.manual_seed(1)
    pictures = torch.randn(4, 6, 8, 8)
    net = nn.Sequential(nn.GroupNorm(3, 6), nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))
    local = copy.deepcopy(net)
    x = pictures.clone().requires_grad_()
    local(x).square().sum().backward()
    spread = monarch_nb.module_to_mesh(net, mesh)
    inputs = monarch_nb.distribute(pictures, mesh, ["data", None, None, None]).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        outputs = spread(inputs)
        outputs.square().sum().backward()
    assert outputs.placements == inputs.grad.placements == (Shard(0), R)
    torch.testing.assert_close(inputs.grad.full_tensor(), x.grad)
    for parameter, expected in zip(spread.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, atol=1e-5, rtol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("placements", [(R, _StridedShard(0, split_factor=3)), (Shard(1), Partial())])
def test_files_and_shards_describe_multi_piece_and_partial_tensors(mesh: Mesh, tmp_path: Path, placements: Any) -> None:
    tensor = torch.arange(24.0 * 4).view(24, 4)
    saved = monarch_nb.distribute(tensor, mesh, placements)
    save({"t": saved}, tmp_path / "once")
    plain = mesh.zeros(24, 4)
    load({"t": plain}, tmp_path / "once")
    assert torch.equal(plain.full_tensor(), tensor)
    read = monarch_nb.distribute(torch.zeros(24, 4), mesh, placements)
    load({"t": read}, tmp_path / "once")
    assert torch.equal(read.full_tensor(), tensor)
    saves = monarch_nb.checkpoint({"t": saved}, every=1, folder=tmp_path / "steps")
    saves.step(1)
    saves.wait()
    saved.zero_()
    assert saves.restore() == 1
    assert torch.equal(saved.full_tensor(), tensor)
    result = mesh.from_parts(
        lambda part: torch.arange(24.0 * 4).view(24, 4)[part], size=(24, 4), sharding_spec=placements
    )
    assert result.placements == placements
    assert torch.equal(result.full_tensor(), tensor)


# -- plans -------------------------------------------------------------------------------------------------------------


def layer_of(kind: Any, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return kind(32, 4, 64, dropout=0.0, batch_first=True, **options)


def test_a_column_parallel_transformer_layer_cuts_heads_and_reduces_twice(mesh: Mesh, tmp_path: Path) -> None:
    local = layer_of(nn.TransformerEncoderLayer)
    layer: Any = monarch_nb.module_to_mesh(copy.deepcopy(local), mesh, Plan({"": "column"}, data=()))
    attention = layer.self_attn
    assert attention.in_proj_weight.placements == (R, _StridedShard(0, split_factor=3))
    assert attention.out_proj.weight.placements == (R, Shard(1))
    assert layer.linear1.weight.placements == (R, Shard(0))
    assert layer.linear2.weight.placements == (R, Shard(1))
    shards = attention.in_proj_weight.local_shards()
    weight = local.self_attn.in_proj_weight
    assert torch.equal(next(iter(shards.values())), weight.view(3, 2, 16, 32)[:, 0].flatten(0, 1))
    x = torch.randn(2, 5, 32)
    mesh.stream.table.clear()
    out = layer(monarch_nb.distribute(x, mesh))
    torch.testing.assert_close(out.full_tensor(), local(x))
    moved = [(movement.collective, movement.count) for movement in mesh.stream.table.movements()]
    assert sum(count for kind, count in moved) == 2, moved
    assert {kind for kind, _ in moved} == {"all_reduce"}

    save({"layer": layer.state_dict()}, tmp_path / "saved")
    target: Any = monarch_nb.module_to_mesh(layer_of(nn.TransformerEncoderLayer), mesh, "fully_sharded")
    with torch.no_grad():
        target.self_attn.in_proj_weight.zero_()
    load({"layer": target.state_dict()}, tmp_path / "saved")
    torch.testing.assert_close(target.self_attn.in_proj_weight.full_tensor(), weight.detach())
    with torch.no_grad():
        attention.in_proj_weight.zero_()
    load({"layer": layer.state_dict()}, tmp_path / "saved")
    torch.testing.assert_close(attention.in_proj_weight.full_tensor(), weight.detach())


def test_a_models_own_plan_is_used_for_named_parameters_and_modules(mesh: Mesh) -> None:
    model: Any = monarch_nb.module_to_mesh(MODELS["mixtral"].make(), mesh, "auto")
    first = model.model.layers[0]
    assert first.self_attn.q_proj.weight.placements == (R, Shard(0))
    assert first.self_attn.o_proj.weight.placements == (R, Shard(1))
    assert first.mlp.experts.gate_up_proj.placements == (R, _StridedShard(1, split_factor=2))
    assert first.mlp.experts.down_proj.placements == (R, Shard(2))
    assert model.model.embed_tokens.weight.placements == (R, Shard(0))
    assert first.mlp.gate.weight.placements == (R, R)


class Planned(nn.Module):
    """Declares its own plan."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.tp_plan = plan
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


@pytest.mark.parametrize(
    ("module", "plan", "text"),
    [
        (Planned({"layers.*": "ep_dispatch_experts"}), "auto", "'ep_dispatch_experts' for 'layers.*', which only SPMD"),
        (nn.Linear(4, 4), "auto", "Linear has no tp_plan: give {pattern: style}"),
        (nn.MultiheadAttention(9, 3), {"": "column"}, "3 heads, which do not divide into 2 equal parts along 'model'"),
        (nn.LazyLinear(3), None, "weight of a LazyLinear has no shape before the module has run once"),
        (nn.Linear(4, 4), Plan("own"), "styles are {pattern: style} or \"auto\", not 'own'"),
    ],
)
def test_a_plan_that_cannot_be_taken_says_why(mesh: Mesh, module: nn.Module, plan: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"plan|shape") as caught:
        monarch_nb.module_to_mesh(module, mesh, plan)
    assert text in str(caught.value)
    assert not any(isinstance(parameter, MeshTensor) for parameter in module.parameters())


def test_a_parameter_of_two_names_is_placed_as_planned_for_one(mesh: Mesh) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    model["head"].weight = model["words"].weight
    monarch_nb.module_to_mesh(model, mesh, {"words": "row"})
    assert model["head"].weight is model["words"].weight
    assert model["head"].weight.placements == (R, Shard(0))
