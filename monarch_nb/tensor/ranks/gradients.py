"""Gradients of ranks' own values by functions of a program: `grad_function`, `grad_generator`, and
`remote_autograd_function`, which runs a program's autograd function on each rank.
"""

import functools
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, count
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.ranks.remote import Remote
from monarch_nb.tensor.ranks.streams import Stream, on_lane
from monarch_nb.tensor.workers.calls import OpaqueRef

Continuation = Callable[..., Any]
_Node: TypeAlias = Any  # of autograd
_Input: TypeAlias = tuple[_Node, int]  # a node, and the index of one of its gradients
_Function = type[torch.autograd.Function]


class _Step(torch.autograd.function.FunctionCtx):
    continuation: Continuation


class WithContinuation(torch.autograd.Function):
    """A step whose function returns its result, and the function of the result's gradient."""

    @staticmethod
    def forward(ctx: _Step, function: Callable[..., tuple[object, Continuation]], *args: object) -> Any:
        """Runs the step."""
        result, ctx.continuation = function(*args)
        return result

    @staticmethod
    def backward(ctx: _Step, *gradients: torch.Tensor) -> tuple[object, ...]:
        """Runs the function of the gradient."""
        result = ctx.continuation(*gradients)
        return (None, *result) if isinstance(result, tuple) else (None, result)


def grad_function(function: Callable[..., tuple[object, Continuation]]) -> Callable[..., Any]:
    """Makes a function differentiable that returns `(result, backward)`.

    `backward` is called with the gradient of the result, and returns the gradients of the arguments: one, or a tuple.
    Both may contain operations that autograd does not support, such as `reduce` and `to_mesh`.
    """
    return functools.partial(WithContinuation.apply, function)


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor | GradientEdge] = (),
    with_respect_to: Sequence[torch.Tensor | GradientEdge] = (),
    grad_roots: Sequence[torch.Tensor | None] = (),
) -> Iterator[torch.Tensor | None]:
    """Yields the gradients of `roots` with respect to each tensor, in their order; None where there is none.

    `grad_roots` are the gradients of the roots, ones by default. The operations of a gradient are issued when it is
    requested, so that a program can exchange one while the next is computed.
    """
    outputs = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    seeds = [*grad_roots, *[None] * (len(outputs) - len(grad_roots))]
    pass_ = _BackwardPass([_input_of(target) for target in with_respect_to])
    pass_.begin([_input_of(root) for root in outputs], [_seed_of(*pair) for pair in zip(outputs, seeds, strict=True)])
    for index in range(len(with_respect_to)):
        yield pass_.gradient(index)


class GradientGenerator(Iterator["torch.Tensor | None"]):
    """The iterator of `grad_generator`, with torchmonarch's name in `monarch.gradient`.

    `context_restorer` is not called: each gradient is computed on the mesh and stream of its operation anyway.
    """

    def __init__(
        self,
        roots: Sequence[torch.Tensor | GradientEdge],
        with_respect_to: Sequence[torch.Tensor | GradientEdge],
        grad_roots: Sequence[torch.Tensor | None] = (),
        context_restorer: object = None,
    ) -> None:
        self._gradients = grad_generator(roots, with_respect_to, grad_roots)

    def __next__(self) -> torch.Tensor | None:
        return next(self._gradients)


def gradient_execution_order(
    roots: Sequence[torch.Tensor | GradientEdge], with_respect_to: Sequence[torch.Tensor | GradientEdge]
) -> list[int]:
    """Returns the indices of tensors in the order in which a backward pass has computed their gradients.

    A gradient is computed once the first operation that has used its tensor was passed; unneeded gradients come
    first.
    """
    first_use: dict[_Input, int] = {}
    visited: set[_Node] = set()
    to_visit = [_input_of(root)[0] for root in roots]
    while to_visit:
        node = to_visit.pop()
        if node in visited:
            continue
        visited.add(node)
        for target in node.next_functions:
            if target[0] is not None:
                number = node._sequence_nr()
                first_use[target] = min(first_use.get(target, number), number)
                to_visit.append(target[0])
    last = max(first_use.values(), default=0) + 1
    return sorted(range(len(with_respect_to)), key=lambda i: -first_use.get(_input_of(with_respect_to[i]), last))


