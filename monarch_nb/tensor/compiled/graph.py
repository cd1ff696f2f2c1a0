"""A program as a graph of PyTorch's: operations on shards and functional collectives, which its compiler takes too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import has_side_effect

from monarch_nb.tensor.compiled.source import Source
from monarch_nb.tensor.seeds import later

Run = Callable[[list[torch.Tensor], int], list[torch.Tensor]]


class Seeds:
    """Sets the generators between the operations of a graph, which bakes in all numbers but these."""

    def __init__(self) -> None:
        self.number = 0

    def node_of(self, seed: Callable[[int], None]) -> Callable[[int, int], None]:
        """What stands in the source for seeding: while a graph is made of it, it becomes a node of the graph."""

        def at_run_time(drawn: int) -> None:
            seed(later(self.number, drawn))

        has_side_effect(at_run_time)

        def while_tracing(number: int, drawn: int) -> None:
            mode = get_proxy_mode()
            assert mode is not None
            mode.tracer.create_node("call_function", at_run_time, (drawn,), {})

        return while_tracing


def graph_of(source: Source, names: dict[str, Any], shards: Sequence[torch.Tensor], seeds: Seeds, backend: str) -> Run:
    """The function of a source as a graph; nothing runs while it is made. Inductor compiles it when it runs first."""
    exec(source.text, names)
    run = names["run"]
    table = {torch.ops.aten._fused_adamw_.default: _fused_adamw} if backend == "inductor" else {}
    made: Any = make_fx(
        lambda *given: run(list(given), 0), decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True
    )(*shards)
    if backend == "inductor":
        made = torch.compile(made, fullgraph=True, dynamic=False)

    def called(inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        seeds.number = seed
        return list(made(*inputs))

    return called


def _fused_adamw(
    parameters: Any, grads: Any, means: Any, squares: Any, most: Any, steps: Any, *, lr: Any, beta1: float,
    beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool, grad_scale: Any = None,
    found_inf: Any = None,
) -> None:  # fmt: skip
    """The pieces of a fused step (Loshchilov and Hutter 2019): inductor takes no operation that writes to lists."""
    if amsgrad or grad_scale is not None or found_inf is not None:
        raise NotImplementedError('AdamW with amsgrad or a scaled gradient has no graph: use backend="python"')
    for parameter, grad, mean, square, step in zip(parameters, grads, means, squares, steps, strict=True):
        gradient = -grad if maximize else grad
        parameter.mul_(1 - lr * weight_decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = square.sqrt() / (1 - beta2**step).sqrt() + eps
        parameter.sub_(mean / divisor * (lr / (1 - beta1**step)))
