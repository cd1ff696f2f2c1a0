"""A local twin of anything that refers to sharded tensors: the same, with the whole tensors in this process."""

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
import torch

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.wire import DISPATCH_TABLE

__all__ = ["LocalMesh", "tensors_in", "twin"]


class LocalTensor(torch.Tensor):
    """A local tensor that stands for a sharded one: what asks for its shards or placement gets it whole."""

    def full_tensor(self) -> torch.Tensor:
        """It is whole."""
        return self.as_subclass(torch.Tensor)

    def redistribute(self, *spec: Any, **options: Any) -> torch.Tensor:
        """It stays where it is."""
        return self


class LocalMesh:
    """Stands for a mesh: what is made on it is made here."""

    device = torch.device("cpu")

    def distribute(self, tensor: torch.Tensor, sharding_spec: Any = None) -> torch.Tensor:
        """The tensor as it is."""
        return tensor.as_subclass(LocalTensor)

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        if name.startswith("_") or not hasattr(Mesh, name):
            raise AttributeError(name)
        function = getattr(torch, name)

        def make(*args: Any, sharding_spec: Any = None, **options: Any) -> torch.Tensor:
            made: torch.Tensor = function(*args, **options)
            return made.as_subclass(LocalTensor)

        return make


class _Taker(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles everything but tensors and meshes, which it takes out, in order and each once."""

    dispatch_table: ClassVar[Any] = DISPATCH_TABLE

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.taken: list[tuple[str, object]] = []
        self._known: dict[int, int] = {}
        self._names: dict[int, str] = {}

    def persistent_id(self, value: object) -> int | None:
        """The place of what is taken out; None for what is pickled."""
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters():
                self._names.setdefault(id(parameter), name)
        if not isinstance(value, torch.Tensor | Mesh):
            return None
        at = self._known.get(id(value))
        if at is None:
            at = self._known[id(value)] = len(self.taken)
            self.taken.append((self._names.get(id(value), ""), value))
        return at


class _Giver(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, twins: list[object]) -> None:
        super().__init__(file)
        self._twins = twins

    def persistent_load(self, at: Any) -> object:
        return self._twins[at]


def twin(value: Any) -> Any:
    """A copy in which every sharded tensor is a local one, with its gradient, and every mesh stands for this process.

    Blocks until tensors are here. Functions of the program's own modules are copied with what they refer to. Raises
    TypeError or pickle.PicklingError for what cannot be copied.
    """
    data, taken = _taken(value)
    return _Giver(io.BytesIO(data), [_local(one) for _, one in taken]).load()


def tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors that something refers to, in an order that its twin has, too; with the names of parameters."""
    return [(name, one) for name, one in _taken(value)[1] if isinstance(one, torch.Tensor)]


def _taken(value: Any) -> tuple[bytes, list[tuple[str, object]]]:
    file = io.BytesIO()
    taker = _Taker(file)
    home = _home_of(value)
    if home is None:
        taker.dump(value)
    else:
        cloudpickle.register_pickle_by_value(home)
        try:
            taker.dump(value)
        finally:
            cloudpickle.unregister_pickle_by_value(home)
    return file.getvalue(), taker.taken


def _home_of(value: Any) -> Any:
    """The module whose functions are to be copied: that of the function, unless it is copied anyway."""
    function = value[0] if isinstance(value, tuple) and value and callable(value[0]) else None
    name = getattr(function, "__module__", None)
    if name is None or name == "__main__" or name.partition(".")[0] in ("torch", "monarch_nb"):
        return None
    home = sys.modules.get(name)
    return None if home is None or home.__name__ in cloudpickle.list_registry_pickle_by_value() else home


def _local(value: object) -> object:
    if isinstance(value, Mesh):
        return LocalMesh()
    assert isinstance(value, torch.Tensor)
    whole = value.full_tensor() if isinstance(value, MeshTensor) else value.detach().clone()
    made: torch.Tensor = whole.as_subclass(LocalTensor)
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
    else:
        made.requires_grad_(value.requires_grad)
    if value.is_leaf and value.grad is not None:
        grad = _local(value.grad)
        assert isinstance(grad, torch.Tensor)
        made.grad = grad
    return made
