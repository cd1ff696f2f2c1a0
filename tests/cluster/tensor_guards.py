"""The same programs on plain DTensors and by our plans, on two gloo ranks, against local tensors."""

import datetime
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from monarch_nb.tensor.propagation import Propagator
from tests.cluster import direct_plans as ours

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Program = Callable[..., torch.Tensor]


def fill_rows(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1:3].fill_(7.0)
    return x


def used_twice(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    rows = functional.embedding(tokens, table)
    return rows * rows + rows


def one_minus(x: torch.Tensor) -> torch.Tensor:
    total = x.sum(0)
    return torch.empty_like(total).fill_(1.0).sub_(total)


def programs() -> dict[str, tuple[Program, list[torch.Tensor], list[Any], bool]]:
    """Name -> the program, its inputs, their placements, and whether gradients are compared, too."""
    torch.manual_seed(0)
    five, target, six = torch.rand(5, 4), torch.rand(5, 4), torch.rand(6, 4)
    pair: list[Any] = [S0, S0]
    cases: dict[str, tuple[Program, list[torch.Tensor], list[Any], bool]] = {
        f"{loss.__name__} on uneven rows": (loss, [five, target], pair, False)
        for loss in (
            functional.mse_loss,
            functional.smooth_l1_loss,
            functional.huber_loss,
            functional.binary_cross_entropy,
            functional.binary_cross_entropy_with_logits,
            functional.soft_margin_loss,
        )
    }
    image, kernel = torch.randn(4, 3, 8), torch.randn(6, 3, 3)
    logits, classes = torch.randn(5, 6), torch.tensor([0, 5, 2, 3, 1])
    tokens = torch.tensor([[0, 5], [2, 3], [1, 4]])
    cases |= {
        "gradient of binary_cross_entropy on even rows": (
            functional.binary_cross_entropy,
            [six, torch.rand(6, 4)],
            pair,
            True,
        ),
        "conv1d with a weight cut by rows": (functional.conv1d, [image, kernel], [R, S0], False),
        "conv1d with both cut by rows": (functional.conv1d, [image, kernel], pair, False),
        "conv1d cut along its length": (functional.conv1d, [image, kernel], [Shard(2), R], False),
        "a write through rows of a tensor cut by rows": (fill_rows, [six], [S0], False),
        "rows of a vocabulary that is cut, used twice": (used_twice, [torch.randn(6, 4), tokens], [S0, R], True),
        "one minus a sum of parts": (one_minus, [six], [S0], False),
        "rms_norm cut along what is normed": (lambda x: functional.rms_norm(x, (4,)), [six], [S1], True),
        "cross_entropy cut along the classes": (functional.cross_entropy, [logits, classes], [S1, R], True),
        "cross_entropy on uneven rows": (functional.cross_entropy, [logits, classes], pair, True),
        "cosine_embedding_loss cut by columns": (
            lambda a, b: functional.cosine_embedding_loss(a, b, torch.ones_like(a.sum(1)).detach()),
            [five, target],
            [S1, S1],
            True,
        ),
        "16-bit whole numbers cut and put together": (lambda x: x.cumsum(0), [torch.arange(6).short()], [S0], False),
        "an operation without a rule": (torch.cdist, [six, torch.rand(6, 4)], pair, False),
        "uneven rows flattened": (lambda x: x.flatten() * 2, [five], [S0], True),
    }
    return cases


def outcome(program: Program, tensors: list[torch.Tensor], make: Callable[..., Any], placements: list[Any],
            gather: Callable[[Any], torch.Tensor], gradients: bool) -> str:  # fmt: skip
    """ "right", "wrong" or "raises …"."""

    def leaf(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.requires_grad_(gradients and tensor.is_floating_point())

    local = [leaf(tensor, tensor.clone()) for tensor in tensors]
    expected = program(*local)
    try:
        sharded = [leaf(tensor, make(tensor, placement)) for tensor, placement in zip(tensors, placements, strict=True)]
        result = program(*sharded)
        pairs = [(expected, result)]
        if isinstance(expected, tuple):
            pairs = list(zip(expected, result, strict=True))
        if gradients:
            expected.square().sum().backward()
            result.square().sum().backward()
            pairs += [(a.grad, b.grad) for a, b in zip(local, sharded, strict=True) if a.requires_grad]
        matches = [
            a.shape == (full := gather(b)).shape and torch.allclose(a, full.to(a.dtype), 1e-3, 1e-5) for a, b in pairs
        ]
    except Exception as error:
        return f"raises {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
    return "right" if all(matches) else "wrong"


def outcomes(rank: int, store: str) -> dict[str, tuple[str, str]]:
    """By program, the outcome on plain DTensors and on ours; runs in each of two processes that share a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2), timeout=wait)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    ours.STATE.update(mesh=mesh, rank=rank, runners={})
    ours.STATE["propagator"] = Propagator(ours.LAYOUT, leaf=ours.Direct)

    def plain(tensor: torch.Tensor, placement: Any) -> DTensor:
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    results = {}
    for name, (program, tensors, placements, gradients) in programs().items():
        before = outcome(program, tensors, plain, placements, lambda t: t.full_tensor(), gradients)
        after = outcome(program, tensors, ours.place, placements, ours.gathered, gradients)
        results[name] = before, after
    dist.barrier()
    return results
