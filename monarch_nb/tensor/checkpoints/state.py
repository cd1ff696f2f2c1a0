"""A state as programs keep it, taken apart: its sharded tensors by name, and the rest as one object."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import Placements


@dataclass(frozen=True)
class Kept:
    """Stands for a sharded tensor in the rest."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements


def taken_apart(state: Any, path: str = "") -> tuple[Any, dict[str, MeshTensor]]:
    """The state with `Kept`s for its sharded tensors, and these by name, as in `optimizer.state.0.exp_avg`."""
    tensors: dict[str, MeshTensor] = {}

    def rest(value: Any, path: str) -> Any:
        if isinstance(value, MeshTensor):
            tensors[path] = value
            return Kept(path, value.meta.shape, value.meta.dtype, value.meta.placements)
        if isinstance(value, dict):
            return {key: rest(each, _joined(path, key)) for key, each in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(rest(each, _joined(path, at)) for at, each in enumerate(value))
        return value

    return rest(state, path), tensors


def put_together(rest: Any, tensor: Callable[[Kept], Any]) -> Any:
    """The state again, with `tensor(kept)` for each that was taken out."""
    if isinstance(rest, Kept):
        return tensor(rest)
    if isinstance(rest, dict):
        return {key: put_together(each, tensor) for key, each in rest.items()}
    if isinstance(rest, list | tuple) and not hasattr(rest, "_fields"):
        return type(rest)(put_together(each, tensor) for each in rest)
    return rest


def put_into(target: Any, values: Any) -> None:
    """Replaces what is in the dictionaries of a state, which stay the same objects, but for tensors of the mesh."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            put_into(target[key], value)
        elif not isinstance(target.get(key), MeshTensor):
            target[key] = value


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
