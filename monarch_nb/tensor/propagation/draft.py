"""Builder of programs: steps, and the collectives that they need. Drafts of exchanges of the ranks' own values."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

from monarch_nb.tensor.propagation.execute import DispatchMode
from monarch_nb.tensor.propagation.meta import OWN_VALUE, Meta, Placements, dense, own_values, replicated
from monarch_nb.tensor.propagation.operation import Operation, counted_from_front, slots, summed
from monarch_nb.tensor.propagation.placing import placed
from monarch_nb.tensor.propagation.plan import (
    Call,
    Collective,
    Finish,
    LocalStep,
    OperationPlan,
    Redistribute,
    ResultSlot,
    Slot,
    Step,
    StepProgram,
    Write,
    builder,
)
from monarch_nb.tensor.propagation.world import World

aten = torch.ops.aten
_QUIET = ("wait_tensor",)
REDUCTIONS = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")


class Recorder(DispatchMode):
    """Records collectives of DTensors in a `with` block. `dims` maps groups to mesh dimensions."""

    def __init__(self, dims: Mapping[str, str]) -> None:
        super().__init__()
        self._dims = dims
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Leaves operations on DTensors to their own dispatch; records their collectives."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("_c10d_functional", "_dtensor", "c10d_functional"):
            kind = func.__name__.partition(".")[0]
            group = next((a for a in reversed(args) if isinstance(a, str) and a in self._dims), None)
            if group is not None and kind not in _QUIET:
                nbytes = sum(t.numel() * t.element_size() for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor))
                self.collectives.append(Collective(kind, self._dims[group], nbytes))
        return func(*args, **(kwargs or {}))


class Draft:
    """Steps, the metas of the registers that they fill, and the collectives that they need."""

    def __init__(self, world: World, metas: Sequence[Meta]) -> None:
        self._imagined = world
        self._inputs = len(metas)
        self.metas = list(metas)
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.seeded: tuple[int, ...] | None = None

    def register(self, meta: Meta) -> int:
        """Returns a new register for a tensor with this meta."""
        self.metas.append(meta)
        return len(self.metas) - 1

    def redistribute(self, source: int, placements: Placements, *, pending: bool = False) -> int:
        """Adds a redistribution; returns the register of the result, the same if placements are equal.

        With `pending` it is only begun, if possible.
        """
        meta = self.metas[source]
        if meta.placements == placements:
            return source
        target = meta.placed(placements)
        expanded = [dim for dim in meta.expanded if dim in target.expanded]
        if expanded:
            return self._expanded(self.redistribute(self._narrowed(source, expanded), placements), target, expanded)
        out = self.register(target)
        self.steps.append(Redistribute(source, self.metas[out], out, pending))
        self.collectives += redistribution(self._imagined, meta, placements)
        return out

    def finish(self, source: int, dims: tuple[int, ...]) -> int:
        """Adds the wait for a pending redistribution; returns the register of the result."""
        out = self.register(self.metas[source])
        self.steps.append(Finish(source, self.metas[out], out, dims))
        return out

    def laid_out(self, source: int, stride: Sequence[int]) -> int:
        """Returns the register of the tensor in the memory order of these strides; the source if it has that order."""
        meta = self.metas[source]
        target = Meta.of(meta.layout, meta.shape, meta.dtype, meta.placements, stride=stride)
        sizes = zip(meta.shape, meta.stride, target.stride, strict=True)
        if 0 in meta.shape or all(step == target_step for size, step, target_step in sizes if size > 1):
            return source
        out = self.register(target)
        self.steps.append(Redistribute(source, target, out))
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
        self._record_seeded(operation, [*out, *operation.writes])
        self.collectives += collectives
        return out

    def local(self, operation: Operation, moved: Sequence[int], metas: Sequence[Meta | None]) -> list[int | None]:
        """Adds an operation on shards of these registers; returns the registers of the results."""
        args, kwargs = operation.filled_with(lambda register: Slot(moved[register]))
        out = [None if meta is None else self.register(meta) for meta in metas]
        self.steps.append(LocalStep(operation.name, tuple(args), kwargs, tuple(out), tuple(metas)))
        self._record_seeded(operation, [*out, *(moved[register] for register in operation.writes)])
        return out

    def _record_seeded(self, operation: Operation, registers: Sequence[int | None]) -> None:
        """Records the mesh dimensions along which ranks draw different random numbers."""
        if operation.random:
            drawn = next((self.metas[register].placements for register in registers if register is not None), ())
            self.seeded = tuple(dim for dim, placement in enumerate(drawn) if not placement.is_replicate())

    def write(self, target: int, source: int) -> None:
        """Adds a copy of `source` into the memory of `target`."""
        source, expanded = self.redistribute(source, self.metas[target].placements), self.metas[target].expanded
        self.steps.append(Write(self._narrowed(target, expanded), self._narrowed(source, expanded)))

    def _narrowed(self, source: int, dims: Sequence[int]) -> int:
        """Narrows expanded dimensions to one element, a view of all distinct elements."""
        for dim in dims:
            meta = self.metas[source]
            shape = tuple(1 if index == dim else size for index, size in enumerate(meta.shape))
            source = self._viewed(aten.slice.Tensor, source, (dim, 0, 1), shape)
        return source

    def _expanded(self, source: int, meta: Meta, dims: Sequence[int]) -> int:
        """Expands narrowed dimensions again to the sizes of a meta."""
        sizes = [size if dim in dims else -1 for dim, size in enumerate(meta.shape)]
        return self._viewed(aten.expand.default, source, (sizes,), meta.shape)

    def _viewed(
        self, func: torch._ops.OpOverload, source: int, args: tuple[object, ...], shape: tuple[int, ...]
    ) -> int:
        source_meta = self.metas[source]
        meta = Meta.of(source_meta.layout, shape, source_meta.dtype, source_meta.placements, stride=source_meta.stride)
        (result,) = self.local(Operation(func, (Slot(0), *args), {}, (source_meta,)), (source,), (meta,))
        assert result is not None
        return result

    def splice(self, draft: "Draft", inputs: Sequence[int]) -> dict[int, int]:
        """Adds the steps of another draft on these input registers; returns a map from its registers to these."""
        mapping = dict(enumerate(inputs))
        for register in range(len(inputs), len(draft.metas)):
            mapping[register] = self.register(draft.metas[register])
        self.steps += [_renumbered(step, mapping) for step in draft.steps]
        self.collectives += draft.collectives
        self.seeded = self.seeded if draft.seeded is None else draft.seeded
        return mapping

    def program(self, results: Sequence[int]) -> StepProgram:
        """Returns the finished program."""
        return StepProgram(self._inputs, len(self.metas), tuple(self.steps), tuple(results), self.seeded)


def _renumbered(step: Step, mapping: dict[int, int]) -> Step:
    def moved(argument: object) -> object:
        if isinstance(argument, Slot):
            return Slot(mapping[argument.register])
        return type(argument)(map(moved, argument)) if isinstance(argument, list | tuple) else argument

    match step:
        case Redistribute() | Finish():
            return replace(step, source=mapping[step.source], out=mapping[step.out])
        case Write():
            return Write(mapping[step.target], mapping[step.source])
    return replace(
        step,
        args=tuple(map(moved, step.args)),
        kwargs={name: moved(value) for name, value in step.kwargs.items()},
        out=tuple(None if register is None else mapping[register] for register in step.out),
    )


def redistribution(world: World, meta: Meta, placements: Placements) -> list[Collective]:
    """Returns the collectives of a redistribution."""
    recorder = Recorder(world.dims)
    tensor, target = world.fake(meta), meta.placed(placements)
    with recorder, contextlib.suppress(DataDependentOutputException):  # shards cut unevenly by views: not counted
        placed(tensor._local_tensor, tensor._spec, target, world.spec(target))
    return recorder.collectives


def joined(collectives: Sequence[Collective]) -> list[Collective]:
    """Merges the collectives of several tensors into one for each kind and mesh dimension."""
    nbytes: dict[tuple[str, str], int] = {}
    for collective in collectives:
        nbytes[collective.kind, collective.dim] = nbytes.get((collective.kind, collective.dim), 0) + collective.nbytes
    return [Collective(*key, total) for key, total in nbytes.items()]


class Writer:
    """Adds operations to a draft; a call returns the slot of the first result."""

    def __init__(
        self, operation: Operation, draft: Draft, draft_of: Callable[[Operation], tuple[Draft, list[int | None]]]
    ) -> None:
        self._operation = operation
        self._draft = draft
        self._draft_of = draft_of

    def __call__(self, func: torch._ops.OpOverload, *args: object, **kwargs: object) -> Slot:
        """Adds an operation; returns the slot of the first result."""
        return self.all(func, *args, **kwargs)[0]

    def all(self, func: torch._ops.OpOverload, *args: object, **kwargs: object) -> list[Slot]:
        """Adds an operation; returns the slots of all results."""
        args, kwargs = counted_from_front(func, args, kwargs, self._shape) or (args, kwargs)
        registers = [*slots(list(args)), *slots(list(kwargs.values()))]
        numbers = iter(range(len(registers)))

        def renumbered(argument: object) -> object:
            if isinstance(argument, Slot):
                return Slot(next(numbers))
            return type(argument)(map(renumbered, argument)) if isinstance(argument, list | tuple) else argument

        inner, results = self._draft_of(
            replace(
                self._operation,
                func=func,
                args=tuple(renumbered(a) for a in args),
                kwargs={name: renumbered(a) for name, a in kwargs.items()},
                metas=tuple(self._draft.metas[register] for register in registers),
            )
        )
        mapping = self._draft.splice(inner, registers)
        return [Slot(mapping[register]) for register in results if register is not None]

    def whole(self, slot: Slot) -> Slot:
        """Returns the tensor, replicated; a tensor of own values is unchanged, since each rank has a whole one."""
        if self._draft.metas[slot.register].is_own:
            return slot
        return Slot(self._draft.gather(slot.register))

    def summed(self, slot: Slot) -> Slot:
        """Returns the tensor, reduced if it is partial."""
        placements = self._draft.metas[slot.register].placements
        return Slot(self._draft.redistribute(slot.register, summed(placements)))

    def cut(self, slot: Slot, placements: Sequence[Placement]) -> Slot:
        """Returns the tensor with these placements."""
        return Slot(self._draft.redistribute(slot.register, tuple(placements)))

    def like(self, slot: Slot, template: Slot) -> Slot:
        """Returns the tensor with the placements of `template`."""
        return Slot(self._draft.redistribute(slot.register, self._draft.metas[template.register].placements))

    def placements(self, slot: Slot) -> Placements:
        """Returns the placements of a slot."""
        return self._draft.metas[slot.register].placements

    def _shape(self, value: object) -> tuple[int, ...] | None:
        return self.shape(value) if isinstance(value, Slot) else None

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Returns the global shape of a slot."""
        return self._draft.metas[slot.register].shape


