"""State on its way between the ranks of a mesh and files, by torch.distributed.checkpoint: each its own shards."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor


def write(state: dict[str, Any], path: str, aside: str) -> None:
    """Saves a state. It is under its name when all of it is there: until then it is `aside`, in the same folder."""
    with _group(state) as (group, first), _plainly():
        try:
            save(state, checkpoint_id=aside, process_group=group)
        except BaseException:
            if first:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        if first:
            before = f"{aside}.before"
            if os.path.isdir(path):
                os.rename(path, before)
            os.rename(aside, path)
            shutil.rmtree(before, ignore_errors=True)


def read(state: dict[str, Any], path: str) -> Any:
    """Loads a state: shards in place. On the first rank gives what is not sharded, with None for what is."""
    with _group(state) as (group, first), _plainly():
        load(state, checkpoint_id=path, process_group=group)
        return _plain(state) if first else None


@contextmanager
def _plainly() -> Iterator[None]:
    """Raises what went wrong on a rank in place of the news that something has."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause


@contextmanager
def _group(state: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """The process group of the tensors' mesh, whichever ranks of the world it has; whether this rank is its first."""
    mesh = next(iter(_sharded(state))).device_mesh
    ranks = mesh.mesh.flatten().tolist()
    whole = ranks == list(range(dist.get_world_size()))
    group = None if whole else dist.new_group(ranks, use_local_synchronization=True)
    try:
        yield group, dist.get_rank() == ranks[0]
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def _sharded(value: Any) -> Iterator[DTensor]:
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _sharded(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _sharded(one)


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value
