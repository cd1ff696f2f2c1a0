"""Names under which torchmonarch's programs find the mesh of tensors, its end and its errors, and log on the ranks."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from monarch_nb.mesh import ProcMesh
from monarch_nb.tensor.errors import TensorError
from monarch_nb.tensor.mesh import Client, Mesh
from monarch_nb.tensor.ranks.remote import Remote

R = TypeVar("R")

DeviceMesh = Mesh
RemoteException = TensorError
_logger = "monarch.builtins.log"


def spawn_tensor_engine(proc_mesh: ProcMesh) -> Mesh:
    """Returns the `Mesh` of a proc mesh for tensors of the ranks' own values, as `activate()`. May block at first."""
    return Mesh.for_ranks(proc_mesh)


MeshClient = Client


def _log(text: object, *args: object, level: int = logging.WARNING, **kwargs: Any) -> None:
    logging.getLogger(_logger).log(level, text, *args, **kwargs)


def _set_level(level: int) -> None:
    logging.getLogger(_logger).setLevel(level)


log_remote = Remote(_log, propagate="inspect")
set_logging_level_remote = Remote(_set_level, propagate="inspect")


def fake_call(function: Callable[..., R], *args: object, **kwargs: object) -> R:
    """Calls a function whose tensors have no values."""
    with FakeTensorMode():
        return function(*args, **kwargs)


def flatten(
    tree: object, wanted: Callable[[object], bool]
) -> tuple[list[object], Callable[[Sequence[object]], object]]:
    """Returns the wanted leaves of a tree, and a function that rebuilds the tree with other leaves."""
    leaves, shape = tree_flatten(tree)
    indices = [index for index, leaf in enumerate(leaves) if wanted(leaf)]

    def unflatten(values: Sequence[object]) -> object:
        filled = list(leaves)
        for index, value in zip(indices, values, strict=True):
            filled[index] = value
        return tree_unflatten(filled, shape)

    return [leaves[index] for index in indices], unflatten


def flattener(tree: object) -> Callable[[object], list[object]]:
    """Returns a function that returns the leaves of trees of this form."""
    return tree_leaves


__all__ = [
    "Client",
    "DeviceMesh",
    "MeshClient",
    "RemoteException",
    "fake_call",
    "flatten",
    "flattener",
    "log_remote",
    "set_logging_level_remote",
    "spawn_tensor_engine",
    "tree_map",
]
