"""Application of PyTorch's sharding rules to an operation, and checks of their results."""

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, _decompositions, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

from .draft import Draft, Recorder
from .execute import flat
from .lowered import Lowering, Unfit, lowered, reason
from .meta import Meta, Placements, carrier
from .operation import Leaf, Operation, slots
from .plan import Collective, Slot
from .world import World

aten = torch.ops.aten
T = TypeVar("T")
_EXPAND = "expand_to_full_mesh_op_strategy"  # modules of PyTorch import it by name
# Limit of costs to compute; each takes about 10 µs.
_MAX_COSTS = 40_000
# Limit of candidates of a decomposed operation, each of which is tried on all parts.
_MAX_CANDIDATES = 250
_CACHE = "_monarch_neighbours"  # attribute of a planner

# For these, DTensor does more than moving inputs and running the operation on shards.
_WHOLE_CALLS = frozenset({aten.argmax.default, aten.argmin.default})

_REDUCTIONS = frozenset({"sum", "mean", "nansum", "amax", "amin"})
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})

# Elements of the index correspond by position to those of the other tensors, which may be larger.
_ELEMENT_BY_ELEMENT = frozenset({"gather", "scatter", "scatter_add", "scatter_reduce"})
# Dimensions of unbatched inputs of pooling, by `2d` in the name of the operation.
_UNBATCHED = {"1d": 2, "2d": 3, "3d": 4}

# Rules of these are wrong, take minutes, or need a process group, which the controller lacks.
_DISTRUSTED = frozenset(
    {
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
        "_batch_norm_no_update",
        "batch_norm_backward",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "_amp_foreach_non_finite_check_and_unscale_",
        "as_strided",
        "convolution",
        "convolution_backward",
        "squeeze_copy",
    }
)


def _remember_neighbours() -> None:
    """Caches the search of PyTorch's redistribution planner, if this version has one."""
    planner: Any = getattr(_redistribute, "DTensorRedistributePlanner", None)
    search = getattr(planner, "get_next_state", None)
    if search is None or hasattr(search, "__wrapped__"):
        return

    @functools.wraps(search)
    def get_next_state(self: Any, placements: object, order: object) -> object:
        try:  # two sets that only grow
            sizes = len(self.strided_shard_placements_in_target), len(self.partial_reduce_ops_in_target)
        except AttributeError:  # another version of PyTorch
            return search(self, placements, order)
        cache = self.__dict__.get(_CACHE)
        if cache is None:
            cache = self.__dict__[_CACHE] = {}
            self.cost_function = functools.cache(self.cost_function)
        states = cache.get((placements, order, sizes))
        if states is None:
            states = cache[placements, order, sizes] = search(self, placements, order)
        return states

    planner.get_next_state = get_next_state


_remember_neighbours()


def by_rules(operation: Operation, leaves: Sequence[Leaf], worlds: Sequence[World]) -> tuple[Draft, list[int | None]]:
    """Drafts an operation by the rules, and returns the registers of the leaves. Raises Unfit if they do not apply."""
    if operation.packet in _DISTRUSTED:
        raise Unfit("its inputs are needed whole")
    if operation.packet in _INDEXED and any(meta.dtype in (torch.bool, torch.uint8) for meta in operation.metas[1:]):
        raise Unfit("a mask among its indices says nothing of how many there are")
    if operation.packet == "embedding_dense_backward" and operation.argument("scale_grad_by_freq"):
        raise Unfit("each rank would count the rows among its own indices only")
    unbatched = _UNBATCHED.get(operation.packet.partition("pool")[2][:2])
    if any(len(meta.shape) == unbatched for meta in operation.metas):
        raise Unfit("its rule takes the first dimension for that of a batch, and there is none")
    operation = _with_all_dims(operation)
    if operation.func in _WHOLE_CALLS:
        return _called(operation, leaves, worlds)
    sharding = _apply_rules(operation, worlds[0])
    inputs = _inputs(operation, sharding)
    if operation.packet.removesuffix("_") in _ELEMENT_BY_ELEMENT and not _cut_alike(operation, inputs):
        raise Unfit("shards of tensors that differ in size along a cut dimension do not meet")
    if any(_is_masked(p) for placements in inputs for p in placements):
        return _called(operation, leaves, worlds)
    outputs = _outputs(operation, sharding, leaves)
    if sharding.use_val_from_redistribute_schema:
        if any(meta.is_uneven for meta in operation.metas):
            return _called(operation, leaves, worlds)  # its arguments have sizes that differ from rank to rank
        operation = _with_local_sizes(operation, sharding)
    return lowered(Lowering(operation, inputs, outputs), leaves, worlds)


