"""One model, trained in one process and over a mesh: what differs."""

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
    """What a training gave, step by step, and the parameters at its end."""

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
    return Course([*map(float, losses)], [*map(float, norms)], {n: whole(p) for n, p in module.named_parameters()})


def whole(tensor: torch.Tensor) -> torch.Tensor:
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
    return sharded, {
        name: monarch_nb.distribute(one, mesh, [dims, *[None] * (one.dim() - 1)]) for name, one in batch.items()
    }


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


def compared(model: Model, mesh: Mesh, parallel: str, wanted: Course | None = None) -> Outcome:
    """Trains it over the mesh, and against one process where that is not known yet."""
    module, batch = module_and_batch(model)
    if wanted is None:
        wanted = course(model, copy.deepcopy(module), batch)
    mesh.stream.noticed.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GatherWarning)
        found = course(model, *spread(model, module, batch, mesh, parallel))
    gathered = sorted({str(one.message).partition(" ")[0] for one in caught})
    differ = [(wanted.parameters[name] - found.parameters[name]).abs().max().item() for name in wanted.parameters]
    return Outcome(_relative(wanted.losses, found.losses), _relative(wanted.norms, found.norms), max(differ), gathered)


def _relative(some: list[float], others: list[float]) -> float:
    return max(abs(one - other) / max(abs(one), 1e-6) for one, other in zip(some, others, strict=True))
