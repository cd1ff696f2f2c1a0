"""Exchanges between ranks of values of their own: `reduce`, `slice_mesh`, `to_mesh`, and these of trees."""

from collections.abc import Sequence
from itertools import count, product
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_map_only

from monarch_nb.mesh import ProcMesh
from monarch_nb.shape import Region, Selector
from monarch_nb.tensor.commands import Await, Locals, Send, Take
from monarch_nb.tensor.errors import RankTensorError, call_site
from monarch_nb.tensor.handle import Destination, MeshTensor, current, run
from monarch_nb.tensor.lanes import check_lane
from monarch_nb.tensor.propagation import Meta, own_values
from monarch_nb.tensor.propagation.draft import REDUCTIONS, Reduction
from monarch_nb.tensor.sharding import placements_of
from monarch_nb.wire import kind_of

if TYPE_CHECKING:
    from monarch_nb.tensor.mesh import Mesh
    from monarch_nb.tensor.ranks.streams import Stream
    from monarch_nb.tensor.ranks.tensor import RankTensor

T = TypeVar("T")
Dims = str | Sequence[str]
_tags = count(1)
_BITS, _COMPLEX = frozenset({"band", "bor", "bxor"}), frozenset({"stack", "sum", "avg"})


def reduced(
    tensor: "RankTensor",
    dims: Dims,
    reduction: str,
    scatter: bool,
    mesh: object,
    out: "RankTensor | None" = None,
    *,
    in_place: bool = False,
) -> "RankTensor":
    """See `RankTensor.reduce`."""
    _require_own("reduce", tensor, out)
    if mesh is not None:
        raise NotImplementedError("reduce: to another mesh: t.reduce(…), and then to_mesh(mesh)")
    operation = "reduce_" if in_place else "reduce"
    stream, layout = tensor.reference.stream, tensor.meta.layout
    if not isinstance(dims, str | list | tuple):
        raise TypeError(f"{operation}: dims is the name of a dimension, several, or () for all, not {kind_of(dims)}")
    names = tuple(dims) if not isinstance(dims, str) else (dims,) if dims else ()
    for name in names:
        if name not in layout.names:
            raise KeyError(f"{operation}: dim {name!r} not found in {tensor.mesh!r}")
    names = names or layout.names
    if len(set(names)) != len(names):
        raise ValueError(f"{operation}: reducing the same dimension twice: {names}")
    if len(names) > 1 and (reduction == "stack" or scatter):
        raise ValueError(f"{operation}: {reduction!r} with {scatter=} is not valid for multiple dimensions: {names}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{operation}: reduction {reduction!r} is none of {', '.join(REDUCTIONS)}")
    _refuse_gradients(operation, tensor, out)
    dtype = tensor.dtype
    if (reduction in _BITS and dtype.is_floating_point) or (dtype.is_complex and reduction not in _COMPLEX):
        raise TypeError(f"{operation}: {reduction!r} of values of {dtype} is not defined")
    size = layout.shape[layout.names.index(names[0])]
    if scatter and (not tensor.shape or tensor.shape[0] != size):
        raise TypeError(
            f"{operation}: When scattering results, the outermost dimension of the tensor, of sizes "
            f"{list(tensor.shape)}, must match the {size} ranks along {names[0]!r}"
        )
    shape = (size, *tensor.shape) if reduction == "stack" and not scatter else tuple(tensor.shape)
    shape = shape[1:] if scatter and reduction != "stack" else shape
    inputs, target = [tensor], ""
    if in_place:
        target = "self"
        if out is not None:
            raise ValueError("reduce_: `out` cannot be used in place")
        if shape != tuple(tensor.shape):
            raise ValueError(f"reduce_: {reduction!r} with scatter={scatter} is not valid in place: it gives {shape}")
    elif out is not None:
        if tuple(out.shape) != shape or out.dtype != tensor.dtype:
            raise ValueError(
                f"reduce: out has the shape {tuple(out.shape)} and {out.dtype}. Reduce expects the shape to be "
                f"{torch.Size(shape)}, and {tensor.dtype}"
            )
        if out.reference.stream is not stream:
            raise RankTensorError("WRONG_MESH", f"reduce: out is on {out.mesh!r}, and the tensor on {tensor.mesh!r}")
        inputs, target = [tensor, out], "out"
    indices = tuple(sorted(layout.names.index(name) for name in names))
    plan = stream.propagator.reduction(tuple(t.meta for t in inputs), Reduction(reduction, indices, scatter, target))
    with torch.no_grad():
        return cast("RankTensor", run(stream, plan, cast(Any, inputs), []))


