"""Runs programs on DTensors in a worker."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import TorchDispatchMode

from .meta import Meta, Placements, dense, dtensor, spec_of
from .placing import (
    Measured,
    Mover,
    exchanged_along,
    exchanging,
    finisher,
    is_in_order,
    laid_out,
    mover,
    moving,
    unmeasured,
)
from .plan import Call, Finish, LocalStep, Redistribute, Scalar, Slot, Step, StepProgram, Write

# PyTorch registers these on first use, perhaps in another process only.
_REGISTERED_BY = {"torch_nn": "torch.nn.modules.linear_cross_entropy", "prims": "torch._prims"}

Run = Callable[[Sequence[DTensor], Sequence[float]], list[DTensor]]
Kind = tuple[int, str, torch.dtype, bool]  # of an exchange: mesh dimension, method, dtype, whether it is pending


class DispatchMode(TorchDispatchMode):
    """A dispatch mode of PyTorch, with types."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class OperationRecorder(DispatchMode):
    """Records the operations on plain tensors in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, tuple[object, ...], dict[str, object]]] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Leaves operations on DTensors to their own dispatch; records their operations on shards."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _direct_call(
    step: Call, recorder: OperationRecorder, registers: Sequence[object], result: object
) -> tuple[tuple[object, ...], dict[str, object], tuple[DTensorSpec | None, ...]] | None:
    """Returns the arguments of the only operation on shards in a step, with the slots of the step, and the specs of
    its results; None if the step has more operations.
    """
    if len(recorder.calls) != 1:
        return None
    func, args, kwargs = recorder.calls[0]
    if str(func) != step.operation:
        return None
    try:
        step_args = _matched(step.args, args, registers)
        step_kwargs = {name: _matched(step.kwargs.get(name), value, registers) for name, value in kwargs.items()}
    except _MismatchError:
        return None
    if not isinstance(step_args, tuple) or len(args) < len(step.args) or step.kwargs.keys() - kwargs.keys():
        return None
    specs = []
    for value, register in zip(flat(result), step.out, strict=True):
        if register is not None and not isinstance(value, DTensor):
            return None
        specs.append(value._spec if register is not None and isinstance(value, DTensor) else None)
    return step_args, step_kwargs, tuple(specs)


class _MismatchError(Exception):
    """The operation on shards has an argument that the step lacks."""


def _matched(planned: object, actual: object, registers: Sequence[object]) -> object:
    """Returns the actual arguments, with slots in place of shards."""
    if isinstance(planned, Slot):
        tensor = registers[planned.register]
        if not isinstance(tensor, DTensor) or actual is not tensor._local_tensor:
            raise _MismatchError
        return planned
    if isinstance(planned, Scalar):
        return planned
    if isinstance(actual, torch.Tensor):
        raise _MismatchError
    if isinstance(actual, list | tuple):
        items = planned if isinstance(planned, list | tuple) else ()
        if any(isinstance(value, Slot | Scalar) for value in items) and len(items) != len(actual):
            raise _MismatchError
        matched = [_matched(items[i] if i < len(items) else None, value, registers) for i, value in enumerate(actual)]
        return tuple(matched) if isinstance(actual, tuple) else matched
    if has_slot(planned):
        raise _MismatchError
    return actual


def flat(result: object) -> list[object]:
    """Returns the leaves of an operation's result."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in flat(item)]
    return [result]