def _cut_alike(operation: Operation, inputs: Sequence[Placements]) -> bool:
    """Returns whether tensors sharded along one mesh dimension are cut in dimensions of equal size."""
    for placements in zip(*inputs, strict=True):
        sizes = {
            meta.shape[placement.dim]
            for meta, placement in zip(operation.metas, placements, strict=True)
            if isinstance(placement, Shard | _StridedShard) and placement.dim < len(meta.shape)
        }
        if len(sizes) > 1:
            return False
    return True


def _with_all_dims(operation: Operation) -> Operation:
    """Replaces an empty list of dimensions by all, which is equivalent, but not for the rules."""
    if operation.packet not in _REDUCTIONS or operation.argument("dim") not in ([], ()) or len(operation.args) < 2:
        return operation
    slot = operation.args[0]
    assert isinstance(slot, Slot)
    dims = list(range(len(operation.metas[slot.register].shape)))
    return replace(operation, args=(slot, dims, *operation.args[2:])) if dims else operation


class TooManyWays(Exception):
    """The rules would try too many combinations."""


class _Bound(threading.local):
    on = False


_bound = _Bound()


@contextmanager
def bounded() -> Iterator[None]:
    """Makes rules that would try too many combinations raise TooManyWays."""
    before, _bound.on = _bound.on, True
    try:
        yield
    finally:
        _bound.on = before


def _install() -> None:
    """Patches the functions of PyTorch that try combinations to count them first; missing ones are skipped."""
    expand: Any = getattr(utils, _EXPAND, None)
    if expand is not None and not hasattr(expand, "__wrapped__"):
        counted = _counting(expand)
        for name, module in tuple(sys.modules.copy().items()):
            if name.startswith("torch.distributed.tensor.") and vars(module).get(_EXPAND) is expand:
                setattr(module, _EXPAND, counted)
    strategy: Any = getattr(_decompositions, "DecompShardingStrategy", None)
    candidates = getattr(strategy, "_get_candidate_placements", None)
    if candidates is not None and not hasattr(candidates, "__wrapped__"):
        strategy._get_candidate_placements = staticmethod(_counting_candidates(candidates))