@dataclass(frozen=True, slots=True)
class Reduction:
    """`kind` of `REDUCTIONS` along these dimensions of a mesh, by index.

    With `scatter` each rank along the only dimension has its part of the result. `target`: the result is written into
    the tensor itself ("self") or into a second one ("out"), or is a new tensor ("").
    """

    kind: str
    dims: tuple[int, ...]
    scatter: bool = False
    target: str = ""


def reduction(world: World, metas: Sequence[Meta], request: Reduction, number: int) -> OperationPlan:
    """Makes the plan of a reduction of a tensor; a second tensor is written to."""
    draft, meta, size = Draft(world, metas), metas[0], metas[0].layout.shape[request.dims[0]]

    def along(placement: Placement) -> tuple[Placement, ...]:
        return tuple(placement if dim in request.dims else Replicate() for dim in range(len(meta.layout.shape)))

    def viewed(source: int, func: torch._ops.OpOverload, args: tuple[object, ...], view: Meta) -> int:
        source_meta = draft.metas[source]
        (register,) = draft.local(Operation(func, (Slot(0), *args), {}, (source_meta,)), (source,), (view,))
        assert register is not None
        return register

    def placed(shape: Sequence[int], placements: Sequence[Placement]) -> Meta:
        return Meta.of(meta.layout, shape, meta.dtype, placements)

    if request.kind == "stack":
        parts = viewed(0, aten.unsqueeze.default, (0,), placed((size, *meta.shape), along(Shard(0))))
        if request.scatter:
            moved = draft.redistribute(parts, along(Shard(1)))
            result, shape = (
                viewed(moved, aten.squeeze.dim, (1,), placed(meta.shape, own_values(meta.layout))),
                meta.shape,
            )
        else:
            moved = draft.redistribute(parts, along(Replicate()))
            shape = (size, *meta.shape)
            result = viewed(moved, aten.alias.default, (), placed(shape, own_values(meta.layout)))
    else:
        parts = viewed(0, aten.clone.default, (), placed(meta.shape, along(Partial(request.kind))))
        if request.scatter:
            moved, shape = draft.redistribute(parts, along(Shard(0))), meta.shape[1:]
            result = viewed(moved, aten.squeeze.dim, (0,), placed(shape, own_values(meta.layout)))
        else:
            moved, shape = draft.redistribute(parts, along(Replicate())), meta.shape
            result = viewed(moved, aten.alias.default, (), placed(shape, own_values(meta.layout)))
    written = {"self": 0, "out": 1}.get(request.target)
    if written is not None:
        draft.write(written, result)
    return OperationPlan(
        number=number,
        operation="reduce_" if request.target == "self" else "reduce",
        program=draft.program(() if written is not None else (result,)),
        made=() if written is not None else (draft.metas[result],),
        build=builder(ResultSlot(0) if written is None else ResultSlot(written, given=True)),
        writes=() if written is None else (written,),
        collectives=tuple(draft.collectives),
        own=True,
        agrees=True,
    )


def retagged(
    world: World, meta: Meta, placements: Sequence[Placement], shape: Sequence[int], number: int
) -> OperationPlan:
    """Makes the plan that gives the values on the ranks other placements, in the same memory."""
    draft, own = Draft(world, (meta,)), OWN_VALUE in placements
    view = Meta.of(meta.layout, shape, meta.dtype, placements, stride=dense(meta.stride, shape))
    (register,) = draft.local(Operation(aten.alias.default, (Slot(0),), {}, (meta,)), (0,), (view,))
    assert register is not None
    return OperationPlan(
        number=number,
        operation="per_rank" if own else "as_sharded",
        program=draft.program((register,)),
        made=(view,),
        build=builder(ResultSlot(0)),
        views=((0, 0),),
        offsets=(0,),
        own=own,
        agrees=not own,
    )