class Runner:
    """Runs one program on a mesh of which this process is a rank. Created once per program.

    A call blocks in its collectives, and raises the errors of its operations. Calls up to the first that succeeds run
    on PyTorch's sharded tensors; later ones run one generated function.
    """

    def __init__(self, program: StepProgram, mesh: DeviceMesh, measured: Measured = unmeasured) -> None:
        self._program = program
        self._mesh = mesh
        self._measured = measured
        self._run: Run | None = None

    def __call__(self, tensors: Sequence[DTensor], scalars: Sequence[float] = ()) -> list[DTensor]:
        """Runs the program; returns new tensors in the order of `program.results`."""
        if self._run is not None:
            return self._run(tensors, scalars)
        program = self._program
        registers: list[Any] = [*tensors, *[None] * (program.registers - program.inputs)]
        writer = _FunctionWriter(program, self._mesh, self._measured)
        with torch.no_grad():
            for steps in grouped_steps(program.steps):
                if isinstance(steps[0], Call):
                    self._first_call(steps[0], registers, scalars, writer)
                else:
                    writer.run(steps, registers, scalars)
        self._run = writer.finished()
        return [registers[register] for register in program.results]

    def _first_call(
        self, step: Call, registers: list[object], scalars: Sequence[float], writer: "_FunctionWriter"
    ) -> None:
        args = [_value(a, registers, scalars) for a in step.args]
        kwargs = {name: _value(a, registers, scalars) for name, a in step.kwargs.items()}
        with OperationRecorder() as recorder:
            result = overload(step.operation)(*args, **kwargs)
        direct = _direct_call(step, recorder, registers, result)
        for value, register in zip(leaves(result), step.out, strict=True):
            if register is not None:
                registers[register] = value
        if direct is None:
            writer.call(step)
        else:
            writer.on_shards(step.operation, *direct[:2], step.out, direct[2])
        writer.in_order(step, registers)


