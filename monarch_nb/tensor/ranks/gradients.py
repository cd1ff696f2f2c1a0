"""Gradients of values of ranks' own by functions of a program: `grad_function` and `grad_generator`."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

Continuation = Callable[..., Any]


class _Step(torch.autograd.function.FunctionCtx):
    continuation: Continuation


class WithContinuation(torch.autograd.Function):
    """A step whose function returns its result, and the function of the result's gradient."""

    @staticmethod
    def forward(ctx: _Step, function: Callable[..., tuple[object, Continuation]], *args: object) -> Any:
        """Runs the step."""
        result, ctx.continuation = function(*args)
        return result

    @staticmethod
    def backward(ctx: _Step, *gradients: torch.Tensor) -> tuple[object, ...]:
        """Runs the function of the gradient."""
        found = ctx.continuation(*gradients)
        return (None, *found) if isinstance(found, tuple) else (None, found)


def grad_function(function: Callable[..., tuple[object, Continuation]]) -> Callable[..., Any]:
    """Makes a function differentiable that returns `(result, backward)`.

    `backward` is called with the gradient of the result, and returns those of the arguments: one, or a tuple. What
    autograd cannot pass through, such as `reduce` and `to_mesh`, can be in both.
    """
    return functools.partial(WithContinuation.apply, function)


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor | GradientEdge] = (),
    with_respect_to: Sequence[torch.Tensor | GradientEdge] = (),
    grad_roots: Sequence[torch.Tensor | None] = (),
) -> Iterator[torch.Tensor | None]:
    """Yields the gradients of `roots` with respect to each tensor, in their order; None where there is none.

    `grad_roots` are the gradients of the roots, ones by default. They are issued when the first is asked for.
    """
    given: Any = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    beginning = [*grad_roots, *[None] * (len(given) - len(grad_roots))]
    asked: Any = list(with_respect_to)
    with torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(given, asked, beginning, allow_unused=True)
    yield from found