def _require_own(operation: str, *tensors: object) -> None:
    """Raises RankTensorError for anything but tensors of the ranks' own values."""
    for tensor in tensors:
        if tensor is not None and not (isinstance(tensor, MeshTensor) and tensor.meta.is_own):
            raise RankTensorError(
                "LOCAL_TENSOR", f"{operation}: {kind_of(tensor)} is given, and no tensor of the ranks' own values"
            )


def _refuse_gradients(operation: str, *tensors: MeshTensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise RankTensorError(
                "REQUIRES_GRAD",
                f"{operation}: the tensor requires gradients, which do not pass through an exchange between ranks: use "
                "t.detach(), torch.no_grad() or monarch.grad_function",
            )


def reduce(tensors: T, dims: Dims, reduction: str = "sum", scatter: bool = False, mesh: object = None) -> T:
    """Returns a tree with each tensor of a tree reduced, and other leaves as they are; see `Tensor.reduce`."""
    return cast(T, tree_map_only(torch.Tensor, lambda tensor: reduced(tensor, dims, reduction, scatter, mesh), tensors))


def reduce_(tensors: T, dims: Dims, reduction: str = "sum", scatter: bool = False, mesh: object = None) -> T:
    """Reduces each tensor of a tree in place, and returns it; see `Tensor.reduce`."""

    def in_place(tensor: Any) -> "RankTensor":
        return reduced(tensor, dims, reduction, scatter, mesh, in_place=True)

    return cast(T, tree_map_only(torch.Tensor, in_place, tensors))


class ValueSlice:
    """A tensor on a part of its mesh, which `to_mesh` copies to another mesh."""

    def __init__(self, tensor: "RankTensor", region: Region) -> None:
        self._tensor, self._part = tensor, region

    def to_mesh(self, mesh: "Mesh | ProcMesh", stream: "Stream | None" = None) -> "RankTensor":
        """See `Tensor.to_mesh`."""
        return move(self._tensor, self._part, mesh, stream or self._tensor.stream)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self._part.sizes.items())
        return f"<a slice {{{sizes}}} of {self._tensor!r}>"


def sliced(tensor: "RankTensor", coordinates: dict[str, Selector]) -> ValueSlice:
    """See `Tensor.slice_mesh`."""
    _require_own("slice_mesh" if coordinates else "to_mesh", tensor)
    return ValueSlice(tensor, tensor.mesh.region.sliced(**coordinates))


