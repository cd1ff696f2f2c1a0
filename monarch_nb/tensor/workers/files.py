"""Saves and loads shards with torch.distributed.checkpoint."""

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
    """Saves a state to `aside`, which is renamed to `path` when it is complete."""
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
    """Loads shards in place. The first rank returns the other values, with None for shards."""
    group, first = _group(state)
    with _plainly(), read_in_pieces(state) as pieces:
        load(pieces, checkpoint_id=path, process_group=group)
        return _plain(pieces) if first else None


@contextmanager
def _plainly() -> Iterator[None]:
    """Raises the error of a rank in place of CheckpointException."""
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
