"""The commands of a step with tensors renamed to registers, so that they are the same on each run."""

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
    """An operation as a step issued it, with tensors by number. `drawn` counts random operations of the step so far."""

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
        """Name such as `aten.add.Tensor`."""
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
        found = [*self.inputs]
        for operation in self.operations:
            made = operation.action.made
            found += made if isinstance(made, tuple) else (made,)
        return found


@dataclass(frozen=True)
class Trace:
    """Defines a program. `fixed` are the tensors of its last inputs; the first inputs are passed with each call."""

    number: int
    program: Program
    fixed: tuple[int, ...]
    backend: str


def renamed(
    issued: Iterable[Issued],
    given: Sequence[int],
    results: Sequence[int],
    metas: Mapping[int, Meta],
    written: Container[int],
) -> tuple[Program, tuple[int, ...]]:
    """Builds the program of a step; also returns the numbers of the tensors that it uses beside its arguments.

    `given` are the tensors that are passed with each call. Inputs are these, then the other tensors in the order of
    use. `metas` has the metas of both, `written` those that the step writes to.
    """
    steps = tuple(issued)
    # An argument that is passed twice has the register of its first position.
    arguments = dict(reversed([(number, register) for register, number in enumerate(given)]))
    made, used = set[int](), dict[int, None]()
    for step in steps:
        used |= dict.fromkeys(number for number in step.tensors if number not in made)
        made.update(step.results)  # which may be a view that was there before, and is made again
    fixed = tuple(number for number in used if number not in arguments)
    registers = {**arguments, **{number: register for register, number in enumerate(fixed, len(given))}}
    next_register = len(given) + len(fixed)
    operations = []
    for step in steps:
        tensors = tuple(registers[number] for number in step.tensors)
        for number in step.results:
            registers[number] = next_register
            next_register += 1
        into = tuple(registers[number] for number in step.results)
        operations.append(ProgramOperation(step.action, tensors, step.floats, into, step.drawn))
    numbers = (*given, *fixed)
    changed = tuple(register for register, number in enumerate(numbers) if number in written)
    inputs = tuple(metas[number] for number in numbers)
    return Program(inputs, tuple(operations), tuple(registers[number] for number in results), changed), fixed
