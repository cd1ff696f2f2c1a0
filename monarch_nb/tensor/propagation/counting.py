"""Dimensions and positions counted from the front, before any rule sees them.

`x.cumsum(-1)` and `x.cumsum(1)` are one operation. Sharding rules compare dimensions with those that are cut, and many
of them, PyTorch's own among them, compare the numbers as they were written.
"""

from collections.abc import Callable, Sequence

import torch

_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "dimension", "axis", "start_dim", "end_dim"})
# These count one dimension more than their input has: their result's.
_ONE_MORE = frozenset({"unsqueeze", "stack", "diag_embed"})
# A dimension of -1 means something else here.
_OTHERWISE = frozenset({"weight_norm", "norm_except_dim"})
# Positions along the dimension `dim`.
_POSITION = {"select": ("index",), "slice": ("start", "end"), "narrow": ("start",)}
_FORMS = ("_copy", "_scatter", "_backward")  # of views

Shape = Callable[[object], Sequence[int] | None]


def counted_from_front(
    func: torch._ops.OpOverload, args: Sequence[object], kwargs: dict[str, object], shape: Shape
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """The arguments with negative dimensions and positions replaced; None where there are none.

    `shape` gives that of what stands for a tensor, and None for anything else. What is out of range stays, so that the
    operation itself refuses it.
    """
    named, packet = func._schema.arguments, _plain(func._schema.name.partition("::")[2])
    given = {argument.name: value for argument, value in zip(named, args, strict=False)} | kwargs
    names = [name for name in given if name in _DIMS]
    if not names or packet in _OTHERWISE:
        return None
    sizes = _sizes(given, shape)
    if sizes is None:
        return None
    rank = len(sizes) + (packet in _ONE_MORE)
    changed: dict[str, object] = {}
    for name in names:
        found = _counted(given[name], max(rank, 1))
        if found != given[name]:
            changed[name] = found
    dim = changed.get("dim", given.get("dim", 0))
    if type(dim) is int and 0 <= dim < len(sizes):
        for name in _POSITION.get(packet, ()):
            found = _placed(given.get(name), sizes[dim], exact=name == "index")
            if found != given.get(name):
                changed[name] = found
    if not changed:
        return None
    new_args = tuple(changed.get(argument.name, value) for argument, value in zip(named, args, strict=False))
    return new_args, {name: changed.get(name, value) for name, value in kwargs.items()}


def _sizes(given: dict[str, object], shape: Shape) -> Sequence[int] | None:
    """Sizes in which dimensions are counted: of the tensor, or of that which a gradient belongs to."""
    for name in ("input_sizes", "self_sizes"):
        sizes = given.get(name)
        if isinstance(sizes, list | tuple):
            return list(sizes)
    for value in given.values():
        found = shape(value)
        if found is not None:
            return found
        if isinstance(value, list | tuple):
            several = [sizes for sizes in map(shape, value) if sizes is not None]
            if several:  # `cat` takes empty tensors of one dimension among others
                return max(several, key=len)
    return None


def _plain(packet: str) -> str:
    """`slice` for `slice_backward`, `stack` for `_stack`: the operation whose dimensions and positions these are."""
    packet = packet.removesuffix("_").removeprefix("_")
    for form in _FORMS:
        packet = packet.removesuffix(form)
    return packet


def _counted(value: object, rank: int) -> object:
    if type(value) is int:
        return value + rank if -rank <= value < 0 else value
    if isinstance(value, list | tuple):
        return type(value)([_counted(each, rank) for each in value])
    return value


def _placed(value: object, size: int, *, exact: bool) -> object:
    """A position counted from the front; ends of a slice are clamped."""
    if type(value) is not int:
        return value
    if exact:
        return value + size if -size <= value < 0 else value
    return min(max(value + size if value < 0 else value, 0), size)
