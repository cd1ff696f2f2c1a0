"""Simulated ranks: fake tensors on a mesh with fake process groups."""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
)
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, _collective_utils, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes

from .meta import MeshLayout, Meta, dense, dtensor, spec_of

_numbers = itertools.count()
_logs = [
    logging.getLogger(name)
    for name in (
        "torch._subclasses.fake_tensor",
        "torch.distributed.tensor._collective_utils",  # its advice is on collectives that no user has chosen
        "torch.distributed.tensor._redistribute",
    )
]
_exchange: Any = _collective_utils.shard_dim_alltoall


def _exchanged(input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """Replaces `shard_dim_alltoall`, whose fake kernel asks the driver of a GPU since PyTorch 2.14."""
    if mesh.device_type == "cpu":
        moved: torch.Tensor = _exchange(input, gather_dim, shard_dim, mesh, mesh_dim)
        return moved
    size, shape = mesh.size(mesh_dim), list(input.shape)
    shape[gather_dim] *= size
    shape[shard_dim] //= size
    return input.new_empty(shape)


# Functions of PyTorch that are replaced while ranks are imagined.
_REPLACED: tuple[tuple[ModuleType, str, Callable[..., object]], ...] = (
    (fake_tensor, "init_gpu_context", lambda device: None),  # creates a tensor on the GPU for the first fake one there
    (placement_types, "shard_dim_alltoall", _exchanged),
    (_collective_utils, "get_rank", lambda group=None: 0),  # of the default group, which does not exist
    (_collective_utils, "get_group_rank", lambda group, rank: group.rank()),
)
_fake = FakeTensorMode(allow_non_fake_inputs=True)


class _ImaginedMesh(DeviceMesh):
    """A mesh seen from one of its ranks, in a process that is none of them: it needs no default process group.

    It equals only itself: DTensor's caches are keyed by mesh, and must never return the groups of an imagined mesh for
    a real mesh of the same sizes in this process.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def get_rank(self) -> int:
        return self._rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        dim = (self.mesh_dim_names or ()).index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0
        coordinates = self._coordinate_on_dim
        assert coordinates is not None
        return coordinates[dim]


@contextmanager
def imagining() -> Iterator[None]:
    """Makes operations return fake tensors, regardless of modes, devices and gradients set by the surrounding code.

    Errors of an operation are raised, but not logged.
    """
    disabled = [log.disabled for log in _logs]
    for log in _logs:
        log.disabled = True
    before = [(module, name, getattr(module, name)) for module, name, _ in _REPLACED]
    for module, name, replacement in _REPLACED:
        setattr(module, name, replacement)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), _fake, torch.no_grad():
            yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)
        for log, was in zip(_logs, disabled, strict=True):
            log.disabled = was


class World:
    """A mesh of imagined ranks, seen from one of them.

    The process groups are this object's own: the default process group of the process is neither created nor changed.
    """

    def __init__(self, layout: MeshLayout, rank: int = 0) -> None:
        self.layout, self.rank = layout, rank
        self.mesh = mesh = _ImaginedMesh(
            layout.device,
            torch.arange(layout.size, device="cpu").view(layout.shape),
            mesh_dim_names=layout.names,
            _init_backend=False,
            _rank=rank,
        )
        self.dims: dict[str, str] = {}  # name of a group -> name of its mesh dimension
        self._groups: dict[GroupName, ProcessGroup] = {}
        for dim, size in enumerate(layout.shape):
            name = GroupName(f"monarch-imagined-{next(_numbers)}")
            self._groups[name] = mesh._pg_registry[name] = _fake_group(
                name, mesh.get_local_rank(dim), size, layout.device
            )
            self.dims[name] = layout.names[dim]
        mesh._dim_group_names = [*map(GroupName, self.dims)]
        self._fakes: dict[Meta, DTensor] = {}
        self._wholes: dict[tuple[object, ...], torch.Tensor] = {}

    def register(self) -> None:
        """Registers the groups with PyTorch; needed again after a `destroy_process_group()`."""
        for name, group in self._groups.items():
            try:
                _resolve_process_group(name)
            except RuntimeError:
                _register_process_group(name, group)

    def whole(self, meta: Meta, *, fresh: bool = True) -> torch.Tensor:
        """Returns a fake tensor of the global shape; `fresh` if an operation may change it or it must be unique."""
        facts = (meta.shape, meta.stride, meta.dtype)
        tensor = None if fresh else self._wholes.get(facts)
        if tensor is None:
            tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.layout.device)
            if not fresh:
                if len(self._wholes) > 4096:
                    self._wholes.clear()
                self._wholes[facts] = tensor
        return tensor

    def fake(self, meta: Meta, *, fresh: bool = False) -> DTensor:
        """Returns a fake DTensor; `fresh` if an operation may change it in place."""
        tensor = None if fresh else self._fakes.get(meta)
        if tensor is None:
            tensor = self._make_fake(meta)
            if not fresh:
                if len(self._fakes) > 4096:
                    self._fakes.clear()
                self._fakes[meta] = tensor
        return tensor

    def _make_fake(self, meta: Meta) -> DTensor:
        spec = self.spec(meta)
        shape = self.local_shape(meta)
        stride = list(meta.stride if shape == meta.shape else dense(meta.stride, shape))
        for dim in meta.expanded:
            stride[dim] = 0
        local = torch.empty_strided(shape, stride, dtype=meta.dtype, device=self.layout.device)
        return dtensor(local, spec, requires_grad=False)

    def spec(self, meta: Meta) -> DTensorSpec:
        """Returns the DTensorSpec of a meta."""
        return spec_of(meta, self.mesh)

    def local_shape(self, meta: Meta) -> tuple[int, ...]:
        """Returns the shape of this rank's shard."""
        shape, _ = compute_local_shape_and_global_offset(meta.shape, self.mesh, meta.placements, skip_offset=True)
        return tuple(shape)

    def meta(self, tensor: DTensor) -> Meta:
        """Returns the meta of a fake DTensor."""
        return Meta.of(self.layout, tuple(tensor.shape), tensor.dtype, tensor.placements, stride=tensor.stride())


def _fake_group(name: GroupName, rank: int, size: int, device: str) -> ProcessGroup:
    group = ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    backend = FakeProcessGroup._create_internal(rank, size)
    for kind in {"cpu", device}:
        group._register_backend(torch.device(kind), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group
