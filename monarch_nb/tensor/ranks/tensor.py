"""The handle of a tensor of which each rank has a value of its own."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from monarch_nb.mesh import HeldByRanksError, ValueMesh
from monarch_nb.shape import Selector
from monarch_nb.tensor.device import mesh_of
from monarch_nb.tensor.errors import RankTensorError, call_site
from monarch_nb.tensor.handle import Destination, MeshTensor, exclude_from_compile
from monarch_nb.tensor.lanes import check_lane
from monarch_nb.tensor.ranks import exchanging
from monarch_nb.tensor.ranks.streams import MAIN, Stream
from monarch_nb.tensor.references import DroppedReference
from monarch_nb.tensor.verbs import ranks_text
from monarch_nb.tensor.workers.handover import given_tensor

if TYPE_CHECKING:
    from monarch_nb.tensor.mesh import Mesh

_ABSENT = object()  # default of arguments for which None is valid


class _Collected(threading.local):
    """Tensors in the arguments of actors on their processes that this thread pickles; None while it pickles none."""

    tensors: "list[RankTensor] | None" = None

    def index_of(self, tensor: "RankTensor") -> int:
        """Returns the number of a tensor among them."""
        assert self.tensors is not None
        for index, item in enumerate(self.tensors):
            if item.reference.number == tensor.reference.number and item.reference.stream is tensor.reference.stream:
                return index
        self.tensors.append(tensor)
        return len(self.tensors) - 1


COLLECTED = _Collected()


class RankTensor(MeshTensor):
    """A tensor of which each rank of a mesh has a value of its own; `monarch.Tensor`.

    Operations run on every rank with its values, and return such tensors. `monarch.inspect(t, gpus=1)` returns the
    value of one rank; `item()`, `tolist()` and `print` give the value that all ranks have, or say where they differ.
    """

    __slots__ = ()

    @property
    def mesh(self) -> "Mesh":
        """The `Mesh` of the tensor."""
        return mesh_of(self.reference.stream).on(None)

    @property
    def stream(self) -> Stream:
        """The stream of the tensor."""
        return self.reference.stream.lane or MAIN

    @property
    def ref(self) -> int | None:
        """Its number among the tensors of its stream; None once it was dropped."""
        return None if self.dropped else self.reference.number

    @classmethod
    def of_parts(cls, tensor: MeshTensor) -> MeshTensor:
        """See `MeshTensor.per_rank`."""
        return exchanging.per_rank(tensor)

    @property
    def dropped(self) -> bool:
        """True once `drop()` was called."""
        return isinstance(self.reference, DroppedReference)

    def drop(self) -> None:
        """Frees the memory on the ranks, although this handle is still referenced; it cannot be used any more."""
        if not self.dropped:
            self.reference = DroppedReference(self.reference.stream, call_site())

    def reduce(
        self,
        dims: str | Sequence[str],
        reduction: str = "sum",
        scatter: bool = False,
        mesh: object = None,
        out: "RankTensor | None" = None,
    ) -> "RankTensor":
        """Reduces the values of the ranks along dimensions of the mesh; each of these ranks has the result.

        `reduction` is stack, sum, avg, product, min, max, band, bor or bxor; `dims` one dimension, several, or () for
        all. "stack" adds an outer dimension, with the values in order of the ranks. With `scatter` the outer dimension
        is as long as the dimension of the mesh, and each rank has its part of the result. `out` is written to, and
        returned. Does not block. Raises KeyError for an unknown dimension, TypeError for a shape that cannot be
        scattered and for gradients, ValueError for other arguments that do not fit.
        """
        return exchanging.reduced(self, dims, reduction, scatter, mesh, out)

    def reduce_(
        self, dims: str | Sequence[str], reduction: str = "sum", scatter: bool = False, mesh: object = None
    ) -> "RankTensor":
        """Reduces in place; see `reduce`."""
        return exchanging.reduced(self, dims, reduction, scatter, mesh, in_place=True)

    def as_sharded(self, spec: object) -> MeshTensor:
        """Returns the tensor whose parts are the ranks' values, in the same memory, according to a sharding spec.

        Values of ranks that the spec makes copies of each other must be equal, which is not checked. Does not block.
        """
        return exchanging.as_sharded(self, spec)

    def slice_mesh(self, **coordinates: Selector) -> exchanging.ValueSlice:
        """Returns the values on a part of the mesh, selected as by `mesh.slice`, for `to_mesh`."""
        return exchanging.sliced(self, coordinates)

    def to_mesh(self, mesh: Any, stream: "Stream | None" = None) -> "RankTensor":
        """Copies it to another mesh, on which dimensions of equal names have equal sizes; along others it is repeated.

        Does not block, unless the meshes are on different processes. Raises ValueError for dimensions that do not fit.
        """
        return exchanging.sliced(self, {}).to_mesh(mesh, stream)

    def local_shards(self) -> ValueMesh[torch.Tensor]:
        """Returns the value of each rank as a local tensor; blocks.

        Raises TensorError for an operation that failed, RankTensorError on another stream and while it is lent.
        """
        check_lane(self.reference.stream, "local_shards", (self.reference,), ())
        return super().local_shards()

    def full_tensor(self) -> torch.Tensor:
        """Returns the value that all ranks have as a local tensor; blocks.

        Raises RankTensorError where ranks have different ones, TensorError for an operation that failed.
        """
        return self._value("full_tensor")

    def _value(self, operation: str) -> torch.Tensor:
        shards = self.local_shards()
        ranks = ranks_with_other_values(shards)
        if ranks:
            raise different_values(operation, shards, ranks)
        return next(iter(shards.values()))

    def tolist(self) -> Any:
        """Returns the values as nested lists; blocks and raises as `full_tensor`."""
        return self._value("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the values as an array; blocks and raises as `full_tensor`."""
        return self._value("numpy").numpy()

    def redistribute(self, spec: object = _ABSENT, placements: object = _ABSENT, *, async_op: bool = False) -> NoReturn:
        """Always raises TypeError, since this tensor has no parts."""
        raise TypeError("redistribute: each rank has a value of its own. t.as_sharded(spec) makes these parts of one")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Converts the tensor, which stays on its mesh, whatever device is named; `to(mesh)` is `to_mesh(mesh)`."""
        if args and isinstance(args[0], Destination):
            return self.to_mesh(args[0], *args[1:], **kwargs)
        if args and isinstance(args[0], str | torch.device):
            args = args[1:]
        kwargs.pop("device", None)
        return torch.Tensor.to(self, *args, **kwargs) if args or kwargs else self

    def cpu(self, *args: object, **kwargs: object) -> Any:
        """Returns the tensor itself: it stays on its mesh."""
        return self

    cuda = cpu

    def __reduce_ex__(self, protocol: object) -> Any:
        if COLLECTED.tensors is not None:
            return given_tensor, (COLLECTED.index_of(self),)
        raise HeldByRanksError(
            "a tensor of the ranks' own values cannot be pickled or saved: its values are in other processes. Save "
            "monarch.inspect(t), or write files on the ranks"
        )

    def _described(self) -> str:
        if self.dropped:
            return f"monarch.Tensor({tuple(self.shape)}, {self.dtype}, dropped)"
        return f"monarch.Tensor({tuple(self.shape)}, {self.dtype}, own value on each rank of {self.mesh!r})"

    def __str__(self) -> str:
        if self.dropped:
            return repr(self)
        try:
            shards = self.local_shards()
        except RankTensorError as error:  # of a stream that is not active, or lent
            return f"{self!r}  # {error.code}"
        first, ranks = next(iter(shards.values())), ranks_with_other_values(shards)
        if not ranks:
            return f"{first}  # on each of {len(shards)} ranks"
        verb = "differs" if len(ranks) == 1 else "differ"
        return f"{first}  # on rank 0; {ranks_text(ranks)} {verb}: monarch.inspect(t, …)"

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and not self.dim() else str(self), spec)


Tensor = RankTensor  # its public name


def _operator(name: str, function: Any, *, reflected: bool = False) -> Callable[[RankTensor, object], object]:
    """Makes an operator that raises the error about an operand, which PyTorch's own turns into Python's error."""
    own = getattr(torch.Tensor, name)

    def operate(self: RankTensor, other: object) -> object:
        result = own(self, other)
        if result is NotImplemented and isinstance(other, torch.Tensor | int | float | complex):
            return function(other, self) if reflected else function(self, other)
        return result

    operate.__name__ = name
    exclude_from_compile(operate)
    return operate


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide, "matmul": torch.matmul,
    "pow": torch.pow, "floordiv": torch.floor_divide, "mod": torch.remainder, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}.items():  # fmt: skip
    setattr(RankTensor, f"__{_name}__", _operator(f"__{_name}__", _function))
    setattr(RankTensor, f"__r{_name}__", _operator(f"__r{_name}__", _function, reflected=True))
    if hasattr(torch.Tensor, f"__i{_name}__"):  # Python would make another tensor instead
        _in_place = getattr(torch.Tensor, f"{_function.__name__}_")
        setattr(RankTensor, f"__i{_name}__", _operator(f"__i{_name}__", _in_place))
for _name, _function in {
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne
}.items():  # fmt: skip
    setattr(RankTensor, f"__{_name}__", _operator(f"__{_name}__", _function))


def ranks_with_other_values(values: ValueMesh[torch.Tensor]) -> list[int]:
    """Returns the ranks whose value is not that of the first."""
    first, *following = values.values()
    ranks = []
    for rank, value in enumerate(following, 1):
        if not _is_equal(first, value):
            ranks.append(rank)
    return ranks


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if first.is_floating_point() or first.is_complex():
        dtype = torch.complex128 if first.is_complex() else torch.float64  # small types cannot be compared themselves
        return torch.allclose(first.to(dtype), second.to(dtype), 0, 0, equal_nan=True)
    return torch.equal(first, second)


def different_values(operation: str, values: ValueMesh[torch.Tensor], ranks: list[int]) -> RankTensorError:
    """Returns the error for a use as one value of a tensor of which ranks have several."""
    entries = list(values)
    (_, first), (point, second) = entries[0], entries[ranks[0]]
    coordinates = ", ".join(f"{name}={position}" for name, position in point.items())
    is_shown = first.numel() == second.numel() == 1
    shown = f" (rank 0 has {first.item()}, rank {ranks[0]} {second.item()})" if is_shown else ""
    return RankTensorError(
        "DIFFERENT_VALUES",
        f"{operation}: {ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} another value than rank 0{shown}. "
        f"monarch.inspect(t, {coordinates}) returns that of one rank",
    )
