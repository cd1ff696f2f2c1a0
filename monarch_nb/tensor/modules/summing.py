"""The summing of gradients of modules over the ranks, many in one collective, during the backward pass."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from monarch_nb.tensor.device import after_backward
from monarch_nb.tensor.handle import MeshTensor, finish_redistributions, redistributed_together
from monarch_nb.tensor.stream import Stream

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, as in PyTorch's DistributedDataParallel
_NESTED = 8  # passes remembered; failed passes never end, and their gradients stay partial


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
