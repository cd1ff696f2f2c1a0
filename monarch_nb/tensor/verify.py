"""The comparison of the effects of a function on a mesh with those in one process."""

import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle
import torch

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.propagation.execute import DispatchMode
from monarch_nb.wire import DISPATCH_TABLE, counted


@dataclass(frozen=True)
class Verification:
    """Result of a comparison; true without differences.

    `tensors` were compared; `differences` lists those that differ and by how much. `random`: random numbers were
    drawn, which differ on a mesh.
    """

    tensors: int
    differences: tuple[str, ...]
    random: bool = False

    def __bool__(self) -> bool:
        return not self.differences

    def __repr__(self) -> str:
        if not self.differences:
            return f"equal to what one process computes: {counted(self.tensors, 'tensor')}"
        lines = [f"{len(self.differences)} of {counted(self.tensors, 'tensor')} differ from what one process computes:"]
        lines += [f"  {text}" for text in self.differences]
        if self.random:
            lines.append("  random numbers were drawn: those of a mesh are others than those of one process")
        return "\n".join(lines)


class _Draws(DispatchMode):
    has_drawn = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class LocalTensor(torch.Tensor):
    """A local stand-in for a sharded tensor, with its methods for shards and placements."""

    def full_tensor(self) -> torch.Tensor:
        """Returns the tensor itself."""
        return self.as_subclass(torch.Tensor)

    def redistribute(self, *spec: object, **options: object) -> torch.Tensor:
        """Returns the tensor itself."""
        return self


class LocalMesh:
    """Stand-in for a mesh, whose factories make local tensors."""

    device = torch.device("cpu")

    def distribute(self, tensor: torch.Tensor, sharding_spec: object = None) -> torch.Tensor:
        """Returns the tensor itself."""
        return tensor.as_subclass(LocalTensor)

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        if name.startswith("_") or not hasattr(Mesh, name):
            raise AttributeError(name)
        function = getattr(torch, name)

        def make(*args: object, sharding_spec: object = None, **options: object) -> torch.Tensor:
            tensor: torch.Tensor = function(*args, **options)
            return tensor.as_subclass(LocalTensor)

        return make


