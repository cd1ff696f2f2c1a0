"""Calls of a program's functions on one rank's values of tensors, and their results."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from monarch_nb.runtime import current_runtime
from monarch_nb.tensor.commands import GroupOf, Number, TensorOf, mapped
from monarch_nb.tensor.propagation import MeshLayout, Meta, own_values
from monarch_nb.tensor.workers.opaque import OpaqueRef
from monarch_nb.wire import encode, error_line

T = TypeVar("T")


@dataclass(frozen=True)
class ReturnedTensor:
    """A tensor in the result of a call; `source`: the argument whose memory it shares from a byte on, or -1."""

    meta: Meta
    source: int = -1
    offset: int = 0


@dataclass(frozen=True)
class Returned:
    """The result of a call, with `ReturnedTensor`s for tensors; `written` are arguments that it changed."""

    tree: object
    written: tuple[int, ...]

    @property
    def tensors(self) -> list[ReturnedTensor]:
        """Its tensors."""
        return [leaf for leaf in tree_leaves(self.tree) if isinstance(leaf, ReturnedTensor)]


def function_at(path: str) -> Callable[..., object]:
    """Returns the function at a path such as "math.sqrt". Raises ImportError or AttributeError."""
    module, _, rest = path.partition(".")
    value: Any = importlib.import_module(module)
    prefix = module
    for name in filter(None, rest.split(".")):
        prefix = f"{prefix}.{name}"
        if not hasattr(value, name):
            importlib.import_module(prefix)
        value = getattr(value, name)
    function: Callable[..., object] = value
    return function


def fill_in(
    value: T, tensor: Callable[[Number], DTensor], mesh: DeviceMesh, shards: dict[Number, torch.Tensor] | None = None
) -> T:
    """Returns an argument for a function, with tensors and groups for their placeholders; `tensor` finds a tensor.

    With `shards`, tensors are local ones, which are noted there.
    """

    def fill(leaf: object) -> object:
        if isinstance(leaf, TensorOf):
            dtensor = tensor(leaf.number)
            if shards is not None:
                shards[leaf.number] = dtensor._local_tensor
                return dtensor._local_tensor
            return dtensor if leaf.sharded else dtensor.to_local()
        if isinstance(leaf, OpaqueRef):
            return OpaqueRef.of_key(mapped(leaf.key, fill))
        return mesh.get_group(leaf.dims[0]) if isinstance(leaf, GroupOf) else leaf

    return mapped(value, fill)


def sendable(value: T) -> T:
    """Returns a function's result. Raises TypeError if it cannot be sent, which would spoil the whole reply."""
    if value is not None and type(value) not in (int, float, bool, str, torch.Tensor):
        try:
            encode(value, current_runtime())
        except Exception as error:
            raise TypeError(f"what it returns cannot be sent: {error_line(error)}") from error
    return value


class Resolved:
    """A function from a resolver of the program: an object with `resolve()`, which returns it on the ranks."""

    def __init__(self, resolvable: Any, name: str) -> None:
        self._resolvable, self.__name__ = resolvable, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls it."""
        return self._resolvable.resolve()(*args, **kwargs)


def to_returned(value: object, inputs: Sequence[torch.Tensor], versions: Sequence[int], layout: MeshLayout) -> Returned:
    """Describes the result of a call; `inputs` are the tensors among its arguments, with their versions before."""
    memories = {tensor.untyped_storage()._cdata: index for index, tensor in reversed([*enumerate(inputs)])}

    def describe(tensor: torch.Tensor) -> ReturnedTensor:
        meta = Meta.of(layout, tuple(tensor.shape), tensor.dtype, own_values(layout), stride=tensor.stride())
        source = memories.get(tensor.untyped_storage()._cdata, -1)
        if source < 0:
            return ReturnedTensor(meta)
        elements = int(tensor.storage_offset()) - int(inputs[source].storage_offset())
        return ReturnedTensor(meta, source, elements * tensor.dtype.itemsize)

    written = (index for index, (t, version) in enumerate(zip(inputs, versions, strict=True)) if t._version != version)
    return Returned(tree_map_only(torch.Tensor, describe, value), tuple(written))


def off_device(value: object) -> object:
    """Converts results for sending: DTensors to shards, on the CPU."""

    def move(leaf: object) -> object:
        if isinstance(leaf, DTensor):
            leaf = leaf.to_local()
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    return mapped(value, move)
