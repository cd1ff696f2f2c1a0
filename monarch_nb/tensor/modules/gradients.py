"""Sums gradients over ranks as soon as they are accumulated, once for each parameter."""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from monarch_nb.tensor.handle import MeshTensor


class Summing:
    """Switch for summing the gradients of a module."""

    def __init__(self) -> None:
        self.off = 0  # open `no_sync` blocks

    def watch(self, parameter: torch.Tensor) -> None:
        """Redistributes the gradient to the placements of the parameter after each backward pass."""
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if self.off or not isinstance(grad, MeshTensor) or not isinstance(parameter, MeshTensor):
            return
        if grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(parameter.placements)

    def __deepcopy__(self, memo: object) -> "Summing":
        return self


_of: "weakref.WeakKeyDictionary[nn.Module, Summing]" = weakref.WeakKeyDictionary()


def sum_gradients(module: nn.Module) -> None:
    """Sums the gradients of a module over the ranks from now on."""
    summing = _of.get(module)
    if summing is None:
        summing = _of[module] = Summing()
    for parameter in module.parameters():
        summing.watch(parameter)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Keeps gradients of a module partial in a `with` block: for all but the last of several backward passes.

    The next pass sums all of them. Raises ValueError for a module that is not on a mesh.
    """
    summing = _of.get(module)
    if summing is None:
        raise ValueError(
            f"this {type(module).__name__} is on no mesh: monarch.module_to_mesh(module, mesh) brings it there"
        )
    summing.off += 1
    try:
        yield
    finally:
        summing.off -= 1