class _FunctionWriter:
    """Writes the source of a program's function."""

    def __init__(self, program: StepProgram, mesh: DeviceMesh, measured: Measured) -> None:
        self._program, self._mesh = program, mesh
        self._measured = measured
        self._names: dict[str, Any] = {"mesh": mesh, "tensor": DTensor._dtensor__new__, "kind": DTensor}
        self._lines: list[str] = []
        inputs = "".join(f"r{register}, " for register in range(program.inputs))
        if inputs:
            self._lines.append(f"{inputs}= t")

    def finished(self) -> Run:
        """Compiles the function of tensors and numbers."""
        results = ", ".join(f"r{register}" for register in self._program.results)
        source = "\n ".join(["def run(t, s):", *self._lines, f"return [{results}]"])
        exec(source, self._names)
        run: Run = self._names["run"]
        return run

    def run(self, steps: Sequence[Step], registers: list[object], scalars: Sequence[float]) -> None:
        """Runs a step other than a call on DTensors, or several redistributions, and writes them to the source."""
        first, step = len(self._lines), steps[0]
        match step:
            case LocalStep():
                specs = tuple(None if meta is None else self._spec(meta) for meta in step.metas)
                self.on_shards(step.operation, step.args, step.kwargs, step.out, specs)
            case Redistribute():
                self._redistribute([move for move in steps if isinstance(move, Redistribute)], registers)
            case Finish():
                waited = self._measured(step.dims, finisher(step.meta.stride))
                finish, spec = self._constant(waited), self._constant(self._spec(step.meta))
                self._lines.append(
                    f"r{step.out} = tensor(kind, {finish}(r{step.source}._local_tensor), {spec}, requires_grad=False)"
                )
            case Write():
                self._lines.append(f"r{step.target}._local_tensor.copy_(r{step.source}._local_tensor)")
        names = {**self._names, "s": scalars, **{f"r{register}": value for register, value in enumerate(registers)}}
        exec("\n".join(self._lines[first:]), names)
        for register in range(len(registers)):
            registers[register] = names[f"r{register}"]
        if isinstance(step, LocalStep):
            self.in_order(step, registers)

    def _redistribute(self, steps: Sequence[Redistribute], registers: Sequence[object]) -> None:
        def placements(step: Redistribute) -> Placements | None:
            source = registers[step.source]
            assert isinstance(source, DTensor)
            return source.placements if len(steps) > 1 or step.pending else None

        moves, exchanges = split_exchanges(steps, placements)
        for step in moves:
            move = self._constant(Redistributor(step.meta, self._spec(step.meta), self._measured))
            self._lines.append(f"r{step.out} = {move}(r{step.source})")
        for (dim, how, _, pending), group in exchanges.items():
            strides = None if pending else [step.meta.stride for step, _ in group]
            exchange = exchanging(self._mesh, dim, how, [axis for _, axis in group], strides)
            call = self._constant(self._measured(() if pending else (dim,), exchange))
            shards = ", ".join(f"r{step.source}._local_tensor" for step, _ in group)
            self._lines.append(f"o = {call}([{shards}])")
            for index, (step, _) in enumerate(group):
                spec = self._constant(self._spec(step.meta))
                self._lines.append(f"r{step.out} = tensor(kind, o[{index}], {spec}, requires_grad=False)")

    def in_order(self, step: Call | LocalStep, registers: list[object]) -> None:
        """Lays results out as in their metas, now and in the source, if the kernel does otherwise.

        Some kernels give other strides than PyTorch's fake tensors, with which later views of the result are planned.
        """
        if any(returned.alias_info is not None for returned in overload(step.operation)._schema.returns):
            return  # views, and written tensors
        for register in step.out:
            value = None if register is None else registers[register]
            if register is not None and isinstance(value, DTensor) and _is_out_of_order(value):
                registers[register] = _relaid(value)
                self._lines.append(f"r{register} = {self._constant(_relaid)}(r{register})")

    def call(self, step: Call) -> None:
        """Writes a call on DTensors."""
        call = f"{self._constant(overload(step.operation))}({self._arguments(step.args, step.kwargs, '')})"
        registers = [register for register in step.out if register is not None]
        if len(step.out) == 1 and registers:
            self._lines.append(f"r{registers[0]}, = {self._constant(leaves)}({call})")
        elif registers:
            self._lines.append(f"o = {self._constant(leaves)}({call})")
            self._lines += [f"r{register} = o[{i}]" for i, register in enumerate(step.out) if register is not None]
        else:
            self._lines.append(call)

    def on_shards(
        self,
        operation: str,
        args: Sequence[object],
        kwargs: dict[str, object],
        out: Sequence[int | None],
        specs: Sequence[DTensorSpec | None],
    ) -> None:
        """Writes an operation on shards, whose results are shards of tensors with these specs."""
        arguments = self._arguments(args, kwargs, "._local_tensor")
        call = f"{self._constant(overload(operation))}({arguments})"
        results = [(i, register, spec) for i, (register, spec) in enumerate(zip(out, specs, strict=True)) if spec]
        if not results:
            self._lines.append(call)
            return
        returns = overload(operation)._schema.returns
        single = len(returns) == 1 and not isinstance(returns[0].type, torch.ListType)
        nested = len(returns) > 1 and any(isinstance(returned.type, torch.ListType) for returned in returns)
        self._lines.append(f"o = {self._constant(leaves)}({call})" if nested else f"o = {call}")
        for i, register, spec in results:
            shard = "o" if single else f"o[{i}]"
            self._lines.append(f"r{register} = tensor(kind, {shard}, {self._constant(spec)}, requires_grad=False)")

    def _arguments(self, args: Sequence[object], kwargs: dict[str, object], part: str) -> str:
        named = (f"{name}={self._written(value, part)}" for name, value in kwargs.items())
        return ", ".join((*(self._written(value, part) for value in args), *named))

    def _written(self, value: object, part: str) -> str:
        if isinstance(value, Slot):
            return f"r{value.register}{part}"
        if isinstance(value, Scalar):
            return f"s[{value.index}]"
        if isinstance(value, list | tuple) and has_slot(value):
            return f"[{', '.join(self._written(item, part) for item in value)}]"
        return self._constant(value)

    def _spec(self, meta: Meta) -> DTensorSpec:
        return spec_of(meta, self._mesh)

    def _constant(self, value: object) -> str:
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name


