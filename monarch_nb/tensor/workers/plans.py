"""Plans in one worker: each runs on the tensors that a command names, or makes one."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_nb.tensor.commands import Define, MakeParts, Making, Number
from monarch_nb.tensor.failure import Failure, LostInputError, LostTensor
from monarch_nb.tensor.propagation import (
    OWN_VALUE,
    MeshLayout,
    Meta,
    Placements,
    Runner,
    dtensor,
    laid_out,
    one_piece_each,
    overload,
    own_values,
    placed_otherwise,
    spec_of,
)
from monarch_nb.tensor.seeds import BORROWED, seeder
from monarch_nb.tensor.workers.agreement import Agreement
from monarch_nb.tensor.workers.opaque import on_device
from monarch_nb.tensor.workers.usage import Stopwatch
from monarch_nb.wire import kind_of

Env = dict[Number, Any]  # DTensors of a stream, by number


class TensorEnv(Env):
    """Tensors of a stream by number. A missing one was lost with the process that this one replaces."""

    def __missing__(self, number: Number) -> LostTensor:
        return LostTensor(
            Failure(0, "heal_mesh", 0, "ContentsLostError", "a process that held a shard of it is lost", "")
        )


def maker(making: Making, mesh: DeviceMesh) -> Callable[[], DTensor]:
    """Returns a function that makes the tensor of a factory plan."""
    operation = overload(making.operation)
    meta, device, spec = making.made, torch.device(mesh.device_type), spec_of(making.made, mesh)
    in_parts = making.in_parts and not meta.is_own
    local, _ = compute_local_shape_and_global_offset(meta.shape, mesh, meta.placements) if in_parts else ((), ())

    def make_whole() -> DTensor:
        tensor = operation(*making.args, **making.kwargs, device=device)
        if not (meta.is_own or meta.is_replicated):
            return distributed(tensor, mesh, meta.placements)
        # DTensor's own functions take 60 µs for this.
        return dtensor(tensor if meta.is_own else laid_out(tensor, meta.stride), spec, requires_grad=False)

    def make_part() -> DTensor:
        tensor = operation(local, *making.args[1:], **making.kwargs, device=device)
        return dtensor(laid_out(tensor, meta.stride), spec, requires_grad=False)

    return make_part if in_parts else make_whole


def distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Returns this rank's shard of a tensor that each rank has."""
    if OWN_VALUE in placements:
        placements = (Replicate(),) * len(placements)
    shard = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    shard._local_tensor = laid_out(shard._local_tensor, shard.stride())
    return shard


def empty(meta: Meta, mesh: DeviceMesh) -> DTensor:
    """Returns an uninitialised tensor."""
    making = Making(0, "aten.empty.memory_format", (meta.shape,), {"dtype": meta.dtype}, meta, in_parts=True)
    return maker(making, mesh)()


def make_in_parts(command: MakeParts, mesh: DeviceMesh) -> DTensor:
    """Makes a tensor from the local part that a function returns. Raises ValueError if the part does not fit."""
    pieces = one_piece_each(command.made.placements)
    if pieces != command.made.placements:
        tensor = make_in_parts(replace(command, made=command.made.placed(pieces)), mesh)
        return placed_otherwise(tensor, command.made.placements)
    meta = command.made
    sizes, offsets = compute_local_shape_and_global_offset(meta.shape, mesh, meta.placements)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    local = command.function(part, *command.args)
    if not isinstance(local, torch.Tensor) or tuple(local.shape) != tuple(sizes) or local.dtype != meta.dtype:
        actual = f"{tuple(local.shape)} {local.dtype}" if isinstance(local, torch.Tensor) else type(local).__name__
        raise ValueError(
            f"a part of size {tuple(sizes)} and {meta.dtype} is expected here, but the function returned {actual}"
        )
    return wrap_shard(local, meta, mesh)


def wrap_shard(local: torch.Tensor, meta: Meta, mesh: DeviceMesh) -> DTensor:
    """Wraps the shard of this rank."""
    if meta.is_own and local.dim() != len(meta.shape):
        return own(local, mesh)
    local = laid_out(local.detach().to(mesh.device_type), meta.stride)
    return dtensor(local, spec_of(meta, mesh), requires_grad=False)


