"""PyTorch's search for the cheapest way from one placement to another, without what it does again and again.

For each pair of placements it goes through all there are and asks which lie next to each, and what it costs to get
there; that takes most of the time in which an operation on strided shards is planned. The answers depend on mesh and
tensor, for each of which there is one planner, and on what that one was ever asked to reach: they are kept there.
"""

import functools
from typing import Any

from torch.distributed.tensor import _redistribute

__all__ = ["remember_neighbours"]

_KEPT = "_monarch_neighbours"  # attribute of a planner


def remember_neighbours() -> None:
    """Has planners of this process answer the same question once. Where PyTorch has no such search, nothing is done."""
    planner: Any = getattr(_redistribute, "DTensorRedistributePlanner", None)
    search = getattr(planner, "get_next_state", None)
    if search is None or hasattr(search, "__wrapped__"):
        return

    @functools.wraps(search)
    def get_next_state(self: Any, placements: Any, order: Any) -> Any:
        try:  # two sets that only grow
            reached = len(self.strided_shard_placements_in_target), len(self.partial_reduce_ops_in_target)
        except AttributeError:  # of another version of PyTorch
            return search(self, placements, order)
        kept = self.__dict__.get(_KEPT)
        if kept is None:
            kept = self.__dict__[_KEPT] = {}
            self.cost_function = functools.cache(self.cost_function)
        found = kept.get((placements, order, reached))
        if found is None:
            found = kept[placements, order, reached] = search(self, placements, order)
        return found

    planner.get_next_state = get_next_state
