"""Training on four real processes equals that in one: layouts of a small transformer, and the same one here."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import monarch_nb
from monarch_nb.actor import this_host
from monarch_nb.distributed import Mesh, MeshTensor, Plan, TensorError, load, no_sync, save

pytestmark = pytest.mark.timeout(120)

WORDS, WIDTH, HEADS, LENGTH, BATCH = 48, 32, 4, 12, 8


class Block(nn.Module):
    """Attention and two layers, each after a norm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.before(x)
        batch, length, _ = x.shape
        q, k, v = (layer(n).view(batch, length, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.between(x)))))


class SimpleTransformer(nn.Module):
    """Blocks between an embedding and a head that has the embedding's weight."""

    def __init__(self, dropout: float = 0.0, *, blocks: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


COLUMNS_AND_ROWS = {
    "words": "row",  # the vocabulary is cut
    "head": "column",
    "blocks.*.[qkv].weight": "column",
    "*.up": ColwiseParallel(),
    "*.down": "row",
    "*.out": RowwiseParallel(),
}
LAYOUTS: dict[str, Any] = {
    "data": None,
    "tensor": Plan(COLUMNS_AND_ROWS, data=()),
    "fully sharded": "fully_sharded",
    "data and tensor": COLUMNS_AND_ROWS,
    "fully sharded and tensor": Plan(COLUMNS_AND_ROWS, fully_sharded=True),
    "sequence": {**COLUMNS_AND_ROWS, "*.before": SequenceParallel(), "*.between": "sequence", "*.down": RowwiseParallel(
        output_layouts=Shard(1))},
}  # fmt: skip
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=False),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    procs = this_host().spawn_procs(per_host={"data": 2, "model": 2}, name="training")
    yield Mesh.of(procs)
    procs.stop().get(30)


@pytest.fixture
def text() -> torch.Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))


def model_of(**options: Any) -> SimpleTransformer:
    torch.manual_seed(1)
    return SimpleTransformer(**options)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def losses(model: nn.Module, words: torch.Tensor, optimizer: str, steps: int) -> list[float]:
    """Losses of a training with schedule and clipping."""
    chosen = OPTIMIZERS[optimizer](model.parameters())
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, steps)
    values = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = loss_of(model, words)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        rates.step()
        values.append(loss.detach())
    return [float(value) for value in values]


