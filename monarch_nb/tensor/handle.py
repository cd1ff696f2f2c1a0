"""Handles of sharded tensors: tensors on the controller that hold no values."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.distributed.tensor import Replicate
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from monarch_nb._package import more
from monarch_nb.mesh import ValueMesh
from monarch_nb.tensor.commands import Define, PutTensor
from monarch_nb.tensor.device import mesh_of
from monarch_nb.tensor.errors import CallSite, RankTensorError, call_site, check_notices
from monarch_nb.tensor.lanes import ACTIVE, check_lane, check_loans
from monarch_nb.tensor.propagation import Meta, OperationPlan, Placements, PropagationError, moving, replicated
from monarch_nb.tensor.references import LiveEntry, Reference, WriteRecord
from monarch_nb.tensor.sharding import placements_of
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import (
    check_gradients,
    check_reshape,
    check_writes,
    make_again,
    make_stale,
    overlapping_inputs,
    record_reshape,
    record_views,
    write_back,
)
from monarch_nb.transport import uninterrupted

if TYPE_CHECKING:
    from monarch_nb.tensor.mesh import Mesh

Args = tuple[Any, ...]  # of an ATen operation
Kwargs = dict[str, Any]
Own = Callable[[torch._ops.OpOverload, Args, Kwargs], object]

_wrap = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided
_is_inference = torch.is_inference_mode_enabled
_DATA: Any = torch._C.TensorBase.data
# Autograd creates a thread for each mesh at the first backward pass, and none for later meshes; operations on these
# threads have no line of the program. The setting is thread-local.
_is_threaded = torch._C._is_multithreading_enabled
_set_threaded = torch._C._set_multithreading_enabled
# With view replay, autograd of writes through views replays the views instead of using offsets into a storage that is
# not here. The setting is thread-local.
_replays_views = torch._C._is_view_replay_enabled
_set_view_replay = torch._C._set_view_replay_enabled
_ABSENT = object()  # default of arguments for which None is valid
_COPY_LIMIT = 1 << 16  # bytes up to which an uploaded tensor is copied and waits for the next batch


class Destination:
    """A mesh that receives tensors of other meshes."""

    def bring(self, tensor: "MeshTensor") -> "MeshTensor":
        """Returns the tensor on that mesh; blocks."""
        raise NotImplementedError


_OWN_KIND: list[type["MeshTensor"]] = []


class MeshTensor(torch.Tensor):
    """A tensor that is sharded over the processes of a mesh. Operations run there and return such tensors.

    `shape`, `dtype` and `placements` are available at once; `full_tensor()`, `item()`, `tolist()` and the like wait for
    the workers.
    """

    meta: Meta
    reference: Reference

    __slots__ = ("meta", "reference")

    def __init_subclass__(cls) -> None:
        """The only subclass is that of the ranks' own values; operations on such tensors return it."""
        _OWN_KIND[:] = [cls]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Meta, reference: Reference) -> "MeshTensor":
        """Creates the handle; sends nothing. A handle of the ranks' own values is a `RankTensor`."""
        device = reference.stream.device
        kind = _OWN_KIND[0] if meta.is_own else cls
        return _make(kind, meta, reference, device)

    @property
    def placements(self) -> Placements:
        """One placement for each dimension of the mesh."""
        return self.meta.placements

    @property
    def device_mesh(self) -> "Mesh":
        """The `Mesh` of the tensor."""
        return mesh_of(self.reference.stream)

    def redistribute(
        self, spec: object = _ABSENT, placements: object = _ABSENT, *, async_op: bool = False
    ) -> "MeshTensor":
        """Returns a copy with other placements, given as a sharding spec or PyTorch's placements; differentiable.

        Also called as for DTensor: `redistribute(placements=[Shard(0)])`, `redistribute(t.device_mesh, [Shard(0)])`.
        Returns the tensor itself if the placements are equal. Never blocks, whatever `async_op`. Raises ValueError for
        a spec that does not fit and for another mesh (use `to(mesh)`), PropagationError for partial placements that
        cannot be reduced.
        """
        if isinstance(spec, Destination):
            if spec is not self.device_mesh:
                raise ValueError(
                    f"redistribute: the tensor is on {self.device_mesh!r}. t.to(mesh) brings it to another one"
                )
            spec = _ABSENT
        if (spec is _ABSENT) == (placements is _ABSENT):
            raise TypeError(
                "redistribute: say how it is to be placed, once: redistribute(placements=[Shard(0), Replicate()])"
            )
        target = placements_of(placements if spec is _ABSENT else spec, self.meta.layout, self.dim())
        if target == self.meta.placements:
            return self
        return _redistribute(self, target)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.to`; `to(mesh)` copies it to another mesh, sharded alike along dimensions of equal names.

        `to("cpu")` and other devices return the whole tensor without gradient; blocks and raises as `full_tensor`.
        """
        if args and isinstance(args[0], Destination):
            return args[0].bring(self)
        return super().to(*args, **kwargs)

    def full_tensor(self) -> torch.Tensor:
        """Returns the whole tensor as a local one without gradient; blocks until all issued operations have run.

        Raises TensorError for an operation that failed, DeviceMeshError if the mesh is broken.
        """
        return self.reference.stream.fetch(current(self), "full_tensor")

    def to_local(self, *, grad_placements: object = None) -> torch.Tensor:
        """Always raises RuntimeError, since this process holds no shard."""
        raise RuntimeError(
            "to_local: this process holds no part of the tensor. t.local_shards() gives what each rank holds, "
            "mesh.execute(function, t) calls a function with it there, t.full_tensor() gives the whole"
        )

    def local_shards(self) -> ValueMesh[torch.Tensor]:
        """Returns the shard of each process as a local tensor; blocks and raises as `full_tensor`."""
        return self.reference.stream.shards_of(current(self))

    def per_rank(self) -> "MeshTensor":
        """Returns each rank's part as a value of its own, in the same memory. Does not block.

        Raises ValueError for parts of different shapes.
        """
        return _OWN_KIND[0].of_parts(self)

    @classmethod
    def of_parts(cls, tensor: "MeshTensor") -> "MeshTensor":
        """See `per_rank`."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """Returns the values as nested lists; blocks and raises as `full_tensor`."""
        return self.reference.stream.fetch(current(self), "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the values as an array, with `force=True`; blocks and raises as `full_tensor`."""
        if not force:
            raise TypeError("a sharded tensor has no memory here: use t.full_tensor().numpy(), or numpy(force=True)")
        return self.reference.stream.fetch(current(self), "numpy").numpy()

    @property
    def data(self) -> torch.Tensor:
        """The tensor without gradient. Assignment gives the handle other values, as in `module.half()`."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, MeshTensor):
            raise TypeError(
                "a sharded tensor takes the values of a sharded tensor: monarch.distribute(tensor, mesh) makes one"
            )
        uninterrupted(_set_data, self, value)

    def backward(self, *args: object, **kwargs: object) -> None:
        """As `torch.Tensor.backward`, but on this thread, so that operations are attributed to lines of the program."""
        with torch.autograd.set_multithreading_enabled(False):
            super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self))
        if copy is None:
            if not self.is_leaf:
                raise RuntimeError("only tensors that a program made itself can be copied deeply; detach() first")
            with torch.no_grad():
                copy = self.clone()
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
            else:
                copy.requires_grad_(self.requires_grad)
            memo[id(self)] = copy
        return copy

    def __copy__(self) -> Any:
        copy = self.detach()
        is_parameter, has_gradient = isinstance(self, torch.nn.Parameter), self.requires_grad
        return torch.nn.Parameter(copy, has_gradient) if is_parameter else copy.requires_grad_(has_gradient)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a sharded tensor cannot be pickled: its values are in other processes. Save t.full_tensor(), or all of a "
            "model with torch.distributed.checkpoint"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if _is_inference():
            # Operations that PyTorch composes of others arrive whole in this mode, and views fail in it.
            with torch.inference_mode(False), torch.no_grad():
                return func(*args, **(kwargs or {}))
        implementation = OWN.get(func)
        if implementation is not None:
            return implementation(func, args, kwargs or {})
        return issue(func, args, kwargs)

    def __format__(self, format_spec: str) -> str:
        return (
            format(self.item(), format_spec) if format_spec and not self.dim() else object.__format__(self, format_spec)
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return self._described()

    def _described(self) -> str:
        shape, placements = tuple(self.shape), self.meta.placements
        return f"MeshTensor({shape}, {self.dtype}, {placements}; full_tensor() gives its values)"


def exclude_from_compile(function: Callable[..., object]) -> bool:
    """Has torch.compile run a function, and all that it calls, as they are. False if this PyTorch has no such setting.

    Unlike `torch.compiler.disable`, which wraps the function, it costs nothing. Without it torch.compile spends tens of
    seconds on the code of this package when a compiled function uses a tensor of a mesh.
    """
    code: Any = getattr(function, "__func__", function)
    code._torchdynamo_disable = True  # not traced as a part of its callers
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:
        return False
    return True


exclude_from_compile(MeshTensor.__torch_dispatch__)


def _make(kind: type[MeshTensor], meta: Meta, reference: Reference, device: torch.device) -> MeshTensor:
    """Creates a handle; never an inference tensor, on which composed operations would arrive whole for ever."""
    if _is_inference():
        with torch.inference_mode(False):
            return _make(kind, meta, reference, device)
    tensor: MeshTensor = _wrap(kind, meta.shape, meta.stride, None, None, meta.dtype, _STRIDED, device)
    tensor.meta, tensor.reference = meta, reference
    return tensor


class _Redistributed(torch.autograd.function.FunctionCtx):
    before: Placements


class Redistribution(torch.autograd.Function):
    """Differentiable redistribution; the gradient has the placements of the input."""

    @staticmethod
    def forward(ctx: _Redistributed, tensor: MeshTensor, placements: Placements) -> MeshTensor:
        """Redistributes the tensor."""
        ctx.before = tensor.meta.placements
        return redistributed(tensor, placements)

    @staticmethod
    def backward(ctx: _Redistributed, grad: MeshTensor) -> tuple[torch.Tensor, None]:
        """Redistributes the gradient back; partial placements become replicated ones."""
        before = tuple(Replicate() if placement.is_partial() else placement for placement in ctx.before)
        if before == grad.meta.placements:  # the same handle, which autograd must not take for a gradient of its own
            return grad, None
        return _redistribute(grad, before), None


_redistribute: Callable[[MeshTensor, Placements], MeshTensor] = Redistribution.apply


def current(tensor: MeshTensor) -> int:
    """Returns the number of a tensor on the workers, after making a stale view again."""
    number = tensor.reference.number
    stream = tensor.reference.stream
    if number in stream.held.stale:
        make_again(stream, (number,), call_site())
    return number


def redistributed(tensor: MeshTensor, placements: Placements) -> MeshTensor:
    """Issues a redistribution, without gradient."""
    if placements == tensor.meta.placements:
        return MeshTensor(tensor.meta, tensor.reference)
    return redistributed_together([tensor], [placements])[0]


def redistributed_together(
    tensors: Sequence[MeshTensor], placements: Sequence[Placements], *, pending: bool = False
) -> list[MeshTensor]:
    """Issues redistributions of tensors of one mesh to other placements, which share collectives; without gradient.

    `pending` results must be passed to `finish_redistributions`, and to nothing else.
    """
    stream = tensors[0].reference.stream
    metas = tuple(tensor.meta for tensor in tensors)
    plan = stream.propagator.redistributions(metas, tuple(placements), pending=pending)
    return cast(list[MeshTensor], run(stream, plan, [*tensors], []))


def finish_redistributions(pending: Sequence[MeshTensor], before: Sequence[MeshTensor]) -> list[MeshTensor]:
    """Issues the waits for pending redistributions; returns the results."""
    stream = pending[0].reference.stream
    dims = tuple(moving(old.meta.placements, new.meta.placements) for old, new in zip(before, pending, strict=True))
    plan = stream.propagator.finishing(tuple(tensor.meta for tensor in pending), dims)
    return cast(list[MeshTensor], run(stream, plan, [*pending], []))


# Operations with implementations of their own, added by `kernels.register_conversions`.
OWN: dict[torch._ops.OpOverload, Own] = {}


def issue(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object] | None) -> object:
    """Issues an operation and returns the handles of its results."""
    stream = stream_of(args, kwargs)
    generator: torch.Generator | None = None
    if kwargs and kwargs.get("generator") is not None:
        kwargs = dict(kwargs)
        generator = cast(torch.Generator, kwargs.pop("generator"))
    refused: PropagationError | None = None
    try:
        plan, inputs, floats = stream.propagator.plan(func, args, kwargs)
    except PropagationError as error:
        refused = error
    if refused is not None:
        uploaded = _with_numbers_uploaded(stream, func, args, kwargs or {})
        if uploaded is None:
            raise refused
        plan, inputs, floats = stream.propagator.plan(func, *uploaded)
    if plan.writes and len(inputs) > 1:
        operands = [(handle, handle.reference, handle.meta) for handle in inputs]
        if read := overlapping_inputs(func, args, kwargs or {}, plan, operands):
            copies = {id(tensor): tensor.clone() for tensor in read}
            args, kwargs = tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
            return issue(func, args, kwargs)
    reshape = partial(func, *args, **(kwargs or {})) if plan.rebinds else None
    return run(stream, plan, inputs, floats, generator, reshape)


def _set_data(tensor: MeshTensor, value: MeshTensor) -> None:
    _DATA.__set__(tensor, value)
    tensor.meta, tensor.reference = value.meta, value.reference


def run(
    stream: Stream,
    plan: OperationPlan,
    inputs: list[MeshTensor],
    floats: Sequence[float],
    generator: torch.Generator | None = None,
    reshape: Callable[[], object] | None = None,
) -> object:
    """Issues a plan on tensors of one mesh; returns the operation's result. `generator` provides a seed.

    `reshape` does to the handle what the operation does to the tensor.
    """
    if _is_inference():  # see `_make`
        with torch.inference_mode(False):
            return run(stream, plan, inputs, floats, generator, reshape)
    site = call_site(2)  # the caller belongs to this package
    if _is_threaded():
        _set_threaded(False)
    if stream.lost is not None:
        stream.resume_if_healed()
    objects = stream.held
    numbers = []
    has_gradient = False
    for tensor in inputs:
        reference = tensor.reference
        if reference.stream is not stream:
            _refuse_two_meshes(plan, stream, reference.stream)
        number = reference.number
        numbers.append(number)
        if tensor.requires_grad:
            has_gradient = True
            leaf = objects.leaves.get(number)
            if (leaf is None or leaf.ref() is not tensor) and is_leaf(tensor):
                objects.register_leaf(number, tensor)
    if objects.lost:
        objects.require_contents(numbers)
    if plan.notices:
        check_notices(stream, plan, site)
    if objects.stale:
        make_again(stream, numbers, site)
    if objects.has_lent or stream.lane is not ACTIVE.stream:
        references = [tensor.reference for tensor in inputs]
        if plan.own or inputs[0].meta.is_own:
            check_lane(stream, plan.operation, references, plan.writes)
        else:  # a sharded tensor may share memory that is lent
            check_loans(stream, plan.operation, references, plan.writes, of_sharded=True)
    targets: Sequence[WriteRecord] = ()
    if plan.changes:
        targets, written = _check_changes(plan, inputs, site, has_gradient=has_gradient)
        is_shared = plan.rebinds and check_reshape(
            plan, inputs[0].reference, has_gradient=inputs[0].requires_grad, is_base=inputs[0]._base is None
        )
    if plan.number not in stream.defined:
        stream.define(
            Define(
                plan.number, plan.operation, plan.program, len(floats), plan.made, plan.writes, plan.own, plan.agrees
            )
        )
    kind = _OWN_KIND[0] if plan.own else MeshTensor
    device, entries, on_end, next_number = stream.device, objects.entries, objects.on_end, objects.next
    outputs = []
    results = []
    for meta in plan.made:
        reference = Reference(stream, next_number())
        entry = entries[reference.number] = LiveEntry(reference, on_end)
        entry.number, entry.meta, entry.call_site = reference.number, meta, site
        tensor = _wrap(kind, meta.shape, meta.stride, None, None, meta.dtype, _STRIDED, device)
        tensor.meta, tensor.reference = meta, reference
        outputs.append(tensor)
        results.append(reference.number)
    if plan.views:
        record_views(plan, [tensor.reference for tensor in inputs], [tensor.reference for tensor in outputs])
        if not _replays_views():
            _set_view_replay(True)
    if plan.program.seeded is None:
        stream.issue((plan.number, *numbers, *floats, *results), site, targets)
    else:
        stream.issue((plan.number, stream.draws.next(stream, generator), *numbers, *floats, *results), site, targets)
    if plan.collectives:
        stream.table.moved(site, plan)
    if plan.changes:
        if written is not None:
            write_back(plan, written, site)
        if plan.rebinds:
            assert reshape is not None
            uninterrupted(_rebind, inputs[0], outputs[0], reshape, is_shared)
    return plan.build(outputs, inputs)


def _rebind(tensor: MeshTensor, output: MeshTensor, reshape: Callable[[], object], is_shared: bool) -> None:
    with no_dispatch():  # its own sizes and strides, too
        reshape()
    before, tensor.meta, tensor.reference = tensor.reference, output.meta, output.reference
    if is_shared:
        record_reshape(before, output.reference)


def _refuse_two_meshes(plan: OperationPlan, stream: Stream, second: Stream) -> NoReturn:
    if plan.own:
        check_lane(second, plan.operation, (), ())
        check_lane(stream, plan.operation, (), ())
        raise RankTensorError(
            "WRONG_MESH",
            f"{plan.operation}: a tensor of {mesh_of(stream)!r} and one of {mesh_of(second)!r}. Bring one to the other "
            "mesh first: t.to_mesh(mesh)",
        )
    raise RuntimeError(
        f"{plan.operation}: tensors of two meshes, {stream.title} and {second.title}. Bring them together first: "
        "tensor.to(mesh)"
    )


def _check_changes(
    plan: OperationPlan, inputs: list[MeshTensor], site: CallSite | None, *, has_gradient: bool
) -> tuple[list[WriteRecord], list[Reference] | None]:
    """Returns the records of a plan's writes, and all its inputs if some of the writes concern other tensors too."""
    targets: list[WriteRecord] = []
    concerns_others = plan.puts_back
    for index in plan.writes:
        reference = inputs[index].reference
        targets.append(reference.writes)
        if reference.memory is not None or reference.copied is not None:
            concerns_others = True
    if not concerns_others:
        return targets, None
    written = [tensor.reference for tensor in inputs]
    check_writes(plan, written, site)
    if has_gradient:
        check_gradients(plan, written)
    for index in plan.writes:
        make_stale(written[index])
    return targets, written


def is_leaf(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor that requires gradients is a leaf, also within an operation.

    `Tensor.is_leaf` of a view makes autograd replay the view if its base was written to, which fails below autograd;
    views of tensors that require gradients are no leaves.
    """
    base = tensor._base
    return (base is None or not base.requires_grad) and tensor.is_leaf


def stream_of(args: tuple[object, ...], kwargs: dict[str, object] | None) -> Stream:
    """Returns the stream of the first sharded tensor among the arguments."""
    for value in args:
        if isinstance(value, MeshTensor):
            return value.reference.stream
    tensor = _first_tensor((args, kwargs))
    if tensor is None:
        raise TypeError("no sharded tensor among the arguments")
    return tensor.reference.stream


def _first_tensor(values: object) -> MeshTensor | None:
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, MeshTensor)), None)


def _with_numbers_uploaded(
    stream: Stream, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Returns the arguments with local scalars uploaded to the mesh; None if there are none.

    Raises RuntimeError for other local tensors, which are never sent implicitly.
    """
    has_numbers = False

    def replace(value: object) -> object:
        nonlocal has_numbers
        if isinstance(value, MeshTensor) or not isinstance(value, torch.Tensor):
            return value
        first = _first_tensor((args, kwargs))
        if value.dim() and first is not None and first.meta.is_own:
            raise RankTensorError(
                "LOCAL_TENSOR",
                f"{func}: operand {_position_of(value, args, kwargs)} is a local tensor of shape {tuple(value.shape)}, "
                f"among tensors of {mesh_of(stream)!r}. Make it on the ranks, inside `with mesh.activate():`, or take "
                "the others' values here: monarch.inspect(t)",
            )
        if value.dim():
            raise RuntimeError(
                f"{func}: a local tensor of shape {tuple(value.shape)} on {value.device} among tensors of mesh "
                f"{stream.title}. Send it there first: monarch.distribute(tensor, mesh), or "
                f"tensor.to({str(stream.device)!r})" + more("manual/tensors.md#sharding-tensors")
            )
        has_numbers = True
        return upload(stream, value, replicated(stream.layout))

    replaced = tree_map(replace, (args, kwargs))
    return replaced if has_numbers else None


def _position_of(operand: object, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    """Returns the index or name of an operand among the arguments."""
    for name, value in (*enumerate(args), *kwargs.items()):
        if value is operand or (isinstance(value, list | tuple) and any(element is operand for element in value)):
            return str(name)
    return "?"


def upload(stream: Stream, tensor: torch.Tensor, placements: Placements) -> MeshTensor:
    """Sends a local tensor, which may change as soon as this returns, and returns its handle.

    Raises TypeError for a sparse or quantized tensor.
    """
    site = call_site()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a tensor of layout {tensor.layout} and type {tensor.dtype} cannot be cut over processes: give a dense "
            "one, as tensor.to_dense() or tensor.dequantize() makes it"
        )
    meta = Meta.of(stream.layout, tensor.shape, tensor.dtype, placements)
    reference = stream.hold(meta, site)
    local = tensor.detach().cpu().contiguous()
    if local.nbytes <= _COPY_LIMIT:
        stream.issue_object(PutTensor(local.clone(), meta.placements, reference.number))
    else:
        stream.issue_object(PutTensor(local, meta.placements, reference.number))
        stream.flush()
    return MeshTensor(meta, reference)
