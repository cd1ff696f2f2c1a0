"""Python source of a program: operations on this rank's shards, one or a few lines each, and `del` after last use.

The controller has computed all placements, so that the source needs DTensors only for operations that require them.
Registers are `r`, temporaries of an operation `t`, DTensors `d`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from monarch_nb.tensor.commands import Define, Making
from monarch_nb.tensor.compiled.program import Program, ProgramOperation
from monarch_nb.tensor.propagation import (
    GATHER,
    Call,
    Finish,
    LocalStep,
    Meta,
    Placements,
    Redistribute,
    Scalar,
    Slot,
    Write,
    grouped_steps,
    has_slot,
    overload,
    split_exchanges,
)

_BY_VALUE = frozenset({"operation", "seed", "exchange", "finish", "move"})
_VARIABLE = re.compile(r"\b[rtd]\d+\b")
# Lines before a collective that is begun early, bytes of their operands, and bytes that are exchanged.
_EARLY_LINES, _EARLY_SIZE, _EARLY_SUM = 16, 1 << 24, 1 << 16
_VIEWS = frozenset({"aten._unsafe_view.default"})  # which are not marked as such in their schemas
_SHARED_GATHER = 1 << 20  # bytes at most that one merged gather returns, since they are held for longer then
_SCALAR = 64  # bytes of operands up to which a line may wait


class Constant(NamedTuple):
    """The value of a name in the source; `kind` says how a worker converts it."""

    kind: str  # operation, spec, exchange, finish, move, redistribution, value, maker, part, seed
    value: Any


@dataclass(frozen=True)
class FunctionSource:
    """Lines of the body of a function, each with its operation of the program."""

    lines: tuple[str, ...]
    operations: tuple[int, ...]
    constants: dict[str, Constant]
    inputs: int
    results: tuple[str, ...]

    @property
    def text(self) -> str:
        """The source of the function of the shards of the inputs and the seed."""
        inputs = "".join(f"r{register}, " for register in range(self.inputs))
        head = ["def run(inputs, seed):", f"{inputs}= inputs" if inputs else "", "del inputs"]
        return "\n ".join([*head, *self.lines, f"return [{', '.join(self.results)}]\n"])

    @property
    def first_line(self) -> int:
        """The line number of the first of `lines` in the text, counted from 1."""
        return 4


@dataclass(frozen=True)
class _Line:
    """A line of an operation of the program.

    A "pure" one reads only its operands and changes nothing, and its results have new memory; the results of a "view"
    share the memory of its operands. `size` is the bytes of the largest of its operands and results.
    """

    text: str
    operation: int
    kind: Literal["pure", "view", "other"] = "other"
    size: int = 0

    @property
    def out(self) -> list[str]:
        """The registers that the line assigns."""
        return assigned(self.text)


@dataclass(frozen=True)
class _Exchange:
    """A collective that redistributes these registers along a mesh dimension; see `placing.exchanging`.

    The program itself waits for a `pending` one.
    """

    operation: int
    dim: int
    how: str
    axes: tuple[int, ...]
    sources: tuple[str, ...]
    out: tuple[str, ...]
    is_pending: bool

    def joined(self, other: "_Exchange") -> "_Exchange":
        return replace(
            self, axes=self.axes + other.axes, sources=self.sources + other.sources, out=self.out + other.out
        )

    def part(self, indices: Sequence[int]) -> "_Exchange":
        return replace(
            self,
            axes=tuple(self.axes[index] for index in indices),
            sources=tuple(self.sources[index] for index in indices),
            out=tuple(self.out[index] for index in indices),
        )


def source_of(program: Program) -> FunctionSource:
    """Returns the source of a program."""
    return _Writer(program).finished()


def variables(line: str) -> list[str]:
    """Returns the registers in a line."""
    return _VARIABLE.findall(line)


def assigned(line: str) -> list[str]:
    """Returns the registers that a line assigns."""
    before, assigns, _ = line.partition(" = ")
    return variables(before) if assigns else []


class _Writer:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._lines: list[_Line | _Exchange] = []
        self._constants: dict[str, Constant] = {}
        self._names: dict[tuple[str, object], str] = {}
        self._metas: dict[str, Meta] = {f"r{register}": meta for register, meta in enumerate(program.metas)}
        self._count = 0
        self._index = 0

    def finished(self) -> FunctionSource:
        for index, operation in enumerate(self._program.operations):
            self._index = index
            self._write(operation)
        inputs = {f"r{register}" for register in range(len(self._program.inputs))}
        constant = inputs - {f"r{register}" for register in self._program.written}
        aliases = _aliases(self._lines)
        changed = _changed(self._lines, aliases)
        lines = _gathered_together(self._lines, self._metas, aliases)
        lines = _exchanged_first(lines, self._metas, constant - changed, changed)
        finished = _waiting_last(lines, aliases, changed, self._finish, self._exchange)
        results = tuple(f"r{register}" for register in self._program.results)
        return FunctionSource(
            tuple(_with_deletions([line.text for line in finished], inputs, results)),
            tuple(line.operation for line in finished),
            self._constants,
            len(self._program.inputs),
            results,
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
        names = {index: f"r{register}" for index, register in enumerate(operation.tensors)}
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
            if isinstance(value, list | tuple) and has_slot(value):
                return f"[{', '.join(written(item, sharded) for item in value)}]"
            return self._value(value)

        for steps in grouped_steps(action.program.steps):
            match step := steps[0]:
                case LocalStep(operation="aten.ones_like.default", metas=(Meta(shape=()) as meta,)):
                    # The first gradient. It reads no value: the loss may still be pending.
                    of = f"dtype={self._value(meta.dtype)}, device={self._value(torch.device(meta.layout.device))}"
                    self._call(step, f"{self._constant('operation', 'aten.ones.default')}([], {of})", names)
                case LocalStep() | Call():
                    sharded = isinstance(step, Call)
                    arguments = [written(value, sharded) for value in step.args]
                    arguments += [f"{name}={written(value, sharded)}" for name, value in step.kwargs.items()]
                    call = f"{self._constant('operation', step.operation)}({', '.join(arguments)})"
                    self._call(step, call, names)
                case Redistribute():
                    self._redistribute([move for move in steps if isinstance(move, Redistribute)], names)
                case Finish():
                    finish = self._constant("finish", (step.dims, step.meta.stride))
                    out = self._named(names, step.out)
                    self._metas[out] = step.meta
                    self._line(f"{out} = {finish}({self._as_shard(names[step.source])})")
                case Write():
                    target, source = self._as_shard(names[step.target]), self._as_shard(names[step.source])
                    self._line(f"{target}.copy_({source})")
        for register, name in renamed:
            self._line(f"r{register} = {self._as_shard(name)}", "view")

    def _call(self, step: LocalStep | Call, call: str, names: dict[int, str]) -> None:
        """Writes a call and the assignment of its results."""
        results = [(index, register) for index, register in enumerate(step.out) if register is not None]
        sharded = isinstance(step, Call)
        kind = "other" if sharded else _kind_of(step.operation)
        if not results:
            self._line(call, kind)
            return
        if isinstance(step, LocalStep):
            for index, register in results:
                meta = step.metas[index]
                assert meta is not None
                self._metas[self._named(names, register)] = meta
        returned = _return_kind(step.operation)
        if returned == "one" and not sharded:
            self._line(f"{names[results[0][1]]} = {call}", kind)
            return
        result = self._fresh("t")
        self._line(f"{result} = leaves({call})" if returned == "nested" else f"{result} = {call}", kind)
        for index, register in results:
            value = result if returned == "one" else f"{result}[{index}]"
            if sharded and register not in names:  # kept whole: it may have more than its meta shows
                names[register] = self._fresh("d")
                self._line(f"{names[register]} = {value}")
            else:
                self._line(f"{names[register]} = {value}{'._local_tensor' if sharded else ''}", "view")

    def _redistribute(self, steps: Sequence[Redistribute], names: dict[int, str]) -> None:
        """Writes redistributions. All exchanges of a kind are one collective, which overlaps with later operations."""

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
        for (dim, how, _, is_pending), group in exchanges.items():
            sources = tuple(names[step.source] for step, _ in group)
            results = tuple(names[step.out] for step, _ in group)
            axes = tuple(axis for _, axis in group)
            self._lines.append(_Exchange(self._index, dim, how, axes, sources, results, is_pending))

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
        self._count += 1
        return f"{kind}{self._count}"

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

    def _line(self, text: str, kind: Literal["pure", "view", "other"] = "other") -> None:
        size = max((self._metas[name].nbytes for name in variables(text) if name in self._metas), default=0)
        self._lines.append(_Line(text, self._index, kind, size))

    def _exchange(self, exchange: _Exchange) -> _Line:
        name = self._constant("exchange", (exchange.dim, exchange.how, exchange.axes))
        return _Line(f"{', '.join(exchange.out)}, = {name}([{', '.join(exchange.sources)}])", exchange.operation)

    def _finish(self, name: str, exchange: _Exchange) -> _Line:
        finish = self._constant("finish", ((exchange.dim,), self._metas[name].stride))
        return _Line(f"{name} = {finish}({name})", exchange.operation)


def _gathered_together(
    lines: Sequence[_Line | _Exchange], metas: Mapping[str, Meta], aliases: Mapping[str, set[str]]
) -> list[_Line | _Exchange]:
    """Gathers small tensors together with earlier ones, if they exist by then and do not change in between.

    Layers of a small model are gathered by one collective, not by one each.
    """
    last: dict[str, int] = {}  # the last line that assigned a register, or may have changed its memory
    merged: dict[int, _Exchange] = {}
    first: dict[tuple[int, torch.dtype], int] = {}  # by mesh dimension and type, the collective that others join
    for index, line in enumerate(lines):
        if isinstance(line, _Line):
            changed = variables(line.text) if line.kind == "other" else line.out
            last.update(dict.fromkeys((alias for name in changed for alias in aliases.get(name, (name,))), index))
            continue
        last.update(dict.fromkeys(line.out, index))
        merged[index] = line
        if line.how != GATHER or line.is_pending:
            continue
        key = (line.dim, metas[line.out[0]].dtype)
        earlier = first.get(key)
        if earlier is not None and all(last.get(name, -1) < earlier for name in line.sources):
            joint = merged[earlier].joined(line)
            if sum(metas[name].nbytes for name in joint.out) <= _SHARED_GATHER:
                merged[earlier] = joint
                del merged[index]
                continue
        first[key] = index
    remaining = (line if isinstance(line, _Line) else merged.get(index) for index, line in enumerate(lines))
    return [line for line in remaining if line is not None]


def _exchanged_first(
    lines: Sequence[_Line | _Exchange], metas: Mapping[str, Meta], constant: set[str], changed: set[str]
) -> list[_Line | _Exchange]:
    """Moves to the front collectives that need only a few small operations on inputs that the program leaves unchanged.

    One example is the number of targets of a loss: the forward pass runs beside the collective.
    """
    needs: dict[str, frozenset[int]] = dict.fromkeys(constant, frozenset())  # lines that make a register
    for index, line in enumerate(lines):
        out = line.out
        if not isinstance(line, _Line) or line.kind == "other" or line.size > _EARLY_SIZE or changed.intersection(out):
            continue
        names = [name for name in variables(line.text) if name not in out]
        if all(name in needs for name in names):
            required = frozenset((index,)).union(*(needs[name] for name in names))
            if len(required) <= _EARLY_LINES:
                needs |= dict.fromkeys(out, required)
    first: set[int] = set()
    exchanges: list[_Line | _Exchange] = []
    rest: list[_Line | _Exchange] = []
    for line in lines:
        if not isinstance(line, _Exchange) or line.is_pending:
            rest.append(line)
            continue
        early = [index for index, name in enumerate(line.sources) if name in needs and metas[name].nbytes <= _EARLY_SUM]
        if early:
            first.update(*(needs[line.sources[index]] for index in early))
            exchanges.append(line.part(early))
        if len(early) < len(line.sources):
            rest.append(line.part([index for index in range(len(line.sources)) if index not in early]))
    moved = {id(lines[index]) for index in first}
    return [*(lines[index] for index in sorted(first)), *exchanges, *(line for line in rest if id(line) not in moved)]


def _waiting_last(
    lines: Iterable[_Line | _Exchange],
    aliases: Mapping[str, set[str]],
    changed: set[str],
    finish: Callable[[str, _Exchange], _Line],
    begin: Callable[[_Exchange], _Line],
) -> list[_Line]:
    """Waits for collectives as late as possible, so that they overlap with other operations.

    A small operation on their results waits with them until its own results are used. An operation that may write to
    what a collective reads runs after it.
    """
    exchanges: dict[str, _Exchange] = {}
    deferred: dict[str, _Line] = {}
    ordered: list[_Line] = []

    def settle(names: Iterable[str]) -> None:
        pending, due = [*names], set[str]()
        while pending:
            name = pending.pop()
            if (name in exchanges or name in deferred) and name not in due:
                due.add(name)
                pending += variables(deferred[name].text) if name in deferred else ()
        ordered.extend(finish(name, exchanges.pop(name)) for name in [*exchanges] if name in due)
        for name in [*deferred]:
            if name in due:
                ordered.append(deferred.pop(name))

    for line in lines:
        if isinstance(line, _Exchange):
            settle(line.sources)
            ordered.append(begin(line))
            if not line.is_pending:
                exchanges |= dict.fromkeys(line.out, line)
            continue
        names = variables(line.text)
        if line.kind == "other":
            memory = {alias for name in names for alias in aliases.get(name, (name,))}
            settle([out for out, exchange in exchanges.items() if memory.intersection(exchange.sources)])
        waits = line.kind == "pure" and any(name in exchanges or name in deferred for name in names)
        if waits and len(line.out) == 1 and line.size <= _SCALAR and not changed.intersection(names):
            deferred[line.out[0]] = line
        else:
            settle(names)
            ordered.append(line)
    settle((*deferred, *exchanges))
    return ordered


def _aliases(lines: Iterable[_Line | _Exchange]) -> dict[str, set[str]]:
    """Returns, for each register that shares memory with others, all of these."""
    groups: dict[str, set[str]] = {}
    for line in lines:
        if isinstance(line, _Line) and line.kind == "view":
            group = {alias for name in variables(line.text) for alias in groups.get(name, (name,))}
            groups.update(dict.fromkeys(group, group))
    return groups


def _changed(lines: Iterable[_Line | _Exchange], aliases: Mapping[str, set[str]]) -> set[str]:
    """Returns the registers whose memory some line may change, directly or through a view."""
    names = [
        name for line in lines if isinstance(line, _Line) and line.kind == "other" for name in variables(line.text)
    ]
    return {alias for name in names for alias in aliases.get(name, (name,))}


def _with_deletions(lines: Sequence[str], inputs: Iterable[str], results: Iterable[str]) -> list[str]:
    """Returns the lines, each with a `del` of the registers that it uses for the last time."""
    last = dict.fromkeys(inputs, -1)
    for index, line in enumerate(lines):
        last.update(dict.fromkeys(variables(line), index))
    dying: dict[int, list[str]] = {}
    for name in last.keys() - {*results}:
        dying.setdefault(last[name], []).append(name)
    return [f"{line}; del {', '.join(sorted(dying[i]))}" if i in dying else line for i, line in enumerate(lines)]


def _kind_of(operation: str) -> Literal["pure", "view", "other"]:
    """Returns the kind of a line that runs an operation on shards."""
    func = overload(operation)
    schema = func._schema
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return "other"
    is_view = any(returned.alias_info is not None for returned in schema.returns) or operation in _VIEWS
    return "view" if is_view else "pure"


def _return_kind(operation: str) -> str:
    """Returns the kind of results: "one" tensor, "several", or "nested" lists."""
    returns = overload(operation)._schema.returns
    if any(isinstance(returned.type, torch.ListType) for returned in returns):
        return "several" if len(returns) == 1 else "nested"
    return "one" if len(returns) == 1 else "several"


def _is_plain(number: float) -> bool:
    return number == number and number not in (float("inf"), float("-inf"))
