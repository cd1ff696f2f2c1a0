"""Calls of a program's functions on one rank's values of tensors, their results, and references to a rank's objects."""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from monarch_nb.runtime import current_runtime
from monarch_nb.tensor.commands import GroupOf, Number, TensorOf, mapped
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.propagation import MeshLayout, Meta, own_values
from monarch_nb.wire import encode, error_line

T = TypeVar("T")
_VALUE = "_monarch_opaque_value"


class OpaqueRef:
    """A reference to an object that each rank has of its own; functions on the ranks return it in the object's place.

    `value` is the object, on the ranks alone. There it lives as long as the reference here. A propagating function
    returns `OpaqueRef(None)`.
    """

    def __init__(self, value: object = None) -> None:
        self._key: Any = torch.zeros((), dtype=torch.int64)  # held and freed like any tensor of the ranks
        self._check("create")
        setattr(self._key, _VALUE, value)

    @classmethod
    def of_key(cls, key: object) -> "OpaqueRef":
        """Returns the reference with this tensor, or its placeholder."""
        reference = OpaqueRef.__new__(OpaqueRef)
        reference._key = key
        return reference

    @property
    def key(self) -> Any:
        """The tensor by which ranks find the object."""
        return self._key

    @property
    def value(self) -> Any:
        """The object. Raises RuntimeError where this is not a rank."""
        self._check("access")
        return getattr(self._key, _VALUE)

    @value.setter
    def value(self, value: object) -> None:
        self._check("set")
        setattr(self._key, _VALUE, value)

    def _check(self, operation: str) -> None:
        if isinstance(self._key, FakeTensor) or (type(self._key) is torch.Tensor and current_runtime().is_worker):
            return
        raise RuntimeError(
            f"OpaqueRef: the program attempts to {operation} an object that ranks have: only remote functions can, and "
            "propagating functions, which create it of None"
        )

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return OpaqueRef.of_key, (self._key,)

    def __repr__(self) -> str:
        return f"OpaqueRef({self._key!r})"


def detach(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without its graph; a tensor that represents an object remains itself."""
    return tensor if hasattr(tensor, _VALUE) else tensor.detach()


def on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a tensor on a device; a tensor that represents an object stays where it is."""
    return tensor if hasattr(tensor, _VALUE) else tensor.to(device)


def _unflatten(leaves: Iterable[object], context: object) -> OpaqueRef:
    return OpaqueRef.of_key(next(iter(leaves)))


def register_opaque(kind: type[OpaqueRef]) -> None:
    """Makes trees of tensors contain the references of a class, which are restored as `OpaqueRef`."""
    register_pytree_node(kind, lambda reference: ([reference.key], None), _unflatten)


register_opaque(OpaqueRef)


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


def fill_in(value: T, tensor: Callable[[Number], DTensor], mesh: DeviceMesh, shards: dict[Number, torch.Tensor]) -> T:
    """Returns an argument for a function, with tensors and groups for their placeholders; `tensor` finds a tensor.

    The local tensors are noted in `shards`.
    """

    def fill(leaf: object) -> object:
        if isinstance(leaf, TensorOf):
            dtensor = tensor(leaf.number)
            local = shards[leaf.number] = dtensor._local_tensor
            return dtensor if leaf.sharded else local
        if isinstance(leaf, OpaqueRef):
            return OpaqueRef.of_key(mapped(leaf.key, fill))
        if isinstance(leaf, GroupOf):
            member = current_runtime().feature(GROUPS).membership
            assert member is not None  # only ranks of a mesh run functions
            return member.world.group_along(mesh, leaf.dims)
        return leaf

    return mapped(value, fill)


@contextmanager
def sizes_kept(shards: Collection[torch.Tensor]) -> Iterator[None]:
    """Raises ValueError after a block that has resized one of the tensors, which then has its former size again."""
    before = [(shard.size(), shard.stride(), shard.storage_offset(), shard.untyped_storage()) for shard in shards]
    resized = []
    try:
        yield
    finally:
        for shard, (size, stride, offset, storage) in zip(shards, before, strict=True):
            if shard.size() != size:
                resized.append(f"{list(size)} to {list(shard.size())}")
                with torch.no_grad():
                    shard.set_(storage, offset, size, stride)
    if resized:
        raise ValueError(
            f"the function has changed the size of a tensor from {resized[0]}, which all ranks rely on; it may write "
            "to the tensor, or return another one"
        )


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