def _counting(expand: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(expand)
    def counted(
        mesh: DeviceMesh,
        op_schema: OpSchema,
        single_mesh_dim_strategies: Sequence[object],
        *args: object,
        **kwargs: object,
    ) -> T:
        if _bound.on:
            _check(mesh.ndim, len(single_mesh_dim_strategies), op_schema)
        return expand(mesh, op_schema, single_mesh_dim_strategies, *args, **kwargs)

    return counted


def _check(ndim: int, rules: int, schema: OpSchema) -> None:
    inputs = [*schema.args_strategy, *getattr(schema, "kwargs_strategy", ())]
    combinations = rules**ndim
    costs = combinations * max(len(inputs), 1)
    if any(isinstance(p, _StridedShard) for strategy in inputs for p in strategy.strategies[0].output_spec.placements):
        costs *= rules ** (ndim - 1)  # paths from strided shards are searched
    if costs > _MAX_COSTS:
        raise TooManyWays(f"its sharding rules would try {combinations} combinations of placements")


def _counting_candidates(candidates: Callable[[OpSchema], T]) -> Callable[[OpSchema], T]:
    @functools.wraps(candidates)
    def counted(op_schema: OpSchema) -> T:
        if _bound.on:
            count = _candidates(op_schema)
            if count > _MAX_CANDIDATES:
                raise TooManyWays(f"its parts would be tried with {count} combinations of placements")
        return candidates(op_schema)

    return counted


def _candidates(schema: OpSchema) -> int:
    """Returns the number of candidates: for each input, each kind of placement of any input, along each dimension."""
    specs = [*schema.args_spec, *(spec for spec in schema.kwargs_schema.values() if isinstance(spec, DTensorSpec))]
    kinds = {p for spec in specs for p in spec.placements}
    strided = {p.split_factor for p in kinds if isinstance(p, _StridedShard)}
    cut = any(p.is_shard() and not isinstance(p, _StridedShard) for p in kinds)
    uncut = 1 + len([p for p in kinds if p.is_partial()])
    return math.prod(uncut + (cut + len(strided)) * spec.ndim for spec in specs)


_install()


def _apply_rules(operation: Operation, world: World) -> OutputSharding:
    """Returns the result of PyTorch's rules. Raises Unfit if they fail."""
    args, kwargs = operation.filled(lambda register: world.fake(operation.metas[register]))
    dispatcher = DTensor._op_dispatcher
    try:
        info = dispatcher.unwrap_to_op_info(operation.func, tuple(args), kwargs)
        assert info.schema is not None
        with unset_fake_temporarily(), bounded():  # it enters its own mode, or none when it decomposes operations
            return dispatcher.sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    except Exception as error:
        too_many = next((cause for cause in (error, error.__cause__) if isinstance(cause, TooManyWays)), None)
        raise Unfit(reason(error) if too_many is None else str(too_many)) from error


def _inputs(operation: Operation, sharding: OutputSharding) -> tuple[Placements, ...]:
    """Returns the placements that the rule requires of the inputs."""
    inputs = [meta.placements for meta in operation.metas]
    if sharding.needs_redistribute and sharding.redistribute_schema is not None:
        positional = slots(operation.args)
        specs = [spec for spec in flat(sharding.redistribute_schema.args_schema) if isinstance(spec, DTensorSpec)]
        if len(specs) != len(positional):
            raise Unfit("the rule takes another number of tensors")
        for register, spec in zip(positional, specs, strict=True):
            meta, inputs[register] = operation.metas[register], tuple(spec.placements)
            if any(getattr(p, "dim", 0) >= max(len(meta.shape), 1) for p in inputs[register]):
                raise Unfit("the rule would cut a dimension that a tensor does not have")
            if meta.placements != inputs[register] and _cuts_numbers(meta, inputs[register]):
                raise Unfit("whole numbers cannot be cut into parts of a sum")
    named = slots(list(operation.kwargs.values()))
    if any(not operation.metas[register].is_replicated for register in named) and not operation.writes:
        raise Unfit("rules do not look at tensors that are given by name")
    return tuple(inputs)


def _outputs(operation: Operation, sharding: OutputSharding, leaves: Sequence[Leaf]) -> tuple[Placements | None, ...]:
    """Returns the placements of the results."""
    specs = flat(sharding.output_spec)
    if len(specs) != len(leaves):
        if any(leaf is not None for leaf in leaves):
            raise Unfit("the rule gives another number of tensors")
        specs = [None] * len(leaves)
    outputs: list[Placements | None] = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if leaf is None or not isinstance(spec, DTensorSpec):
            outputs.append(None)
            continue
        placements = tuple(spec.placements)
        if any(p.is_partial("avg") for p in placements) and any(meta.is_uneven for meta in operation.metas):
            raise Unfit("means of shards that differ in size are not the mean of all")
        if leaf[0].is_complex() and any(p.is_partial("product") for p in placements):
            raise Unfit("process groups do not multiply complex numbers")
        if operation.random and any(p.is_partial() for p in placements):
            raise Unfit("random numbers of different ranks would be added")
        outputs.append(placements)
    reused = [spec for leaf, spec in zip(leaves, specs, strict=True) if leaf is None and isinstance(spec, DTensorSpec)]
    if len(reused) == len(operation.writes):
        for register, spec in zip(operation.writes, reused, strict=True):
            if tuple(spec.placements) != operation.metas[register].placements:
                raise Unfit("it would change the placement of a tensor in place")
    return tuple(outputs)


def _with_local_sizes(operation: Operation, sharding: OutputSharding) -> Operation:
    """Replaces global sizes in the arguments by shards' sizes."""
    schema = sharding.redistribute_schema
    assert schema is not None
    registers = iter(slots(operation.args))

    def local(value: object) -> object:
        if isinstance(value, DTensorSpec):
            return Slot(next(registers))
        if isinstance(value, list | tuple):
            return [local(item) for item in value]
        return value

    return replace(operation, func=schema.op, args=tuple(local(argument) for argument in schema.args_schema))


def _called(operation: Operation, leaves: Sequence[Leaf], worlds: Sequence[World]) -> tuple[Draft, list[int | None]]:
    """Drafts a call of the operation on DTensors, which PyTorch handles on the ranks."""
    metas, collectives = _dry_run(operation, leaves, worlds[0])
    for world in worlds[1:] if any(meta.is_uneven for meta in (*operation.metas, *filter(None, metas))) else ():
        if _dry_run(operation, leaves, world)[0] != metas:
            raise Unfit("ranks disagree on the placement of its result")
    draft = Draft(worlds[0], operation.metas)
    if collectives and any(carrier(meta.dtype) for meta in operation.metas):
        raise Unfit("process groups do not carry numbers of this type")
    return draft, draft.call(operation, metas, collectives)


def _dry_run(operation: Operation, leaves: Sequence[Leaf], world: World) -> tuple[list[Meta | None], list[Collective]]:
    fresh = bool(operation.writes)
    tensors = [world.fake(meta, fresh=fresh) for meta in operation.metas]
    args, kwargs = operation.filled(tensors.__getitem__)
    recorder = Recorder(world.dims)
    try:
        with recorder, bounded():
            result = operation.func(*args, **kwargs)
    except Exception as error:
        raise Unfit(reason(error)) from error
    for tensor, meta in zip(tensors, operation.metas, strict=True):
        if fresh and (tensor.placements != meta.placements or tuple(tensor.shape) != meta.shape):
            raise Unfit("it would change the placement of a tensor in place")
    results = flat(result)
    if len(results) != len(leaves):
        raise Unfit("it returns another number of tensors")
    return list(_checked(operation.metas, tensors, leaves, results, world)), recorder.collectives


def _checked(
    inputs: Sequence[Meta], tensors: list[DTensor], leaves: Sequence[Leaf], results: list[object], world: World
) -> Iterator[Meta | None]:
    for leaf, tensor in zip(leaves, results, strict=True):
        if leaf is None:
            yield None
            continue
        plain, bases = leaf
        if not isinstance(tensor, DTensor):
            raise Unfit("its result is no sharded tensor")
        if tensor.shape != plain.shape or tensor.dtype != plain.dtype:
            raise Unfit("its result would have another shape or type")
        meta, local = world.meta(tensor), tensor._local_tensor
        if tuple(local.shape) != world.local_shape(meta):
            raise Unfit(f"a shard of its result would have the shape {tuple(local.shape)}, which does not fit")
        storages = [tensors[base]._local_tensor.untyped_storage()._cdata for base in bases]
        copied = bool(bases) and local.untyped_storage()._cdata not in storages
        copied = copied or any(inputs[base].copied for base in bases)
        yield Meta.of(meta.layout, meta.shape, meta.dtype, meta.placements, stride=meta.stride, copied=copied)


def _cuts_numbers(meta: Meta, placements: Placements) -> bool:
    parts = any(p.is_partial() and not _is_masked(p) for p in placements)
    return parts and not meta.dtype.is_floating_point and not meta.dtype.is_complex


def _is_masked(placement: object) -> bool:
    return type(placement).__name__.endswith("MaskPartial")
