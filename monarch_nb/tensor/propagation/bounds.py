"""How much PyTorch's sharding rules may try: counted before they begin, so that a plan depends on no clock.

Rules name the placements for one dimension of the mesh; PyTorch then goes through all combinations over its dimensions,
and works out for each input of each what it costs to place it so. A few operations are over the bound on meshes of
three dimensions, where views of shards meet; those of four with many rules are.
"""

import functools
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import _decompositions
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["TooManyWays", "bounded"]

_EXPAND = "expand_to_full_mesh_op_strategy"  # which modules of PyTorch's import by its name
# Costs that are worked out; each takes some hundredth of a millisecond.
_MOST = 40_000
# Candidates of an operation that PyTorch knows by its parts alone: each is taken through all its parts.
_MOST_IN_PARTS = 250


class TooManyWays(Exception):
    """The rules would have to try more than is worth it."""


class _Bound(threading.local):
    on = False


_bound = _Bound()


@contextmanager
def bounded() -> Iterator[None]:
    """While this is entered, rules that would try too much raise TooManyWays before they begin."""
    before, _bound.on = _bound.on, True
    try:
        yield
    finally:
        _bound.on = before


def _install() -> None:
    """Has the places in PyTorch that try combinations count first. One that is not there is left out."""
    expand: Any = getattr(utils, _EXPAND, None)
    if expand is not None and not hasattr(expand, "__wrapped__"):
        counted = _counting(expand)
        for name, module in tuple(sys.modules.items()):
            if name.startswith("torch.distributed.tensor.") and vars(module).get(_EXPAND) is expand:
                setattr(module, _EXPAND, counted)
    strategy: Any = getattr(_decompositions, "DecompShardingStrategy", None)
    candidates = getattr(strategy, "_get_candidate_placements", None)
    if candidates is not None and not hasattr(candidates, "__wrapped__"):
        strategy._get_candidate_placements = staticmethod(_counting_candidates(candidates))


def _counting(expand: Any) -> Any:
    @functools.wraps(expand)
    def counted(mesh: Any, op_schema: Any, single_mesh_dim_strategies: Any, *args: Any, **kwargs: Any) -> Any:
        if _bound.on:
            _check(mesh.ndim, len(single_mesh_dim_strategies), op_schema)
        return expand(mesh, op_schema, single_mesh_dim_strategies, *args, **kwargs)

    return counted


def _check(ndim: int, rules: int, schema: Any) -> None:
    given = [*schema.args_strategy, *getattr(schema, "kwargs_strategy", ())]
    combinations = rules**ndim
    costs = combinations * max(len(given), 1)
    if any(isinstance(p, _StridedShard) for each in given for p in each.strategies[0].output_spec.placements):
        costs *= rules ** (ndim - 1)  # each way from there is searched for
    if costs > _MOST:
        raise TooManyWays(f"its sharding rules would try {combinations} combinations of placements")


def _counting_candidates(candidates: Any) -> Any:
    @functools.wraps(candidates)
    def counted(op_schema: Any) -> Any:
        if _bound.on:
            count = _candidates(op_schema)
            if count > _MOST_IN_PARTS:
                raise TooManyWays(f"its parts would be tried with {count} combinations of placements")
        return candidates(op_schema)

    return counted


def _candidates(schema: Any) -> int:
    """How many there are: for each input, each kind of placement among all inputs, along each of its dimensions."""
    specs = [*schema.args_spec, *(one for one in schema.kwargs_schema.values() if hasattr(one, "placements"))]
    kinds = {p for spec in specs for p in spec.placements}
    strided = {p.split_factor for p in kinds if isinstance(p, _StridedShard)}
    cut = any(p.is_shard() and not isinstance(p, _StridedShard) for p in kinds)
    others = 1 + len([p for p in kinds if p.is_partial()])
    return math.prod(others + (cut + len(strided)) * spec.ndim for spec in specs)


_install()