def check(mesh: Mesh, text: torch.Tensor, layout: str, optimizer: str, steps: int) -> None:
    local = model_of()
    spread = monarch_nb.module_to_mesh(copy.deepcopy(local), mesh, LAYOUTS[layout])
    words = monarch_nb.distribute(text, mesh, [Replicate() if layout == "tensor" else Shard(0), Replicate()])
    expected = losses(local, text, optimizer, steps)
    assert losses(spread, words, optimizer, steps) == pytest.approx(expected, abs=5e-5)
    assert expected[-1] < expected[0] - 0.1
    assert all(p.grad is not None and p.grad.placements == p.placements for p in spread.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("fully sharded", "AdamW fused"),
        pytest.param("fully sharded and tensor", "AdamW foreach", marks=pytest.mark.slow),
        pytest.param("data", "AdamW fused", marks=pytest.mark.slow),
        pytest.param("sequence", "SGD", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(mesh: Mesh, text: torch.Tensor, layout: str, optimizer: str) -> None:
    check(mesh, text, layout, optimizer, 4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_twenty_steps_are_those_of_one_process(
    mesh: Mesh, text: torch.Tensor, layout: str, optimizer: str
) -> None:
    check(mesh, text, layout, optimizer, 20)


def test_parameters_lie_as_the_plan_says_and_shared_ones_stay_shared(mesh: Mesh) -> None:
    plan = Plan({**COLUMNS_AND_ROWS, "blocks.0.up.bias": [None]}, fully_sharded=True)
    model = monarch_nb.module_to_mesh(model_of(), mesh, plan)
    placements = {name: parameter.placements for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    assert model.head.weight is model.words.weight
    assert placements["words.weight"] == (Shard(1), Shard(0))
    assert placements["blocks.0.q.weight"] == (Shard(1), Shard(0))
    assert placements["blocks.0.q.bias"] == (Replicate(), Shard(0))
    assert placements["blocks.0.up.bias"] == (Replicate(), Replicate())
    assert placements["blocks.1.down.weight"] == (Shard(0), Shard(1))
    assert placements["norm.weight"] == (Shard(0), Replicate())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"bocks.*": "column"}, "'bocks.*' is the name of no module and no parameter"),
        ({"norm": "column"}, "'norm' is a LayerNorm"),
        ({"head": "columns"}, "'columns' is no style: 'column', 'row', 'sequence'"),
        (Plan({"head": "column"}, tensor="rows"), "no dimension 'rows'; it has 'data', 'model'"),
        ({"words": "row", "head.weight": [None, None]}, "words.weight and head.weight are one parameter"),
        ("sharded", 'plan \'sharded\' is not known: "data_parallel", "fully_sharded"'),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(mesh: Mesh, plan: Any, message: str) -> None:
    model = model_of()
    with pytest.raises(ValueError, match="plan") as caught:
        monarch_nb.module_to_mesh(model, mesh, plan)
    assert message in str(caught.value)
    assert not any(isinstance(parameter, MeshTensor) for parameter in model.parameters())


@pytest.mark.slow
def test_gradients_are_summed_once_or_at_the_end_of_no_sync(mesh: Mesh, text: torch.Tensor) -> None:
    local = model_of(blocks=1)
    model = monarch_nb.module_to_mesh(copy.deepcopy(local), mesh)
    halves = text.view(2, 4, -1)[:, :2].flatten(0, 1), text.view(2, 4, -1)[:, 2:].flatten(0, 1)  # of each rank
    table = mesh.stream.table

    def reductions(call: Any) -> int:
        table.clear()
        call()
        return sum(movement.count for movement in table.movements() if movement.collective.startswith("all_reduce"))

    with no_sync(model):
        assert reductions(lambda: loss_of(model, monarch_nb.distribute(halves[0], mesh, ["data", None])).backward()) < 4
        assert model.norm.weight.grad.placements[0].is_partial()
    once = reductions(lambda: loss_of(model, monarch_nb.distribute(halves[1], mesh, ["data", None])).backward())
    assert once <= 4, "the gradients together, and the loss"
    (loss_of(local, halves[0]) + loss_of(local, halves[1])).backward()
    for (name, param), plain in zip(model.named_parameters(), local.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad, atol=1e-5, rtol=1e-4, msg=name)  # type: ignore[attr-defined]


def layers(mesh: Mesh, dropout: float) -> tuple[nn.Module, torch.Tensor]:
    """Two of them, the first cut by columns and the second by rows, and their input."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(dropout), nn.Linear(8, 4))
    x = monarch_nb.distribute(torch.randn(8, 16), mesh, ["data", None])
    return monarch_nb.module_to_mesh(model, mesh, {"0": "column", "2": "row"}), x


@pytest.mark.slow
def test_activation_checkpoints_draw_the_same_dropout_again(mesh: Mesh) -> None:
    gradients = []
    for checkpointed in (False, True):
        model, x = layers(mesh, 0.3)
        torch.manual_seed(7)
        out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        out.square().sum().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.slow
def test_autocast_computes_products_in_lower_precision(mesh: Mesh) -> None:
    model, x = layers(mesh, 0.0)
    full = model(x).full_tensor()
    with torch.autocast("mesh", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.full_tensor().float(), full, atol=0.02, rtol=0.02)
    out.float().square().sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}  # type: ignore[union-attr]


@pytest.mark.slow
def test_checkpointing_dropout_and_autocast_give_the_expected_losses(mesh: Mesh, text: torch.Tensor) -> None:
    words = monarch_nb.distribute(text, mesh, ["data", None])
    gradients = []
    for checkpointed in (False, True):
        model = monarch_nb.module_to_mesh(
            model_of(dropout=0.3, checkpointed=checkpointed), mesh, LAYOUTS["fully sharded"]
        )
        torch.manual_seed(7)
        loss_of(model, words).backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(gradients[1], gradients[0])
    local = model_of()
    model = monarch_nb.module_to_mesh(copy.deepcopy(local), mesh, COLUMNS_AND_ROWS)
    with torch.autocast("mesh", torch.bfloat16):
        assert model(words[:, :-1]).dtype == torch.bfloat16
        loss = loss_of(model, words)
    loss.backward()
    assert loss.item() == pytest.approx(loss_of(local, text).item(), rel=0.02)
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_a_module_on_the_meta_device_is_made_on_the_mesh(mesh: Mesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256))
    monarch_nb.module_to_mesh(model, mesh, {"0": "column"})
    weight = model[0].weight
    assert [tuple(shard.shape) for shard in weight.local_shards().values()] == [(128, 64)] * 4
    full = weight.full_tensor()
    assert float(full.abs().max()) <= 1 / 8 + 1e-6
    assert float(full.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert not torch.equal(full[:128], full[128:])
    assert model[1].running_var.tolist() == [1.0] * 256
    with torch.device("meta"):
        bare = nn.ParameterDict({"scale": nn.Parameter(torch.ones(2))})
    with pytest.raises(ValueError, match=r"scale on the meta device.*needs a method reset_parameters"):
        monarch_nb.module_to_mesh(bare, mesh)


def test_a_module_takes_local_inputs_and_losses_do_not(mesh: Mesh, text: torch.Tensor) -> None:
    model = monarch_nb.module_to_mesh(model_of(), mesh)
    out = model(text[:, :-1])
    assert out.placements == (Shard(0), Replicate())
    with pytest.raises(RuntimeError, match=r"local tensor of shape .*monarch.distribute"):
        functional.cross_entropy(out.flatten(0, 1), text[:, 1:].flatten())


@pytest.mark.slow
def test_state_saved_by_ranks_loads_on_a_mesh_of_another_shape(mesh: Mesh, text: torch.Tensor, tmp_path: Path) -> None:
    def train(target: Mesh, plan: Any) -> tuple[nn.Module, torch.optim.Optimizer, MeshTensor]:
        model = monarch_nb.module_to_mesh(model_of(blocks=1), target, plan)
        words = monarch_nb.distribute(text, target)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loss_of(model, words).backward()
        optimizer.step()
        return model, optimizer, words

    model, optimizer, words = train(mesh, Plan(COLUMNS_AND_ROWS, fully_sharded=True))
    for _ in range(2):  # the second replaces the first
        loss_of(model, words).backward()
        optimizer.step()
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "saved")
    saved_weight = model.blocks[0].up.weight.full_tensor()  # type: ignore[union-attr,index,operator]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    pair = mesh.slice(data=0)
    second, second_optimizer, second_words = train(pair, {"head": "column", "words": "row"})
    state: dict[str, Any] = {"model": second.state_dict(), "optimizer": second_optimizer.state_dict(), "step": 0}
    load(state, tmp_path / "saved")
    second_optimizer.load_state_dict(state["optimizer"])
    assert state["step"] == 3
    for network, adam, inputs in ((model, optimizer, words), (second, second_optimizer, second_words)):
        adam.zero_grad()
        loss_of(network, inputs).backward()
        adam.step()
    assert loss_of(second, second_words).item() == pytest.approx(loss_of(model, words).item(), abs=1e-5)

    plain = {"model": model_of(blocks=1).state_dict()}  # in one process, by PyTorch alone
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(plain, checkpoint_id=tmp_path / "saved", no_dist=True)
    torch.testing.assert_close(plain["model"]["blocks.0.up.weight"], saved_weight)
    with pytest.raises(TensorError, match="Missing key in checkpoint state_dict: more"):
        load({"model": model.state_dict(), "more": model.norm.weight}, tmp_path / "saved")
    with pytest.raises(TensorError, match=r"there is no complete checkpoint in .*nothing"):
        load({"model": model.state_dict()}, tmp_path / "nothing")
    (file := tmp_path / "file").touch()
    with pytest.raises(TensorError, match="NotADirectoryError"):
        save({"model": model.state_dict()}, file)
    assert sorted(tmp_path.iterdir()) == [file, tmp_path / "saved"]
