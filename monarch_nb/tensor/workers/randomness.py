"""Random numbers on the workers: the same for replicas, others for each shard, and the same again after a seed.

A CPU mesh has no random state of its own in PyTorch: with equal seeds all shards would draw the same numbers. So each
random operation is seeded by itself, from the number that the controller gave it and the shard that this worker holds.
"""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

_ODD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mixed(seed: int, shard: int) -> int:
    """A seed of its own for each shard (the step of splitmix64), in 63 bits."""
    value = (seed + (shard + 1) * _ODD) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return (value ^ (value >> 31)) >> 1


def seeder(mesh: DeviceMesh, dims: Sequence[int]) -> Callable[[int], None]:
    """What seeds a random operation before it runs; its argument is the number that the controller gave.

    Ranks draw different numbers along the mesh dimensions `dims`, and equal ones along the others.
    """
    shard = 0
    for dim in dims:
        shard = shard * mesh.size(dim) + mesh.get_local_rank(dim)
    cuda = mesh.device_type == "cuda"

    def seed(number: int) -> None:
        value = mixed(number, shard)
        torch.default_generator.manual_seed(value)
        if cuda:
            torch.cuda.manual_seed(value)

    return seed
