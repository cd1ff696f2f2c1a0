"""Gradients of modules are summed over the ranks in few collectives, by the end of the backward pass."""

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monarch_nb
from monarch_nb.distributed import Mesh, Plan
from monarch_nb.tensor.modules.gathering import FIRST_BUCKET

pytestmark = pytest.mark.timeout(120)

WIDE = FIRST_BUCKET // 4 // 256 // 2  # half a bucket of float32 in a matrix with 256 columns


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with_mesh = Mesh(shape=(2,), mesh_dim_names=("data",))
    yield with_mesh
    with_mesh.stop().get(30)


@pytest.fixture(params=["whole", "fully sharded"])
def models(request: pytest.FixtureRequest, mesh: Mesh) -> tuple[nn.Sequential, nn.Sequential]:
    """A model on the mesh, and the same here."""
    torch.manual_seed(0)
    local = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, WIDE), nn.Linear(WIDE, 256), nn.Linear(256, 4))
    plan = Plan(data=("data",), fully_sharded=request.param == "fully sharded")
    return monarch_nb.module_to_mesh(copy.deepcopy(local), mesh, plan), local


def rows() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module) -> None:
    model(rows()).square().mean().backward()


def compare(model: nn.Module, local: nn.Module) -> None:
    for (name, param), plain in zip(model.named_parameters(), local.parameters(), strict=True):
        assert isinstance(param, monarch_nb.distributed.MeshTensor)
        assert isinstance(param.grad, monarch_nb.distributed.MeshTensor)
        assert param.grad.placements == param.placements, name
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_of_a_pass_share_a_collective_for_each_bucket(mesh: Mesh) -> None:
    torch.manual_seed(0)
    local = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, WIDE), nn.Linear(WIDE, 256), nn.Linear(256, 4))
    model = monarch_nb.module_to_mesh(copy.deepcopy(local), mesh)
    loss = model(rows()).square().mean()
    mesh.stream.table.clear()
    loss.backward()
    train(local)
    [sums] = mesh.stream.table.movements()
    assert sums.count == 2, "the first bucket, and the rest"
    assert sums.nbytes == sum(parameter.numel() * 4 for parameter in local.parameters())
    compare(model, local)

    loss = model(rows()).square().mean()
    mesh.stream.table.clear()
    loss.backward()
    train(local)
    assert [move.count for move in mesh.stream.table.movements()] == [2], "those that are added to earlier ones, too"
    compare(model, local)


@pytest.fixture
def layers(mesh: Mesh) -> tuple[nn.Sequential, nn.Sequential]:
    """A fully sharded model of two layers and a head, and the same here."""
    torch.manual_seed(0)
    local = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)])
    local.append(nn.Linear(8, 4))
    local[1][2].weight = local[0][2].weight
    local[1][0].weight.requires_grad_(False)
    return monarch_nb.module_to_mesh(copy.deepcopy(local), mesh, "fully_sharded"), local


def test_parameters_of_a_layer_are_gathered_by_one_collective(
    layers: tuple[nn.Sequential, nn.Sequential], mesh: Mesh
) -> None:
    model, local = layers
    for step in range(2):
        mesh.stream.table.clear()
        train(model)
        train(local)
        counts: Counter[str] = Counter()
        for movement in mesh.stream.table.movements():
            counts[movement.collective] += movement.count
        assert counts["all_gather_into_tensor"] == 2 * 3, "two layers and the head, forward and backward"
        assert counts["reduce_scatter_tensor"] == (1 if step == 0 else 3), "those of earlier passes are added to"
    for network in layers:
        assert network[1][0].weight.grad is None
        network[1][0].weight.requires_grad_(True)
        train(network)
    compare(*layers)


def test_a_part_of_a_layer_can_be_called_by_itself(layers: tuple[nn.Sequential, nn.Sequential], mesh: Mesh) -> None:
    for model in layers:
        model[1][0].weight.requires_grad_(True)
        hidden = monarch_nb.distribute(rows(), mesh, ["data", None]) if model is layers[0] else rows()
        hidden = model[0](hidden)
        for part in model[1]:
            hidden = part(hidden)
        model[2](hidden).square().mean().backward()
    compare(*layers)


def test_gradients_that_are_kept_are_added_to(models: tuple[nn.Sequential, nn.Sequential]) -> None:
    for model in models:
        model[0].weight.requires_grad_(False)
    for _ in range(2):
        for model in models:
            train(model)
            model[0].weight.requires_grad_(True)
    compare(*models)


def test_passes_inside_a_pass_are_summed_too(models: tuple[nn.Sequential, nn.Sequential], mesh: Mesh) -> None:
    for model in models:
        inputs = monarch_nb.distribute(rows(), mesh, ["data", None]) if model is models[0] else rows()
        hidden = checkpoint(model[:3], inputs.requires_grad_(), use_reentrant=True)
        model[3:](hidden).square().mean().backward()
    compare(*models)


def test_a_pass_that_failed_leaves_the_next_as_it_would_be(models: tuple[nn.Sequential, nn.Sequential]) -> None:
    first = models[0][0].weight

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    hook = first.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        train(models[0])
    hook.remove()
    for model in models:
        model.zero_grad()
        train(model)
    compare(*models)


def test_gradients_that_a_hook_changes_are_summed_as_changed(models: tuple[nn.Sequential, nn.Sequential]) -> None:
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def replace(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 3

    for model in models:
        model[3].weight.register_post_accumulate_grad_hook(halve)
        model[4].weight.register_post_accumulate_grad_hook(replace)
        train(model)
    compare(*models)


def test_a_gradient_that_changes_while_it_is_summed_is_summed_again(
    models: tuple[nn.Sequential, nn.Sequential],
) -> None:
    last, first = models[0][4].weight, models[0][0].weight

    def double(gradient: torch.Tensor) -> None:
        last.grad.mul_(2)  # that of the first bucket, whose sum is under way

    first.register_hook(double)
    for model in models:
        train(model)
    local_weight = models[1][4].weight
    assert local_weight.grad is not None
    local_weight.grad.mul_(2)
    compare(*models)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_that_are_differentiated_are_summed_with_their_own(models: tuple[nn.Module, nn.Module]) -> None:
    for model in models:
        model(rows()).square().mean().backward(create_graph=True)
        norm = sum(parameter.grad.square().sum() for parameter in model.parameters())
        assert isinstance(norm, torch.Tensor)
        assert norm.requires_grad
    compare(*models)
