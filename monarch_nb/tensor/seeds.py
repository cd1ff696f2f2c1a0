"""Seeds of random operations, derived from the seed of the mesh and the number of earlier ones.

On the workers random numbers are the same for replicas, others for each shard, and the same again after a seed. A CPU
mesh has no random state of its own in PyTorch: with equal seeds all shards would draw the same numbers. So each random
operation is seeded by itself, from the number that the controller gave it and the shard that this worker holds. The
process's generators are borrowed for that: its own code, in cells and actors, draws on from where it was.
"""

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch.distributed.device_mesh import DeviceMesh

_SEED, _DRAWN = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_MASK = (1 << 62) - 1
_WORD = (1 << 64) - 1


def seed_number(seed: int, drawn: int) -> int:
    """Seed of the random operation number `drawn` since the seed was set."""
    return (seed * _SEED + drawn * _DRAWN) & _MASK


def later(number: int, drawn: int) -> int:
    """Seed of the random operation `drawn` later."""
    return (number + drawn * _DRAWN) & _MASK


def mixed(seed: int, index: int) -> int:
    """A different 63-bit seed for each index, such as that of a shard (one step of splitmix64)."""
    value = (seed + (index + 1) * _SEED) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return (value ^ (value >> 31)) >> 1


class _Thread(threading.local):
    """`runs_operations`: it does what a mesh is to do here, and what it seeds is this rank, not the program."""

    runs_operations = False


THREAD = _Thread()


class Borrowed:
    """Borrows the generators of the process for random operations of a mesh.

    An operation is seeded and draws in a `with` block, so that those of several streams draw what each of them would
    draw alone.
    """

    def __init__(self) -> None:
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        self._lock = threading.RLock()
        self.is_apart = False  # operations of a mesh draw from them as they are
        self.is_shared = False  # functions of other streams draw meanwhile: what an operation borrows goes back at once

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.is_shared:
                self.give_back()
        finally:
            self._lock.release()

    def seed(self, value: int, *, cuda: bool) -> None:
        """Seeds the generators for one operation, after saving their states on the first."""
        if self.is_apart:
            self.give_back()
            return
        generators = [torch.default_generator]
        if cuda:
            device = torch.cuda.current_device()  # initializes CUDA, which makes the generators
            generators.append(torch.cuda.default_generators[device])
        if not self._states:
            self._states = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            generator.manual_seed(value)

    def give_back(self) -> None:
        """Restores the saved states."""
        with self._lock:
            states, self._states = self._states, []
            for generator, state in states:
                generator.set_state(state)


BORROWED = Borrowed()  # those of this process


def seeder(mesh: DeviceMesh, dims: Sequence[int]) -> Callable[[int], None]:
    """Returns a function that seeds a random operation; its argument is the number from the controller.

    Ranks draw different numbers along the mesh dimensions `dims`, and equal ones along the others.
    """
    shard, coordinates = 0, mesh.get_coordinate() or ()  # groups may be made later
    for dim in dims:
        shard = shard * mesh.size(dim) + coordinates[dim]
    cuda = mesh.device_type == "cuda"

    def seed(number: int) -> None:
        BORROWED.seed(mixed(number, shard), cuda=cuda)

    return seed


def draw_apart(number: int | None) -> None:
    """Has operations of a mesh draw from the generators of this process, which are seeded by a number and the rank."""
    BORROWED.is_apart = True
    if number is not None:
        torch.manual_seed(mixed(number, torch.distributed.get_rank()))


def draw_together() -> None:
    """Has operations of a mesh draw by its seed again, in this process."""
    BORROWED.is_apart = False
