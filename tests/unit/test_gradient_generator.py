"""Gradients one by one equal those of autograd, and each computes no more than it needs."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_nb.tensor.ranks.gradients import grad_generator

pytestmark = pytest.mark.timeout(60)
Tensors = Sequence[torch.Tensor]


def check(roots: Tensors, targets: Tensors, gradients: Sequence[torch.Tensor | None] = ()) -> None:
    grad_outputs = [*gradients, *[None] * (len(roots) - len(gradients))]
    expected = torch.autograd.grad(roots, targets, grad_outputs, retain_graph=True, allow_unused=True)
    results = list(grad_generator(roots, targets, gradients))
    for result, reference in zip(results, expected, strict=True):
        assert (result is None) == (reference is None)
        assert result is None or torch.allclose(result, reference)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(3, 3, requires_grad=True)


def test_targets_may_be_unused_repeated_and_between(x: torch.Tensor) -> None:
    y = (x * x) @ x
    z = y.sin()
    check([(z + y).sum()], [x, y, torch.rand(1, requires_grad=True), z, x])
    y = (x * x) @ x
    z = y.sin()
    check([(z + y).sum()], [z, y, x])


def test_several_roots_have_gradients_of_their_own(x: torch.Tensor) -> None:
    y = x * 2
    check([y.sum(), y], [x], [torch.tensor(2.0), torch.ones(3, 3)])
    check(list(torch.std_mean(x + 1)), [x])


def test_results_of_one_operation_share_its_gradient(x: torch.Tensor) -> None:
    first, second = x.unbind()[:2]
    check([(first * second).sum()], [x])


def test_sums_over_broadcast_dimensions_are_taken(x: torch.Tensor) -> None:
    row = torch.rand(3, requires_grad=True)
    y = x + row * row.sum()
    check([(y * row + y.exp()).sum()], [row, x])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = data + self.second(self.first(data).relu()) + self.first.bias
        return result


@pytest.mark.parametrize("backwards", [True, False])
def test_modules_that_share_what_they_compute(backwards: bool) -> None:
    model = nn.Sequential(Residual(), nn.LayerNorm(4), Residual(), nn.Linear(4, 2))
    parameters = list(model.parameters())
    check([model(torch.rand(5, 4)).square().mean()], parameters[::-1] if backwards else parameters)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, factor: float, a: torch.Tensor, b: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.factor = factor  # type: ignore[attr-defined]
        ctx.save_for_backward(a, b)
        return a * b * factor

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor):  # type: ignore[no-untyped-def]
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        return None, gradient * b * ctx.factor, gradient * a * ctx.factor  # type: ignore[attr-defined]


def test_functions_of_a_program_take_part(x: torch.Tensor) -> None:
    weight = torch.rand(3, 3, requires_grad=True)
    y = x * 2
    z = Product.apply(2.0, Product.apply(3.0, y, y.sin()), weight)  # type: ignore[no-untyped-call]
    check([(z + y * weight).sum()], [weight, x])


def test_an_edge_of_the_graph_is_a_root_and_a_target(x: torch.Tensor) -> None:
    [gradient] = grad_generator([get_gradient_edge((x**3).sum())], [get_gradient_edge(x)])
    assert gradient is not None
    assert torch.allclose(gradient, 3 * x**2)


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_each_gradient_computes_what_it_needs_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    loss = model(torch.rand(2, 4)).sum()
    gradients = grad_generator(loss, list(model.parameters())[::-1])
    computed = []
    for _ in range(4):
        with Names() as recorder:
            next(gradients)
        computed.append({"sum", "mm", "threshold_backward"} & set(recorder.names))
    assert computed == [{"sum"}, {"mm"}, {"mm", "threshold_backward", "sum"}, {"mm"}]
