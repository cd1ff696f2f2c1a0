"""From an operation on sharded tensors to its plan: once made, then found."""

from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from .draft import Draft
from .errors import DataDependentShapeError, NoRuleError, PropagationError, ViewWriteError
from .gathered import gathered
from .lines import user_line
from .meta import Layout, Meta, Placements
from .operation import Operation
from .plan import Notice, Plan, Result, Scalar, Slot, builder
from .sharded import Unfit, by_rules
from .world import World, imagining

__all__ = ["Propagator"]

aten = torch.ops.aten

_TRUE, _FALSE, _FLOAT, _LIST, _TUPLE, _END, _KEYWORDS, _PLACED = (object() for _ in range(8))

# Of these, too, no number decides on the shape or placement of a result, though they carry no tag that says so.
_PLAIN_NUMBERS = frozenset({"fill", "fill_", "full_like", "masked_fill", "masked_fill_", "lerp", "lerp_"})


class Propagator:
    """Plans for the operations of one mesh.

    `leaf` is the class of what stands for a tensor in arguments; its instances have a `meta`. `notify` is called with
    what the user should hear, once per operation. Where `gather` is false, an operation that needs its inputs whole
    on every rank raises NoRuleError instead. Nothing here blocks or talks to workers.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        leaf: type = Meta,
        notify: Callable[[Notice], None] | None = None,
        gather: bool = True,
    ) -> None:
        self.layout = layout
        self._leaf = leaf
        self._notify = notify
        self._gather = gather
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._number_free: dict[object, bool] = {}
        self._worlds: list[World] = []
        self._told: set[str] = set()
        self._made = 0

    def plan(
        self, func: torch._ops.OpOverload, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> tuple[Plan, list[object], list[object]]:
        """The plan, the tensors among the arguments, and the numbers that go with them, in the plan's order.

        Raises what the operation raises on local tensors of these shapes, or a PropagationError that says what to do.
        """
        key: list[object] = [func]
        leaves: list[object] = []
        scalars: list[object] = []
        self._read(args, key, leaves, scalars, func)
        if kwargs:
            key.append(_KEYWORDS)
            for name, value in kwargs.items():
                key.append(name)
                self._read((value,), key, leaves, scalars, func)
        found = tuple(key)
        plan = self._plans.get(found)
        if plan is None:
            plan = self._plans[found] = self._planned(func, args, kwargs or {}, leaves, scalars)
        return plan, leaves, scalars

    def redistribution(self, meta: Meta, placements: Placements) -> Plan:
        """The plan that places a tensor otherwise."""
        key = (_PLACED, meta, placements)
        plan = self._plans.get(key)
        if plan is None:
            with imagining():
                draft = Draft(self._imagined()[0], (meta,))
                made = draft.redistribute(0, placements)
            self._made += 1
            plan = self._plans[key] = Plan(
                number=self._made,
                operation="redistribute",
                program=draft.program((made,)),
                made=(draft.metas[made],),
                build=builder(Result(0)),
                collectives=tuple(draft.collectives),
            )
        return plan

    def _imagined(self) -> list[World]:
        if not self._worlds:
            with torch._C.DisableTorchFunction():
                self._worlds = [World(self.layout, rank) for rank in dict.fromkeys((0, self.layout.size - 1))]
        return self._worlds

    def _read(
        self, args: Sequence[object], key: list[object], leaves: list[object], scalars: list[object], func: object
    ) -> None:
        leaf = self._leaf
        for value in args:
            kind = type(value)
            if kind is leaf:
                leaves.append(value)
                key.append(value.meta)  # type: ignore[attr-defined]
            elif kind is float:
                if self._free(func):
                    scalars.append(value)
                    key.append(_FLOAT)
                else:
                    key.append(kind)
                    key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is list or kind is tuple:
                key.append(_LIST if kind is list else _TUPLE)
                self._read(value, key, leaves, scalars, func)  # type: ignore[arg-type]
                key.append(_END)
            elif isinstance(value, leaf):
                leaves.append(value)
                key.append(value.meta)  # type: ignore[attr-defined]
            elif isinstance(value, torch.Tensor):
                raise PropagationError(
                    str(func),
                    "a local tensor among sharded ones",
                    "Send it to the mesh first: monarch.distribute(tensor, mesh)",
                    user_line(),
                )
            elif isinstance(value, list | tuple):  # torch.Size
                key.append(_TUPLE)
                self._read(value, key, leaves, scalars, func)
                key.append(_END)
            else:
                key.append(value)

    def _free(self, func: object) -> bool:
        known = self._number_free.get(func)
        if known is None:
            assert isinstance(func, torch._ops.OpOverload)
            name = func._schema.name.partition("::")[2]
            known = self._number_free[func] = (
                torch.Tag.pointwise in func.tags
                or name in _PLAIN_NUMBERS
                or (name.startswith(("_foreach_", "_fused_")) and "norm" not in name)
            )
        return known

    def _planned(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[object],
        kwargs: dict[str, object],
        leaves: Sequence[object],
        scalars: Sequence[object],
    ) -> Plan:
        slots, numbers = iter(range(len(leaves))), iter(range(len(scalars)))
        free = self._free(func)

        def template(value: object) -> object:
            if isinstance(value, self._leaf):
                return Slot(next(slots))
            if type(value) is float and free:
                return Scalar(next(numbers))
            if isinstance(value, list | tuple):
                return [*map(template, value)] if isinstance(value, list) else (*map(template, value),)
            return torch.device(self.layout.device) if isinstance(value, torch.device) else value

        operation = Operation(
            func,
            tuple(map(template, args)),
            {name: template(value) for name, value in kwargs.items()},
            tuple(leaf.meta for leaf in leaves),  # type: ignore[attr-defined]
            tuple(scalars),
        )
        self._imagined()
        with imagining():
            return self._propagated(operation)

    def _propagated(self, operation: Operation) -> Plan:
        for register in operation.writes:
            if operation.metas[register].copied:
                raise ViewWriteError(
                    operation.name,
                    "this writes through a view of a tensor that is sharded on a dimension which the view cuts, so "
                    "that the view is a copy and the write would be lost",
                    "Write to the tensor itself: t = torch.slice_scatter(t, values, dim, start, end), "
                    "t = t.index_copy(dim, index, values), or redistribute it first",
                    user_line(),
                )
        plain = self._plain(operation)
        tree, leaves = operation.results(plain)
        draft: Draft | None = None
        registers: list[int | None] = []
        notices: tuple[Notice, ...] = ()
        if not all(meta.is_replicated for meta in operation.metas):
            try:
                draft, registers = by_rules(operation, leaves, self._seen_by(operation))
            except Unfit as unfit:
                reason = str(unfit)
                if not self._gather:
                    raise NoRuleError(
                        operation.name,
                        f"its inputs would have to be gathered on every rank ({reason})",
                        "Redistribute them yourself, or allow it with gather=True",
                        user_line(),
                    ) from unfit
        if draft is None:
            draft, registers = gathered(operation, leaves, self._worlds[0])
            if draft.collectives:
                moved = sum(meta.nbytes for meta in operation.metas if not meta.is_replicated)
                notices = (
                    Notice(
                        operation.name,
                        f"{operation.name} runs on whole tensors: its inputs are gathered on every rank "
                        f"({moved} bytes here), because {reason}",
                    ),
                )
                if operation.name not in self._told:
                    self._told.add(operation.name)
                    if self._notify is not None:
                        self._notify(notices[0])
        results = [at for at in registers if at is not None]
        bases = [leaf[1] for leaf in leaves if leaf is not None]
        made = tuple(draft.metas[at] for at in results)
        self._made += 1
        return Plan(
            number=self._made,
            operation=operation.name,
            program=draft.program(results, seeded=_drawn(operation, made)),
            made=made,
            build=builder(tree),
            views=tuple((at, base) for at, over in enumerate(bases) for base in over),
            writes=tuple(dict.fromkeys(operation.writes)),
            collectives=tuple(draft.collectives),
            notices=notices,
        )

    def _plain(self, operation: Operation) -> object:
        """What the operation gives on plain tensors of the global shapes."""
        world = self._worlds[0]
        args, kwargs = operation.filled(lambda at: world.whole(operation.metas[at]))
        try:
            return operation.func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise DataDependentShapeError(
                operation.name,
                "the shape of its result depends on values, which only the workers have",
                "Fetch the tensor first (t.full_tensor()), or use a form of fixed shape: torch.where(mask, a, b), "
                "masked_fill, a product with the mask",
                user_line(),
            ) from error

    def _seen_by(self, operation: Operation) -> list[World]:
        """Whose views to ask: all ranks have shards of one size, or the last may have a smaller one."""
        return self._worlds if any(meta.is_uneven for meta in operation.metas) else self._worlds[:1]


def _drawn(operation: Operation, made: Sequence[Meta]) -> tuple[int, ...] | None:
    """Mesh dimensions along which ranks draw different random numbers."""
    if not operation.random:
        return None
    drawn = [operation.metas[at] for at in operation.writes] or list(made)
    if not drawn:
        return ()
    return tuple(dim for dim, p in enumerate(drawn[0].placements) if not p.is_replicate())
