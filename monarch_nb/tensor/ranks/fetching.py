"""Values of one rank: `fetch_shard`, `inspect`, `show` and `call_on_shard_and_fetch`."""

import sys
from collections.abc import Mapping
from importlib import import_module
from operator import index
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_nb.runtime import Future, derived_future
from monarch_nb.tensor.errors import RankTensorError
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.lanes import ACTIVE, check_lane
from monarch_nb.tensor.ranks.active import get_active_mesh
from monarch_nb.tensor.ranks.tensor import RankTensor

if TYPE_CHECKING:
    from monarch_nb.tensor.mesh import Mesh


def rank_at(mesh: "Mesh", shard: Mapping[str, int] | None, coordinates: Mapping[str, int], operation: str) -> int:
    """Returns the rank in a mesh at these coordinates; the first one without any.

    Raises KeyError for an unknown dimension, ValueError for a missing one, IndexError for one out of range.
    """
    point = {**(shard or {}), **coordinates}
    sizes = mesh.sizes
    for name in point:
        if name not in sizes:
            raise KeyError(
                f"{operation}: {mesh!r} has no dimension {name!r}; it has {', '.join(map(repr, sizes)) or 'none'}"
            )
    if not point:
        return 0
    rank = 0
    for name, size in sizes.items():
        if name not in point:
            raise ValueError(
                f"{operation}: Missing key {name!r} in shard map: give a coordinate for each dimension, or none"
            )
        coordinate = index(point[name])
        if not 0 <= coordinate < size:
            raise IndexError(f"{operation}: {name}={coordinate} is out of range; {mesh!r} has {size} along {name!r}")
        rank = rank * size + coordinate
    return rank


def mesh_of_all(tensors: list[Any], operation: str) -> "Mesh":
    """Returns the mesh of tensors, or the active one without any. Raises RankTensorError for several."""
    meshes = list(dict.fromkeys(tensor.reference.stream for tensor in tensors))
    if (count := len(meshes)) > 1:
        raise RankTensorError("WRONG_MESH", f"{operation}: tensors of {count} meshes; take those of one at a time")
    return tensors[0].device_mesh if tensors else get_active_mesh().on(ACTIVE.stream)


def fetch_shard(obj: object, /, shard: Mapping[str, int] | None = None, **coordinates: int) -> Future[Any]:
    """Returns one rank's values of the tensors in `obj`, as local tensors on the CPU; other leaves as they are.

    The rank is at the given coordinates; without any, at the first of each dimension. Does not block; the future waits
    for all earlier operations on their mesh, and raises TensorError if operations that they depend on have failed on
    any rank. `fetch_shard(None)` waits for all earlier operations on the active mesh.
    """
    leaves, tree = tree_flatten(obj)
    tensors = [leaf for leaf in leaves if isinstance(leaf, MeshTensor)]
    _refuse_sharded(tensors)
    mesh = mesh_of_all(tensors, "fetch_shard")
    check_lane(mesh.stream, "fetch_shard", [tensor.reference for tensor in tensors], ())
    rank = rank_at(mesh, shard, coordinates, "fetch_shard")
    values = mesh.stream.own_of([current(tensor) for tensor in tensors], rank)

    def fetched() -> Any:
        shards = iter(values.get())
        return tree_unflatten(
            [next(shards).values()[rank] if isinstance(leaf, MeshTensor) else leaf for leaf in leaves], tree
        )

    return derived_future(values, fetched)


def _refuse_sharded(tensors: list[MeshTensor]) -> None:
    if any(not isinstance(tensor, RankTensor) for tensor in tensors):
        raise TypeError(
            "fetch_shard: a tensor that is sharded over ranks is fetched whole, t.full_tensor(), or by t.local_shards()"
        )


def inspect(obj: object, /, shard: Mapping[str, int] | None = None, **coordinates: int) -> Any:
    """Returns the values of one rank; blocks. See `fetch_shard`."""
    return fetch_shard(obj, shard, **coordinates).get()


def show(obj: object, /, shard: Mapping[str, int] | None = None, **coordinates: int) -> Any:
    """Shows the values of one rank: as an image by torchshow, if installed, else printed. Blocks."""
    value = inspect(obj, shard, **coordinates)
    try:
        torchshow = import_module("torchshow")
    except ImportError:
        sys.stdout.write(f"{value}\n")
        return None
    return torchshow.show(value)
