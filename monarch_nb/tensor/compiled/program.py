"""The commands of one step, with tensors renamed to registers: what is the same each time the step runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from monarch_nb.tensor.commands import Define, Making
from monarch_nb.tensor.propagation import Meta


@dataclass(frozen=True, eq=False)
class Sent:
    """A local tensor that a step sent to the mesh, and how it was placed."""

    tensor: torch.Tensor
    made: Meta


Told = Define | Making | Sent


@dataclass(frozen=True)
class Issued:
    """An operation as a step issued it: tensors by number. `drawn` counts random operations of the step up to it."""

    told: Told
    tensors: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    results: tuple[int, ...] = ()
    drawn: int = 0


@dataclass(frozen=True)
class Operation:
    """The same with registers."""

    told: Told
    tensors: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    results: tuple[int, ...] = ()
    drawn: int = 0

    @property
    def name(self) -> str:
        """As in `aten.add.Tensor`."""
        return "distribute" if isinstance(self.told, Sent) else self.told.operation


@dataclass(frozen=True)
class Program:
    """Operations on registers: the inputs' first, then one for each tensor that they make, in order.

    `results` are the registers of what is there afterwards and was not before.
    """

    inputs: tuple[Meta, ...]
    operations: tuple[Operation, ...]
    results: tuple[int, ...]

    @property
    def metas(self) -> list[Meta]:
        """What is known of each register."""
        found = [*self.inputs]
        for operation in self.operations:
            made = operation.told.made
            found += made if isinstance(made, tuple) else (made,)
        return found

    @property
    def written(self) -> tuple[int, ...]:
        """Registers of inputs that change in place."""
        found: dict[int, None] = {}
        for operation in self.operations:
            for at in operation.told.writes if isinstance(operation.told, Define) else ():
                if operation.tensors[at] < len(self.inputs):
                    found[operation.tensors[at]] = None
        return tuple(found)


@dataclass(frozen=True)
class Trace:
    """Tells a program. `fixed` are the tensors that its last inputs always are; the others come with each call."""

    number: int
    program: Program
    fixed: tuple[int, ...]
    backend: str


def renamed(
    issued: Iterable[Issued], given: Sequence[int], results: Sequence[int], metas: Mapping[int, Meta]
) -> tuple[Program, tuple[int, ...]]:
    """The program of a step, and the numbers of the tensors that it used without being given them.

    `given` are the tensors that may be others with each call; inputs are these, then those that were not given, in the
    order in which the step used them. `metas` knows all of both.
    """
    steps = tuple(issued)
    made = {number for one in steps for number in one.results}
    known = dict(reversed([(number, at) for at, number in enumerate(given)]))  # one given twice is where it came first
    fixed = tuple(dict.fromkeys(n for one in steps for n in one.tensors if n not in made and n not in known))
    registers = {**known, **{number: len(given) + at for at, number in enumerate(fixed)}}
    next_register = len(given) + len(fixed)
    operations = []
    for one in steps:
        tensors = tuple(registers[number] for number in one.tensors)
        for number in one.results:
            registers[number] = next_register
            next_register += 1
        into = tuple(registers[number] for number in one.results)
        operations.append(Operation(one.told, tensors, one.floats, into, one.drawn))
    inputs = tuple(metas[number] for number in (*given, *fixed))
    return Program(inputs, tuple(operations), tuple(registers[number] for number in results)), fixed
