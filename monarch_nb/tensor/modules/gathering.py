"""The collectives of modules: fully sharded parameters are gathered where they are used, and gradients are summed.

Those of a layer are gathered by one collective. The backward pass gathers the parameters that it needs again, a layer
at a time, and sums many gradients in one collective.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.hooks import RemovableHandle

from monarch_nb.tensor.device import after_backward
from monarch_nb.tensor.handle import MeshTensor, finish_redistributions, redistributed_together
from monarch_nb.tensor.propagation import Placements
from monarch_nb.tensor.stream import Stream

_LISTS = (nn.ModuleList, nn.ModuleDict)
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, as in PyTorch's DistributedDataParallel
_NESTED = 8  # passes remembered; failed passes never end, and their gradients stay partial


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules of lists and sequences that have modules of their own."""
    for child in module.children():
        if isinstance(module, (*_LISTS, nn.Sequential)) and not isinstance(child, _LISTS) and any(child.children()):
            yield child
        else:
            yield from layers_of(child)


class GatheredParameters:
    """Parameters that one call of a module has gathered, and gathers again for its backward pass."""

    def __init__(self, parameters: Sequence[MeshTensor], dims: frozenset[int]) -> None:
        self.parameters = parameters
        self.placements: list[Placements] = [
            tuple(Replicate() if dim in dims else placement for dim, placement in enumerate(parameter.placements))
            for parameter in parameters
        ]
        self.needed: set[int] = set()  # indices of those that autograd has saved

    def gathered(self) -> Sequence[MeshTensor]:
        """Returns the parameters as modules use them; differentiable."""
        return _gather(self.placements, *self.parameters)

    def regather(self, index: int) -> MeshTensor:
        """Returns one parameter; a backward pass gathers those that it needs together."""
        if torch._C._current_graph_task_id() < 0:  # saved tensors are read outside of a backward pass
            return redistributed_together([self.parameters[index]], [self.placements[index]])[0]
        return _REGATHERED.of(self)[index]


class _Regathered:
    """Parameters that backward passes have gathered again: of one call at a time, until the pass ends."""

    def __init__(self) -> None:
        self._last: tuple[GatheredParameters, int, dict[int, MeshTensor]] | None = None  # of a call and pass, by index

    def of(self, parameters: GatheredParameters) -> dict[int, MeshTensor]:
        """Returns the parameters of a call by index."""
        task, last = torch._C._current_graph_task_id(), self._last
        if last is not None and last[:2] == (parameters, task):
            return last[2]
        self._last = last = None  # frees its memory before the next gather
        needed = sorted(parameters.needed)
        tensors = [parameters.parameters[index] for index in needed]
        results = redistributed_together(tensors, [parameters.placements[index] for index in needed])
        gathered = dict(zip(needed, results, strict=True))
        self._last = parameters, task, gathered
        after_backward(self._drop)
        return gathered

    def _drop(self) -> None:
        self._last = None


_REGATHERED = _Regathered()


class _GatherContext(torch.autograd.function.FunctionCtx):
    parameters: tuple[MeshTensor, ...]


