"""Autograd functions of a program that run on each rank: `remote_autograd_function`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_nb.tensor.ranks.remote import Remote
from monarch_nb.tensor.workers.opaque import OpaqueRef

_Function = type[torch.autograd.Function]


class RankContext(torch.autograd.function.FunctionCtx):
    """The `ctx` of an autograd function on a rank, in its forward pass and in its backward pass."""

    to_save: tuple[torch.Tensor, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()
    outputs: Sequence[object] = ()

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `save_for_backward`."""
        return self.to_save


def _forward(function: _Function, needed: list[bool], *args: object) -> tuple[OpaqueRef, object]:
    """Runs the forward pass on a rank; returns its `ctx`, and the result."""
    leaves, tree = tree_flatten(args)
    for index, (leaf, need) in enumerate(zip(leaves, needed, strict=True)):
        if need:
            leaves[index] = leaf.detach().requires_grad_()
    context = RankContext()
    inputs = tree_unflatten(leaves, tree)
    context.needs_input_grad = tuple(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in inputs)
    with torch.no_grad():
        if function.setup_context is torch.autograd.Function.setup_context:
            result = function.forward(context, *inputs)
        else:
            result = function.forward(*inputs)
            function.setup_context(context, inputs, result)
    context.outputs = result if isinstance(result, tuple | list) else (result,)
    return OpaqueRef(context), result


def _backward(function: _Function, context: OpaqueRef, *gradients: torch.Tensor | None) -> object:
    outputs = context.value.outputs
    filled = [
        torch.zeros_like(output) if gradient is None and isinstance(output, torch.Tensor) else gradient
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    with torch.no_grad():
        return function.backward(context.value, *filled)


class _FunctionCall(torch.autograd.function.FunctionCtx):
    function: "RemoteAutogradFunction"
    context: OpaqueRef


class RemoteStep(torch.autograd.Function):
    """One call of an autograd function of the program."""

    @staticmethod
    def forward(ctx: _FunctionCall, function: "RemoteAutogradFunction", *args: object) -> object:
        """Makes the ranks run the forward pass."""
        leaves, _ = tree_flatten(args)
        needed = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        ctx.function = function
        ctx.set_materialize_grads(False)  # ranks do
        ctx.context, result = function.on_ranks(needed, *args)
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: _FunctionCall, *gradients: torch.Tensor) -> tuple[object, ...]:
        """Makes the ranks run the backward pass."""
        result = ctx.function.back_on_ranks(ctx.context, *gradients)
        return (None, *result) if isinstance(result, tuple) else (None, result)


_apply: Callable[..., Any] = RemoteStep.apply


class RemoteAutogradFunction:
    """An autograd function whose passes both run on each rank, with its values of the tensors. `apply` calls it.

    Shapes come from the first call with such arguments, which waits for it, as for `remote`. The `ctx` of the forward
    pass stays on the ranks for the backward pass.
    """

    def __init__(self, function: _Function) -> None:
        self._function = function
        self._forward, self._backward = Remote(_forward), Remote(_backward)

    def apply(self, *args: object) -> Any:
        """Calls it on each rank of the arguments' mesh."""
        return _apply(self, *args)

    def on_ranks(self, needed: list[bool], *args: object) -> tuple[OpaqueRef, object]:
        """Runs the forward pass on the ranks."""
        context, result = self._forward(self._function, needed, *args)
        return context, result

    def back_on_ranks(self, context: OpaqueRef, *gradients: torch.Tensor) -> object:
        """Runs the backward pass on the ranks."""
        return self._backward(self._function, context, *gradients)

    def __repr__(self) -> str:
        return f"<remote autograd function {self._function.__name__}>"


def remote_autograd_function(function: _Function) -> RemoteAutogradFunction:
    """Makes a `torch.autograd.Function` run on each rank; see `RemoteAutogradFunction`."""
    return RemoteAutogradFunction(function)
