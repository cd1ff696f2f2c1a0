"""What a sharding spec says: over which dimensions of a mesh the dimensions of a tensor are cut."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from monarch_nb.tensor.propagation import Layout
from monarch_nb.wire import counted

# One entry for each dimension of a tensor: the mesh dimension it is sharded over, several of them, or None.
Spec = Sequence[str | tuple[str, ...] | None]


def placements_of(spec: Any, layout: Layout, ndim: int) -> tuple[Placement, ...]:
    """The placements, one for each mesh dimension, that a sharding spec means for a tensor of `ndim` dimensions.

    A spec has one entry for each dimension of the tensor: the name of the mesh dimension it is sharded over, a tuple of
    several such names, or None. PyTorch's own placements (`[Shard(0), Replicate()]`, one for each mesh dimension) are
    taken as they are; None alone replicates. Raises ValueError for what does not fit, TypeError for what is neither.
    """
    if spec is None:
        return (Replicate(),) * len(layout.shape)
    if isinstance(spec, (str, Placement)):
        spec = (spec,)
    entries = tuple(spec)
    if entries and all(isinstance(entry, Placement) for entry in entries):
        return _checked(entries, layout, ndim)
    if len(entries) != ndim:
        raise ValueError(
            f"sharding_spec has {counted(len(entries), 'entry')}, but the tensor has {ndim} dimensions: give one for "
            "each, None where it is not sharded"
        )
    placements: list[Placement] = [Replicate()] * len(layout.shape)
    for dim, entry in enumerate(entries):
        last = -1
        for name in _names(entry):
            place = _dimension(layout, name)
            if not placements[place].is_replicate():
                raise ValueError(f"sharding_spec: mesh dimension {name!r} shards two dimensions of the tensor")
            if place < last:
                raise ValueError(
                    f"sharding_spec: {entry!r} names mesh dimensions in another order than the mesh, "
                    f"{layout.names!r}: the outer one is cut first"
                )
            placements[place] = Shard(dim)
            last = place
    return tuple(placements)


def _dimension(layout: Layout, name: str) -> int:
    try:
        return layout.names.index(name)
    except ValueError:
        raise ValueError(f"the mesh has no dimension {name!r}; it has {', '.join(map(repr, layout.names))}") from None


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    raise TypeError(f"sharding_spec: {entry!r} is neither a mesh dimension, a tuple of them, None, nor a Placement")


def _checked(entries: tuple[Placement, ...], layout: Layout, ndim: int) -> tuple[Placement, ...]:
    if len(entries) != len(layout.shape):
        sizes = ", ".join(f"{name}={size}" for name, size in zip(layout.names, layout.shape, strict=True))
        raise ValueError(
            f"{len(entries)} placements for a mesh of {len(layout.shape)} dimensions ({sizes}): give one for each"
        )
    placements = []
    for entry in entries:
        dim = getattr(entry, "dim", None)
        if dim is not None and not -ndim <= dim < ndim:
            raise ValueError(f"{entry!r} shards dimension {dim} of a tensor that has {ndim}")
        placements.append(Shard(dim % ndim) if type(entry) is Shard and dim is not None and dim < 0 else entry)
    return tuple(placements)
