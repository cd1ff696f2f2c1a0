"""State on its way between the ranks of a mesh and files, by torch.distributed.checkpoint: each its own shards."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from monarch_nb.tensor.checkpoints.nested import all_of, mapped
from monarch_nb.tensor.checkpoints.workers import group_of, in_pieces, read_in_pieces


def write(state: dict[str, Any], path: str, aside: str) -> None:
    """Saves a state. It is under its name when all of it is there: until then it is `aside`, in the same folder."""
    group, first = _group(state)
    state = mapped(DTensor, in_pieces, state)
    with _plainly():
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
    group, first = _group(state)
    with _plainly(), read_in_pieces(state) as pieces:
        load(pieces, checkpoint_id=path, process_group=group)
        return _plain(pieces) if first else None


@contextmanager
def _plainly() -> Iterator[None]:
    """Raises what went wrong on a rank in place of the news that something has."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause


def _group(state: dict[str, Any]) -> tuple[Any, bool]:
    return group_of(next(iter(all_of(DTensor, state))).device_mesh)


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value
