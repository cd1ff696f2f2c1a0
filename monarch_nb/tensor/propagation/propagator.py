"""The cache of plans of operations on sharded tensors."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import torch

from monarch_nb.tensor.propagation.draft import Reduction
from monarch_nb.tensor.propagation.plan import PropagationError, user_line
from monarch_nb.tensor.propagation.rewrites import has_kernel
from monarch_nb.transport import held_back

from .meta import MeshLayout, Meta, Placements
from .operation import Operation, counted_from_front
from .plan import OperationPlan, Scalar, Slot
from .planner import Planner

_TRUE, _FALSE, _FLOAT, _LIST, _TUPLE, _END, _KEYWORDS, _PLACED, _BACK, _REDUCED, _RETAGGED, _BEGUN, _FINISHED = (
    object() for _ in range(13)
)

_planning = threading.RLock()  # one thread plans at a time: modes of PyTorch, and the numbers of plans, are shared

# Numbers do not affect shapes or placements of their results either, though they have no tag for it.
_PLAIN_NUMBERS = frozenset({"fill", "fill_", "full_like", "masked_fill", "masked_fill_", "lerp", "lerp_"})


class HasMeta(Protocol):
    """A stand-in for a tensor in arguments."""

    @property
    def meta(self) -> Meta:
        """All properties of the tensor except its values."""


L = TypeVar("L", bound=HasMeta)
P = ParamSpec("P")


class Propagator(Generic[L]):
    """Plans for the operations of one mesh.

    `leaf` is the class of stand-ins for tensors in arguments; its instances have a `meta`. Nothing here blocks or sends
    to workers. Interrupts are held back during planning: PyTorch's rules enter modes of the whole thread, which an
    interrupt would leave switched on.
    """

    @overload
    def __init__(self: "Propagator[Meta]", layout: MeshLayout) -> None: ...
    @overload
    def __init__(self, layout: MeshLayout, *, leaf: type[L]) -> None: ...
    def __init__(self, layout: MeshLayout, *, leaf: type[Any] = Meta) -> None:
        self.layout = layout
        self._leaf: type[L] = leaf
        self._leaf_kinds: set[type[object]] = {leaf}  # and its subclasses in arguments so far
        self._planner = Planner(layout)
        self._plans: dict[tuple[object, ...], OperationPlan] = {}
        self._operations: dict[int, torch._ops.OpOverload] = {}  # of plans, which keeps their ids from others
        self._number_free: dict[object, bool] = {}

    def plan(
        self, func: torch._ops.OpOverload, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> tuple[OperationPlan, list[L], list[float]]:
        """Returns the plan, the tensors among the arguments, and the numbers among them, in the plan's order.

        Raises the operation's errors on local tensors of these shapes, or a PropagationError with a remedy.
        """
        key: list[object] = [id(func), torch.get_default_dtype()]  # an operation computes its hash in Python
        leaves: list[L] = []
        scalars: list[float] = []
        self._read(args, key, leaves, scalars, func)
        if kwargs:
            key.append(_KEYWORDS)
            for name, value in kwargs.items():
                key.append(name)
                self._read((value,), key, leaves, scalars, func)
        plan_key = tuple(key)
        plan = self._plans.get(plan_key)
        if plan is None:
            plan = held_back(self._make_once, plan_key, self._make_plan, func, args, kwargs or {}, leaves, scalars)
        return plan, leaves, scalars

    def redistributions(
        self, metas: tuple[Meta, ...], placements: tuple[Placements, ...], *, pending: bool = False
    ) -> OperationPlan:
        """Returns the plan of redistributions; see `Planner.redistributions`."""
        kind = _BEGUN if pending else _PLACED
        return self._plan_of(kind, partial(self._planner.redistributions, pending=pending), metas, placements)

    def finishing(self, metas: tuple[Meta, ...], dims: tuple[tuple[int, ...], ...]) -> OperationPlan:
        """Returns the plan that waits for redistributions; see `Planner.finishing`."""
        return self._plan_of(_FINISHED, self._planner.finishing, metas, dims)

    def reduction(self, metas: tuple[Meta, ...], request: Reduction) -> OperationPlan:
        """Returns the plan of a reduction of the ranks' own values; see `Planner.reduction`."""
        return self._plan_of(_REDUCED, self._planner.reduction, metas, request)

    def retagged(self, meta: Meta, placements: Placements, shape: tuple[int, ...]) -> OperationPlan:
        """Returns the plan that gives the values on the ranks other placements, in the same memory."""
        return self._plan_of(_RETAGGED, self._planner.retagged, meta, placements, shape)

    def putting_back(self, base: Meta, steps: tuple[tuple[int, int], ...], view: Meta) -> OperationPlan:
        """Returns the plan that writes a copied view back to its base; see `Planner.putting_back`."""
        return self._plan_of(_BACK, self._planner.putting_back, base, steps, view)

    def _plan_of(
        self, kind: object, make: Callable[P, OperationPlan], *args: P.args, **kwargs: P.kwargs
    ) -> OperationPlan:
        """Returns the plan of this kind for these arguments, made if it is not cached."""
        key = (kind, *args)
        plan = self._plans.get(key)
        if plan is None:
            plan = held_back(self._make_once, key, partial(make, *args, **kwargs))
        return plan

    def _make_once(self, key: tuple[object, ...], make: Callable[..., OperationPlan], *args: object) -> OperationPlan:
        with _planning:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = make(*args)
            return plan

    def _read(
        self, args: Sequence[Any], key: list[object], leaves: list[L], scalars: list[float], func: object
    ) -> None:
        leaf_kinds = self._leaf_kinds
        for value in args:
            kind = type(value)
            if kind in leaf_kinds:
                leaves.append(value)
                key.append(value.meta)
            elif kind is float:
                if self._is_free(func):
                    scalars.append(value)
                    key.append(_FLOAT)
                else:
                    key.append(kind)
                    key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is list or kind is tuple:
                key.append(_LIST if kind is list else _TUPLE)
                self._read(value, key, leaves, scalars, func)
                key.append(_END)
            elif isinstance(value, self._leaf):
                leaf_kinds.add(kind)
                leaves.append(value)
                key.append(value.meta)
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

    def _is_free(self, func: object) -> bool:
        is_free = self._number_free.get(func)
        if is_free is None:
            assert isinstance(func, torch._ops.OpOverload)
            name = func._schema.name.partition("::")[2]
            is_free = self._number_free[func] = has_kernel(func, self.layout.device) and (
                torch.Tag.pointwise in func.tags
                or name in _PLAIN_NUMBERS
                or (name.startswith(("_foreach_", "_fused_")) and "norm" not in name)
            )
        return is_free

    def _shape(self, value: object) -> tuple[int, ...] | None:
        return value.meta.shape if isinstance(value, self._leaf) else None

    def _make_plan(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[object],
        kwargs: dict[str, object],
        leaves: Sequence[L],
        scalars: Sequence[float],
    ) -> OperationPlan:
        self._operations[id(func)] = func
        arguments = counted_from_front(func, args, kwargs, self._shape)
        if arguments is not None:
            return self.plan(func, *arguments)[0]
        slots, numbers = iter(range(len(leaves))), iter(range(len(scalars)))
        free = self._is_free(func)

        def template(value: object) -> object:
            if isinstance(value, self._leaf):
                return Slot(next(slots))
            if type(value) is float and free:
                return Scalar(next(numbers))
            if isinstance(value, list | tuple):
                return [*map(template, value)] if isinstance(value, list) else (*map(template, value),)
            return torch.device(self.layout.device) if isinstance(value, torch.device) else value

        return self._planner.plan(
            Operation(
                func,
                tuple(map(template, args)),
                {name: template(value) for name, value in kwargs.items()},
                tuple(leaf.meta for leaf in leaves),
                tuple(scalars),
            )
        )
