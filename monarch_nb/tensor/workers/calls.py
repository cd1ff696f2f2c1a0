"""Calls of a program's functions on what one rank has of tensors, and what they return."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from monarch_nb.tensor.propagation import MeshLayout, Meta, own_values


@dataclass(frozen=True)
class ReturnedTensor:
    """A tensor among what a call has returned; `source`: the argument whose memory it shows from a byte on, or -1."""

    meta: Meta
    source: int = -1
    offset: int = 0


@dataclass(frozen=True)
class Returned:
    """What a call has returned, with `ReturnedTensor`s for tensors; `written` are arguments that it changed."""

    tree: object
    written: tuple[int, ...]

    @property
    def tensors(self) -> list[ReturnedTensor]:
        """Its tensors."""
        return [leaf for leaf in tree_leaves(self.tree) if isinstance(leaf, ReturnedTensor)]


def function_at(path: str) -> Callable[..., object]:
    """What a path names, such as "math.sqrt". Raises ImportError or AttributeError."""
    module, _, rest = path.partition(".")
    value: Any = importlib.import_module(module)
    at = module
    for name in filter(None, rest.split(".")):
        at = f"{at}.{name}"
        if not hasattr(value, name):
            importlib.import_module(at)
        value = getattr(value, name)
    found: Callable[..., object] = value
    return found


class Resolved:
    """A function as a resolver of the program gives it: something with `resolve()`, which returns it on the ranks."""

    def __init__(self, resolvable: Any, name: str) -> None:
        self._resolvable, self.__name__ = resolvable, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls it."""
        return self._resolvable.resolve()(*args, **kwargs)


def returned(value: object, given: Sequence[torch.Tensor], before: Sequence[int], layout: MeshLayout) -> Returned:
    """Describes what a call has returned; `given` are the tensors among its arguments, with their versions before."""
    memories = {tensor.untyped_storage()._cdata: at for at, tensor in reversed([*enumerate(given)])}

    def described(tensor: torch.Tensor) -> ReturnedTensor:
        meta = Meta.of(layout, tuple(tensor.shape), tensor.dtype, own_values(layout), stride=tensor.stride())
        source = memories.get(tensor.untyped_storage()._cdata, -1)
        if source < 0:
            return ReturnedTensor(meta)
        elements = int(tensor.storage_offset()) - int(given[source].storage_offset())
        return ReturnedTensor(meta, source, elements * tensor.dtype.itemsize)

    written = (at for at, (one, version) in enumerate(zip(given, before, strict=True)) if one._version != version)
    return Returned(tree_map_only(torch.Tensor, described, value), tuple(written))


def off_device(value: object) -> object:
    """Converts results for sending: DTensors to shards, on the CPU."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(off_device, value))
    if isinstance(value, dict):
        return {key: off_device(item) for key, item in value.items()}
    return value
