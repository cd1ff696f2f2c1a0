"""The commands of a step with tensors renamed to registers, so that they are comparable between runs.

Only steps with equal runs can be compiled.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from monarch_nb.tensor.commands import Define, Making
from monarch_nb.tensor.propagation import Meta


@dataclass(frozen=True, eq=False)
class Sent:
    """A local tensor that a step sent to the mesh, and its placement there."""

    tensor: torch.Tensor
    made: Meta


Action = Define | Making | Sent


@dataclass(frozen=True)
class Issued:
    """An operation issued by a step, with tensors by number. `drawn` counts random operations of the step so far."""

    action: Action
    tensors: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    results: tuple[int, ...] = ()
    drawn: int = 0


@dataclass(frozen=True)
class ProgramOperation:
    """An operation on registers; see `Issued`."""

    action: Action
    tensors: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    results: tuple[int, ...] = ()
    drawn: int = 0

    @property
    def name(self) -> str:
        """The name, such as `aten.add.Tensor`."""
        return "distribute" if isinstance(self.action, Sent) else self.action.operation


@dataclass(frozen=True)
class Program:
    """Operations on registers. Registers are numbered in order: inputs first, then results of the operations.

    `results` are the registers of new tensors that outlive the step. `written` are those of inputs whose elements
    change, also through views of them.
    """

    inputs: tuple[Meta, ...]
    operations: tuple[ProgramOperation, ...]
    results: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def metas(self) -> list[Meta]:
        """The meta of each register."""
        metas = [*self.inputs]
        for operation in self.operations:
            results = operation.action.made
            metas += results if isinstance(results, tuple) else (results,)
        return metas


@dataclass(frozen=True)
class Trace:
    """Defines a program. `fixed` are the tensors of its last inputs; the first inputs are passed with each call."""

    number: int
    program: Program
    fixed: tuple[int, ...]
    backend: str


def renamed(
    issued: Iterable[Issued],
    arguments: Sequence[int],
    results: Sequence[int],
    metas: Mapping[int, Meta],
    written: Container[int],
) -> tuple[Program, tuple[int, ...]]:
    """Builds the program of a step; also returns the numbers of the tensors that it uses beside its arguments.

    `arguments` are the tensors that are passed with each call. Inputs are these, then the other tensors in the order of
    use. `metas` has the metas of both, `written` the tensors that the step writes to.
    """
    steps = tuple(issued)
    # An argument that is passed twice has the register of its first position.
    argument_registers = dict(reversed([(number, register) for register, number in enumerate(arguments)]))
    outputs, used = set[int](), dict[int, None]()
    for step in steps:
        used |= dict.fromkeys(number for number in step.tensors if number not in outputs)
        outputs.update(step.results)  # which may include existing views that are made again
    fixed = tuple(number for number in used if number not in argument_registers)
    registers = {**argument_registers, **{number: register for register, number in enumerate(fixed, len(arguments))}}
    next_register = len(arguments) + len(fixed)
    operations = []
    for step in steps:
        tensors = tuple(registers[number] for number in step.tensors)
        for number in step.results:
            registers[number] = next_register
            next_register += 1
        into = tuple(registers[number] for number in step.results)
        operations.append(ProgramOperation(step.action, tensors, step.floats, into, step.drawn))
    numbers = (*arguments, *fixed)
    changed = tuple(register for register, number in enumerate(numbers) if number in written)
    inputs = tuple(metas[number] for number in numbers)
    return Program(inputs, tuple(operations), tuple(registers[number] for number in results), changed), fixed


@dataclass(frozen=True)
class RunDifference:
    """The first difference: index of the operation in the later run, and a text.

    `scalars` is not empty if the runs differ in numbers only: (operation, index of the number, before, now) for each.
    """

    index: int | None
    text: str
    scalars: tuple[tuple[int, int, float, float], ...] = ()


def difference(before: Program, now: Program) -> RunDifference | None:
    """Returns the first difference between two programs, or None."""
    for index, (old, new) in enumerate(zip(before.operations, now.operations, strict=False)):
        text = _operation_difference(old, new)
        if text:
            return RunDifference(index, text)
    lengths = len(before.operations), len(now.operations)
    if lengths[0] != lengths[1]:
        last = min(lengths)
        longer = now if lengths[1] > lengths[0] else before
        missing = "more" if longer is now else "no longer"
        text = f"{lengths[0]} operations before and {lengths[1]} now: {longer.operations[last].name} {missing}"
        return RunDifference(last if longer is now else None, text)
    scalars = changing(before, now)
    if scalars:
        index, _, was, value = scalars[0]
        rest = f" (and {len(scalars) - 1} more)" if len(scalars) > 1 else ""
        text = f"{now.operations[index].name} takes the number {was!r} before and {value!r} now{rest}"
        return RunDifference(index, text, scalars)
    if before.inputs != now.inputs:
        return RunDifference(None, "it uses tensors of other shapes, types or placements")
    if before.results != now.results:
        return RunDifference(
            None, f"it leaves {len(before.results)} tensors before and {len(now.results)} now, or others"
        )
    return None


def changing(before: Program, now: Program) -> tuple[tuple[int, int, float, float], ...]:
    """Returns the numbers in which two runs of the same operations differ."""
    return tuple(
        (index, position, was, value)
        for index, (old, new) in enumerate(zip(before.operations, now.operations, strict=True))
        for position, (was, value) in enumerate(zip(old.floats, new.floats, strict=True))
        if was != value and not (was != was and value != value)
    )


def _operation_difference(before: ProgramOperation, now: ProgramOperation) -> str:
    if before.name != now.name:
        return f"{before.name} before and {now.name} now"
    if not _is_same_action(before.action, now.action):
        return f"{_arguments(before.action)} before and {_arguments(now.action)} now"
    if before.tensors != now.tensors:
        return f"{before.name} takes another tensor than before"
    if before.drawn != now.drawn:
        return f"{before.name} draws other random numbers than before"
    if len(before.floats) != len(now.floats):
        return f"{before.name} takes {len(before.floats)} numbers before and {len(now.floats)} now"
    return ""


def _is_same_action(before: Action, now: Action) -> bool:
    if isinstance(before, Define) and isinstance(now, Define):
        return before is now or before == now
    if isinstance(before, Sent) and isinstance(now, Sent):
        return before.made == now.made and torch.equal(before.tensor, now.tensor)
    if type(before) is not type(now):
        return False
    return _arguments(before) == _arguments(now)


def _arguments(action: Action) -> str:
    """Returns the text of an action; equal for equal actions of a kind."""
    match action:
        case Define():
            shapes = ", ".join(f"{tuple(meta.shape)}" for meta in action.made)
            return f"{action.operation} (giving {shapes or 'nothing'})"
        case Sent():
            return f"a local tensor of shape {tuple(action.tensor.shape)} sent to the mesh"
    args = ", ".join([*map(repr, action.args), *(f"{name}={value!r}" for name, value in sorted(action.kwargs.items()))])
    return f"{action.operation}({args}) giving {action.made} in parts {action.in_parts}, {action.seeded}"