def layout_of(mesh: DeviceMesh) -> MeshLayout:
    """Returns the layout of a mesh."""
    return MeshLayout(tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()), mesh.device_type)


def own(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Wraps a value of this rank's own, in its memory if that is on the device."""
    layout = layout_of(mesh)
    meta = Meta.of(layout, tuple(local.shape), local.dtype, own_values(layout), stride=local.stride())
    return dtensor(on_device(local, mesh.device_type), spec_of(meta, mesh), requires_grad=False)


class PlanSignature:
    """Layout of the commands of a plan: slices of a command for tensors, floats and results; `length` is the total."""

    def __init__(self, definition: Define | Making) -> None:
        if isinstance(definition, Define):
            self.operation, seeded, inputs, floats = (
                definition.operation,
                definition.program.seeded,
                definition.program.inputs,
                definition.scalars,
            )
            self.made, self.writes, self.own = definition.made, definition.writes, definition.own
            self.agrees = definition.agrees
        else:
            self.operation, seeded, inputs, floats = definition.operation, definition.seeded, 0, 0
            self.made, self.writes, self.own = (definition.made,), (), definition.made.is_own
            self.agrees = False
        first = 1 if seeded is None else 2
        self.seeded = seeded
        self.tensors = slice(first, first + inputs)
        self.floats = slice(first + inputs, first + inputs + floats)
        self.results = slice(first + inputs + floats, first + inputs + floats + len(self.made))
        self.length = self.results.stop


class Executable(PlanSignature):
    """A plan that is ready to run on a mesh."""

    def __init__(self, definition: Define | Making, env: Env, mesh: DeviceMesh, stopwatch: Stopwatch) -> None:
        super().__init__(definition)
        self._env = env
        self._agreed = not self.made
        self._agreement: Agreement | None = None
        self._seed = seeder(mesh, self.seeded) if self.seeded is not None else None
        self._call: Callable[[Sequence[DTensor], Sequence[Number]], Sequence[DTensor]]
        if isinstance(definition, Define):
            self._call = Runner(definition.program, mesh, stopwatch.measured)
            if self.agrees:
                self._agreement = Agreement(mesh, definition.operation)
        else:
            make = maker(definition, mesh)
            self._call = lambda tensors, floats: (make(),)

    def run(self, command: Sequence[Number]) -> None:
        """Runs the plan on a command. Raises the errors of its operations."""
        env = self._env
        tensors = [env[number] for number in command[self.tensors]]
        if self._agreement is not None:
            self._agreement.reached(tensors)
        if self._seed is None:
            results = self._call(tensors, command[self.floats])
        else:
            with BORROWED if self.own or BORROWED.is_shared else nullcontext():
                self._seed(int(command[1]))
                results = self._call(tensors, command[self.floats])
        for number, tensor in zip(command[self.results], results, strict=True):
            env[number] = tensor
        if not self._agreed:
            self._compare(results)

    def _compare(self, results: Sequence[object]) -> None:
        """Checks on the first run that the results are those that the controller predicted."""
        for tensor, meta in zip(results, self.made, strict=True):
            difference = _difference(tensor, meta)
            if difference:
                raise RuntimeError(
                    f"{self.operation} gave {difference} here, which is not what the controller worked out: the "
                    "versions of torch differ, or this is a defect of Monarch-NB"
                )
        self._agreed = True


class Unusable(PlanSignature):
    """A plan that could not be prepared; running it raises the reason."""

    def __init__(self, definition: Define | Making, failure: Failure) -> None:
        super().__init__(definition)
        self._failure = failure

    def run(self, command: Sequence[Number]) -> None:
        """Always raises LostInputError."""
        raise LostInputError(self._failure)


def _difference(result: object, expected: Meta) -> str:
    if not isinstance(result, DTensor):
        return kind_of(result)
    if tuple(result.shape) != expected.shape:
        return f"shape {tuple(result.shape)} in place of {expected.shape}"
    if result.dtype != expected.dtype:
        return f"{result.dtype} in place of {expected.dtype}"
    if result.placements != expected.placements and not expected.is_own:
        return f"placements {result.placements} in place of {expected.placements}"
    return ""