def _input_of(value: torch.Tensor | GradientEdge) -> _Input:
    if isinstance(value, GradientEdge):
        return value.node, value.output_nr
    with on_lane(_lane_of(value)):  # a view of a leaf gives its edge
        edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


def _seed_of(root: torch.Tensor | GradientEdge, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is not None or isinstance(root, GradientEdge):
        return gradient
    with torch.no_grad(), on_lane(_lane_of(root)):
        return torch.ones_like(root)


class _BackwardPass:
    """A backward pass in stages: stage `i` computes the part of the `i`-th gradient that earlier ones have not.

    A node takes part in each stage that needs one of its results, and computes only those. If a result goes to a node
    that others use too, autograd would continue to these, so that all results are computed at once and kept.
    """

    def __init__(self, targets: list[_Input]) -> None:
        self._targets = targets
        self._target_index = {target: index for index, target in enumerate(targets)}
        self._stages: dict[_Input, int] = {}  # of the gradients that are needed
        self._gradients: dict[_Input, torch.Tensor | None] = {}  # None: there is none, or autograd begins with ones
        self._incoming: defaultdict[_Node, list[_Input]] = defaultdict(list)  # by node: the gradients it takes
        self._pending: dict[_Node, int] = {}  # by node: how many gradients it waits for
        self._last: dict[_Node, int] = {}  # by node that is ready: its last stage
        self._ready: list[tuple[int, int, int, _Node]] = []  # a heap: the stage, and the latest nodes first
        self._ones: set[_Input] = set()
        self._users: defaultdict[_Node, set[_Node]] = defaultdict(set)  # by node
        self._computed: dict[_Node, Sequence[torch.Tensor | None]] = {}  # by node: results for later stages
        self._tie = count().__next__

    def begin(self, roots: list[_Input], gradients: "list[torch.Tensor | None]") -> None:
        """Determines the gradients that each stage needs."""
        users: defaultdict[_Input, list[_Node]] = defaultdict(list)
        visited: set[_Node] = set()
        to_visit = [node for node, _ in roots]
        while to_visit:
            node = to_visit.pop()
            if node not in visited:
                visited.add(node)
                for target in node.next_functions:
                    if target[0] is not None:
                        users[target].append(node)
                        self._users[target[0]].add(node)
                        to_visit.append(target[0])
        edges_of: defaultdict[_Node, set[_Input]] = defaultdict(set)
        for edge in (*users, *roots):
            edges_of[edge[0]].add(edge)
        for stage, target in enumerate(self._targets):
            to_mark = [target] if target[0] in visited else []
            while to_mark:
                edge = to_mark.pop()
                if edge not in self._stages:
                    self._stages[edge] = stage
                    to_mark += (needed for user in users[edge] for needed in edges_of[user])
        for edge in self._stages:
            self._incoming[edge[0]].append(edge)
            self._pending[edge[0]] = self._pending.get(edge[0], 0) + len(users[edge])
        for root, gradient in zip(roots, gradients, strict=True):
            if root in self._stages:
                self._add(root, gradient)
                if gradient is None:
                    self._ones.add(root)
        for node, pending in tuple(self._pending.items()):
            if not pending:
                self._begin(node)

    def gradient(self, index: int) -> torch.Tensor | None:
        """Computes the gradient of a target, unless that is done, and returns it."""
        while self._ready and self._ready[0][0] <= index:
            stage, *_, node = heapq.heappop(self._ready)
            self._run(node, stage)
        target = self._targets[index]
        gradient = self._gradients.get(target)
        if self._target_index[target] == index and target[0] not in self._last:
            self._gradients.pop(target, None)
        return gradient

    def _add(self, edge: _Input, gradient: torch.Tensor | None) -> None:
        before = self._gradients.get(edge)
        if before is not None and gradient is not None:
            with torch.no_grad(), on_lane(_lane_of(gradient)):
                gradient = before + gradient
        self._gradients[edge] = before if gradient is None else gradient

    def _begin(self, node: _Node) -> None:
        """Notes that all gradients that a node takes are computed."""
        stages = {self._stages[edge] for edge in node.next_functions if edge in self._stages}
        if stages:
            self._last[node] = max(stages)
        for stage in stages:
            heapq.heappush(self._ready, (stage, -node._sequence_nr(), self._tie(), node))

    def _run(self, node: _Node, stage: int) -> None:
        is_last = self._last[node] == stage
        incoming = self._incoming[node]
        needed = [(index, edge) for index, edge in enumerate(node.next_functions) if self._stages.get(edge) == stage]
        results = self._results(node, [edge for _, edge in needed], is_last=is_last)
        if results is None:
            all_results = self._all_results(node)
            results = {}
            for index, edge in needed:
                self._add(edge, _fit(all_results[index], edge))
        for edge, gradient in results.items():
            self._add(edge, gradient)
        if is_last:
            del self._last[node]
            self._computed.pop(node, None)
            for edge in incoming:
                if edge not in self._target_index:
                    self._gradients.pop(edge, None)
        for _, (successor, _) in needed:
            self._pending[successor] -= 1
            if not self._pending[successor]:
                self._begin(successor)

    def _results(
        self, node: _Node, needed: Sequence[_Input], *, is_last: bool
    ) -> "dict[_Input, torch.Tensor | None] | None":
        """Returns some of a node's results alone, or None where autograd would compute more than these."""
        outputs = [edge for edge in self._incoming[node] if edge in self._ones or self._gradients.get(edge) is not None]
        if not outputs:
            return dict.fromkeys(needed)
        if node in self._computed or any(self._users[successor] != {node} for successor, _ in needed):
            return None
        values, inputs = [self._gradients[edge] for edge in outputs], list(dict.fromkeys(needed))
        with torch.autograd.set_multithreading_enabled(False), on_lane(_lane_of(values[0])):
            gradients = torch.autograd.grad(
                [GradientEdge(*edge) for edge in outputs],
                [GradientEdge(*edge) for edge in inputs],
                values,
                retain_graph=not is_last,
                allow_unused=True,
            )
        return dict(zip(inputs, gradients, strict=True))

    def _all_results(self, node: _Node) -> "Sequence[torch.Tensor | None]":
        """Returns all results of a node, one for each of its next functions."""
        if node not in self._computed:
            if not self._ones.isdisjoint(self._incoming[node]):
                raise ValueError("grad_generator: give the gradient of this GradientEdge, in grad_roots")
            gradients = [self._gradients.get((node, index)) for index in range(len(node._input_metadata))]
            is_program = isinstance(node, torch.autograd.function.BackwardCFunction)
            example = next(gradient for gradient in gradients if gradient is not None)
            with torch.no_grad(), on_lane(_lane_of(example)):
                if is_program:
                    shapes = [tuple(metadata.shape) for metadata in node._input_metadata]
                    filled = [
                        example.new_zeros(shape) if gradient is None else gradient
                        for gradient, shape in zip(gradients, shapes, strict=True)
                    ]
                    result = node.apply(*filled)
                else:
                    result = node(*gradients)
            results = result if isinstance(result, tuple) else (result,)
            if is_program:  # one for each argument
                needed = compress(results, node.needs_input_grad)
                results = tuple(None if successor is None else next(needed) for successor, _ in node.next_functions)
            self._computed[node] = results
        return self._computed[node]


def _fit(gradient: torch.Tensor | None, target: _Input) -> torch.Tensor | None:
    """Returns a gradient in the shape and type of its target."""
    if gradient is None:
        return None
    metadata = target[0]._input_metadata[target[1]]
    with torch.no_grad(), on_lane(_lane_of(gradient)):
        return gradient.sum_to_size(tuple(metadata.shape)).to(metadata.dtype)


def _lane_of(gradient: torch.Tensor | None) -> Stream | None:
    return gradient.reference.stream.lane if isinstance(gradient, MeshTensor) else None


class RankContext(torch.autograd.function.FunctionCtx):
    """The `ctx` of an autograd function on a rank, in its forward pass and in its backward pass."""

    to_save: tuple[torch.Tensor, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()
    outputs: Sequence[object] = ()

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `save_for_backward`."""
        return self.to_save


def _forward(function: _Function, needed: list[bool], *args: object) -> tuple[OpaqueRef, object]:
    """Runs the forward pass on a rank; returns its `ctx`, and the result."""
    leaves, tree = tree_flatten(args)
    for index, (leaf, need) in enumerate(zip(leaves, needed, strict=True)):
        if need:
            leaves[index] = leaf.detach().requires_grad_()
    context = RankContext()
    inputs = tree_unflatten(leaves, tree)
    context.needs_input_grad = tuple(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in inputs)
    with torch.no_grad():
        if function.setup_context is torch.autograd.Function.setup_context:
            result = function.forward(context, *inputs)
        else:
            result = function.forward(*inputs)
            function.setup_context(context, inputs, result)
    context.outputs = result if isinstance(result, tuple | list) else (result,)
    return OpaqueRef(context), result


def _backward(function: _Function, context: OpaqueRef, *gradients: torch.Tensor | None) -> object:
    outputs = context.value.outputs
    filled = [
        torch.zeros_like(output) if gradient is None and isinstance(output, torch.Tensor) else gradient
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    with torch.no_grad():
        return function.backward(context.value, *filled)


class _FunctionCall(torch.autograd.function.FunctionCtx):
    function: "RemoteAutogradFunction"
    context: OpaqueRef


class RemoteStep(torch.autograd.Function):
    """One call of an autograd function of the program."""

    @staticmethod
    def forward(ctx: _FunctionCall, function: "RemoteAutogradFunction", *args: object) -> object:
        """Makes the ranks run the forward pass."""
        leaves, _ = tree_flatten(args)
        needed = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        ctx.function = function
        ctx.set_materialize_grads(False)  # ranks do
        ctx.context, result = function.on_ranks(needed, *args)
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: _FunctionCall, *gradients: torch.Tensor) -> tuple[object, ...]:
        """Makes the ranks run the backward pass."""
        result = ctx.function.back_on_ranks(ctx.context, *gradients)
        return (None, *result) if isinstance(result, tuple) else (None, result)


_apply: Callable[..., Any] = RemoteStep.apply


class RemoteAutogradFunction:
    """An autograd function whose passes both run on each rank, with its values of the tensors. `apply` calls it.

    Shapes come from the first call with such arguments, which waits for it, as for `remote`. The `ctx` of the forward
    pass stays on the ranks for the backward pass.
    """

    def __init__(self, function: _Function) -> None:
        self._function = function
        self._forward, self._backward = Remote(_forward), Remote(_backward)

    def apply(self, *args: object) -> Any:
        """Calls it on each rank of the arguments' mesh."""
        return _apply(self, *args)

    def on_ranks(self, needed: list[bool], *args: object) -> tuple[OpaqueRef, object]:
        """Runs the forward pass on the ranks."""
        context, result = self._forward(self._function, needed, *args)
        return context, result

    def back_on_ranks(self, context: OpaqueRef, *gradients: torch.Tensor) -> object:
        """Runs the backward pass on the ranks."""
        return self._backward(self._function, context, *gradients)

    def __repr__(self) -> str:
        return f"<remote autograd function {self._function.__name__}>"


def remote_autograd_function(function: _Function) -> RemoteAutogradFunction:
    """Makes a `torch.autograd.Function` run on each rank; see `RemoteAutogradFunction`."""
    return RemoteAutogradFunction(function)
