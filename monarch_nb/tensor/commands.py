"""What travels to the workers of a mesh: operations as short runs of numbers, everything else as objects.

A batch is one list of numbers and the objects that its `OBJECT` commands take, in order. An operation is
`[plan, (seed), tensors…, floats…, results…]`: tensors by number, floats as they are. What the plan does with them, and
how many there are, was told once, in its `Define`. A tensor that nobody refers to any more is `[FREE, number]`, in the
same order, so that workers need no more memory than a program that runs locally. What is asked for comes back with the
answer to its batch.
"""

from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from monarch_nb.tensor.propagation import Layout, Meta, Program
from monarch_nb.wire import msgpack_decoder

OBJECT = -1  # the next of the batch's objects
FREE = -2
WHOLE = -3  # asks for the whole of a tensor: `[WHOLE, number]`, rank 0 of the mesh answers
NUMBER = -4  # asks for its one element, likewise
SHARDS = -5  # asks for each rank's part of it
REPLAY = -6  # runs a compiled step: `[REPLAY, program, operations, inputs, outputs, seed, inputs…, outputs…]`
FIRST_MAKING = -16  # plans that make something of nothing count down from here, those of operations up from 1
_MAKINGS = 1024  # plans of these that workers know; a new plan replaces the oldest

Number = int | float

encode_numbers = msgspec.msgpack.Encoder().encode
decode_numbers = msgpack_decoder(list[Number]).decode


@dataclass(frozen=True)
class Open:
    """The first command of a stream: the ranks of the world that its mesh is made of, row by row."""

    layout: Layout
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Define:
    """Tells what a plan does. `scalars` floats come with each call; `made` are the metas of what it makes."""

    number: int
    operation: str
    program: Program
    scalars: int
    made: tuple[Meta, ...]
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Making:
    """Tells a plan that makes a tensor of nothing, placed as its meta says.

    With `in_parts` each worker makes no more than its own part: the first argument of the operation is the size.
    """

    number: int
    operation: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Meta
    in_parts: bool
    seeded: tuple[int, ...] | None = None  # the mesh dimensions along which ranks draw other numbers


@dataclass(frozen=True)
class Put:
    """A tensor of the controller, of which each worker keeps its part."""

    tensor: Any
    placements: tuple[Any, ...]
    result: int


@dataclass(frozen=True)
class Locals:
    """What each rank has of a tensor, in the order of ranks; equal ones are the same object."""

    tensors: tuple[Any, ...]
    made: Meta
    result: int


@dataclass(frozen=True)
class Revive:
    """Gives a tensor whose contents are lost new memory, for whoever writes to all of it next."""

    made: Meta
    result: int


@dataclass(frozen=True)
class Run:
    """Runs a function on each rank. Tensors of the mesh among its arguments come as the rank's part of them."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """Has each rank make its part of a tensor, by `function(part, *args)`: `part` has a slice for each dimension."""

    function: Any
    args: tuple[Any, ...]
    made: Meta
    result: int


@dataclass(frozen=True)
class TensorOf:
    """Stands for a tensor of the mesh in the arguments of a `Run`: a rank's part of it, or all of what a rank knows."""

    number: int
    sharded: bool = False  # comes as a DTensor


@dataclass(frozen=True)
class Cell:
    """What follows is of another cell of the program."""

    number: int


def nbytes_of(command: object) -> int:
    """Bytes of the local tensors that a command takes along."""
    match command:
        case Put():
            return int(command.tensor.nbytes)
        case Locals():
            return sum(each.nbytes for each in {id(one): one for one in command.tensors}.values())
    return 0


Command = Open | Define | Making | Put | Locals | Parts | Revive | Run | Cell


class Makings:
    """Which plans that make something of nothing the workers of a stream know, by what they make."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._keys: dict[int, object] = {}
        self._count = count()

    def find(self, key: object) -> int | None:
        """The number of a plan that workers know; None of another."""
        return self._numbers.get(key)

    def free(self) -> int:
        """A number for a new plan; the plan that had it before is forgotten."""
        number = FIRST_MAKING - next(self._count) % _MAKINGS
        self._numbers.pop(self._keys.pop(number, None), None)
        return number

    def told(self, key: object, number: int) -> None:
        """From now on, workers know the plan by the number."""
        self._numbers[key], self._keys[number] = number, key