class _Gather(torch.autograd.Function):
    """Gathers parameters. Gradients stay partial until all of the backward pass are summed into pieces.

    Those that are added to earlier gradients are summed first, by one collective for all of them.
    """

    @staticmethod
    def forward(
        ctx: _GatherContext, placements: Sequence[Placements], *parameters: MeshTensor
    ) -> tuple[MeshTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        gathered = redistributed_together(parameters, placements)
        frozen = [tensor for tensor, parameter in zip(gathered, parameters, strict=True) if not parameter.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: _GatherContext, *grads: MeshTensor | None) -> tuple[MeshTensor | None, ...]:
        added = {
            index: grad
            for index, (grad, parameter) in enumerate(zip(grads, ctx.parameters, strict=True))
            if grad is not None and not grad.requires_grad and _has_whole_gradient(parameter)
        }
        summed: dict[int, MeshTensor] = {}
        if added:
            placements = [ctx.parameters[index].placements for index in added]
            summed = dict(zip(added, redistributed_together([*added.values()], placements), strict=True))
        return None, *(summed.get(index, grad) for index, grad in enumerate(grads))


def _has_whole_gradient(parameter: MeshTensor) -> bool:
    grad = parameter.grad
    return isinstance(grad, MeshTensor) and not any(placement.is_partial() for placement in grad.placements)


_gather: Callable[..., tuple[MeshTensor, ...]] = _Gather.apply


class Gathering:
    """The hooks of a module that gather the parameters of these names, which are sharded along these mesh dimensions.

    While its `forward` runs, the modules in it have the gathered tensors as plain attributes, which hide their
    parameters. Names are those of `named_parameters()`.
    """

    def __init__(self, names: Sequence[str], dims: Sequence[int]) -> None:
        self._names, self._dims = tuple(names), frozenset(dims)
        self._open: list[tuple[ExitStack, list[tuple[nn.Module, str]]]] = []

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Registers the hooks."""
        return [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: object) -> None:
        stack, hidden = ExitStack(), list[tuple[nn.Module, str]]()
        self._open.append((stack, hidden))
        users: dict[MeshTensor, list[tuple[nn.Module, str]]] = {}
        for path in self._names:
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent) if parent else module
            parameter: object = owner._parameters.get(name)
            if isinstance(parameter, MeshTensor) and name not in owner.__dict__:  # not gathered for a layer
                users.setdefault(parameter, []).append((owner, name))
        if not users:
            return
        parameters = GatheredParameters([*users], self._dims)
        gathered = parameters.gathered()
        for tensor, owners in zip(gathered, users.values(), strict=True):
            for owner, name in owners:
                owner.__dict__[name] = tensor
                hidden.append((owner, name))
        if not _has_hooks():  # else others, such as activation checkpoints, own saved tensors, and run this again
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_Packing(parameters, gathered), _unpack))

    def _after(self, module: nn.Module, args: object, result: object) -> None:
        if not self._open:
            return
        stack, hidden = self._open.pop()
        for owner, name in hidden:
            owner.__dict__.pop(name, None)
        stack.close()

    def __deepcopy__(self, memo: object) -> "Gathering":
        return Gathering(self._names, tuple(self._dims))


class _Placeholder:
    """Placeholder of a gathered parameter that the backward pass needs."""

    def __init__(self, parameters: GatheredParameters, index: int, *, transposed: bool) -> None:
        self.parameters, self.index, self.transposed = parameters, index, transposed
        parameters.needed.add(index)


class _Packing:
    """Recognises gathered parameters and their transposes among the tensors that autograd saves."""

    def __init__(self, parameters: GatheredParameters, gathered: Sequence[MeshTensor]) -> None:
        self._parameters, self._gathered = parameters, gathered
        self._indices = {id(tensor): index for index, tensor in enumerate(gathered)}

    def __call__(self, tensor: torch.Tensor) -> object:
        index = self._indices.get(id(tensor))
        if index is not None:
            return _Placeholder(self._parameters, index, transposed=False)
        index = self._indices.get(id(tensor._base))
        if index is not None and tensor.dim() == 2:
            parameter = self._gathered[index]
            if (tensor.shape, tensor.stride()) == (parameter.shape[::-1], parameter.stride()[::-1]):
                return _Placeholder(self._parameters, index, transposed=True)
        return tensor


def _has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _unpack(packed: "torch.Tensor | _Placeholder") -> torch.Tensor:
    if not isinstance(packed, _Placeholder):
        return packed
    with torch.no_grad():
        tensor = packed.parameters.regather(packed.index)
        return tensor.t() if packed.transposed else tensor


class BegunSums:
    """Sums of the gradients of parameters on one mesh, in flight."""

    def __init__(self, pairs: Sequence[tuple[MeshTensor, MeshTensor]]) -> None:
        self._pairs = pairs
        self._grads = [grad for _, grad in pairs]
        self._versions = [grad._version for grad in self._grads]
        placements = [parameter.placements for parameter, _ in pairs]
        self._pending = redistributed_together(self._grads, placements, pending=True)

    def finish(self) -> None:
        """Waits for the sums, and assigns them to the parameters. A gradient that has changed is summed again."""
        sums = finish_redistributions(self._pending, self._grads)
        for (parameter, grad), version, summed in zip(self._pairs, self._versions, sums, strict=True):
            latest = parameter.grad
            if latest is grad and grad._version == version:
                parameter.grad = summed
            elif isinstance(latest, MeshTensor):
                parameter.grad = latest.redistribute(parameter.placements)


class BackwardPass:
    """The gradients of one backward pass that have to be redistributed.

    A gradient may change until it is summed: by hooks, and by passes inside this one.
    """

    def __init__(self, task: int) -> None:
        self.task = task  # of autograd
        self._waiting: list[MeshTensor] = []  # parameters
        self._sums: list[BegunSums] = []  # one for each mesh
        self._bytes, self._limit = 0, FIRST_BUCKET

    def add(self, parameter: MeshTensor, nbytes: int) -> None:
        """Adds a parameter whose gradient is ready. Starts the sum of a full bucket, and waits for the previous one."""
        self._waiting.append(parameter)
        self._bytes += nbytes
        if self._bytes >= self._limit:
            self._begin()
            self._bytes, self._limit = 0, BUCKET

    def end(self) -> None:
        """Sums the remaining gradients."""
        self._begin()
        self._finish()

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, []
        by_stream: dict[Stream, list[tuple[MeshTensor, MeshTensor]]] = {}
        for parameter in waiting:
            grad = parameter.grad
            if isinstance(grad, MeshTensor) and grad.placements != parameter.placements:
                by_stream.setdefault(grad.reference.stream, []).append((parameter, grad))
        begun = [BegunSums(pairs) for pairs in by_stream.values()]
        self._finish()
        self._sums = begun

    def _finish(self) -> None:
        begun, self._sums = self._sums, []
        for sums in begun:
            sums.finish()


class Summing:
    """Redistributes the gradients of a module to the placements of the parameters, by the end of a backward pass.

    Until then a gradient is partial, which operations on it take into account.
    """

    def __init__(self) -> None:
        self.off = 0  # open `no_sync` blocks
        self._passes: list[BackwardPass] = []  # the innermost last

    def watch(self, parameter: torch.Tensor) -> None:
        """Includes a parameter. A frozen one may be trained later."""
        if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # else PyTorch accepts no hook
            parameter.register_hook(partial(self._before_accumulation, weakref.ref(parameter)))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(self._after_accumulation)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)

    @staticmethod
    def _before_accumulation(reference: "weakref.ref[torch.Tensor]", added: object) -> None:
        """Makes an existing gradient partial before another is added to it, so that one collective sums both."""
        parameter = reference()
        if parameter is None or not isinstance(added, MeshTensor) or added.requires_grad or added.meta.is_sharded:
            return
        grad = parameter.grad
        if isinstance(grad, MeshTensor) and not grad.requires_grad and grad.meta.is_replicated:
            parameter.grad = grad.redistribute(added.placements)

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if self.off or not isinstance(grad, MeshTensor) or not isinstance(parameter, MeshTensor):
            return
        if grad.placements == parameter.placements:
            return
        if grad.requires_grad:  # the gradient is differentiated, too
            parameter.grad = grad.redistribute(parameter.placements)
            return
        task = torch._C._current_graph_task_id()
        if not self._passes or self._passes[-1].task != task:
            self._passes = [*self._passes[1 - _NESTED :], BackwardPass(task)]
            after_backward(partial(self._end, task))
        self._passes[-1].add(parameter, grad.meta.nbytes)

    def _end(self, task: int) -> None:
        for index, backward_pass in enumerate(self._passes):
            if backward_pass.task == task:
                del self._passes[index:]
                backward_pass.end()
                return

    def __deepcopy__(self, memo: object) -> "Summing":
        return self


_summing: "weakref.WeakKeyDictionary[nn.Module, Summing]" = weakref.WeakKeyDictionary()


def sum_gradients(module: nn.Module) -> None:
    """Sums the gradients of a module over the ranks from now on."""
    summing = _summing.get(module)
    if summing is None:
        summing = _summing[module] = Summing()
    for parameter in module.parameters():
        summing.watch(parameter)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Keeps gradients of a module partial in a `with` block: for all but the last of several backward passes.

    The next pass sums all of them. Raises ValueError for a module that is not on a mesh.
    """
    summing = _summing.get(module)
    if summing is None:
        raise ValueError(
            f"this {type(module).__name__} is on no mesh: monarch.module_to_mesh(module, mesh) brings it there"
        )
    summing.off += 1
    try:
        yield
    finally:
        summing.off -= 1
