"""A program, taken step by step on real sharded tensors: what each worker does with a plan."""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .meta import Meta, dense
from .plan import Call, Local, Program, Redistribute, Scalar, Slot, Write

__all__ = ["Runner"]


class Runner:
    """Runs one program on a mesh of which this process is a rank. Made once per program.

    Calling it blocks as its collectives do, and raises what its operations raise.
    """

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        self._program = program
        self._mesh = mesh
        self._steps = [self._compiled(step) for step in program.steps]
        self._empty = [None] * (program.registers - program.inputs)

    def __call__(self, tensors: Sequence[DTensor], scalars: Sequence[float] = ()) -> list[DTensor]:
        """The new tensors, in the order of `program.results`. Arguments that are written to change in place."""
        registers: list[object] = [*tensors, *self._empty]
        with torch.no_grad():
            for step in self._steps:
                step(registers, scalars)
        return [registers[at] for at in self._program.results]  # type: ignore[misc]

    def _compiled(self, step: object) -> Callable[[list[object], Sequence[float]], None]:
        match step:
            case Call():
                return self._call(step)
            case Local():
                return self._local(step)
            case Redistribute():
                return self._redistribute(step)
            case Write(target, source):

                def write(registers: list[object], scalars: Sequence[float]) -> None:
                    _dtensor(registers[target])._local_tensor.copy_(_dtensor(registers[source])._local_tensor)

                return write
        raise TypeError(f"{step!r} is no step")

    def _call(self, step: Call) -> Callable[[list[object], Sequence[float]], None]:
        operation, args, kwargs, out = overload(step.operation), step.args, step.kwargs, step.out

        def call(registers: list[object], scalars: Sequence[float]) -> None:
            result = operation(
                *[_value(a, registers, scalars) for a in args],
                **{name: _value(a, registers, scalars) for name, a in kwargs.items()},
            )
            _keep(result, out, registers)

        return call

    def _local(self, step: Local) -> Callable[[list[object], Sequence[float]], None]:
        operation, args, kwargs, out = overload(step.operation), step.args, step.kwargs, step.out
        specs = [None if meta is None else self._spec(meta) for meta in step.metas]

        def local(registers: list[object], scalars: Sequence[float]) -> None:
            result = operation(
                *[_shard(_value(a, registers, scalars)) for a in args],
                **{name: _shard(_value(a, registers, scalars)) for name, a in kwargs.items()},
            )
            for value, register, spec in zip(_leaves(result), out, specs, strict=True):
                if register is not None and spec is not None:
                    registers[register] = DTensor(value, spec, requires_grad=False)  # type: ignore[no-untyped-call]

        return local

    def _redistribute(self, step: Redistribute) -> Callable[[list[object], Sequence[float]], None]:
        source, placements, out, stride, mesh = step.source, step.placements, step.out, step.stride, self._mesh

        def redistribute(registers: list[object], scalars: Sequence[float]) -> None:
            placed = _dtensor(registers[source]).redistribute(mesh, placements)
            if stride is not None:
                local = placed._local_tensor
                wanted = dense(stride, local.shape)
                if local.stride() != wanted:
                    laid = torch.empty_strided(local.shape, wanted, dtype=local.dtype, device=local.device)
                    placed = DTensor(laid.copy_(local), placed._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            registers[out] = placed

        return redistribute

    def _spec(self, meta: Meta) -> DTensorSpec:
        facts = TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype)
        return DTensorSpec(self._mesh, meta.placements, tensor_meta=facts)


def overload(name: str) -> torch._ops.OpOverload:
    """The operation that a name (`aten.add.Tensor`) means."""
    namespace, packet, variant = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), variant)
    assert isinstance(found, torch._ops.OpOverload)
    return found


def _value(given: object, registers: list[object], scalars: Sequence[float]) -> object:
    kind = type(given)
    if kind is Slot:
        return registers[given.register]  # type: ignore[attr-defined]
    if kind is Scalar:
        return scalars[given.index]  # type: ignore[attr-defined]
    if kind is list or kind is tuple:
        return kind(_value(each, registers, scalars) for each in given)  # type: ignore[attr-defined]
    return given


def _shard(given: object) -> object:
    if isinstance(given, DTensor):
        return given._local_tensor
    if isinstance(given, list | tuple):
        return type(given)(map(_shard, given))
    return given


def _dtensor(value: object) -> DTensor:
    assert isinstance(value, DTensor)
    return value


def _leaves(result: object) -> list[torch.Tensor | None]:
    if isinstance(result, list | tuple):
        return [leaf for each in result for leaf in _leaves(each)]
    return [result if isinstance(result, torch.Tensor) else None]


def _keep(result: object, out: tuple[int | None, ...], registers: list[object]) -> None:
    for value, register in zip(_leaves(result), out, strict=True):
        if register is not None:
            registers[register] = value
