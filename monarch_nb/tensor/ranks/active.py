"""The active mesh: in its `with` block tensors are made on each of its ranks."""

import contextlib
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from monarch_nb.tensor.factories import make
from monarch_nb.tensor.handle import MeshTensor, exclude_from_compile, upload
from monarch_nb.tensor.lanes import ACTIVE
from monarch_nb.tensor.propagation import own_values
from monarch_nb.tensor.propagation.execute import DispatchMode

if TYPE_CHECKING:
    from monarch_nb.tensor.mesh import Mesh

aten = torch.ops.aten
M = TypeVar("M", bound="Mesh | None")
_WITHOUT_GENERATOR = {"generator": "default", "generator_with_names": "names", "low_generator": "low"}  # overloads


class _Activations(threading.local):
    """The activations of this thread, the innermost last."""

    def __init__(self) -> None:
        self.all: list[Activation[Any]] = []
        self.mode: contextlib.AbstractContextManager[object] | None = None


_active = _Activations()


class ActiveMode(DispatchMode):
    """Makes tensors on the active mesh, and issues operations there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns whether PyTorch is to wrap the method below, which costs 2 µs per operation."""
        return not exclude_from_compile(cls.__torch_dispatch__)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Runs one operation."""
        if types:
            for kind in types:
                if issubclass(kind, MeshTensor):
                    if torch.is_inference_mode_enabled():
                        with torch.inference_mode(False), torch.no_grad(), self:  # as in MeshTensor
                            return func(*args, **(kwargs or {}))
                    return MeshTensor.__torch_dispatch__(func, types, args, kwargs)
        mesh = active_mesh()
        if mesh is not None:
            if func is aten.lift_fresh.default:
                return _upload(mesh, args[0])
            if _is_factory(func):
                return _make_on_ranks(mesh, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _is_factory(func: OpOverload) -> bool:
    """Returns whether an operation is a factory: it takes a device as an argument, and no tensor."""
    is_factory = _factories.get(func)
    if is_factory is None:
        arguments = func._schema.arguments
        named = any(argument.name == "device" for argument in arguments)
        is_factory = _factories[func] = named and not any("Tensor" in str(argument.type) for argument in arguments)
    return is_factory


_factories: dict[OpOverload, bool] = {}


def _make_on_ranks(mesh: "Mesh", func: OpOverload, args: tuple[object, ...], kwargs: dict[str, Any]) -> MeshTensor:
    variant = _WITHOUT_GENERATOR.get(func._overloadname)
    if variant is not None:
        func = getattr(getattr(torch.ops.aten, func._schema.name.partition("::")[2]), variant)
    if kwargs.get("layout") not in (None, torch.strided):
        raise TypeError(f"{func}: each rank holds dense tensors: make them without a layout")
    stream = mesh.on(ACTIVE.stream).stream
    return make(stream, func, args, kwargs, own_values(stream.layout))


def _upload(mesh: "Mesh", local: torch.Tensor) -> MeshTensor:
    """Sends a local tensor to each rank, which then has its own value."""
    stream = mesh.on(ACTIVE.stream).stream
    return upload(stream, local, own_values(stream.layout))


class Activation(contextlib.AbstractContextManager[M]):
    """Makes a mesh the active one of this thread, from now on until `end()` or the end of a `with` block.

    None: no mesh.
    """

    def __init__(self, mesh: M) -> None:
        self._mesh = mesh
        self._begin()

    def _begin(self) -> None:
        if _active.mode is None:
            mode: contextlib.AbstractContextManager[object] = ActiveMode()
            mode.__enter__()
            _active.mode = mode
        _active.all.append(self)
        ACTIVE.has_mesh = self._mesh is not None

    @property
    def mesh(self) -> M:
        """The mesh."""
        return self._mesh

    def end(self) -> None:
        """Makes the previous mesh the active one again. Does nothing after its end, or in another thread."""
        if self not in _active.all:
            return
        _active.all.remove(self)
        ACTIVE.has_mesh = active_mesh() is not None
        is_innermost = _get_current_dispatch_mode_stack()[-1:] == [_active.mode]
        if not _active.all and _active.mode is not None and is_innermost:  # else it ends with a later activation
            mode, _active.mode = _active.mode, None
            mode.__exit__(None, None, None)

    def __enter__(self) -> M:
        if self not in _active.all:  # it has ended, or was made in another thread
            self._begin()
        return self._mesh

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def deactivate(mesh: "Mesh") -> None:
    """Ends the last activation of a mesh in this thread, if there is one."""
    activations = [activation for activation in _active.all if activation.mesh is mesh]
    if activations:
        activations[-1].end()


def get_active_mesh() -> "Mesh":
    """Returns the mesh of the innermost `with mesh.activate():`. Raises ValueError if there is none."""
    mesh = active_mesh()
    if mesh is None:
        raise ValueError("no device mesh is active: use `with mesh.activate():`")
    return mesh


def active_mesh() -> "Mesh | None":
    """Returns the active mesh of this thread, or None."""
    return _active.all[-1].mesh if _active.all else None


def disabled() -> contextlib.AbstractContextManager[object]:
    """Makes operations in a `with` block run as if no mesh were active."""
    context: contextlib.AbstractContextManager[object] = _disable_current_modes()
    return context


class NoMesh:
    """Deactivates the active mesh in a `with` block: `with no_mesh.activate():` makes local tensors."""

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context manager."""
        return Activation(None)

    def __repr__(self) -> str:
        return "no_mesh"


no_mesh = NoMesh()