def overload(name: str) -> torch._ops.OpOverload:
    """Returns the operation of a name such as `aten.add.Tensor`. Raises LookupError if it is not registered."""
    namespace, packet, variant = name.split(".")
    if namespace in _REGISTERED_BY:
        import_module(_REGISTERED_BY[namespace])
    try:
        operation = getattr(getattr(getattr(torch.ops, namespace), packet), variant)
    except AttributeError:
        raise LookupError(
            f"this process has no operation {name}: import what registers it on the workers too, as in a set-up cell"
        ) from None
    assert isinstance(operation, torch._ops.OpOverload)
    return operation


def grouped_steps(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Yields the steps in order, with successive redistributions of arguments as one group."""
    group: list[Step] = []
    outputs = set[int]()
    for step in steps:
        if group and not (isinstance(step, Redistribute) and step.source not in outputs):
            yield group
            group, outputs = [], set()
        if isinstance(step, Redistribute):
            group.append(step)
            outputs.add(step.out)
        else:
            yield [step]
    if group:
        yield group


def split_exchanges(
    steps: Sequence[Redistribute], placements: Callable[[Redistribute], Placements | None]
) -> tuple[list[Redistribute], dict[Kind, list[tuple[Redistribute, int]]]]:
    """Splits redistributions into single ones and, with their axes, those that can share a collective.

    `placements` returns the source's placements; None for a step that must stay single.
    """
    moves: list[Redistribute] = []
    exchanges: dict[Kind, list[tuple[Redistribute, int]]] = {}
    for step in steps:
        current = placements(step)
        shared = None if current is None else exchanged_along(current, step.meta)
        if shared is None or step.meta.layout.shape[shared.dim] == 1:
            moves.append(step)
        else:
            exchanges.setdefault((shared.dim, shared.how, step.meta.dtype, step.pending), []).append(
                (step, shared.axis)
            )
    return moves, exchanges


class Redistributor:
    """Redistributes tensors to a spec. The move is planned for the first tensor, and again for other placements."""

    def __init__(self, meta: Meta, spec: DTensorSpec, measured: Measured) -> None:
        self._meta, self._spec, self._measured = meta, spec, measured
        self._source: DTensorSpec | None = None
        self._move: Mover

    def __call__(self, tensor: DTensor) -> DTensor:
        """Returns the tensor, in new memory."""
        spec = tensor._spec
        if spec is not self._source:
            if self._source is None or spec != self._source:
                dims = moving(spec.placements, self._meta.placements)
                self._move = self._measured(dims, mover(spec, self._meta, self._spec))
            self._source = spec
        return dtensor(self._move(tensor._local_tensor), self._spec, requires_grad=False)


def _is_out_of_order(value: DTensor) -> bool:
    """Returns whether the whole tensor is dense and the strides of a shard are not in the same order."""
    local, meta = value._local_tensor, value._spec.tensor_meta
    if meta is None or tuple(meta.stride) != dense(meta.stride, meta.shape):
        return False
    return not is_in_order(local, meta.stride)


def _relaid(value: DTensor) -> DTensor:
    spec = value._spec
    assert spec.tensor_meta is not None
    return dtensor(laid_out(value._local_tensor, spec.tensor_meta.stride), spec, requires_grad=False)


def has_slot(value: object) -> bool:
    """Returns whether an argument has a placeholder."""
    return any(isinstance(leaf, Slot | Scalar) for leaf in flat(value))


def _value(value: Any, registers: list[object], scalars: Sequence[float]) -> object:
    kind = type(value)
    if kind is Slot:
        return registers[value.register]
    if kind is Scalar:
        return scalars[value.index]
    if kind is list or kind is tuple:
        return kind(_value(item, registers, scalars) for item in value)
    return value


def leaves(result: object) -> list[object]:
    """Returns the leaves of a result; None for values other than tensors."""
    return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in flat(result)]
