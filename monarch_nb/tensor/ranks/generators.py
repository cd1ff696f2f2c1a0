"""The generators of random numbers of ranks: `monarch.random`, and `monarch.builtins.random`.

Operations of a mesh draw from the seed of the mesh. Once a program has read or set a rank's own generator, they draw
from that, until `torch.manual_seed` sets the seed of the mesh again.
"""

import os
from typing import NamedTuple, SupportsInt

import torch

from monarch_nb.tensor.lanes import ACTIVE
from monarch_nb.tensor.ranks.active import get_active_mesh
from monarch_nb.tensor.ranks.remote import Remote, remote
from monarch_nb.tensor.ranks.tensor import RankTensor


class State(NamedTuple):
    """The states of a rank's CPU generator and GPU generator; the latter is empty without a GPU."""

    cpu: RankTensor
    cuda: RankTensor


def _draw_apart(*, seeded: bool) -> None:
    """Makes operations of the active stream draw from ranks' own generators, seeded by the mesh's, or seeded next."""
    stream = get_active_mesh().on(ACTIVE.stream).stream
    stream.draws.draw_apart(stream, seeded=seeded)


def _states() -> tuple[torch.Tensor, torch.Tensor]:
    has_gpu = torch.cuda.is_available()
    return torch.get_rng_state(), torch.cuda.get_rng_state() if has_gpu else torch.empty(0, dtype=torch.uint8)


def _restore(cpu: torch.Tensor, cuda: torch.Tensor) -> None:
    torch.set_rng_state(cpu.cpu())
    if cuda.numel():
        torch.cuda.set_rng_state(cuda.cpu())


def _seed(seed: SupportsInt, index: SupportsInt = 0) -> None:
    torch.manual_seed(int(seed) ^ int(index))


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


_get, _set = Remote(_states), Remote(_restore, propagate="inspect")
_set_seed = Remote(_seed, propagate="inspect")
make_deterministic = Remote(_deterministic, propagate="inspect")


def get_state() -> State:
    """Returns the state of each rank's generators, as tensors. The first call waits for the ranks."""
    _draw_apart(seeded=True)
    return State(*_get())


def set_state(state: tuple[RankTensor, RankTensor]) -> None:
    """Sets the state of each rank's generators. Does not block."""
    _draw_apart(seeded=False)
    _set(*state)


def new_state(seed: RankTensor) -> State:
    """Returns the state of generators that each rank seeds with its value of `seed`; its own state stays as it is."""
    before = get_state()
    _set_seed(seed)
    state = get_state()
    set_state(before)
    return state


def set_manual_seed_remote(seed: int, process_idx: "RankTensor | int" = 0) -> None:
    """Makes each rank call `torch.manual_seed(seed ^ process_idx)`, so that all draw equal numbers, or each its own."""
    _draw_apart(seeded=False)
    _set_seed(seed, process_idx)


def get_rng_state_remote() -> RankTensor:
    """Returns the state of each rank's generator of the CPU, as a tensor."""
    return get_state().cpu


def set_rng_state_remote(new_state: RankTensor) -> None:
    """Sets the state of each rank's generator of the CPU."""
    _draw_apart(seeded=False)
    Remote(torch.set_rng_state, propagate="inspect")(new_state)


def seed_remote() -> None:
    """Makes each rank seed its generators at random."""
    _draw_apart(seeded=False)
    remote("torch.seed", propagate="inspect")()


random_seed_remote = seed_remote
manual_seed_cuda_remote = Remote("torch.cuda.manual_seed", propagate="inspect")
manual_seed_all_cuda_remote = Remote("torch.cuda.manual_seed_all", propagate="inspect")
get_rng_state_all_cuda_remote = Remote("torch.cuda.get_rng_state_all")
set_rng_state_all_cuda_remote = Remote("torch.cuda.set_rng_state_all", propagate="inspect")
