"""Operations on sharded tensors without sharding rules: they share, fetch or send tensors."""

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from monarch_nb.tensor.errors import RankTensorError
from monarch_nb.tensor.factories import refill
from monarch_nb.tensor.handle import OWN, Args, Kwargs, MeshTensor, Own, current, is_leaf, issue, upload
from monarch_nb.tensor.propagation import PropagationError, replicated, user_line
from monarch_nb.tensor.ranks.tensor import RankTensor

aten = torch.ops.aten


def _fetch(tensor: MeshTensor, operation: str) -> torch.Tensor:
    return tensor.reference.stream.fetch(current(tensor), operation)


def _share(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Returns another handle of the same tensor."""
    tensor = args[0]
    if tensor.requires_grad and is_leaf(tensor):
        tensor.reference.stream.held.register_leaf(tensor.reference.number, tensor)
    tensor.reference.stream.handed_out(tensor.reference, str(func).removesuffix(".default"))
    return MeshTensor(tensor.meta, tensor.reference)


def _number(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    if isinstance(args[0], RankTensor):
        return args[0].full_tensor().item()
    return args[0].reference.stream.number_in(current(args[0]), "item")


def _truth(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    if args[0].numel() != 1:
        raise RuntimeError(f"the truth of a tensor of shape {tuple(args[0].shape)} is ambiguous: use .any() or .all()")
    if isinstance(args[0], RankTensor):
        return bool(args[0].full_tensor())
    return bool(args[0].reference.stream.number_in(current(args[0]), "bool"))


def _equal(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    first, second = args
    return first.shape == second.shape and bool((first == second).all())


def _close(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def _move(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Implements `to`: an operation on the mesh; to another device it fetches the tensor."""
    device = kwargs.get("device")
    tensor = args[0]
    stays = isinstance(tensor, RankTensor) or not isinstance(tensor, MeshTensor)
    if device is None or stays or device.type == tensor.device.type:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        return issue(func, args, kwargs)
    local = _fetch(tensor, "to")
    return func(local, *args[1:], **kwargs)


def _copy(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Implements `copy_`, the only operation that accepts local tensors, since it copies explicitly."""
    target, source = args[0], args[1]
    if not isinstance(target, MeshTensor):
        if isinstance(source, RankTensor):
            raise RankTensorError(
                "LOCAL_TENSOR",
                "copy_: the values of the ranks do not go into a local tensor by themselves: target.copy_("
                "monarch.inspect(t, …)) takes those of one rank",
            )
        return target.copy_(_fetch(source, "copy_"))
    stream = target.reference.stream
    if not isinstance(source, MeshTensor):
        source = upload(stream, source, replicated(stream.layout))
    elif _shows_same_elements(target, source):
        return target  # as in PyTorch: nothing is written, so an expanded tensor may be copied onto itself
    elif (
        source.meta.shape
        and not any(source.meta.stride)
        and source.reference.memory is target.reference.memory is not None
    ):
        source = source.clone()  # `t[:] = t[0]`: PyTorch reads one element on a CPU before it writes to all
    stream.held.require_contents((source.reference.number,))
    refill(target)
    return issue(func, (target, source), kwargs)


def _shows_same_elements(first: MeshTensor, second: MeshTensor) -> bool:
    """Returns whether two tensors are the same elements of the same memory, in the same order."""
    a, b = first.reference, second.reference
    shares = a is b or (a.memory is not None and a.memory is b.memory and a.offset == b.offset)
    facts = [
        (tensor.meta.shape, tensor.meta.stride, tensor.meta.dtype, tensor.is_conj(), tensor.is_neg())
        for tensor in (first, second)
    ]
    return shares and facts[0] == facts[1]


def _strided(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Implements `as_strided`, refused where memory on the workers differs from that of the program."""
    tensor = args[0]
    if tensor.reference.is_view and (tensor.meta.copied or not tensor.meta.is_replicated):
        raise PropagationError(
            str(func),
            "it looks at the memory under a view, which is in parts on several processes",
            "Use it on the tensor itself, or on a copy: view.clone()",
            user_line(),
        )
    return issue(func, args, kwargs)


def _with_lengths(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Fetches lengths on which the sizes of results depend."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for name in ("input_lengths", "target_lengths"):
        lengths = named[name]
        named[name] = (_fetch(lengths, "ctc_loss") if isinstance(lengths, MeshTensor) else lengths).tolist()
    overload = getattr(torch.ops.aten, func._schema.name.partition("::")[2]).default
    return issue(
        overload,
        tuple(named.pop(argument.name) for argument in overload._schema.arguments if argument.name in named),
        {},
    )


def index_fill(tensor: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Implements `index_fill` of a value that is a tensor by a mask.

    PyTorch's own gradient of the value counts the different indices, which only the workers have.
    """
    return tensor.masked_fill(_index_mask(tensor, dim, index), value)


def index_fill_(tensor: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Implements `index_fill_` in the same way."""
    return tensor.masked_fill_(_index_mask(tensor, dim, index), value)


def _index_mask(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the indices along a dimension, which broadcasts with the tensor."""
    sizes = list(tensor.shape)
    mask = tensor.new_zeros((sizes[dim] if sizes else 1,), dtype=torch.bool).index_fill(0, index, True)
    return mask.view([-1 if axis == dim % len(sizes) else 1 for axis in range(len(sizes))])


def tensor_split(tensor: torch.Tensor, indices_or_sections: torch.Tensor, dim: int = 0) -> Sequence[torch.Tensor]:
    """Implements `tensor_split` at a tensor of indices; fetches them."""
    indices = indices_or_sections
    return tensor.tensor_split(
        (_fetch(indices, "tensor_split") if isinstance(indices, MeshTensor) else indices).tolist(), dim
    )


def register() -> None:
    """Registers these implementations with `MeshTensor`."""
    own: dict[OpOverload, Own] = {
        aten.detach.default: _share,
        aten.alias.default: _share,
        aten.lift_fresh.default: _share,
        aten._local_scalar_dense.default: _number,
        aten.is_nonzero.default: _truth,
        aten.equal.default: _equal,
        aten.allclose.default: _close,
        aten._to_copy.default: _move,
        aten.copy_.default: _copy,
        aten.as_strided.default: _strided,
        aten._ctc_loss.Tensor: _with_lengths,
        aten._ctc_loss_backward.Tensor: _with_lengths,
    }
    OWN.update(own)
