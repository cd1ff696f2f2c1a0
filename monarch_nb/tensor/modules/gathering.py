"""Fully sharded parameters: gathered where a module uses them, and let go again until the backward pass."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.hooks import RemovableHandle

from monarch_nb.tensor.handle import MeshTensor, redistributed
from monarch_nb.tensor.propagation import Placements


class Gathering:
    """The hooks of one module, whose parameters of these names are cut along these mesh dimensions.

    While its `forward` runs, the module has the gathered tensors as plain attributes, which hide its parameters. What
    autograd would keep of them for the backward pass is gathered again there.
    """

    def __init__(self, names: Sequence[str], dims: Sequence[int]) -> None:
        self._names, self._dims = tuple(names), frozenset(dims)
        self._open: list[ExitStack] = []

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Registers them."""
        return [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        kept: list[tuple[MeshTensor, MeshTensor, Placements]] = []
        for name in self._names:
            parameter: Any = module._parameters[name]
            if not isinstance(parameter, MeshTensor):
                continue
            whole = tuple(Replicate() if dim in self._dims else p for dim, p in enumerate(parameter.placements))
            module.__dict__[name] = gathered = parameter.redistribute(whole)
            kept.append((gathered, parameter, whole))
        stack = ExitStack()
        if not _hooked():  # else what is kept is somebody else's, as with activation checkpoints, who run this again
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_Packing(kept), _unpacked))
        self._open.append(stack)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        for name in self._names:
            module.__dict__.pop(name, None)
        if self._open:
            self._open.pop().close()

    def __deepcopy__(self, memo: Any) -> "Gathering":
        return Gathering(self._names, tuple(self._dims))


class _Again:
    """In the place of a gathered parameter that the backward pass will need."""

    def __init__(self, parameter: MeshTensor, whole: Placements, transposed: bool) -> None:
        self.parameter, self.whole, self.transposed = parameter, whole, transposed


class _Packing:
    """Recognises gathered parameters, and their transposes, among the tensors that autograd keeps."""

    def __init__(self, kept: Sequence[tuple[MeshTensor, MeshTensor, Placements]]) -> None:
        self._kept = kept

    def __call__(self, tensor: torch.Tensor) -> object:
        base = tensor._base
        for gathered, parameter, whole in self._kept:
            if tensor is gathered:
                return _Again(parameter, whole, transposed=False)
            turned = (gathered.shape[::-1], gathered.stride()[::-1])
            if base is gathered and tensor.dim() == 2 and (tensor.shape, tensor.stride()) == turned:
                return _Again(parameter, whole, transposed=True)
        return tensor


def _hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _unpacked(packed: object) -> Any:
    if not isinstance(packed, _Again):
        return packed
    with torch.no_grad():
        again = redistributed(packed.parameter, packed.whole)
        return again.t() if packed.transposed else again
