"""Builder of programs."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from .accounting import Recorder
from .meta import Meta, Placements, replicated
from .operation import Operation
from .placing import placed
from .plan import Call, Collective, LocalStep, Redistribute, Slot, Step, StepProgram, Write
from .world import World

__all__ = ["Draft"]

aten = torch.ops.aten


class Draft:
    """Steps, the metas of the registers that they fill, and the collectives that they cost."""

    def __init__(self, world: World, metas: Sequence[Meta]) -> None:
        self._imagined = world
        self._inputs = len(metas)
        self.metas = list(metas)
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.seeded: tuple[int, ...] | None = None

    def register(self, meta: Meta) -> int:
        """A new register for a tensor with this meta."""
        self.metas.append(meta)
        return len(self.metas) - 1

    def redistribute(self, source: int, placements: Placements) -> int:
        """Adds a redistribution; returns the register of the result, the same if placements are equal."""
        meta = self.metas[source]
        if meta.placements == placements:
            return source
        wanted = meta.placed(placements)
        expanded = [dim for dim in meta.expanded if dim in wanted.expanded]
        if expanded:
            return self._expanded(self.redistribute(self._one(source, expanded), placements), wanted, expanded)
        out = self.register(wanted)
        self.steps.append(Redistribute(source, self.metas[out], out))
        self.collectives += redistribution(self._imagined, meta, placements)
        return out

    def laid_out(self, source: int, stride: Sequence[int]) -> int:
        """The register with the tensor in memory in the order of these strides: the same one where it already is."""
        meta = self.metas[source]
        wanted = Meta.of(meta.layout, meta.shape, meta.dtype, meta.placements, stride=stride)
        sizes = zip(meta.shape, meta.stride, wanted.stride, strict=True)
        if 0 in meta.shape or all(one == other for size, one, other in sizes if size > 1):
            return source
        out = self.register(wanted)
        self.steps.append(Redistribute(source, wanted, out))
        return out

    def gather(self, source: int) -> int:
        """Adds a gather; returns the register of the replicated tensor."""
        return self.redistribute(source, replicated(self.metas[source].layout))

    def call(
        self, operation: Operation, metas: Sequence[Meta | None], collectives: Sequence[Collective]
    ) -> list[int | None]:
        """Adds a call on DTensors; returns the registers of the results."""
        out = [None if meta is None else self.register(meta) for meta in metas]
        self.steps.append(Call(operation.name, operation.args, operation.kwargs, tuple(out)))
        self._drawn(operation, [*out, *operation.writes])
        self.collectives += collectives
        return out

    def local(self, operation: Operation, moved: Sequence[int], metas: Sequence[Meta | None]) -> list[int | None]:
        """Adds an operation on shards of these registers; returns the registers of the results."""
        args, kwargs = operation.filled_with(lambda at: Slot(moved[at]))
        out = [None if meta is None else self.register(meta) for meta in metas]
        self.steps.append(LocalStep(operation.name, tuple(args), kwargs, tuple(out), tuple(metas)))
        self._drawn(operation, [*out, *(moved[at] for at in operation.writes)])
        return out

    def _drawn(self, operation: Operation, registers: Sequence[int | None]) -> None:
        """Records the mesh dimensions along which ranks draw different random numbers."""
        if operation.random:
            drawn = next((self.metas[at].placements for at in registers if at is not None), ())
            self.seeded = tuple(dim for dim, placement in enumerate(drawn) if not placement.is_replicate())

    def write(self, target: int, source: int) -> None:
        """Adds a copy of `source` into the memory of `target`."""
        source, expanded = self.redistribute(source, self.metas[target].placements), self.metas[target].expanded
        self.steps.append(Write(self._one(target, expanded), self._one(source, expanded)))

    def _one(self, source: int, dims: Sequence[int]) -> int:
        """Narrows expanded dimensions to one element, a view of all distinct elements."""
        for dim in dims:
            meta = self.metas[source]
            shape = tuple(1 if at == dim else size for at, size in enumerate(meta.shape))
            source = self._viewed(aten.slice.Tensor, source, (dim, 0, 1), shape)
        return source

    def _expanded(self, source: int, meta: Meta, dims: Sequence[int]) -> int:
        """Expands narrowed dimensions again to the sizes of a meta."""
        sizes = [size if at in dims else -1 for at, size in enumerate(meta.shape)]
        return self._viewed(aten.expand.default, source, (sizes,), meta.shape)

    def _viewed(
        self, func: torch._ops.OpOverload, source: int, args: tuple[object, ...], shape: tuple[int, ...]
    ) -> int:
        before = self.metas[source]
        meta = Meta.of(before.layout, shape, before.dtype, before.placements, stride=before.stride)
        (made,) = self.local(Operation(func, (Slot(0), *args), {}, (before,)), (source,), (meta,))
        assert made is not None
        return made

    def splice(self, other: "Draft", given: Sequence[int]) -> dict[int, int]:
        """Adds the steps of another draft on these input registers; returns a map of its registers to ours."""
        ours = dict(enumerate(given))
        for at in range(len(given), len(other.metas)):
            ours[at] = self.register(other.metas[at])
        self.steps += [_renumbered(step, ours) for step in other.steps]
        self.collectives += other.collectives
        self.seeded = self.seeded if other.seeded is None else other.seeded
        return ours

    def program(self, results: Sequence[int]) -> StepProgram:
        """The finished program."""
        return StepProgram(self._inputs, len(self.metas), tuple(self.steps), tuple(results), self.seeded)


def _renumbered(step: Step, ours: dict[int, int]) -> Step:
    def moved(given: object) -> object:
        if isinstance(given, Slot):
            return Slot(ours[given.register])
        return type(given)(map(moved, given)) if isinstance(given, list | tuple) else given

    match step:
        case Redistribute():
            return replace(step, source=ours[step.source], out=ours[step.out])
        case Write():
            return Write(ours[step.target], ours[step.source])
    return replace(
        step,
        args=tuple(map(moved, step.args)),
        kwargs={name: moved(value) for name, value in step.kwargs.items()},
        out=tuple(None if at is None else ours[at] for at in step.out),
    )


def redistribution(world: World, meta: Meta, placements: Placements) -> list[Collective]:
    """The collectives of a redistribution."""
    recorder = Recorder(world.dims)
    tensor, wanted = world.fake(meta), meta.placed(placements)
    with recorder, contextlib.suppress(DataDependentOutputException):  # shards that views cut unevenly: not counted
        placed(tensor._local_tensor, tensor._spec, wanted, world.spec(wanted))
    return recorder.found
