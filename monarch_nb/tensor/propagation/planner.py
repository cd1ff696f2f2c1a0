"""Planning of operations on tensors with given metas."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import Partial
from torch.utils._python_dispatch import _disable_current_modes

from monarch_nb.tensor.propagation.draft import Reduction, reduction, retagged
from monarch_nb.tensor.propagation.plan import DataDependentShapeError, PropagationError, user_line
from monarch_nb.tensor.propagation.rewrites import Body, SubstituteTrace, substitute

from .draft import Draft, Writer, joined
from .execute import flat
from .lowered import Unfit, imagined, lowered, reason, refuse_one_address
from .meta import MeshLayout, Meta, Placements, own_values, replicated
from .operation import Leaf, Operation, carries_parts, has_parts, out_of_place, summed
from .plan import Collective, OperationPlan, PlanNotice, Redistribute, ResultSlot, Slot, Write, builder
from .rewrites import ALWAYS, REWRITES
from .rules import by_equal_placements, by_own_rules, has_own_rule
from .sharded import by_rules
from .world import World, imagining

aten = torch.ops.aten


class Planner:
    """Makes plans from, in this order: substitutes, rewrites, own rules, PyTorch's rules; else by gathering."""

    def __init__(self, layout: MeshLayout) -> None:
        self._layout = layout
        self._worlds: list[World] = []
        self._views: dict[int, Operation] = {}  # by number of the plan
        self._count = 0
        self._reasons: list[tuple[Operation, str]] = []  # reasons why parts of the current plan gather

    def plan(self, operation: Operation) -> OperationPlan:
        """Makes the plan of an operation. Raises the operation's errors on local tensors, or PropagationError."""
        self._imagine()
        with imagining():
            if torch.Tag.inplace_view in operation.func.tags:
                return self._reshaped(operation)
            return self._propagated(operation)

    def redistributions(
        self, metas: Sequence[Meta], placements: Sequence[Placements], *, pending: bool
    ) -> OperationPlan:
        """Makes the plan of redistributions that share collectives; `finishing` waits for `pending` ones.

        Raises PropagationError for partial placements that cannot be reduced.
        """
        for meta, target in zip(metas, placements, strict=True):
            _refuse_parts(meta, target)
        self._imagine()
        with imagining():
            draft = Draft(self._worlds[0], metas)
            results = [draft.redistribute(index, target, pending=pending) for index, target in enumerate(placements)]
        return self._redistributed(draft, results, joined(draft.collectives))

    def finishing(self, metas: Sequence[Meta], dims: Sequence[tuple[int, ...]]) -> OperationPlan:
        """Makes the plan that waits for redistributions to these metas, along these mesh dimensions."""
        self._imagine()
        with imagining():
            draft = Draft(self._worlds[0], metas)
            results = [draft.finish(register, waits) for register, waits in enumerate(dims)]
        return self._redistributed(draft, results, ())

    def _redistributed(self, draft: Draft, results: Sequence[int], collectives: Sequence[Collective]) -> OperationPlan:
        self._count += 1
        return OperationPlan(
            number=self._count,
            operation="redistribute",
            program=draft.program(results),
            made=tuple(draft.metas[register] for register in results),
            build=builder([*map(ResultSlot, range(len(results)))]),
            collectives=tuple(collectives),
        )

    def reduction(self, metas: Sequence[Meta], request: Reduction) -> OperationPlan:
        """Makes the plan of a reduction of the ranks' own values. Raises PropagationError if there is none."""
        _refuse_parts(metas[0], (Partial(request.kind),) if request.kind != "stack" else ())
        self._imagine()
        self._count += 1
        with imagining():
            return reduction(self._worlds[0], metas, request, self._count)

    def retagged(self, meta: Meta, placements: Placements, shape: Sequence[int]) -> OperationPlan:
        """Makes the plan that gives the values on the ranks other placements, in the same memory."""
        self._imagine()
        self._count += 1
        with imagining():
            return retagged(self._worlds[0], meta, placements, shape, self._count)

    def putting_back(self, base: Meta, steps: Sequence[tuple[int, int]], view: Meta) -> OperationPlan:
        """Makes the plan that writes a copied view back to its base.

        `steps` are the numbers of the plans from base to view, with indices of their results. The inputs of the plan
        are the base and the view.
        """
        self._imagine()
        with imagining():
            draft = Draft(self._worlds[0], (base, view))
            current = gathered = draft.gather(0)
            for number, index in steps:
                operation = replace(self._views[number], metas=(draft.metas[current],))
                inner, registers = _gathered(operation, operation.results(self._plain(operation))[1], self._worlds[0])
                results = [register for register in registers if register is not None]
                current = draft.splice(inner, (current,))[results[index]]
            draft.write(current, draft.gather(1))
            if gathered:
                draft.write(0, gathered)
        self._count += 1
        return OperationPlan(
            number=self._count,
            operation="a write through a view",
            program=draft.program(()),
            made=(),
            build=builder(None),
            writes=(0,),
            collectives=tuple(draft.collectives),
        )

    def _imagine(self) -> None:
        if not self._worlds:
            with _disable_current_modes(), torch._C.DisableTorchFunction():  # a mesh may be active
                self._worlds = [World(self._layout, rank) for rank in dict.fromkeys((0, self._layout.size - 1))]
        for world in self._worlds:
            world.register()

    def _reshaped(self, operation: Operation) -> OperationPlan:
        """Plans a change of shape in place as a new view, to which the handle is rebound."""
        func = out_of_place(operation.func)
        if func is None:
            raise PropagationError(
                operation.name,
                "it changes the memory of a sharded tensor in place",
                "Make a new tensor instead",
                user_line(),
            )
        plan = self._propagated(replace(operation, func=func))
        return replace(plan, operation=operation.name, rebinds=True, build=builder(ResultSlot(0, given=True)))

    def _propagated(self, operation: Operation) -> OperationPlan:
        self._reasons.clear()
        value = VALUES.get(operation.packet)
        tree: object
        registers: list[int | None]
        if value is not None:
            draft = Draft(self._worlds[0], operation.metas)
            slot = value(operation, Writer(operation, draft, self._drafted))
            leaves: list[Leaf] = [None]
            tree = ResultSlot(0) if isinstance(slot, Slot) else slot
            registers = [slot.register] if isinstance(slot, Slot) else []
        else:
            tree, leaves, draft, registers = self._draft_with_tree(operation)
        results = [register for register in registers if register is not None]
        tensors = [leaf for leaf in leaves if leaf is not None]
        metas = tuple(draft.metas[register] for register in results)
        self._count += 1
        views = tuple((index, base) for index, (_, bases) in enumerate(tensors) for base in bases)
        offsets = tuple(int(t.storage_offset()) * t.dtype.itemsize for t, bases in tensors for _ in bases)
        if views:
            self._views[self._count] = operation
        program = draft.program(results)
        return OperationPlan(
            number=self._count,
            operation=operation.name,
            program=program,
            made=metas,
            build=builder(tree),
            views=views,
            offsets=offsets,
            writes=tuple(dict.fromkeys(operation.writes)),
            puts_back=len(operation.writes) > 1 and any(isinstance(step, Write) for step in program.steps),
            collectives=tuple(draft.collectives),
            notices=self._notices(operation) if any(isinstance(step, Redistribute) for step in program.steps) else (),
            value=value is not None and bool(metas),
            own=any(meta.is_own for meta in operation.metas),
        )

    def _drafted(self, operation: Operation) -> tuple[Draft, list[int | None]]:
        return self._draft_with_tree(operation)[2:]

    def _draft_with_tree(self, operation: Operation) -> tuple[object, list[Leaf], Draft, list[int | None]]:
        """Returns the result tree of the operation, its leaves, the steps, and the registers of the leaves."""
        body = substitute(operation, self._layout.device)
        if body is not None:
            return self._substituted(operation, body)
        tree, leaves = operation.results(self._plain(operation))
        default = torch.get_default_dtype()
        if default != torch.float32 and _becomes_default(operation, leaves):  # on the ranks it may be another
            draft = Draft(self._worlds[0], operation.metas)
            write = Writer(operation, draft, self._drafted)
            slots = [write(aten._to_copy.default, Slot(index), dtype=default) for index in range(len(operation.metas))]
            args, kwargs = operation.filled(slots.__getitem__)
            return tree, leaves, draft, [slot.register for slot in write.all(operation.func, *args, **kwargs)]
        return tree, leaves, *self._drafted_as(operation, leaves)

    def _substituted(self, operation: Operation, body: Body) -> tuple[object, list[Leaf], Draft, list[int | None]]:
        draft = Draft(self._worlds[0], operation.metas)
        tensors = [self._worlds[0].whole(meta) for meta in operation.metas]
        args, kwargs = operation.filled(tensors.__getitem__)
        write = Writer(operation, draft, self._drafted)
        with SubstituteTrace(write, tensors) as trace:
            result = body(*args, **kwargs)
        tree, leaves = operation.results(result)
        registers: list[int | None] = []
        for leaf in leaves:
            slot = None if leaf is None else trace.slot(leaf[0])
            if slot is not None and slot.register < len(tensors):  # it returns an argument
                slot = write(torch.ops.aten.clone.default, slot)
            registers.append(None if slot is None else slot.register)
        return tree, leaves, draft, registers

    def _drafted_as(self, operation: Operation, leaves: list[Leaf]) -> tuple[Draft, list[int | None]]:
        """Returns the steps of an operation, and the registers of its leaves."""
        if any(meta.is_own for meta in operation.metas):
            return _on_each_rank(operation, leaves, self._worlds[0])
        is_replicated = all(meta.is_replicated for meta in operation.metas)
        rewrite = REWRITES.get(operation.packet)
        if rewrite is not None and (not is_replicated or operation.packet in ALWAYS):
            draft = Draft(self._worlds[0], operation.metas)
            slots = rewrite(operation, Writer(operation, draft, self._drafted))
            if slots is not None:
                return draft, [
                    None if slot is None else _rewritten(draft, slot, leaf)
                    for slot, leaf in zip(slots, leaves, strict=True)
                ]
        if any(map(has_parts, operation.metas)) and not has_own_rule(operation) and not carries_parts(operation):
            return self._with_reduced_inputs(operation, leaves)
        if any(0 in meta.shape and not meta.is_replicated for meta in operation.metas):
            return self._with_gathered_empties(operation, leaves)
        if not is_replicated:
            try:
                return self._sharded(operation, leaves)
            except Unfit as unfit:
                self._reasons.append((operation, str(unfit)))
            except PropagationError:
                raise
            except Exception as error:  # an error of a rule: the operation itself accepts these tensors
                self._reasons.append((operation, reason(error)))
        return _gathered(operation, leaves, self._worlds[0])

    def _sharded(self, operation: Operation, leaves: list[Leaf]) -> tuple[Draft, list[int | None]]:
        draft, registers = self._by_rules(operation, leaves)
        is_list = operation.packet.startswith("_foreach_")  # whose results are added up together, later
        return draft, [None if register is None else _settled(draft, register, is_list) for register in registers]

    def _with_reduced_inputs(self, operation: Operation, leaves: list[Leaf]) -> tuple[Draft, list[int | None]]:
        """Plans the operation after reducing partial inputs, each with one all-reduce."""
        written = [operation.metas[register] for register in operation.writes if has_parts(operation.metas[register])]
        for placement in (p for meta in written for p in meta.placements if p.is_partial()):
            if type(placement) is not Partial:
                raise PropagationError(
                    operation.name,
                    f"ranks hold parts of the tensor that it changes in place, {placement!r}, which cannot be made of "
                    "just any values",
                    "Make a new tensor instead, or use t.redistribute(...) first, with Replicate() where t has parts",
                    user_line(),
                )
        if written:
            return _gathered(operation, leaves, self._worlds[0])
        draft = Draft(self._worlds[0], operation.metas)
        moved = [draft.redistribute(register, summed(meta.placements)) for register, meta in enumerate(operation.metas)]
        reduced = replace(operation, metas=tuple(draft.metas[register] for register in moved))
        inner, registers = self._drafted_as(reduced, leaves)
        mapping = draft.splice(inner, moved)
        return draft, [None if register is None else mapping[register] for register in registers]

    def _with_gathered_empties(self, operation: Operation, leaves: list[Leaf]) -> tuple[Draft, list[int | None]]:
        """Plans the operation after gathering empty tensors, since some view rules do not terminate for them."""
        empty = [register for register, meta in enumerate(operation.metas) if 0 in meta.shape]
        if any(register in operation.writes for register in empty):
            return _gathered(operation, leaves, self._worlds[0])
        draft = Draft(self._worlds[0], operation.metas)
        moved = [draft.gather(register) if register in empty else register for register in range(len(operation.metas))]
        gathered = replace(operation, metas=tuple(draft.metas[register] for register in moved))
        inner, registers = self._drafted_as(gathered, leaves)
        mapping = draft.splice(inner, moved)
        results = [None if register is None else mapping[register] for register in registers]
        for leaf, register in zip(leaves, results, strict=True):
            if leaf is not None and register is not None and any(moved[base] != base for base in leaf[1]):
                draft.metas[register] = draft.metas[register].as_copy()
        return draft, results

    def _by_rules(self, operation: Operation, leaves: list[Leaf]) -> tuple[Draft, list[int | None]]:
        worlds = self._worlds
        if has_own_rule(operation):
            return lowered(by_own_rules(operation, leaves), leaves, worlds)
        lowering = by_equal_placements(operation, leaves)
        if lowering is not None:
            return lowered(lowering, leaves, worlds)
        try:
            return by_rules(operation, leaves, worlds)
        except Unfit as unfit:
            try:
                return lowered(by_own_rules(operation, leaves), leaves, worlds)
            except Unfit:
                raise unfit from None

    def _notices(self, operation: Operation) -> tuple[PlanNotice, ...]:
        notices = []
        for inner, cause in self._reasons:
            moved = sum(meta.nbytes for meta in inner.metas if not meta.is_replicated)
            part = "" if inner.name == operation.name else f" (a part of {operation.name})"
            text = (
                f"{inner.name}{part} runs on whole tensors: its inputs are gathered on every rank "
                f"({moved} bytes here), because {cause}"
            )
            notices.append(PlanNotice(inner.name, text))
        return tuple(notices)

    def _plain(self, operation: Operation) -> object:
        """Returns the result of the operation on fake local tensors of the global shapes."""
        fresh = bool(operation.writes)
        tensors = [self._worlds[0].whole(meta, fresh=fresh) for meta in operation.metas]
        args, kwargs = operation.filled(tensors.__getitem__)
        try:
            result = imagined(operation, args, kwargs)
            refuse_one_address(operation, tensors)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise DataDependentShapeError(
                operation.name,
                "the shape of its result depends on values, which only the workers have",
                "Fetch the tensor first (t.full_tensor()), or use a form of fixed shape: torch.where(mask, a, b), "
                "masked_fill, a product with the mask",
                user_line(),
            ) from error
        for leaf in flat(result):
            if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_quantized):
                raise PropagationError(
                    operation.name,
                    "its result is no dense tensor, and no other kind is cut over ranks",
                    "Fetch the tensor first: t.full_tensor()",
                    user_line(),
                )
        for register in operation.writes:
            meta, tensor = operation.metas[register], tensors[register]
            if tuple(tensor.shape) != meta.shape or tensor.stride() != meta.stride:
                raise PropagationError(
                    operation.name,
                    f"it changes the shape of a sharded tensor in place, from {meta.shape} to {tuple(tensor.shape)}",
                    "Make a new tensor instead",
                    user_line(),
                )
        return result


