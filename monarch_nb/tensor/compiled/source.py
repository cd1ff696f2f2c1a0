"""A program as Python source: operations on this rank's shards, one line or a few for each, and `del` after last use.

The controller has computed all placements, so that the source needs DTensors only for operations that require them.
Registers are `r`, temporaries of an operation `t`, DTensors `d`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from monarch_nb.tensor.commands import Define, Making
from monarch_nb.tensor.compiled.program import Program, ProgramOperation
from monarch_nb.tensor.propagation import (
    Call,
    Finish,
    LocalStep,
    Meta,
    Placements,
    Redistribute,
    Scalar,
    Slot,
    Write,
    overload,
    split_exchanges,
    together,
)

_BY_VALUE = frozenset({"operation", "seed", "exchange", "finish", "move"})
_VARIABLE = re.compile(r"\b[rtd]\d+\b")


class Constant(NamedTuple):
    """Meaning of a name in the source; `kind` says how a worker converts the value."""

    kind: str  # operation, spec, exchange, finish, move, redistribution, value, maker, part, seed
    value: Any


@dataclass(frozen=True)
class FunctionSource:
    """Lines of the body of a function, each with the operation of the program that it belongs to."""

    lines: tuple[str, ...]
    operations: tuple[int, ...]
    constants: dict[str, Constant]
    inputs: int
    results: tuple[str, ...]

    @property
    def text(self) -> str:
        """Source of the function of the shards of the inputs and the seed."""
        inputs = "".join(f"r{at}, " for at in range(self.inputs))
        head = ["def run(inputs, seed):", f"{inputs}= inputs" if inputs else "", "del inputs"]
        return "\n ".join([*head, *self.lines, f"return [{', '.join(self.results)}]\n"])

    @property
    def first_line(self) -> int:
        """Line number of the first of `lines` in the text, counted from 1."""
        return 4


def source_of(program: Program) -> FunctionSource:
    """The source of a program."""
    return _Writer(program).finished()


def variables(line: str) -> list[str]:
    """The registers in a line."""
    return _VARIABLE.findall(line)


class _Writer:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._lines: list[str] = []
        self._operations: list[int] = []
        self._constants: dict[str, Constant] = {}
        self._names: dict[tuple[str, object], str] = {}
        self._metas: dict[str, Meta] = {f"r{at}": meta for at, meta in enumerate(program.metas)}
        # Exchanges that are under way: along which mesh dimension, and of which operation.
        self._begun: dict[str, tuple[int, int]] = {}
        self._own = 0
        self._at = 0

    def finished(self) -> FunctionSource:
        for at, operation in enumerate(self._program.operations):
            self._at = at
            self._write(operation)
        results = tuple(f"r{at}" for at in self._program.results)
        for name in tuple(self._begun):
            self._end(name)
        self._drop(results)
        return FunctionSource(
            tuple(self._lines), tuple(self._operations), self._constants, len(self._program.inputs), results
        )

    def _write(self, operation: ProgramOperation) -> None:
        action = operation.action
        if isinstance(action, Define):
            if action.program.seeded is not None:
                self._seed(action.program.seeded, operation.drawn)
            self._define(action, operation)
            return
        if isinstance(action, Making):
            if action.seeded is not None:
                self._seed(action.seeded, operation.drawn)
            self._line(f"r{operation.results[0]} = {self._constant('maker', action)}()")
        else:
            self._line(f"r{operation.results[0]} = {self._constant('part', action)}.clone()")

    def _seed(self, dims: tuple[int, ...], drawn: int) -> None:
        self._line(f"{self._constant('seed', dims)}(seed, {drawn})")

    def _define(self, action: Define, operation: ProgramOperation) -> None:
        names = {at: f"r{register}" for at, register in enumerate(operation.tensors)}
        renamed = []
        for local, register in zip(action.program.results, operation.results, strict=True):
            if local in names:
                renamed.append((register, names[local]))
            else:
                names[local] = f"r{register}"
        numbers = operation.floats

        def written(value: object, sharded: bool) -> str:
            if isinstance(value, Slot):
                name = names[value.register]
                return self._as_sharded(name) if sharded else self._as_shard(name)
            if isinstance(value, Scalar):
                return repr(numbers[value.index]) if _is_plain(numbers[value.index]) else self._number(value, numbers)
            if isinstance(value, list | tuple) and _holds(value):
                return f"[{', '.join(written(each, sharded) for each in value)}]"
            return self._value(value)

        for steps in together(action.program.steps):
            match step := steps[0]:
                case LocalStep() | Call():
                    sharded = isinstance(step, Call)
                    given = [written(value, sharded) for value in step.args]
                    given += [f"{name}={written(value, sharded)}" for name, value in step.kwargs.items()]
                    call = f"{self._constant('operation', step.operation)}({', '.join(given)})"
                    self._call(step, call, names)
                case Redistribute():
                    self._redistribute([each for each in steps if isinstance(each, Redistribute)], names)
                case Finish():
                    finish = self._constant("finish", (step.dims, step.meta.stride))
                    out = self._named(names, step.out)
                    self._metas[out] = step.meta
                    self._line(f"{out} = {finish}({self._as_shard(names[step.source])})")
                case Write():
                    target, source = self._as_shard(names[step.target]), self._as_shard(names[step.source])
                    self._line(f"{target}.copy_({source})")
        for register, name in renamed:
            self._line(f"r{register} = {self._as_shard(name)}")

    def _call(self, step: LocalStep | Call, call: str, names: dict[int, str]) -> None:
        """Writes a call and the assignment of its results."""
        kept = [(at, register) for at, register in enumerate(step.out) if register is not None]
        if not kept:
            self._line(call)
            return
        sharded = isinstance(step, Call)
        if isinstance(step, LocalStep):
            for at, register in kept:
                meta = step.metas[at]
                assert meta is not None
                self._metas[self._named(names, register)] = meta
        returned = _returned(step.operation)
        if returned == "one" and not sharded:
            self._line(f"{names[kept[0][1]]} = {call}")
            return
        result = self._fresh("t")
        self._line(f"{result} = leaves({call})" if returned == "nested" else f"{result} = {call}")
        for at, register in kept:
            value = result if returned == "one" else f"{result}[{at}]"
            if sharded and register not in names:  # kept whole: what it stands for may be more than its meta says
                names[register] = self._fresh("d")
                self._line(f"{names[register]} = {value}")
            else:
                self._line(f"{names[register]} = {value}{'._local_tensor' if sharded else ''}")

    def _redistribute(self, steps: Sequence[Redistribute], names: dict[int, str]) -> None:
        """Writes redistributions. All exchanges of a kind are one collective, which runs beside what follows."""

        def placements(step: Redistribute) -> Placements | None:
            source = names[step.source]
            return None if source.startswith("d") else self._metas[source].placements

        moves, exchanges = split_exchanges(steps, placements)
        for step in steps:
            self._metas[self._named(names, step.out)] = step.meta
        for step in moves:
            source, out = names[step.source], names[step.out]
            if source.startswith("d"):
                self._line(f"{out} = {self._constant('redistribution', step.meta)}({source})._local_tensor")
            else:
                self._line(f"{out} = {self._constant('move', (self._metas[source], step.meta))}({source})")
        for (dim, how, _, is_pending), alike in exchanges.items():
            sources = ", ".join(names[step.source] for step, _ in alike)
            results = [names[step.out] for step, _ in alike]
            exchange = self._constant("exchange", (dim, how, tuple(axis for _, axis in alike)))
            self._line(f"{', '.join(results)}, = {exchange}([{sources}])")
            if not is_pending:
                self._begun |= dict.fromkeys(results, (dim, self._at))

    def _as_shard(self, name: str) -> str:
        return f"{name}._local_tensor" if name.startswith("d") else name

    def _as_sharded(self, name: str) -> str:
        if name.startswith("d"):
            return name
        return f"sharded({name}, {self._constant('spec', self._metas[name])})"

    def _named(self, names: dict[int, str], register: int) -> str:
        if register not in names:
            names[register] = self._fresh("t")
        return names[register]

    def _fresh(self, kind: str) -> str:
        self._own += 1
        return f"{kind}{self._own}"

    def _number(self, value: Scalar, numbers: Sequence[float]) -> str:
        return self._constant("value", numbers[value.index])

    def _value(self, value: object) -> str:
        if value is None or type(value) in (bool, int) or (type(value) is float and _is_plain(value)):
            return repr(value)
        return self._constant("value", value)

    def _constant(self, kind: str, value: object) -> str:
        key = (kind, value if kind in _BY_VALUE else id(value))
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"k{len(self._constants)}"
            self._constants[name] = Constant(kind, value)
        return name

    def _line(self, text: str) -> None:
        if self._begun:
            for name in variables(text):
                if name in self._begun:
                    self._end(name)
        self._lines.append(text)
        self._operations.append(self._at)

    def _end(self, name: str) -> None:
        """Waits for an exchange just before its first use, so that it overlaps with other operations."""
        dim, operation = self._begun.pop(name)
        finish = self._constant("finish", ((dim,), self._metas[name].stride))
        self._lines.append(f"{name} = {finish}({name})")
        self._operations.append(operation)

    def _drop(self, kept: Iterable[str]) -> None:
        """Adds `del` where a register is used for the last time."""
        last = {f"r{at}": -1 for at in range(len(self._program.inputs))}
        for at, line in enumerate(self._lines):
            last.update(dict.fromkeys(variables(line), at))
        dying: dict[int, list[str]] = {}
        for name, at in last.items():
            if name not in kept and at >= 0:
                dying.setdefault(at, []).append(name)
        self._lines = [
            f"{line}; del {', '.join(dying[at])}" if at in dying else line for at, line in enumerate(self._lines)
        ]


def _returned(operation: str) -> str:
    """Kind of results: "one" tensor, "several", or "nested" lists."""
    returns = overload(operation)._schema.returns
    if any(isinstance(one.type, torch.ListType) for one in returns):
        return "several" if len(returns) == 1 else "nested"
    return "one" if len(returns) == 1 else "several"


def _is_plain(number: float) -> bool:
    return number == number and number not in (float("inf"), float("-inf"))


def _holds(value: object) -> bool:
    return isinstance(value, Slot | Scalar) or (isinstance(value, list | tuple) and any(map(_holds, value)))
