"""Plans in one worker: each runs on the tensors that a command names, or makes one. A journal has the recent ones.

Ranks agree before they exchange values of their own: each of them has one, and the shapes fit. A rank that left others
alone in a collective would block them, and different sizes there end processes.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_nb.tensor.commands import (
    FREE,
    NUMBER,
    OBJECT,
    OWN,
    REPLAY,
    SHARDS,
    WHOLE,
    CallRemote,
    Define,
    MakeParts,
    Making,
    Name,
    Number,
)
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
from monarch_nb.tensor.verbs import Failure, LostInputError, LostTensor
from monarch_nb.tensor.workers.calls import on_device
from monarch_nb.tensor.workers.usage import Stopwatch
from monarch_nb.wire import kind_of

_NONE = (1 << 62) - 1  # above all numbers that ranks exchange to agree
REQUESTS = frozenset({WHOLE, NUMBER, SHARDS})
JOURNAL_LENGTH = 8192  # operations; more than ranks can be apart, which the controller's window limits
Env = dict[Number, Any]  # DTensors of a stream, by number


class DifferentShapesError(ValueError):
    """Ranks hold tensors of different shapes or dtypes, and were to exchange them."""


class Agreement:
    """The agreement of all ranks of a mesh on the inputs of one operation."""

    def __init__(self, mesh: DeviceMesh, operation: str) -> None:
        self._mesh, self._operation = mesh, operation

    def reached(self, tensors: Sequence[DTensor | LostTensor]) -> None:
        """Blocks until all ranks have their inputs.

        Raises LostInputError on all of them where one lacks an input, DifferentShapesError where shapes differ.
        """
        lost = next((item.failure for item in tensors if isinstance(item, LostTensor)), None)
        shapes = [(tuple(item._local_tensor.shape), str(item.dtype)) for item in tensors if isinstance(item, DTensor)]
        number = zlib.crc32(repr(shapes).encode()) if lost is None else 0
        key = (_NONE, _NONE, _NONE) if lost is None else (lost.number, lost.stream, lost.rank)
        # The number of the one with the smallest key stands for its stream and rank, too.
        minima = torch.tensor(
            [number if lost is None else _NONE, -number if lost is None else _NONE, *key], device=self._mesh.device_type
        )
        for dim in range(self._mesh.ndim):
            dist.all_reduce(minima, dist.ReduceOp.MIN, group=self._mesh.get_group(dim))
        least, most, first, stream, rank = minima.tolist()
        if lost is not None:
            raise LostInputError(lost)
        if first != _NONE:
            text = "another rank has lost what it was to give"
            raise LostInputError(Failure(first, self._operation, rank, "LostInputError", text, "", stream, True))
        if least != -most:
            own_text = " and ".join(str(shape) for shape, _ in shapes)
            raise DifferentShapesError(f"ranks hold tensors of different shapes or dtypes: this one {own_text}")


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


def _effects(command: object) -> tuple[Sequence[Number], Sequence[Number]]:
    """Returns the tensors that a command makes, and those that it writes to."""
    if isinstance(command, CallRemote | Name):
        return command.results, getattr(command, "writes", ())
    result = getattr(command, "result", None)
    return () if result is None else (result,), ()


class BatchJournal:
    """Recent batches of one stream. `plans` are the plans that it uses."""

    def __init__(self, plans: Mapping[Number, PlanSignature]) -> None:
        self._plans = plans
        self._steps: deque[tuple[int, int, Sequence[Number], Sequence[Number]]] = deque()
        self._batches: deque[tuple[int, Sequence[Number], tuple[tuple[Sequence[Number], Sequence[Number]], ...]]]
        self._batches = deque()

    def note(self, first: int, numbers: Sequence[Number], objects: Sequence[object]) -> None:
        """Adds a batch that begins with operation `first`."""
        self._batches.append((first, numbers, tuple(map(_effects, objects))))
        while self._batches[0][0] < first - JOURNAL_LENGTH:
            self._batches.popleft()

    def replayed(self, first: int, count: int, results: Sequence[Number], targets: Sequence[Number]) -> None:
        """Adds a compiled step of `count` operations that has begun or was skipped."""
        self._steps.append((first, first + count, results, targets))
        while self._steps[0][0] < first - JOURNAL_LENGTH:
            self._steps.popleft()

    def touched(self, start: int, stop: int) -> tuple[set[Number], set[Number]]:
        """Returns tensors that operations in [start, stop) make, and those they write to, without freed ones."""
        outputs: set[Number] = set()
        written: set[Number] = set()
        freed: set[Number] = set()
        for number, results, targets in self._operations():
            if number is None:
                freed.update(results)
            elif start <= number < stop:
                outputs.update(results)
                written.update(targets)
        for begin, end, results, targets in self._steps:
            if begin < stop and start < end:  # the whole step, since its progress is unknown
                outputs.update(results)
                written.update(targets)
        return outputs - freed, written - freed

    def _operations(self) -> Iterator[tuple[int | None, Sequence[Number], Sequence[Number]]]:
        """Yields the number of each operation, its results and the tensors it writes to; or None and freed tensors."""
        for first, numbers, effects in self._batches:
            number, position, objects = first - 1, 0, iter(effects)
            while position < len(numbers):
                code = numbers[position]
                if code == FREE:
                    yield None, numbers[position + 1 : position + 2], ()
                    position += 2
                    continue
                number += 1
                if code == OBJECT:
                    yield number, *next(objects)
                    position += 1
                elif code in REQUESTS:
                    position += 2
                elif code == OWN:
                    position += 3
                elif code == REPLAY:
                    _, operations, inputs, outputs = map(int, numbers[position + 1 : position + 5])
                    number += operations - 1
                    position += 6 + inputs + outputs
                else:
                    plan = self._plans[code]
                    tensors = numbers[position + plan.tensors.start : position + plan.tensors.stop]
                    results = numbers[position + plan.results.start : position + plan.results.stop]
                    yield number, results, [tensors[index] for index in plan.writes]
                    position += plan.length