def _becomes_default(operation: Operation, leaves: Sequence[Leaf]) -> bool:
    """Returns whether whole numbers become floats of the default dtype."""
    kinds = (torch.get_default_dtype(), torch.get_default_dtype().to_complex())
    if any(meta.dtype.is_floating_point or meta.dtype.is_complex for meta in operation.metas) or operation.writes:
        return False
    is_free = operation.argument("dtype") is None and bool(leaves)
    return is_free and all(leaf is not None and leaf[0].dtype in kinds for leaf in leaves)


def _refuse_parts(meta: Meta, placements: Placements) -> None:
    """Raises PropagationError for partial placements that cannot be reduced."""
    parts = [p for p in placements if p.is_partial()]
    kinds = dict.fromkeys(str(p) for p in parts)
    reason = ""
    if len(kinds) > 1:
        reason, instead = (
            f"parts of several kinds, {', '.join(kinds)}, cannot be put together",
            "Take one kind of Partial",
        )
    elif any(type(p) is not Partial for p in parts):
        reason, instead = (
            f"{parts[0]!r} is what PyTorch's operations make of it",
            "Take Replicate(), Shard() or Partial()",
        )
    elif any(p.is_partial("avg") for p in parts) and not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        reason, instead = (
            f"parts of an average are fractions, and its dtype is {meta.dtype}",
            "Convert it first: t.float()",
        )
    elif any(p.is_partial(kind) for p in parts for kind in ("band", "bor", "bxor")) and meta.dtype.is_floating_point:
        reason, instead = f"bits of {meta.dtype} are not put together", "Take another kind of Partial"
    if reason:
        raise PropagationError("redistribute", reason, instead, user_line())


