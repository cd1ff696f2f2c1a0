"""One model, trained in one process and over a mesh: the differences."""

import copy
import warnings
from dataclasses import dataclass

import torch
from torch import nn

import monarch_nb
from monarch_nb.distributed import GatherWarning, Mesh, MeshTensor, Plan
from tests.models.zoo import Batch, Model

STEPS = 3
PARALLEL = ("data", "fully sharded", "tensor", "data + tensor", "fully sharded + tensor")


@dataclass
class Course:
    """Losses and norms of a training, step by step, and the parameters at its end."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def plan_of(model: Model, parallel: str) -> Plan:
    """On a mesh of dimensions `data` and `model`."""
    match parallel:
        case "data":
            return Plan(data=("data", "model"))
        case "fully sharded":
            return Plan(data=("data", "model"), fully_sharded=True)
        case "tensor":
            return Plan(model.plan, data=(), tensor="model")
        case "data + tensor":
            return Plan(model.plan)
        case "fully sharded + tensor":
            return Plan(model.plan, fully_sharded=True)
    raise ValueError(parallel)


def course(model: Model, module: nn.Module, batch: Batch) -> Course:
    """Trains it, with clipped gradients."""
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, eps=1e-6)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(module, batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.detach())
    return Course([*map(float, losses)], [*map(float, norms)], {n: full(p) for n, p in module.named_parameters()})


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor).detach().clone()


def module_and_batch(model: Model) -> tuple[nn.Module, Batch]:
    torch.manual_seed(1)
    module = model.make()
    return module.train(), model.batch()


def spread(model: Model, module: nn.Module, batch: Batch, mesh: Mesh, parallel: str) -> tuple[nn.Module, Batch]:
    """A copy of the module on the mesh, and the batch there."""
    plan = plan_of(model, parallel)
    sharded = monarch_nb.module_to_mesh(copy.deepcopy(module), mesh, plan)
    dims = {"data": ("data", "model"), "fully sharded": ("data", "model"), "tensor": None}.get(parallel, "data")
    return sharded, {name: monarch_nb.distribute(t, mesh, [dims, *[None] * (t.dim() - 1)]) for name, t in batch.items()}


@dataclass
class Outcome:
    """The largest differences, relative for losses and norms of gradients; and the operations that gathered."""

    loss: float
    norm: float
    parameter: float
    gathered: list[str]

    def is_equal(self) -> bool:
        """To the digits that float32 has after three steps."""
        return self.loss < 1e-5 and self.norm < 1e-4 and self.parameter < 1e-3


def compare(model: Model, mesh: Mesh, parallel: str, local: Course | None = None) -> Outcome:
    """Trains it over the mesh, and in one process unless `local` has that."""
    module, batch = module_and_batch(model)
    if local is None:
        local = course(model, copy.deepcopy(module), batch)
    mesh.stream.noticed.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GatherWarning)
        remote = course(model, *spread(model, module, batch, mesh, parallel))
    gathered = sorted({str(warning.message).partition(" ")[0] for warning in caught})
    differ = [(local.parameters[name] - remote.parameters[name]).abs().max().item() for name in local.parameters]
    return Outcome(_relative(local.losses, remote.losses), _relative(local.norms, remote.norms), max(differ), gathered)


def _relative(expected: list[float], actual: list[float]) -> float:
    return max(abs(first - second) / max(abs(first), 1e-6) for first, second in zip(expected, actual, strict=True))