def move(tensor: "RankTensor", part: Region, target: "Mesh | ProcMesh", lane: "Stream") -> "RankTensor":
    """Copies the values of ranks in a part of a mesh to another mesh: along dimensions of equal names, to all others.

    Values are sent from process to process, or through this one between meshes on different processes, which blocks.
    """
    if not isinstance(target, ProcMesh | Destination):
        raise TypeError(f"to_mesh: a mesh is wanted, not {kind_of(target)}")
    mesh = type(tensor.mesh).for_ranks(target) if isinstance(target, ProcMesh) else target
    _refuse_gradients("to_mesh", tensor)
    stream, dst = tensor.reference.stream, mesh.on(lane).stream
    check_lane(stream, "to_mesh", (tensor.reference,), ())
    sizes = mesh.sizes
    if _is_one(part) and not part.sizes.keys() <= sizes.keys():  # a mesh of one rank has a dimension all the same
        part = part.sliced(**dict.fromkeys(part.sizes, 0))
    for name, size in part.sizes.items():
        if name not in sizes:
            raise ValueError(f"to_mesh: destination mesh does not have dimensions {{{name!r}}}: slice them away first")
        if sizes[name] != size:
            raise ValueError(
                f"to_mesh: dimension {name!r} of the destination mesh has a different length, {sizes[name]}, than the "
                f"source tensor's, {size}"
            )
    points = [dict(zip(sizes, point, strict=True)) for point in product(*map(range, sizes.values()))]
    bases = [part.ndslice.nditem([point[name] for name in part.sizes]) for point in points]
    meta = Meta.of(dst.layout, tensor.meta.shape, tensor.meta.dtype, own_values(dst.layout), stride=tensor.meta.stride)
    region = tensor.mesh.region
    ranks = {base: rank for rank, base in enumerate(region.ranks())}
    if not mesh.shares_processes(tensor.mesh):
        shards = tensor.local_shards().values()
        reference = dst.hold(meta, call_site())
        dst.issue_object(Locals(tuple(shards[ranks[base]] for base in bases), meta, reference.number))
        return cast("RankTensor", MeshTensor(meta, reference))
    members, receivers = tensor.mesh.members, mesh.members
    targets: list[list[int]] = [[] for _ in members]
    for member, base in zip(receivers, bases, strict=True):
        targets[ranks[base]].append(member)
    tag = next(_tags)
    stream.resume_if_healed()
    dst.resume_if_healed()
    stream.held.require_contents((tensor.reference.number,))
    stream.issue_object(Send(current(tensor), tuple(map(tuple, targets)), tag))
    stream.flush()  # before: a rank that waits for the value may be one that sends it
    if dst.lane is not stream.lane:
        dst.issue_object(Await(stream.number, stream.sent(), members))
    reference = dst.hold(meta, call_site())
    dst.issue_object(Take(meta, tuple(members[ranks[base]] for base in bases), tag, reference.number))
    return cast("RankTensor", MeshTensor(meta, reference))


def _is_one(part: Region) -> bool:
    return part.size() == 1


def to_mesh(tensors: T, mesh: "Mesh | ProcMesh", stream: "Stream | None" = None) -> T:
    """Returns a tree with each tensor of a tree, or slice of one, on another mesh; see `Tensor.to_mesh`."""

    def bring(value: Any) -> "RankTensor":
        part = value if isinstance(value, ValueSlice) else sliced(value, {})
        return part.to_mesh(mesh, stream)

    return cast(T, tree_map_only((torch.Tensor, ValueSlice), bring, tensors))


def slice_mesh(tensors: Any, **coordinates: Selector) -> Any:
    """Returns a tree with the slice of each tensor of a tree; see `Tensor.slice_mesh`."""
    return tree_map_only(torch.Tensor, lambda tensor: sliced(tensor, coordinates), tensors)


def per_rank(tensor: MeshTensor) -> "RankTensor":
    """See `MeshTensor.per_rank`."""
    meta, layout = tensor.meta, tensor.meta.layout
    if meta.is_own:
        return cast("RankTensor", tensor)
    if meta.is_uneven:
        raise ValueError(f"per_rank: the parts of {meta!r} have different shapes: pad it, or redistribute it first")
    _refuse_gradients("per_rank", tensor)
    shape = list(meta.shape)
    for size, placement in zip(layout.shape, meta.placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] //= size
    stream = tensor.reference.stream
    plan = stream.propagator.retagged(meta, own_values(layout), tuple(shape))
    return cast("RankTensor", run(stream, plan, [tensor], []))


def as_sharded(tensor: "RankTensor", spec: object) -> MeshTensor:
    """See `RankTensor.as_sharded`."""
    meta, layout = tensor.meta, tensor.meta.layout
    placements = placements_of(spec, layout, len(meta.shape))
    _refuse_gradients("as_sharded", tensor)
    shape = list(meta.shape)
    for size, placement in zip(layout.shape, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] *= size
    stream = tensor.reference.stream
    plan = stream.propagator.retagged(meta, placements, tuple(shape))
    return cast(MeshTensor, run(stream, plan, [tensor], []))
