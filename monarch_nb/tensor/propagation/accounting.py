"""Records the collectives of an operation, and the bytes that each rank contributes."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .plan import Collective

__all__ = ["Recorder"]

_QUIET = ("wait_tensor",)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records collectives of DTensors in a `with` block. `dims` maps groups to mesh dimensions."""

    def __init__(self, dims: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dims = dims
        self.found: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Lets DTensors dispatch; records their collectives."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("_c10d_functional", "_dtensor", "c10d_functional"):
            kind = func.__name__.partition(".")[0]
            group = next((a for a in reversed(args) if isinstance(a, str) and a in self._dims), None)
            if group is not None and kind not in _QUIET:
                nbytes = sum(t.numel() * t.element_size() for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor))
                self.found.append(Collective(kind, self._dims[group], nbytes))
        return func(*args, **(kwargs or {}))
