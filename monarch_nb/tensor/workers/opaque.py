"""Objects of ranks that are not tensors: a program's functions return and take references to them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import register_pytree_node

from monarch_nb.runtime import current_runtime

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