class _Extractor(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles a value without its tensors and meshes, which it collects in order, each once."""

    dispatch_table = DISPATCH_TABLE

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.extracted: list[tuple[str, object]] = []
        self._indices: dict[int, int] = {}
        self._names: dict[int, str] = {}

    def persistent_id(self, value: object) -> int | None:
        """Returns the index of a tensor or mesh; None for other values."""
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters():
                self._names.setdefault(id(parameter), name)
        if not isinstance(value, torch.Tensor | Mesh):
            return None
        index = self._indices.get(id(value))
        if index is None:
            index = self._indices[id(value)] = len(self.extracted)
            self.extracted.append((self._names.get(id(value), ""), value))
        return index


class _Restorer(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, twins: list[object]) -> None:
        super().__init__(file)
        self._twins = twins

    def persistent_load(self, index: int) -> object:
        return self._twins[index]


def _twin(value: object) -> Any:
    """Returns a copy with local tensors, with gradients, for sharded ones, and stand-ins of this process for meshes.

    Blocks until tensors are fetched. Functions of the program's own modules are copied with their references. Raises
    TypeError or pickle.PicklingError for objects that cannot be copied.
    """
    data, objects = _extract(value)
    return _Restorer(io.BytesIO(data), [_local_twin(item) for _, item in objects]).load()


def _tensors_in(value: object) -> list[tuple[str, torch.Tensor]]:
    """Returns all tensors that a value refers to, with parameter names, in the same order as for its twin."""
    return [(name, item) for name, item in _extract(value)[1] if isinstance(item, torch.Tensor)]


def _extract(value: object) -> tuple[bytes, list[tuple[str, object]]]:
    file = io.BytesIO()
    extractor = _Extractor(file)
    home = _home_of(value)
    if home is None:
        extractor.dump(value)
    else:
        cloudpickle.register_pickle_by_value(home)
        try:
            extractor.dump(value)
        finally:
            cloudpickle.unregister_pickle_by_value(home)
    return file.getvalue(), extractor.extracted


def _home_of(value: object) -> ModuleType | None:
    """Returns the module to pickle by value: that of the function, unless it is registered already."""
    function = value[0] if isinstance(value, tuple) and value and callable(value[0]) else None
    name = getattr(function, "__module__", None)
    if name is None or name == "__main__" or name.partition(".")[0] in ("torch", "monarch_nb"):
        return None
    home = sys.modules.get(name)
    return None if home is None or home.__name__ in cloudpickle.list_registry_pickle_by_value() else home


def _local_twin(value: object) -> object:
    if isinstance(value, Mesh):
        return LocalMesh()
    assert isinstance(value, torch.Tensor)
    local = value.full_tensor() if isinstance(value, MeshTensor) else value.detach().clone()
    twin: torch.Tensor = local.as_subclass(LocalTensor)
    if isinstance(value, torch.nn.Parameter):
        twin = torch.nn.Parameter(twin, requires_grad=value.requires_grad)
    else:
        twin.requires_grad_(value.requires_grad)
    if value.is_leaf and value.grad is not None:
        grad = _local_twin(value.grad)
        assert isinstance(grad, torch.Tensor)
        twin.grad = grad
    return twin


def verify(
    function: Callable[..., object], *args: object, rtol: float = 1e-3, atol: float = 1e-5, **kwargs: object
) -> Verification:
    """Runs the function on the mesh, and again in this process on whole local copies of all that it refers to.

    Its result, and every tensor that its arguments and variables refer to afterwards (parameters, gradients, the
    state of optimizers), is compared. The copy is of the state before; only the run on the mesh keeps its effects.
    Blocks until both have ended, and needs the memory of the whole tensors here. Raises errors of the function on the
    mesh; an error on the copies is a difference. Raises TypeError for objects that cannot be copied.
    """
    lone, lone_args, lone_kwargs = _twin((function, args, kwargs))
    result = function(*args, **kwargs)
    draws = _Draws()
    try:
        with draws:
            lone_result = lone(*lone_args, **lone_kwargs)
    except Exception as error:
        text = f"one process raises {type(error).__name__}: {error}, the mesh does not"
        return Verification(0, (text,), draws.has_drawn)
    actual = _tensors_in((function, args, kwargs, result))
    expected = _tensors_in((lone, lone_args, lone_kwargs, lone_result))
    return compared(expected, actual, rtol, atol, random=draws.has_drawn)


def compared(
    expected: list[tuple[str, torch.Tensor]],
    actual: list[tuple[str, torch.Tensor]],
    rtol: float,
    atol: float,
    *,
    random: bool = False,
) -> Verification:
    """Compares two lists of named tensors and their gradients."""
    differences = []
    if len(expected) != len(actual):
        differences.append(f"{counted(len(actual), 'tensor')}, where one process has {len(expected)}")
    for index, ((name, plain), (_, sharded)) in enumerate(zip(expected, actual, strict=False)):
        title = name or f"tensor {index}"
        pairs: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = [(title, plain, sharded)]
        if plain.is_leaf and sharded.is_leaf and (plain.grad is not None or sharded.grad is not None):
            pairs.append((f"gradient of {title}", plain.grad, sharded.grad))
        for label, expected_value, actual_value in pairs:
            if text := _difference(expected_value, actual_value, rtol, atol):
                differences.append(f"{label} {text}")
    return Verification(len(actual), tuple(differences), random)


def _difference(expected: torch.Tensor | None, actual: torch.Tensor | None, rtol: float, atol: float) -> str:
    if expected is None or actual is None:
        return "is missing in one of them" if expected is not actual else ""
    suffix = f" [{', '.join(map(str, actual.placements))}]" if isinstance(actual, MeshTensor) else ""
    full = actual.full_tensor() if isinstance(actual, MeshTensor) else actual
    if full.shape != expected.shape:
        return f"{tuple(full.shape)}{suffix} has another shape: {tuple(expected.shape)} in one process"
    if full.dtype != expected.dtype:
        return f"{tuple(full.shape)}{suffix} has another type: {expected.dtype} in one process"
    dtype = torch.complex128 if expected.is_complex() else torch.float64
    expected, values = expected.detach().as_subclass(torch.Tensor).to(dtype), full.detach().to(dtype)
    if torch.allclose(expected, values, rtol, atol, equal_nan=True):
        return ""
    worst = int((expected - values).abs().nan_to_num(torch.inf).argmax())
    point = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape)) if expected.dim() else ()
    position = f" at [{', '.join(map(str, point))}]" if point else ""
    return f"{tuple(full.shape)}{suffix} is {values[point].item():.6g}{position}, not {expected[point].item():.6g}"
