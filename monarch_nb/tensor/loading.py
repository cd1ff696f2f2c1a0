"""Sharded tensors from files: each process reads its own part, and nothing passes through the controller."""

from collections.abc import Callable, Mapping
from typing import Any

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.safetensors import read_part, stored_in


def load_safetensors(
    path: str, mesh: Mesh, sharding_spec: Mapping[str, Any] | Callable[[str, tuple[int, ...]], Any] | None = None
) -> dict[str, MeshTensor]:
    """The tensors in a file of safetensors, or in all such files of a folder, cut over the processes of a mesh.

    `sharding_spec` says how each is cut, as for `monarch.distribute`: a mapping of names, or a function of name and
    shape; those that have none are whole on each process. The path must lead to the same files on each host. Blocks
    until the headers are read; the values are read while the program goes on.
    Raises TensorError where a file cannot be read, ValueError for a name that is in none.
    """
    first, *others = mesh.execute(stored_in, str(path)).values()
    if any(other.keys() != first.keys() for other in others):
        raise ValueError(f"{path}: the processes of the mesh see different files there")
    if isinstance(sharding_spec, Mapping):
        unknown = sorted(set(sharding_spec) - set(first))
        if unknown:
            raise ValueError(f"{path} has no tensor {', '.join(map(repr, unknown[:5]))}")
    loaded = {}
    for name, stored in first.items():
        spec = sharding_spec(name, stored.shape) if callable(sharding_spec) else (sharding_spec or {}).get(name)
        loaded[name] = mesh.from_parts(read_part, stored, size=stored.shape, dtype=stored.dtype, sharding_spec=spec)
    return loaded
