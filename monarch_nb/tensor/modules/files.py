"""Saves and loads state dicts of sharded tensors; workers write and read their own shards."""

import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from monarch_nb.mesh import ValueMesh
from monarch_nb.tensor.checkpoints import workers
from monarch_nb.tensor.checkpoints.workers import State, all_of
from monarch_nb.tensor.commands import RunFunction, TensorOf
from monarch_nb.tensor.factories import refilling
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import rewriting

T = TypeVar("T")


def save(state_dict: State, path: str | os.PathLike[str]) -> None:
    """Saves a state dict to a folder in the format of `torch.distributed.checkpoint`; blocks until it is complete.

    `state_dict` may be nested: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}. All hosts
    of the mesh have to see the folder; its earlier content is replaced at the end. Raises TensorError for errors on
    the workers, ContentsLostError where contents are lost: the folder is unchanged then.
    """
    path = os.path.abspath(path)
    stream = _stream(state_dict)
    stream.held.require_contents(tensor.reference.number for tensor in all_of(MeshTensor, state_dict))
    _run(stream, state_dict, workers.write, path, f"{path}.{uuid.uuid4().hex[:8]}")


def load(state_dict: State, path: str | os.PathLike[str]) -> None:
    """Loads a checkpoint of `save`, or of `torch.distributed.checkpoint`, into a state dict of the same form, in place.

    Tensors may have other placements than when they were saved, on a mesh of another shape. Values such as numbers are
    replaced in the dict: pass it to `load_state_dict` afterwards if it has such. Tensors whose contents are lost
    since the mesh was healed have contents again. Blocks; raises TensorError where the folder lacks a value.
    """
    stream = _stream(state_dict)
    tensors = tuple(all_of(MeshTensor, state_dict))
    with rewriting(tensor.reference for tensor in tensors), refilling(stream, tensors):
        loaded = _run(stream, state_dict, workers.read, os.path.abspath(path), written=tensors)
    _copy_values(state_dict, loaded)


def run_on_shards(
    tensors: Mapping[str, MeshTensor], function: Callable[..., T], *args: object, written: bool = False
) -> ValueMesh[T]:
    """Runs `function(tensors, *args)` in each process of a mesh, in order with the operations, on DTensors.

    `written`: the function fills all of them, which may have lost their contents before. Blocks; returns the results.
    Raises TensorError with the errors by rank, ContentsLostError.
    """
    stream = _stream(dict(tensors))
    if not written:
        stream.held.require_contents(tensor.reference.number for tensor in tensors.values())
        return stream.run_everywhere(RunFunction(function, (_as_references(dict(tensors)), *args), {}))
    references = [tensor.reference for tensor in tensors.values()]
    with rewriting(references), refilling(stream, tuple(tensors.values())):
        return stream.run_everywhere(RunFunction(function, (_as_references(dict(tensors)), *args), {}), references)


def _stream(state: State) -> Stream:
    streams = {tensor.reference.stream for tensor in all_of(MeshTensor, state)}
    if len(streams) != 1:
        contents = "no tensor on a mesh" if not streams else "tensors of several meshes"
        raise ValueError(f"a state dict that is saved and loaded by workers has those of one mesh; here is {contents}")
    stream: Stream = streams.pop()
    stream.resume_if_healed()
    return stream


def _run(
    stream: Stream, state: State, function: Callable[..., T], *args: object, written: Iterable[MeshTensor] = ()
) -> T:
    command = RunFunction(function, (_as_references(state), *args), {})
    return stream.run_everywhere(command, [tensor.reference for tensor in written]).get(0)


def _as_references(value: object) -> object:
    if isinstance(value, MeshTensor):
        return TensorOf(current(value), sharded=True)
    if isinstance(value, dict):
        return {key: _as_references(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_references, value))
    return value


def _copy_values(state: Any, loaded: Any) -> None:
    """Copies values other than sharded tensors into a state of the same structure."""
    for key in state if isinstance(state, dict) else range(len(state)):
        old, new = state[key], loaded[key]
        if isinstance(old, MeshTensor):
            continue
        if isinstance(old, torch.Tensor):
            old.copy_(new)
        elif isinstance(old, (dict, list)):
            _copy_values(old, new)
        elif not (isinstance(old, tuple) and next(all_of(MeshTensor, old), None) is not None):
            state[key] = new
