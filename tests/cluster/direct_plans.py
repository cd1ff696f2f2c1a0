"""Plans run directly on two gloo ranks: what the rules say, without a controller."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._mode_utils import no_dispatch

from monarch_nb.tensor.propagation import MeshLayout, Meta, OperationPlan, Runner, ViewWriteError

WORLD = 2
LAYOUT = MeshLayout((WORLD,), ("ranks",))
STATE: dict[str, Any] = {}


class Direct(torch.Tensor):
    """Looks like the whole tensor; every operation is planned, and its program run at once on this rank's shards."""

    meta: Meta
    value: DTensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: DTensor, meta: Meta) -> "Direct":
        out = torch.Tensor._make_wrapper_subclass(cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device="cpu")
        out.meta, out.value = meta, value
        return out

    def __repr__(self) -> str:
        return f"Direct({self.meta})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})


def place(tensor: torch.Tensor, placement: Any) -> Direct:
    tensor = tensor.resolve_conj().resolve_neg()
    meta = Meta.of(LAYOUT, tensor.shape, tensor.dtype, (placement,), stride=tensor.stride())
    with torch.no_grad():
        if placement.is_partial():
            part = tensor * (0.25 if STATE["rank"] else 0.75) + (0.5 if STATE["rank"] else -0.5)
            return Direct(DTensor.from_local(part, STATE["mesh"], [placement], run_check=False), meta)
        if not placement.is_replicate():
            return Direct(distribute_tensor(tensor, STATE["mesh"], [placement], src_data_rank=None), meta)
        return Direct(DTensor.from_local(tensor, STATE["mesh"], [placement], run_check=False, shape=tensor.shape,
                      stride=tensor.stride()), meta)  # fmt: skip


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.value.full_tensor() if isinstance(tensor, Direct) else tensor


def perform(func: Any, args: Any, kwargs: Any) -> Any:
    def handle(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, Direct):
            return place(value, Replicate())
        return type(value)(map(handle, value)) if isinstance(value, list | tuple) else value

    plan, leaves, scalars = STATE["propagator"].plan(
        func, handle(list(args)), {name: handle(value) for name, value in kwargs.items()}
    )
    if any(leaves[index].meta.copied for index in plan.writes):
        raise ViewWriteError(plan.operation, "written to a copy, which only handles of a mesh write back")
    runner = STATE["runners"].get(plan.number)
    if runner is None:
        runner = STATE["runners"][plan.number] = Runner(plan.program, STATE["mesh"])
    if plan.program.seeded is not None:
        torch.manual_seed(7 + (STATE["rank"] if plan.program.seeded else 0))
    results = runner([leaf.value for leaf in leaves], scalars)
    outputs = [Direct(value, meta) for value, meta in zip(results, plan.made, strict=True)]
    check_agreement(plan, results)
    if plan.rebinds:
        leaves[0].meta, leaves[0].value = outputs[0].meta, outputs[0].value
        with no_dispatch():
            func(*args, **kwargs)
    if plan.value:
        return outputs[0].value.to_local().item()
    return plan.build(outputs, leaves)


def check_agreement(plan: OperationPlan, results: list[DTensor]) -> None:
    """The plan's metadata of a tensor is that of the ranks."""
    for value, meta in zip(results, plan.made, strict=True):
        if value.placements != meta.placements or tuple(value.shape) != meta.shape:
            raise AssertionError(f"{plan.operation}: ranks have {value._spec}, the plan says {meta}")
