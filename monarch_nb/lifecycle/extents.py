"""The ranks and hosts of a mesh that grows or shrinks. Pure.

Ranks of processes never change their numbers, since references hold them. New ones are appended, or replace those of
lost hosts as another incarnation, so an older slice always denotes the same ranks.
"""

from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from monarch_nb.host.protocol import Launch
from monarch_nb.runtime import ProcState
from monarch_nb.shape import Region, region_of_ranks
from monarch_nb.wire import Layout, counted


class GrownLayout(Struct, frozen=True):
    """The extent of a mesh of processes after it has grown."""

    layout: Layout
    region: Region
    fresh: tuple[int, ...]  # ranks to be started


def dimension_of_hosts(state: ProcState) -> str:
    """Returns the dimension along which a mesh of processes has its hosts. Raises ValueError if there is none."""
    labels, sizes = state.region.labels, state.region.ndslice.sizes
    if labels and sizes[0] * state.layout.per_host == len(state.region):
        return labels[0]
    count = len(host_numbers(state))
    location = f"{count} hosts in {len(labels)} dimensions" if count > 1 else "one host, without a dimension of hosts"
    raise ValueError(
        f"{state.name} cannot grow or shrink: it lies on {location}, and only the one dimension of its hosts can "
        "change. Spawn it on a host mesh with such a dimension, as that of a job"
    )


def host_numbers(state: ProcState) -> list[int]:
    """Returns the numbers, in its layout, of the hosts that a mesh has, in its order."""
    return list(dict.fromkeys(rank // state.layout.per_host for rank in state.ranks))


def growth(state: ProcState, hosts: Sequence[str]) -> GrownLayout:
    """Appends hosts. Raises ValueError for hosts that the mesh has already."""
    dimension_of_hosts(state)
    repeated = [host for index, host in enumerate(hosts) if host in state.hosts or host in hosts[:index]]
    if repeated:
        raise ValueError(f"{state.name} lies on {', '.join(dict.fromkeys(repeated))} already")
    per, names, in_use = state.layout.per_host, list(state.layout.hosts), host_numbers(state)
    numbers = []
    for host in hosts:
        free = [number for number in range(len(names)) if number not in in_use]
        number = next((index for index in free if names[index] == host), free[0] if free else len(names))
        names[number : number + 1] = [host]
        in_use.append(number)
        numbers.append(number)
    fresh = tuple(number * per + local_rank for number in numbers for local_rank in range(per))
    return GrownLayout(replace(state.layout, hosts=tuple(names)), _region_over(state, (*state.ranks, *fresh)), fresh)


def shrinkage(state: ProcState, positions: Collection[int]) -> tuple[Region, Region]:
    """Removes hosts by their indices along the dimension of hosts; returns the remaining and the removed region.

    Raises ValueError if nothing would remain.
    """
    label, per, ranks = dimension_of_hosts(state), state.layout.per_host, list(state.ranks)
    removed = [rank for index, rank in enumerate(ranks) if index // per in positions]
    if len(removed) == len(ranks):
        present = counted(len(ranks) // per, label.removesuffix("s"))
        raise ValueError(f"{state.name} has {present}: at least one must stay; stop() ends them all")
    return _region_over(state, [rank for rank in ranks if rank not in set(removed)]), _region_over(state, removed)


def launches(state_name: str, launch: Sequence[Launch], per_host: int, size: int) -> tuple[Launch, ...]:
    """Returns the launch commands of a larger mesh, which repeat those of its first host. Raises ValueError."""
    first = tuple(launch[:per_host])
    if any(command != first[rank % per_host] for rank, command in enumerate(launch)):
        raise ValueError(
            f"{state_name} cannot grow: its bootstrap_command was worked out for each place, and differs by host. "
            "Spawn a new mesh with the hosts that are wanted"
        )
    return first * (size // per_host)


def _region_over(state: ProcState, ranks: Sequence[int]) -> Region:
    _, *inner = state.region.ndslice.sizes
    return region_of_ranks(state.region.labels, (len(ranks) // state.layout.per_host, *inner), ranks)