def _settled(draft: Draft, register: int, is_list: bool) -> int:
    """Returns the register of a result, reduced if it has partial placements that later operations cannot use.

    Masked partial placements can be reduced once only; averages and norms cannot be changed in place.
    """
    placements = draft.metas[register].placements
    masked = any(type(p).__name__.endswith("MaskPartial") for p in placements)
    made_of_any = all(type(p) is Partial and not p.is_partial("avg") for p in placements if p.is_partial())
    if masked or not (made_of_any or is_list):
        return draft.redistribute(register, summed(placements))
    return register


def _rewritten(draft: Draft, slot: Slot, leaf: Leaf) -> int:
    """Returns the register of a rewritten result, laid out as PyTorch's; a view of PyTorch's is a copy here."""
    if leaf is not None:
        slot = Slot(draft.laid_out(slot.register, leaf[0].stride()))
    if leaf is not None and leaf[1]:
        draft.metas[slot.register] = draft.metas[slot.register].as_copy()
    return slot.register


def _gathered(operation: Operation, leaves: Sequence[Leaf], world: World) -> tuple[Draft, list[int | None]]:
    """Drafts the operation on gathered tensors, with writes back to tensors that change in place.

    Costs an all-gather of each sharded tensor, and nothing if all are replicated.
    """
    draft = Draft(world, operation.metas)
    moved = [draft.gather(register) for register in range(len(operation.metas))]
    metas = [
        None
        if leaf is None
        else Meta.of(
            world.layout,
            tuple(leaf[0].shape),
            leaf[0].dtype,
            replicated(world.layout),
            stride=leaf[0].stride(),
            copied=any(moved[base] != base or operation.metas[base].copied for base in leaf[1]),
        )
        for leaf in leaves
    ]
    registers = draft.local(operation, moved, metas)
    for register in dict.fromkeys(operation.writes):
        if moved[register] != register:
            draft.write(register, moved[register])
    return draft, registers


