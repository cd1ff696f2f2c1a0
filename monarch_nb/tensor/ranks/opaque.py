"""Objects and modules that ranks have of their own, for a program: `OpaqueObject` and `OpaqueModule`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from monarch_nb.runtime import Future
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.ranks.remote import call_on_shard_and_fetch, remote
from monarch_nb.tensor.ranks.tensor import RankTensor
from monarch_nb.tensor.workers.calls import OpaqueRef, function_at, register_opaque

Constructor = Callable[..., object] | str


def _constructed(constructor: Constructor, *args: object, **kwargs: object) -> OpaqueRef:
    function = function_at(constructor) if isinstance(constructor, str) else constructor
    return OpaqueRef(function(*args, **kwargs))


def _invoked(reference: OpaqueRef, name: str, *args: object, **kwargs: object) -> object:
    return getattr(reference.value, name)(*args, **kwargs)


def opaque_method(method: Callable[..., object]) -> Callable[..., Any]:
    """Makes a method of a subclass of `OpaqueObject` call that of the ranks' objects; its body defines the shapes."""

    @functools.wraps(method)
    def call(self: "OpaqueObject", *args: object, **kwargs: object) -> Any:
        return self.call_method(method.__name__, method, *args, **kwargs)

    return call


class OpaqueObject(OpaqueRef):
    """An object on each rank, made there by a class, or by the function at a path such as "torch.nn.Linear".

    A subclass declares its methods with `@opaque_method`.
    """

    def __init_subclass__(cls) -> None:
        register_opaque(cls)

    def __init__(self, constructor: "Constructor | OpaqueRef", *args: object, **kwargs: object) -> None:
        if isinstance(constructor, OpaqueRef):
            self._key = constructor.key
        else:
            make = remote(_constructed, propagate=lambda *args, **kwargs: OpaqueRef())
            self._key = make(constructor, *args, **kwargs).key

    def call_method(self, name: str, propagate: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Calls a method on each rank; `propagate(self, *args)` returns the form of its result. Does not block."""

        def predict(reference: object, name: str, *args: object, **kwargs: object) -> object:
            return propagate(reference, *args, **kwargs)

        return remote(_invoked, propagate=predict)(self, name, *args, **kwargs)

    def call_method_on_shard_and_fetch(
        self, name: str, *args: object, shard: Mapping[str, int] | None = None, **kwargs: object
    ) -> Future[Any]:
        """Calls a method on one rank; the future gives its result."""
        return call_on_shard_and_fetch(remote(_invoked), self, name, *args, shard=shard, **kwargs)


register_opaque(OpaqueObject)


def _parameters(module: OpaqueRef) -> list[torch.Tensor]:
    return list(module.value.parameters())


def _forward(module: OpaqueRef, needed: Sequence[bool], args: object, kwargs: object) -> tuple[OpaqueRef, object]:
    """Calls a module on a rank; returns the function for gradients of its inputs and parameters, and the result."""
    leaves, tree = tree_flatten((args, kwargs))
    inputs: list[torch.Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if needed[len(inputs)]:
                leaves[index] = leaf.detach().requires_grad_()
            inputs.append(leaves[index])
    inputs += module.value.parameters()
    positional, options = tree_unflatten(leaves, tree)
    result = module.value(*positional, **options)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    targets = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]

    def backward(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        candidates = zip(outputs, gradients, strict=True)
        pairs = [(out, grad) for out, grad in candidates if out.requires_grad and grad is not None]
        results = torch.autograd.grad(
            [out for out, _ in pairs], targets, [grad for _, grad in pairs], allow_unused=True, materialize_grads=True
        )
        return list(results)

    return OpaqueRef(backward), tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _backward(backward: OpaqueRef, gradients: Sequence[torch.Tensor]) -> object:
    return backward.value(gradients)


class _ModuleCall(torch.autograd.function.FunctionCtx):
    backward: OpaqueRef
    inputs: list[tuple[torch.Size, torch.dtype] | None]


class ModuleStep(torch.autograd.Function):
    """A call of a module that ranks have; the gradients of inputs and parameters are computed there."""

    @staticmethod
    def forward(
        ctx: _ModuleCall,
        module: OpaqueRef,
        propagate: Callable[..., object],
        tree: TreeSpec,
        needed: list[bool],
        *leaves: object,
    ) -> tuple[object, ...]:
        """Calls the module."""
        args, kwargs, _ = tree_unflatten(leaves, tree)
        ctx.set_materialize_grads(False)

        def predict(reference: object, needed: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            return OpaqueRef(), propagate(reference, *args, **kwargs)

        ctx.backward, result = remote(_forward, propagate=predict)(module, needed, args, kwargs)
        flags = iter(needed)
        ctx.inputs = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) and next(flags) else None for leaf in leaves
        ]
        outputs, shape = tree_flatten(result)
        return shape, *outputs

    @staticmethod
    def backward(ctx: _ModuleCall, _: None, *gradients: torch.Tensor) -> tuple[object, ...]:
        """Makes the ranks compute the gradients."""
        specs = [spec for spec in ctx.inputs if spec is not None]

        def predict(reference: object, gradients: object) -> object:
            return [torch.empty(size, dtype=dtype) for size, dtype in specs]

        results = iter(remote(_backward, propagate=predict)(ctx.backward, list(gradients)))
        return (None, None, None, None, *(None if spec is None else next(results) for spec in ctx.inputs))


_apply: Callable[..., Any] = ModuleStep.apply


class OpaqueModule:
    """A module on each rank, such as `OpaqueModule("torch.nn.Linear", 3, 3)`, with gradients as of any module.

    `parameters()` are tensors in the memory of the ranks' parameters.
    """

    def __init__(self, constructor: Constructor, *args: object, **kwargs: object) -> None:
        self._object = OpaqueObject(constructor, *args, **kwargs)
        self._parameters: list[RankTensor] | None = None

    def parameters(self) -> list[RankTensor]:
        """Returns the parameters. The first call waits for the ranks."""
        if self._parameters is None:
            self._parameters = [parameter.requires_grad_() for parameter in remote(_parameters)(self._object)]
        return self._parameters

    def call_method(self, name: str, propagate: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """See `OpaqueObject.call_method`. No gradients pass through it."""
        return self._object.call_method(name, propagate, *args, **kwargs)

    def __call__(self, *args: object, propagator: Callable[..., object], **kwargs: object) -> Any:
        """Calls it on each rank; `propagator(self, *args)` returns the form of the result. Differentiable."""
        leaves, tree = tree_flatten((args, kwargs, self.parameters()))
        needed = [leaf.requires_grad for leaf in leaves if isinstance(leaf, MeshTensor)]
        if not any(needed) or not torch.is_grad_enabled():
            return self.call_method("__call__", propagator, *args, **kwargs)
        shape, *outputs = _apply(self._object, propagator, tree, needed, *leaves)
        return tree_unflatten(outputs, shape)
