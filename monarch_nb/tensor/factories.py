"""Tensors made of nothing on a mesh: by its own methods, and by PyTorch's functions with `device="mesh"`."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.commands import Making, Revive
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.origin import place
from monarch_nb.tensor.propagation import Meta, Placements
from monarch_nb.tensor.stream import Stream

aten = torch.ops.aten

# Each element is like any other, or random: a part is made as the whole would be. Their first argument is the size.
_IN_PARTS = frozenset(
    {
        "aten.zeros.default",
        "aten.ones.default",
        "aten.full.default",
        "aten.empty.memory_format",
        "aten.rand.default",
        "aten.randn.default",
    }
)
_ELSEWHERE = ("device", "layout", "pin_memory", "generator")  # what says nothing about the values


def make(
    stream: Stream, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], placements: Placements
) -> MeshTensor:
    """The tensor that an operation makes of its arguments alone, placed so. Nothing of it is made here."""
    where = place()
    kwargs = {name: value for name, value in kwargs.items() if value is not None and name not in _ELSEWHERE}
    with torch.utils._python_dispatch._disable_current_modes():
        shown = operation(*args, **kwargs, device="meta")
    name = str(operation)
    in_parts = name in _IN_PARTS
    meta = Meta.of(stream.layout, shown.shape, shown.dtype, placements)
    seeded: tuple[int, ...] | None = None
    if torch.Tag.nondeterministic_seeded in operation.tags:
        seeded = tuple(dim for dim, one in enumerate(placements) if in_parts and not one.is_replicate())
    stream.come_back()
    number = _making(stream, Making(0, name, tuple(args), kwargs, meta, in_parts, seeded))
    reference = stream.hold(meta, where)
    command = (number, reference.number) if seeded is None else (number, stream.draw(), reference.number)
    stream.issue(command, where)
    return MeshTensor(meta, reference)


def refill(tensor: MeshTensor) -> None:
    """For whoever writes to all of a tensor next: where its contents are lost, it has new memory from now on.

    One whose memory something else shows has not, unless all of that is gone: it would not be theirs any more.
    """
    reference = tensor.reference
    stream, number = reference.stream, reference.number
    may_be_lost = stream.has_failed and stream.watcher is None  # a step that is captured is taken as it is
    if number in stream.held.gone or (may_be_lost and stream.held.is_alone(reference)):
        stream.tell(Revive(tensor.meta, number))
        stream.held.gone.pop(number, None)


@contextmanager
def refilling(stream: Stream, tensors: Collection[MeshTensor]) -> Iterator[None]:
    """Around what reads values into all of these tensors: what is gone of them has new memory for that.

    If it fails, that is gone as before.
    """
    gone = stream.held.gone
    before = {one.reference.number: gone[one.reference.number] for one in tensors if one.reference.number in gone}
    for tensor in tensors:
        refill(tensor)
    try:
        yield
    except DeviceMeshError:
        raise
    except BaseException:
        stream.held.gone.update(before)  # what was read of it is not the whole
        raise


def _making(stream: Stream, told: Making) -> int:
    """The number by which workers know it."""
    key = (told.operation, repr(told.args), repr(sorted(told.kwargs.items())), told.made, told.in_parts)
    number = stream.makings.find(key)
    if number is None:
        number = stream.makings.free()
        stream.tell_plan(replace(told, number=number))
        stream.makings.told(key, number)
    return number


def size_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """The size that `f(2, 3)` or `f((2, 3))` means."""
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    sizes = tuple(int(one) for one in shape)
    if math.prod(sizes) < 0 or any(one < 0 for one in sizes):
        raise ValueError(f"a tensor cannot have the shape {sizes}")
    return sizes