def _on_each_rank(operation: Operation, leaves: Sequence[Leaf], world: World) -> tuple[Draft, list[int | None]]:
    """Drafts the operation on the local values of each rank, with results of own values; nothing is exchanged."""
    for register, meta in enumerate(operation.metas):
        if not (meta.is_own or meta.is_replicated):
            raise PropagationError(
                operation.name,
                f"one tensor has a value of its own on each rank, and another is sharded, {list(meta.placements)}",
                "t.per_rank() makes each rank's part of a sharded tensor its own value",
                user_line(),
            )
        if register in operation.writes and not meta.is_own:
            raise PropagationError(
                operation.name,
                "it would write other values on each rank into a tensor that is the same on all",
                "t.per_rank() gives each rank a value of its own, which may be written to",
                user_line(),
            )
    draft = Draft(world, operation.metas)
    metas = [None if leaf is None else _own_meta(leaf[0], world) for leaf in leaves]
    return draft, draft.local(operation, range(len(operation.metas)), metas)


def _own_meta(plain: torch.Tensor, world: World) -> Meta:
    layout = world.layout
    return Meta.of(layout, tuple(plain.shape), plain.dtype, own_values(layout), stride=plain.stride())


def _item(operation: Operation, write: Writer) -> Slot:
    slot = operation.args[0]
    assert isinstance(slot, Slot)
    return write.whole(slot)


def _equal(operation: Operation, write: Writer) -> Slot | bool:
    first, second = operation.args
    assert isinstance(first, Slot)
    assert isinstance(second, Slot)
    if write.shape(first) != write.shape(second):
        return False
    return write.whole(write(aten.all.default, write(aten.eq.Tensor, first, second)))


def _allclose(operation: Operation, write: Writer) -> Slot:
    return write.whole(write(aten.all.default, write(aten.isclose.default, *operation.args, **operation.kwargs)))


# Each gives the slot of a tensor of one element, whole on every rank, or the value if shapes determine it.
VALUES: dict[str, Callable[[Operation, Writer], Slot | bool]] = {
    "_local_scalar_dense": _item,
    "equal": _equal,
    "allclose": _allclose,
}
