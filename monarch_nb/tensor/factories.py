"""Tensor factories on a mesh: its own methods, and PyTorch's functions with `device="mesh"`."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.commands import Making, Revive
from monarch_nb.tensor.errors import call_site
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import Meta, Placements
from monarch_nb.tensor.references import UNSENT
from monarch_nb.tensor.stream import Stream

aten = torch.ops.aten

# All elements are equal or random, so that a part is created like the whole. The first argument is the size.
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
_IGNORED = ("device", "layout", "pin_memory", "generator")  # a generator gives the seed


def make(
    stream: Stream, operation: OpOverload, args: Sequence[object], kwargs: dict[str, Any], placements: Placements
) -> MeshTensor:
    """Issues an operation without tensor inputs, and returns the handle of its result. Allocates nothing here."""
    site, generator = call_site(), kwargs.get("generator")
    kwargs = {name: value for name, value in kwargs.items() if value is not None and name not in _IGNORED}
    with torch.utils._python_dispatch._disable_current_modes():
        result = operation(*args, **kwargs, device="meta")
    if any(argument.name == "dtype" for argument in operation._schema.arguments):
        kwargs["dtype"] = result.dtype  # the default one of ranks may differ
    name = str(operation)
    in_parts = name in _IN_PARTS
    meta = Meta.of(stream.layout, result.shape, result.dtype, placements)
    seeded: tuple[int, ...] | None = None
    if torch.Tag.nondeterministic_seeded in operation.tags:
        is_divided = in_parts or meta.is_own
        seeded = tuple(dim for dim, placement in enumerate(placements) if is_divided and not placement.is_replicate())
    stream.resume_if_healed()
    number = _define(stream, Making(0, name, tuple(args), kwargs, meta, in_parts, seeded))
    reference = stream.hold(meta, site)
    if seeded is None:
        stream.issue((number, reference.number), site)
    else:
        stream.issue((number, stream.draws.next(stream, generator), reference.number), site)
    return MeshTensor(meta, reference)


def refill(tensor: MeshTensor) -> None:
    """Allocates a tensor whose contents are lost, before all of it is overwritten.

    Leaves out a tensor that shares its memory with others, unless all of them are lost, since the new memory would not
    be shared.
    """
    reference = tensor.reference
    stream, number = reference.stream, reference.number
    may_be_lost = stream.has_failed and stream.watcher is None  # a captured step must not contain it
    if number in stream.held.lost or (may_be_lost and stream.held.is_alone(reference)):
        stream.issue_object(Revive(tensor.meta, number))
        reference.writes.written = UNSENT  # the value until it is overwritten
        stream.held.lost.pop(number, None)


@contextmanager
def refilling(stream: Stream, tensors: Collection[MeshTensor]) -> Iterator[None]:
    """Surrounds reading values into all of these tensors, and allocates those whose contents are lost.

    After an error their contents are lost, as before.
    """
    lost = stream.held.lost
    numbers = [tensor.reference.number for tensor in tensors]
    before = {number: lost[number] for number in numbers if number in lost}
    for tensor in tensors:
        refill(tensor)
    try:
        yield
    except DeviceMeshError:
        raise
    except BaseException:
        stream.held.lost.update(before)  # only a part of the values was read
        raise


def _define(stream: Stream, making: Making) -> int:
    """Returns the number of a factory plan, after sending it if the workers do not store it."""
    key = (making.operation, repr(making.args), repr(sorted(making.kwargs.items())), making.made, making.in_parts)
    number = stream.makings.find(key)
    if number is None:
        number = stream.makings.next_number()
        stream.define(replace(making, number=number))
        stream.makings.add(key, number)
    return number


def size_of(shape: Sequence[Any]) -> tuple[int, ...]:
    """Returns the size of `f(2, 3)` or `f((2, 3))`."""
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    sizes = tuple(int(size) for size in shape)
    if math.prod(sizes) < 0 or any(size < 0 for size in sizes):
        raise ValueError(f"a tensor cannot have the shape {sizes}")
    return sizes
