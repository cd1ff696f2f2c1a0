"""Substitutes for operations without a kernel on the device of the ranks.

PyTorch and libraries choose operations by the device of tensors. Handles are on a device that is neither CPU nor CUDA,
so that the chosen operation may have no kernel on the ranks. Substitutes compute the same with other operations.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_leaves, tree_map

from .draft import Writer
from .errors import PropagationError, user_line
from .execute import DispatchMode
from .operation import Operation
from .plan import Slot

aten = torch.ops.aten
Tensor = torch.Tensor
Body = Callable[..., object]

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
_ANY_DEVICE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def substitute(operation: Operation, device: str) -> Body | None:
    """Returns a function of the operation's arguments for a kind of device; None if the device has a kernel.

    Raises PropagationError if there is no substitute.
    """
    func = operation.func
    of_integers = _OF_INTEGERS.get(operation.packet) if device == "cpu" else None
    if of_integers is not None and not operation.writes and not operation.metas[0].dtype.is_floating_point:
        return of_integers
    if has_kernel(func, device):
        return None
    body = _OURS.get(operation.packet) or decomposition_table.get(func)
    if body is None or operation.writes:
        raise PropagationError(
            operation.name,
            f"PyTorch has no kernel for it on {device}, which the processes of the mesh compute on",
            "Write it with other operations, or register how it is: torch._decomp.register_decomposition",
            user_line(),
        )
    return body


@cache
def has_kernel(func: torch._ops.OpOverload, device: str) -> bool:
    """Returns whether a kind of device has a kernel; True if PyTorch here is built without that device."""
    key = _KEYS.get(device)
    if key is None or not _is_registered("aten::mm", key):
        return True
    name = _name(func)
    if func.namespace == "prim":
        return True
    return _is_registered(name, key) or any(_is_registered(name, other_key) for other_key in _ANY_DEVICE)


def _name(func: torch._ops.OpOverload) -> str:
    return ".".join(filter(None, (func._schema.name, func._schema.overload_name)))


def _is_registered(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


class SubstituteTrace(DispatchMode):
    """Records the operations on tensors with known slots in a `with` block."""

    def __init__(self, write: Writer, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._write = write
        self._slots: dict[int, tuple[Tensor, Slot]] = {id(t): (t, Slot(i)) for i, t in enumerate(tensors)}

    def slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of a tensor."""
        return self._slots[id(tensor)][1]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Runs an operation and records it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries of a tensor's device, and the like
            return func(*args, **kwargs)
        with self:  # this runs below autograd, where such operations would otherwise be decomposed
            parts = func.decompose(*args, **kwargs) if _is_registered(_name(func), _ANY_DEVICE[0]) else NotImplemented
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)

        def located(value: object) -> object:
            return self.slot(value) if isinstance(value, Tensor) else value

        slots = self._write.all(func, *tree_map(located, args), **tree_map(located, kwargs))
        new = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and id(tensor) not in self._slots]
        self._slots |= {id(tensor): (tensor, slot) for tensor, slot in zip(new, slots, strict=True)}
        return result


# -- operations of devices other than CPUs, as PyTorch computes them on a CPU -----------------------------------------


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _with_biases(input_gates, input_bias) + _with_biases(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    c = cy.tanh()
    to_o = torch.zeros_like(c) if grad_hy is None else grad_hy * c
    to_c = torch.zeros_like(c) if grad_hy is None else grad_hy * o * (1 - c * c)
    if grad_cy is not None:
        to_c = to_c + grad_cy
    gates = torch.cat([to_c * g * i * (1 - i), to_c * cx * f * (1 - f), to_c * i * (1 - g * g), to_o * o * (1 - o)], 1)
    return gates, to_c * f, gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    input_r, input_z, input_n = _with_biases(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _with_biases(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    to_n = grad_hy * (1 - z) * (1 - n * n)
    to_z = grad_hy * (hx - n) * z * (1 - z)
    to_r = to_n * hidden_n * r * (1 - r)
    inputs, hidden = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    return inputs, hidden, grad_hy * z, inputs.sum(0) if has_bias else None, hidden.sum(0) if has_bias else None


def _with_biases(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _wider_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


def _wider_sum_and_product(
    addend: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = _wider_product(a, b, out_dtype) * alpha
    return product if beta == 0 else addend.to(out_dtype) * beta + product


def _masked_scale(tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
    return tensor * mask.to(tensor.dtype) * scale


def _whole_numbers_in_bins(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Returns a histogram of integers in integer arithmetic, as on CUDA."""
    values = values.reshape(-1)
    low, high = torch.full((), int(min), dtype=torch.int64), torch.full((), int(max), dtype=torch.int64)
    numbers = values.to(torch.int64)
    if min == max and values.numel():
        low, high = numbers.amin(), numbers.amax()
    is_point = low == high  # a separate range around one number
    low, high = torch.where(is_point, low - 1, low), torch.where(is_point, high + 1, high)
    inside = (numbers >= low) & (numbers <= high)
    positions = torch.div((numbers - low) * bins, high - low, rounding_mode="floor").clamp(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.int64).index_add(0, positions, inside.to(torch.int64))
    return counts.to(values.dtype)


_OURS: dict[str, Body] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_masked_scale": _masked_scale,
    "mm": _wider_product,
    "bmm": _wider_product,
    "addmm": _wider_sum_and_product,
    "baddbmm": _wider_sum_and_product,
}

# A CPU has a kernel for floating-point numbers only.
_OF_INTEGERS: dict[str, Body] = {"histc": _whole_numbers_in_bins}
