"""Attention of sharded tensors: by a fused kernel if one exists, with the values of local tensors."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

import monarch_nb as monarch
from monarch_nb.distributed import Mesh
from monarch_nb.tensor import kernels

pytestmark = pytest.mark.timeout(120)
PLACEMENTS = {"batch": [Shard(0)], "heads": [Shard(1)], "whole": [Replicate()], "words": [Shard(2)]}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh(shape=(2,), mesh_dim_names=("rank",))
    yield mesh
    mesh.stop().get(30)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls that were computed by plain operations."""
    calls: list[object] = []
    before = kernels._decompose

    def record(*args: Any) -> Any:
        calls.append(args)
        return before(*args)

    monkeypatch.setattr(kernels, "_decompose", record)
    return calls


def check(mesh: Mesh, placement: Any, width: int = 16, heads: int = 8, **options: Any) -> None:
    """Results and gradients are those of local tensors."""
    torch.manual_seed(0)
    shapes = ((4, 8, 12, width), (4, heads, 10, width), (4, heads, 10, width))
    local = [torch.randn(shape, requires_grad=True) for shape in shapes]
    expected = functional.scaled_dot_product_attention(*local, **options)
    expected.square().sum().backward()
    sharded = [monarch.distribute(tensor.detach(), mesh, placement).requires_grad_() for tensor in local]
    mask = options.pop("attn_mask", None)
    result = functional.scaled_dot_product_attention(
        *sharded, attn_mask=None if mask is None else monarch.distribute(mask, mesh), **options
    )
    result.square().sum().backward()
    assert torch.allclose(result.full_tensor(), expected, atol=1e-5)
    for leaf, local_leaf in zip(sharded, local, strict=True):
        assert leaf.grad is not None
        assert local_leaf.grad is not None
        assert torch.allclose(leaf.grad.full_tensor(), local_leaf.grad, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}, {"scale": 0.5}], ids=repr)
def test_attention_is_fused(mesh: Mesh, plain: list[object], placement: str, options: dict[str, Any]) -> None:
    if "attn_mask" in options:
        options = {"attn_mask": torch.randn(12, 10)}
    check(mesh, PLACEMENTS[placement], **options)
    assert plain == []


def test_attention_whose_queries_share_keys_is_fused(mesh: Mesh, plain: list[object]) -> None:
    check(mesh, [Shard(0)], heads=2, enable_gqa=True)
    check(mesh, [Shard(1)], heads=4, enable_gqa=True, is_causal=True)
    assert plain == []


@pytest.mark.filterwarnings("ignore:.*a rank has nothing of it")
@pytest.mark.parametrize("placement", ["batch", "heads"])
def test_ranks_without_a_part_of_the_attention_end_nothing(mesh: Mesh, placement: str) -> None:
    torch.manual_seed(0)
    local = torch.randn(1, 1, 3, 4, requires_grad=True)  # one rank has all of it; the kernel divides by its sizes
    expected = functional.scaled_dot_product_attention(local, local, local, is_causal=True)
    expected.sum().backward()
    sharded = monarch.distribute(local.detach(), mesh, PLACEMENTS[placement]).requires_grad_()
    result = functional.scaled_dot_product_attention(sharded, sharded, sharded, is_causal=True)
    result.sum().backward()
    assert torch.allclose(result.full_tensor(), expected)
    assert local.grad is not None
    assert sharded.grad is not None
    assert torch.allclose(sharded.grad.full_tensor(), local.grad)


def test_words_that_lie_apart_in_memory_are_attended_plainly(mesh: Mesh, plain: list[object]) -> None:
    local = torch.randn(2, 3, 4, 5).mT
    sharded = monarch.distribute(local.mT, mesh, [Shard(0)]).mT
    result = functional.scaled_dot_product_attention(sharded, sharded, sharded)
    expected = functional.scaled_dot_product_attention(local, local, local)
    assert torch.allclose(result.full_tensor(), expected, atol=1e-6)
    assert result.stride() == expected.stride()
    assert len(plain) == 1


def test_what_no_fused_kernel_takes_is_computed_plainly(mesh: Mesh, plain: list[object]) -> None:
    check(mesh, [Shard(0)], attn_mask=torch.rand(12, 10) > 0.3)
    assert len(plain) == 1


def test_attention_in_a_layer_is_fused_with_and_without_gradients(mesh: Mesh, plain: list[object]) -> None:
    rows = monarch.distribute(torch.randn(4, 12, 32), mesh, [Shard(0)])
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    expected = layer(rows.full_tensor())
    sharded = monarch.module_to_mesh(layer, mesh)
    assert torch.allclose(sharded(rows).full_tensor(), expected, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(sharded(rows).full_tensor(), expected, atol=1e-5)
    assert plain == []
