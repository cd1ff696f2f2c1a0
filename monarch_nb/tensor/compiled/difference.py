"""In what two runs of a step differ, in words: only what is the same twice can be compiled."""

from dataclasses import dataclass

import torch

from monarch_nb.tensor.commands import Define
from monarch_nb.tensor.compiled.program import Operation, Program, Sent, Told


@dataclass(frozen=True)
class Difference:
    """The first one: at which operation of the later run, and what it is.

    `scalars` is not empty where runs differ in numbers alone: (operation, which of its numbers, before, now) for each.
    """

    at: int | None
    text: str
    scalars: tuple[tuple[int, int, float, float], ...] = ()


def difference(before: Program, now: Program) -> Difference | None:
    """In what two programs differ; None where they are the same."""
    for at, (one, other) in enumerate(zip(before.operations, now.operations, strict=False)):
        text = _between(one, other)
        if text:
            return Difference(at, text)
    lengths = len(before.operations), len(now.operations)
    if lengths[0] != lengths[1]:
        last = min(lengths)
        longer = now if lengths[1] > lengths[0] else before
        missing = "more" if longer is now else "no longer"
        text = f"{lengths[0]} operations before and {lengths[1]} now: {longer.operations[last].name} {missing}"
        return Difference(last if longer is now else None, text)
    scalars = changing(before, now)
    if scalars:
        at, _, was, value = scalars[0]
        others = f" (and {len(scalars) - 1} more)" if len(scalars) > 1 else ""
        text = f"{now.operations[at].name} takes the number {was!r} before and {value!r} now{others}"
        return Difference(at, text, scalars)
    if before.inputs != now.inputs:
        return Difference(None, "it uses tensors of other shapes, types or placements")
    if before.results != now.results:
        return Difference(None, f"it leaves {len(before.results)} tensors before and {len(now.results)} now, or others")
    return None


def changing(before: Program, now: Program) -> tuple[tuple[int, int, float, float], ...]:
    """The scalar slots: numbers that two runs of the same operations do not share."""
    return tuple(
        (at, place, was, value)
        for at, (one, other) in enumerate(zip(before.operations, now.operations, strict=True))
        for place, (was, value) in enumerate(zip(one.floats, other.floats, strict=True))
        if was != value and not (was != was and value != value)
    )


def _between(one: Operation, other: Operation) -> str:
    if one.name != other.name:
        return f"{one.name} before and {other.name} now"
    if not _same(one.told, other.told):
        return f"{_arguments(one.told)} before and {_arguments(other.told)} now"
    if one.tensors != other.tensors:
        return f"{one.name} takes another tensor than before"
    if one.drawn != other.drawn:
        return f"{one.name} draws other random numbers than before"
    if len(one.floats) != len(other.floats):
        return f"{one.name} takes {len(one.floats)} numbers before and {len(other.floats)} now"
    return ""


def _same(one: Told, other: Told) -> bool:
    if isinstance(one, Define) and isinstance(other, Define):
        return one is other or one == other
    if isinstance(one, Sent) and isinstance(other, Sent):
        return one.made == other.made and torch.equal(one.tensor, other.tensor)
    if type(one) is not type(other):
        return False
    return _arguments(one) == _arguments(other)


def _arguments(told: Told) -> str:
    """A command in words; those of one kind are the same where these are."""
    match told:
        case Define():
            shapes = ", ".join(f"{tuple(meta.shape)}" for meta in told.made)
            return f"{told.operation} (giving {shapes or 'nothing'})"
        case Sent():
            return f"a local tensor of shape {tuple(told.tensor.shape)} sent to the mesh"
    args = ", ".join([*map(repr, told.args), *(f"{name}={value!r}" for name, value in sorted(told.kwargs.items()))])
    return f"{told.operation}({args}) giving {told.made} in parts {told.in_parts}, {told.seeded}"
