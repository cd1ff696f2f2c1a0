"""A call of an ATen operation with placeholders for its tensors, to be planned.

Dimensions and positions are counted from the front, before any rule sees them: `x.cumsum(-1)` and `x.cumsum(1)` are one
operation. Sharding rules compare dimensions with cut ones, and many of them, PyTorch's own included, compare the
numbers as they were written.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import Partial, Replicate

from .meta import Meta, Placements
from .plan import ResultSlot, Scalar, Slot

# A result on plain tensors: a new tensor and the registers of which it is a view; None for other values.
Leaf = tuple[torch.Tensor, tuple[int, ...]] | None

# In training they change running_mean and running_var in place, which their schema lacks.
_TRACKING = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


@dataclass(frozen=True)
class Operation:
    """The operation, its arguments with `Slot`s for tensors and `Scalar`s for numbers, and their values.

    `scalars` are those of the planned call: the next call may pass others of the same type.
    """

    func: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    metas: tuple[Meta, ...]
    scalars: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """The name, such as `aten.add.Tensor`."""
        return str(self.func)

    @cached_property
    def random(self) -> bool:
        """True for operations that draw random numbers; attention draws them for its dropout alone."""
        return torch.Tag.nondeterministic_seeded in self.func.tags and self.argument("dropout_p") != 0.0

    def argument(self, name: str) -> object:
        """Returns value or default of an argument of the schema; None for other names."""
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                return self.args[index] if index < len(self.args) else argument.default_value
        return None

    @property
    def device(self) -> str:
        """The kind of device of the ranks."""
        return self.metas[0].layout.device

    @property
    def packet(self) -> str:
        """The name without overload, such as `add`."""
        return self.func._schema.name.partition("::")[2]

    def filled(self, tensor: Callable[[int], object]) -> tuple[list[object], dict[str, object]]:
        """Returns the arguments with `tensor(register)` for each tensor, and the numbers of this call."""
        return self.filled_with(tensor, lambda index: self.scalars[index])

    def filled_with(
        self, tensor: Callable[[int], object], number: Callable[[int], object] = Scalar
    ) -> tuple[list[object], dict[str, object]]:
        """Returns the arguments with `tensor(register)` for each tensor, and `number(index)` for each number."""

        def fill(value: object) -> object:
            if isinstance(value, Slot):
                return tensor(value.register)
            if isinstance(value, Scalar):
                return number(value.index)
            if isinstance(value, list | tuple):
                return type(value)(map(fill, value))
            return value

        return [fill(a) for a in self.args], {name: fill(a) for name, a in self.kwargs.items()}

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """Registers of tensors that change in place."""
        registers: list[int] = []
        for argument in self.func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                registers += slots(self.argument(argument.name))
        if self.packet in _TRACKING and self.argument("training"):
            registers += [*slots(self.argument("running_mean")), *slots(self.argument("running_var"))]
        return tuple(registers)

    def aliases(self, index: int) -> tuple[tuple[int, ...], bool]:
        """Returns registers with which return `index` shares memory by the schema, and whether it *is* these."""
        returned = self.func._schema.returns[index].alias_info
        if returned is None:
            return (), False
        registers: list[int] = []
        for argument in self.func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.before_set & returned.before_set:
                registers += slots(self.argument(argument.name))
        if not registers and self.func.is_view:  # a list of views: their base is not in the schema
            registers = slots(self.argument(self.func._schema.arguments[0].name))
        return tuple(registers), returned.is_write

    def results(self, plain: object) -> tuple[object, list[Leaf]]:
        """Returns the tree of a call's result, from its result on plain tensors, and its new tensors.

        New tensors are in the order of the leaves, each with the registers of which it is a view; None stands for a
        leaf that is not a new tensor.
        """
        returns = self.func._schema.returns
        leaves: list[Leaf] = []
        count = 0

        def tree(value: object, aliased: Sequence[int], is_argument: bool, registers: Iterator[int]) -> object:
            nonlocal count
            if isinstance(value, list | tuple):
                return type(value)(tree(item, aliased, is_argument, registers) for item in value)
            if not isinstance(value, torch.Tensor):
                leaves.append(None)
                return value
            if is_argument:
                leaves.append(None)
                return ResultSlot(next(registers), given=True)
            leaves.append((value, tuple(aliased)))
            count += 1
            return ResultSlot(count - 1)

        if len(returns) == 1:
            aliased, is_argument = self.aliases(0)
            return tree(plain, aliased, is_argument, iter(aliased)), leaves
        if not isinstance(plain, tuple):
            return tree(plain, (), False, iter(())), leaves
        trees = []
        for index, value in enumerate(plain):
            aliased, is_argument = self.aliases(index)
            trees.append(tree(value, aliased, is_argument, iter(aliased)))
        return tuple(trees), leaves


def slots(value: object) -> list[int]:
    """Returns the registers of the tensors in an argument."""
    if isinstance(value, Slot):
        return [value.register]
    if isinstance(value, list | tuple):
        return [register for item in value for register in slots(item)]
    return []


def out_of_place(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Returns the operation that gives as a new view the effect of an in-place one; None if there is none."""
    name = func._schema.name.partition("::")[2]
    if name not in ("as_strided_", "detach_", "squeeze_", "t_", "transpose_", "unsqueeze_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1])
    overload = packet.int if name == "transpose_" else getattr(packet, func._overloadname)
    assert isinstance(overload, torch._ops.OpOverload)
    return overload


# These move or copy elements: the part of each rank remains a part, of any kind.
_MOVES = frozenset(
    ["clone", "contiguous", "_unsafe_view", "_reshape_alias", "cat", "stack", "expand_copy", "view_copy", "t_copy"]
)
# Sums of parts are parts of the sum.
_SUMS = frozenset(["add", "sub", "add_", "sub_", "_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_"])
# Multiples of parts are parts of the multiple.
_MULTIPLES = frozenset(["mul", "mul_", "div", "div_", "_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_"])
_LINEAR = frozenset(
    ["neg", "neg_", "sum", "zero_", "embedding_dense_backward", "_foreach_neg", "_foreach_neg_", "_foreach_zero_"]
)


def has_parts(meta: Meta) -> bool:
    """Returns whether any placement is partial."""
    return any(placement.is_partial() for placement in meta.placements)


def summed(placements: Placements) -> Placements:
    """Returns the placements after a reduction."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def carries_parts(operation: Operation) -> bool:
    """Returns whether the operation, run on each rank's parts, gives parts of its result.

    PyTorch's rules wrongly accept more operations: `fill_` would write the value on each rank, `1 - x` would count the
    one once for each.
    """
    metas, packet = operation.metas, operation.packet
    alike = all(meta.placements == metas[0].placements for meta in metas)
    if operation.func.is_view or packet in _MOVES:
        return alike and operation.func is not torch.ops.aten.view.dtype  # which depends on bits
    if not all(map(_adds_up, metas)):
        return False
    dtype = operation.argument("dtype")
    if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point and metas[0].dtype.is_floating_point):
        return False  # each part would be rounded
    if packet == "_to_copy":
        return True
    if packet in _SUMS:
        numbers = any(isinstance(argument, int | float | complex) for argument in operation.args)
        return alike and not numbers and "Scalar" not in operation.name and "Tensor_mode" not in operation.name
    if packet in _MULTIPLES:
        first = operation.args[0]
        own = {
            slot.register for slot in (first if isinstance(first, list | tuple) else [first]) if isinstance(slot, Slot)
        }
        factors = [meta for register, meta in enumerate(metas) if register not in own]
        return not any(map(has_parts, factors)) and operation.kwargs.get("rounding_mode") is None
    return packet in _LINEAR


def _adds_up(meta: Meta) -> bool:
    """Returns whether all partial placements are sums of numbers, not of bools."""
    parts = [placement for placement in meta.placements if placement.is_partial()]
    return all(type(part) is Partial and part.is_partial("sum") for part in parts) and not (
        parts and meta.dtype == torch.bool
    )


_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "dimension", "axis", "start_dim", "end_dim"})
# These count the dimensions of their result, one more than their input's.
_ONE_MORE = frozenset({"unsqueeze", "stack", "diag_embed"})
# A dimension of -1 has another meaning here.
_NOT_COUNTED = frozenset({"weight_norm", "norm_except_dim"})
# Positions along the dimension `dim`.
_POSITION = {"select": ("index",), "slice": ("start", "end"), "narrow": ("start",)}
_FORMS = ("_copy", "_scatter", "_backward")  # of views

Shape = Callable[[object], Sequence[int] | None]


def counted_from_front(
    func: torch._ops.OpOverload, args: Sequence[object], kwargs: dict[str, object], shape: Shape
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Returns the arguments with negative dimensions and positions replaced; None if there are none.

    `shape` returns the shape of a tensor's placeholder, and None for other values. Values out of range are kept, so
    that the operation itself rejects them.
    """
    named, packet = func._schema.arguments, _plain(func._schema.name.partition("::")[2])
    values = {argument.name: value for argument, value in zip(named, args, strict=False)} | kwargs
    names = [name for name in values if name in _DIMS]
    if not names or packet in _NOT_COUNTED:
        return None
    sizes = _sizes(values, shape)
    if sizes is None:
        return None
    rank = len(sizes) + (packet in _ONE_MORE)
    changed: dict[str, object] = {}
    for name in names:
        counted = _counted_dim(values[name], max(rank, 1))
        if counted != values[name]:
            changed[name] = counted
    dim = changed.get("dim", values.get("dim", 0))
    if type(dim) is int and 0 <= dim < len(sizes):
        for name in _POSITION.get(packet, ()):
            counted = _counted_position(values.get(name), sizes[dim], exact=name == "index")
            if counted != values.get(name):
                changed[name] = counted
    if not changed:
        return None
    new_args = tuple(changed.get(argument.name, value) for argument, value in zip(named, args, strict=False))
    return new_args, {name: changed.get(name, value) for name, value in kwargs.items()}


def _sizes(arguments: dict[str, object], shape: Shape) -> Sequence[int] | None:
    """Returns the sizes in which dimensions are counted: of the tensor, or of the tensor of a gradient."""
    for name in ("input_sizes", "self_sizes"):
        sizes = arguments.get(name)
        if isinstance(sizes, list | tuple):
            return list(sizes)
    for value in arguments.values():
        value_shape = shape(value)
        if value_shape is not None:
            return value_shape
        if isinstance(value, list | tuple):
            several = [sizes for sizes in map(shape, value) if sizes is not None]
            if several:  # `cat` also takes empty tensors of one dimension
                return max(several, key=len)
    return None


def _plain(packet: str) -> str:
    """Returns `slice` for `slice_backward`, `stack` for `_stack`: the operation with these dimensions and positions."""
    packet = packet.removesuffix("_").removeprefix("_")
    for form in _FORMS:
        packet = packet.removesuffix(form)
    return packet


def _counted_dim(value: object, rank: int) -> object:
    if type(value) is int:
        return value + rank if -rank <= value < 0 else value
    if isinstance(value, list | tuple):
        return type(value)([_counted_dim(item, rank) for item in value])
    return value


def _counted_position(value: object, size: int, *, exact: bool) -> object:
    """Returns a position counted from the front; ends of a slice are clamped."""
    if type(value) is not int:
        return value
    if exact:
        return value + size if -size <= value < 0 else value
    return min(max(value + size if value < 0 else value, 0), size)
