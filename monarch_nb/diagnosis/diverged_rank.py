"""Checksums of the parameters, buffers and optimizer states that an actor, or a namespace, holds, and of generators:
its share of `compare_replicas`, and of `ReplicaWatch`, which takes them after steps of an optimizer."""

import math
import threading
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # PyTorch 2.4
    from torch.distributed._tensor import DTensor  # type: ignore[attr-defined]

_DEPTH = 3  # of containers that are searched for modules
_MOST = 1000  # elements of a container
_CHUNK = 1 << 24  # elements at a time
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 1 << 64
_READINGS = 128  # of a watch; beyond it, every other one is dropped, and half as many steps are read


@dataclass(frozen=True)
class TensorSum:
    """A tensor of one rank. Replicas have the same `path` and `part`, and are equal if their `checksum` is.

    `part` is its position in a distributed tensor, "" for whole ones. `is_replica` is False where nothing says that
    other ranks have the same: neither DistributedDataParallel nor the placement of a distributed tensor.
    """

    path: str
    part: str
    is_replica: bool
    checksum: int
    norm: float  # of the elements; NaN if they are not numbers


def tensor_sums(holder: object) -> list[TensorSum]:
    """Returns the checksums of the parameters, buffers and optimizer states that an actor or a namespace holds.

    The checksums of PyTorch's random number generators are included.
    """
    attributes = holder if isinstance(holder, dict) else vars(holder)
    items = [pair for name, value in tuple(attributes.items()) for pair in _search(str(name), value, 0)]
    modules = [(path, item) for path, item in items if isinstance(item, nn.Module)]
    # Wrapped modules first: they say which parameters are replicas.
    modules.sort(key=lambda pair: not isinstance(pair[1], DistributedDataParallel))
    sums: list[TensorSum] = []
    names: dict[int, tuple[str, bool]] = {}  # of parameters, and whether they are replicas, by identity
    for path, module in modules:
        replicated = isinstance(module, DistributedDataParallel)
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            if id(parameter) not in names:
                names[id(parameter)] = f"{path}.{name}", replicated
                sums += _sums(f"{path}.{name}", parameter, replicated)
        # Ranks may rightly differ in the rest: a suspicion, and only where most of them are equal.
        for name, buffer in inner.named_buffers():
            if id(buffer) not in names:
                names[id(buffer)] = f"{path}.{name}", False
                sums += _sums(f"{path}.{name}", buffer, False)
    if modules:
        sums += _generator_sums()
    summed: set[int] = set()
    for path, item in items:
        if isinstance(item, Optimizer) and id(item) not in summed:
            summed.add(id(item))
            sums += _optimizer_sums(path, item, names)
    return sums


def _generator_sums() -> Iterator[TensorSum]:
    """Yields the checksums of PyTorch's random number generators, on the CPU and on this rank's GPU."""
    yield from _sums("PyTorch's random numbers", torch.get_rng_state(), False)
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        yield from _sums("PyTorch's random numbers on the GPU", cuda.get_rng_state(), False)


def _optimizer_sums(path: str, optimizer: Optimizer, names: Mapping[int, tuple[str, bool]]) -> Iterator[TensorSum]:
    for parameter, state in optimizer.state.items():
        name, replicated = names.get(id(parameter), ("", False))
        if name and isinstance(state, Mapping):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield from _sums(f"{path}: {key} of {name}", value, replicated)


def _search(path: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    """Yields modules and optimizers with their paths."""
    if isinstance(value, (nn.Module, Optimizer)):
        yield path, value
    elif depth < _DEPTH and isinstance(value, (dict, list, tuple)):
        pairs: Iterable[tuple[object, object]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, element in tuple(pairs)[:_MOST]:
            yield from _search(f"{path}[{key!r}]", element, depth + 1)


def _sums(path: str, tensor: torch.Tensor, replicated: bool) -> Iterator[TensorSum]:
    part = ""
    if isinstance(tensor, DTensor):
        coordinate = list[int](tensor.device_mesh.get_coordinate() or ())
        placements = zip(tensor.placements, coordinate, strict=False)
        if any(placement.is_partial() for placement in tensor.placements):
            return
        part = ",".join(f"{placement}@{index}" for placement, index in placements if not placement.is_replicate())
        tensor, replicated = tensor.to_local(), True
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return
    tensor = tensor.detach()
    shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    yield TensorSum(path, f"{shape}{part}", replicated, checksum(tensor), _norm(tensor))


def checksum(tensor: torch.Tensor) -> int:
    """Returns a number of 64 bits that is the same for the same bits in the same order, on every device.

    It is the sum of all elements as integers, each times an odd number of its own, modulo 2**64, so that
    the order of summation does not matter.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    words = tensor.resolve_neg().contiguous().reshape(-1).view(_WORDS[tensor.element_size()])
    total = 0
    for begin in range(0, words.numel(), _CHUNK):
        chunk = words[begin : begin + _CHUNK].to(torch.int64)
        weights = torch.arange(begin, begin + chunk.numel(), device=chunk.device).mul_(2).add_(1)
        weights.mul_(0x9E3779B97F4A7C15 - _WORD)  # odd, so that each element counts in full
        total += int((chunk * weights).sum().item())  # not in place: an int64 chunk may be the tensor itself
    return (total + words.numel()) % _WORD


def _norm(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return math.nan
    wide = torch.complex128 if tensor.is_complex() else torch.float32
    return float(torch.linalg.vector_norm(tensor.to(wide)).item()) if tensor.numel() else 0.0


# -- after steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaReading:
    """The sums after a step; `tensors` is the number of a list of tensors in the history."""

    step: int
    tensors: int
    checksums: "array[int]"
    norms: "array[float]"


@dataclass(frozen=True)
class ReplicaHistory:
    """The sums of one rank after steps. The last reading is that at the end of the watch."""

    tensors: tuple[tuple[TensorSum, ...], ...]  # several where a model was made meanwhile; their first sums
    readings: tuple[ReplicaReading, ...]

    def sums(self, reading: ReplicaReading) -> list[TensorSum]:
        """Returns the tensors of a reading with its sums."""
        return [
            TensorSum(tensor.path, tensor.part, tensor.is_replica, checksum, norm)
            for tensor, checksum, norm in zip(
                self.tensors[reading.tensors], reading.checksums, reading.norms, strict=True
            )
        ]


class ReplicaSums:
    """Sums up the tensors of a holder after steps of the first optimizer that is used on this thread."""

    def __init__(self, every: int, holder: object) -> None:
        self._every, self._holder = every, holder
        self._thread = threading.get_ident()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._steps = 0
        self._tensors: dict[tuple[tuple[str, str], ...], tuple[TensorSum, ...]] = {}
        self._readings: list[ReplicaReading] = []
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if threading.get_ident() != self._thread or torch.compiler.is_compiling():
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        self._steps += 1
        if self._steps % self._every == 0:
            self._read()
            if len(self._readings) > _READINGS:  # on all ranks after the same step
                self._every *= 2
                self._readings = [reading for reading in self._readings if reading.step % self._every == 0]

    def _read(self) -> None:
        sums = tensor_sums(self._holder)
        names = tuple((item.path, item.part) for item in sums)
        self._tensors.setdefault(names, tuple(sums))
        checksums, norms = array("Q", (item.checksum for item in sums)), array("d", (item.norm for item in sums))
        self._readings.append(ReplicaReading(self._steps, [*self._tensors].index(names), checksums, norms))

    def end(self) -> ReplicaHistory:
        """Ends the readings and returns their history."""
        self._hook.remove()
        self._read()
        return ReplicaHistory(tuple(self._tensors.values()), tuple(self._readings))
