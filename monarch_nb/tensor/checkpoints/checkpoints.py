"""Files of sharded tensors: checkpoints during training, state dicts, and safetensors files.

Workers write and read their own shards. A safetensors file is eight bytes with the length of the header, the header in
JSON, and the values, row-major.
"""

import json
import math
import mmap
import operator
import os
import pickle
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.distributed.tensor import Replicate

from monarch_nb.mesh import ValueMesh
from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.checkpoints import workers
from monarch_nb.tensor.checkpoints.workers import State, all_of
from monarch_nb.tensor.commands import RunFunction, TensorOf, mapped
from monarch_nb.tensor.factories import make, refilling
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.propagation import Placements
from monarch_nb.tensor.sharding import ShardingSpec
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import rewriting

aten = torch.ops.aten
T = TypeVar("T")

# Names of data types in the header of a safetensors file.
_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_LONGEST = 100 << 20  # bytes of such a header, the limit of the format


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or restored."""


@dataclass(frozen=True)
class TensorPlaceholder:
    """Placeholder of a sharded tensor in the pickled state."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements


def _split(state: object, path: str = "") -> tuple[object, dict[str, MeshTensor]]:
    """Splits a state: `TensorPlaceholder`s for its sharded tensors, and these by name (`optimizer.state.0.exp_avg`)."""
    tensors: dict[str, MeshTensor] = {}

    def replace(value: object, path: str) -> object:
        if isinstance(value, MeshTensor):
            if path in tensors:
                raise ValueError(f"checkpoint: two tensors of this state are named {path}: rename a key")
            tensors[path] = value
            return TensorPlaceholder(path, value.meta.shape, value.meta.dtype, value.meta.placements)
        if isinstance(value, dict):
            return {key: replace(item, _key_path(path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(replace(item, _key_path(path, index)) for index, item in enumerate(value))
        return value

    return replace(state, path), tensors


def _merge_into(target: dict[str, object], values: Mapping[str, object]) -> None:
    """Replaces values in the dictionaries of a state in place, except for tensors of the mesh."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(inner := target.get(key), dict):
            _merge_into(inner, value)
        elif not isinstance(target.get(key), MeshTensor):
            target[key] = value


def _key_path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint in the memory of the processes: copies of the shards, and the rest of the state."""

    number: int
    rest: bytes
    tensors: dict[str, MeshTensor]


class Checkpoints:
    """Checkpoints of one training run in a folder, or in memory if `folder` is None; made by `monarch.checkpoint`."""

    def __init__(
        self,
        state: torch.nn.Module | dict[str, object],
        optimizer: torch.optim.Optimizer | None,
        every: int | None,
        folder: str | None,
        keep: int,
    ) -> None:
        if (every is not None and every < 1) or keep < 1:
            raise ValueError("checkpoint: every and keep have to be 1 or more")
        self.folder = None if folder is None else os.path.abspath(os.path.expanduser(folder))
        self._copies: MemoryCheckpoint | None = None
        self._state, self._optimizer, self._every, self._keep = state, optimizer, every, keep
        _ = self._stream  # raises here, not later

    @property
    def _stream(self) -> Stream:
        _, tensors = _split(self._full_state())
        if not tensors:
            raise ValueError(
                "checkpoint: there is no sharded tensor in this. Send the model to a mesh first, with "
                "model.to(mesh.device) or monarch.distribute; save others with torch.save"
            )
        streams = {tensor.reference.stream for tensor in tensors.values()}
        if len(streams) > 1:
            raise ValueError("checkpoint: tensors of several meshes; make one checkpoint of each")
        return streams.pop()

    def _full_state(self) -> dict[str, object]:
        state = self._state
        full: dict[str, object] = {"model": state.state_dict() if isinstance(state, torch.nn.Module) else state}
        if self._optimizer is not None:
            full["optimizer"] = self._optimizer.state_dict()
        return full

    # -- saving -----------------------------------------------------------------------------------------------------

    def step(self, number: int) -> bool:
        """Saves after each `every`-th step; to be called with the number of each step. Returns whether it saved."""
        if self._every is None or number % self._every:
            return False
        self.save(number)
        return True

    def save(self, number: int) -> None:
        """Saves now, as step `number`. Does not block: workers copy their shards in order with the operations, and
        write the copies while they continue. Copies in memory replace the last ones once all ranks have made them,
        which blocks.

        Raises ContentsLostError where contents are lost, ValueError for a negative number.
        """
        number = operator.index(number)
        if number < 0:
            raise ValueError(f"checkpoint: the number of a step is 0 or more, not {number}")
        stream = self._stream
        rest, tensors = _split(self._full_state())
        stream.resume_if_healed()
        stream.held.require_contents(tensor.reference.number for tensor in tensors.values())
        metadata = {"state": rest, "random": (stream.draws.seed, stream.draws.drawn)}
        if self.folder is None:
            with torch.no_grad():
                copies = {name: cast(MeshTensor, tensor.clone()) for name, tensor in tensors.items()}
            self._await(stream, copies)
            self._copies = MemoryCheckpoint(number, pickle.dumps(metadata), copies)
            return
        state = {name: TensorOf(current(tensor), sharded=True) for name, tensor in tensors.items()}
        arguments = (state, self.folder, number, secrets.token_hex(4), pickle.dumps(metadata), self._keep)
        stream.issue_object(RunFunction(workers.save, arguments, {}))

    def wait(self) -> None:
        """Blocks until all saves are on disk. Raises CheckpointError if one failed."""
        if self.folder is None:
            return
        results = self._stream.run_everywhere(RunFunction(workers.finished, (self.folder,), {}))
        errors = {rank: text for rank, text in enumerate(results.values()) if text}
        if errors:
            rank, text = next(iter(errors.items()))
            raise CheckpointError(f"rank {rank} could not save into {self.folder}: {text}")

    # -- restoring --------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None) -> int | None:
        """Restores the latest complete checkpoint, or that of a step; returns its step, None without one.

        The mesh may have another shape than the one it was saved from. Blocks. Raises CheckpointError where it does not
        fit, DeviceMeshError where the mesh is broken: heal it first; ContentsLostError where copies in memory are lost.
        """
        stream = self._stream
        checkpoint = self._find(stream, step)
        if checkpoint is None:
            return None
        number: int = checkpoint[0]
        try:
            metadata = pickle.loads(checkpoint[1])
        except Exception as error:
            raise self._unreadable(number, error) from error
        rest = metadata["state"]
        _, targets = _split(self._full_state())
        tensors = {
            spec.name: self._target(stream, spec, targets.get(spec.name)) for spec in all_of(TensorPlaceholder, rest)
        }
        missing = [name for name in targets if name not in tensors and name.startswith("model.")]
        if missing:
            raise CheckpointError(f"the checkpoint of step {number} in {self.folder} has no {', '.join(missing[:3])}")
        self._load(stream, tensors, number)
        stream.draws.seed, stream.draws.drawn = metadata["random"]
        state = mapped(rest, lambda leaf: tensors[leaf.name] if isinstance(leaf, TensorPlaceholder) else leaf)
        model, optimizer = state["model"], state.get("optimizer")
        assert isinstance(model, dict)
        if isinstance(self._state, torch.nn.Module):
            local = {name: value for name, value in model.items() if not isinstance(value, MeshTensor)}
            self._state.load_state_dict(local, strict=False)
        else:
            _merge_into(self._state, model)
        if self._optimizer is not None and isinstance(optimizer, dict):
            self._optimizer.load_state_dict(optimizer)
        return number

    def _find(self, stream: Stream, step: int | None) -> tuple[int, bytes] | None:
        """Returns the step of the checkpoint to restore, and its state without sharded tensors."""
        copies = self._copies
        if self.folder is not None:
            stream.run_everywhere(RunFunction(workers.finished, (self.folder,), {}))  # ends a save in progress
            results = stream.run_everywhere(RunFunction(workers.find, (self.folder, step), {})).values()
            checkpoint: tuple[int, bytes] | None = next(iter(results))
            return checkpoint
        return (copies.number, copies.rest) if copies is not None and step in (None, copies.number) else None

    @staticmethod
    def _await(stream: Stream, tensors: dict[str, MeshTensor]) -> None:
        """Blocks until all ranks have made these tensors. Raises TensorError if one failed."""
        references = {name: TensorOf(tensor.reference.number) for name, tensor in tensors.items()}
        stream.run_everywhere(RunFunction(workers.ready, (references,), {}))

    def _target(self, stream: Stream, spec: TensorPlaceholder, tensor: MeshTensor | None) -> MeshTensor:
        """Returns the tensor to read a saved one into."""
        if tensor is not None:
            if tensor.meta.shape != spec.shape or tensor.meta.dtype != spec.dtype:
                raise CheckpointError(
                    f"{spec.name} is {tuple(tensor.shape)} {tensor.dtype}, and was {spec.shape} {spec.dtype} when it "
                    "was saved: this is another model"
                )
            return tensor
        placements = spec.placements
        for parameter in self._parameters(spec):
            placements = parameter.meta.placements
        if len(placements) != len(stream.layout.shape) or any(placement.is_partial() for placement in placements):
            placements = (Replicate(),) * len(stream.layout.shape)
        return make(stream, aten.empty.memory_format, (spec.shape,), {"dtype": spec.dtype}, placements)

    def _parameters(self, spec: TensorPlaceholder) -> Iterator[MeshTensor]:
        """Yields the parameter for which an optimizer has a state tensor of equal shape."""
        words = spec.name.split(".")
        if self._optimizer is None or words[:2] != ["optimizer", "state"] or not words[2].isdecimal():
            return
        params = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        index = int(words[2])
        if index < len(params) and isinstance(params[index], MeshTensor) and params[index].meta.shape == spec.shape:
            yield params[index]

    def _load(self, stream: Stream, tensors: dict[str, MeshTensor], number: int) -> None:
        if self._copies is not None:
            stream.resume_if_healed()
            stream.held.require_contents(copy.reference.number for copy in self._copies.tensors.values())
            with torch.no_grad(), refilling(stream, tensors.values()):
                for name, tensor in tensors.items():
                    tensor.copy_(self._copies.tensors[name])
                self._await(stream, tensors)
            return
        try:
            with rewriting(tensor.reference for tensor in tensors.values()), refilling(stream, tensors.values()):
                state = {name: TensorOf(current(tensor), sharded=True) for name, tensor in tensors.items()}
                command = RunFunction(workers.load, (state, self.folder, number), {})
                stream.run_everywhere(command, [tensor.reference for tensor in tensors.values()])
        except DeviceMeshError:
            raise
        except Exception as error:
            raise self._unreadable(number, error) from error

    def _unreadable(self, number: int, error: Exception) -> CheckpointError:
        return CheckpointError(f"the checkpoint of step {number} in {self.folder} cannot be read: {error}")


def save(state_dict: State, path: str | os.PathLike[str]) -> None:
    """Saves a state dict to a folder in the format of `torch.distributed.checkpoint`; blocks until it is complete.

    `state_dict` may be nested: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}. All hosts
    of the mesh have to see the folder; its earlier content is replaced at the end. Raises TensorError for errors on
    the workers, ContentsLostError where contents are lost: the folder is unchanged then.
    """
    path = os.path.abspath(path)
    stream = _stream(state_dict)
    stream.held.require_contents(tensor.reference.number for tensor in all_of(MeshTensor, state_dict))
    _run(stream, state_dict, workers.write, path, f"{path}.{uuid.uuid4().hex[:8]}")


def load(state_dict: State, path: str | os.PathLike[str]) -> None:
    """Loads a checkpoint of `save`, or of `torch.distributed.checkpoint`, into a state dict of the same form, in place.

    Tensors may have other placements than when they were saved, on a mesh of another shape. Values such as numbers are
    replaced in the dict: pass it to `load_state_dict` afterwards if it has such. Tensors whose contents are lost
    since the mesh was healed have contents again. Blocks; raises TensorError where the folder lacks a value.
    """
    stream = _stream(state_dict)
    tensors = tuple(all_of(MeshTensor, state_dict))
    with rewriting(tensor.reference for tensor in tensors), refilling(stream, tensors):
        loaded = _run(stream, state_dict, workers.read, os.path.abspath(path), written=tensors)
    _copy_values(state_dict, loaded)


def run_on_shards(
    tensors: Mapping[str, MeshTensor], function: Callable[..., T], *args: object, written: bool = False
) -> ValueMesh[T]:
    """Runs `function(tensors, *args)` in each process of a mesh, in order with the operations, on DTensors.

    `written`: the function fills all of them, which may have lost their contents before. Blocks; returns the results.
    Raises TensorError with the errors by rank, ContentsLostError.
    """
    stream = _stream(dict(tensors))
    if not written:
        stream.held.require_contents(tensor.reference.number for tensor in tensors.values())
        return stream.run_everywhere(RunFunction(function, (mapped(dict(tensors), _as_reference), *args), {}))
    references = [tensor.reference for tensor in tensors.values()]
    with rewriting(references), refilling(stream, tuple(tensors.values())):
        return stream.run_everywhere(
            RunFunction(function, (mapped(dict(tensors), _as_reference), *args), {}), references
        )


def _stream(state: State) -> Stream:
    streams = {tensor.reference.stream for tensor in all_of(MeshTensor, state)}
    if len(streams) != 1:
        contents = "no tensor on a mesh" if not streams else "tensors of several meshes"
        raise ValueError(f"a state dict that is saved and loaded by workers has those of one mesh; here is {contents}")
    stream: Stream = streams.pop()
    stream.resume_if_healed()
    return stream


def _run(
    stream: Stream, state: State, function: Callable[..., T], *args: object, written: Iterable[MeshTensor] = ()
) -> T:
    command = RunFunction(function, (mapped(state, _as_reference), *args), {})
    return stream.run_everywhere(command, [tensor.reference for tensor in written]).get(0)


def _as_reference(leaf: object) -> object:
    return TensorOf(current(leaf), sharded=True) if isinstance(leaf, MeshTensor) else leaf


def _copy_values(state: Any, loaded: Any) -> None:
    """Copies values other than sharded tensors into a state of the same structure."""
    for key in state if isinstance(state, dict) else range(len(state)):
        old, new = state[key], loaded[key]
        if isinstance(old, MeshTensor):
            continue
        if isinstance(old, torch.Tensor):
            old.copy_(new)
        elif isinstance(old, (dict, list)):
            _copy_values(old, new)
        elif not (isinstance(old, tuple) and next(all_of(MeshTensor, old), None) is not None):
            state[key] = new


class Stored(NamedTuple):
    """A tensor in a file; `begin` is the offset of its values in bytes."""

    file: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_in(path: str) -> dict[str, Stored]:
    """Returns the tensors in a file, or in all such files of a folder, by name. Reads the headers only.

    Raises FileNotFoundError, and ValueError for a file of another format.
    """
    location = Path(path)
    files = sorted(location.glob("*.safetensors")) if location.is_dir() else [location]
    if not files:
        raise FileNotFoundError(f"there is no *.safetensors in {path}")
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors.update(_header(file))
    return tensors


def _header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_LONGEST, size - 8):
            raise ValueError(f"{file} is no file of safetensors, or its end is missing")
        try:
            entries = json.loads(opened.read(length))
            return {
                name: _entry(file, entry, 8 + length, size) for name, entry in entries.items() if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no file of safetensors: {error}") from None


def _entry(file: Path, entry: dict[str, Any], values: int, size: int) -> Stored:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(length) for length in entry["shape"])
    dtype = _TYPES[str(entry["dtype"])]
    if not 0 <= begin <= end <= size - values or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor in it has another size than its header says")
    return Stored(str(file), values + begin, dtype, shape)


def read_part(part: Sequence[slice], stored: Stored) -> torch.Tensor:
    """Reads a part of a tensor in a file, and only the pages of that part."""
    count = math.prod(stored.shape)
    if not count:
        return torch.empty(stored.shape, dtype=stored.dtype)[tuple(part)]
    with open(stored.file, "rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(memory, dtype=stored.dtype, count=count, offset=stored.begin)
    return tensor.view(stored.shape)[tuple(part)].clone(memory_format=torch.contiguous_format)


def load_safetensors(
    path: str,
    mesh: Mesh,
    sharding_spec: Mapping[str, ShardingSpec] | Callable[[str, tuple[int, ...]], ShardingSpec] | None = None,
) -> dict[str, MeshTensor]:
    """Returns the tensors in a file of safetensors, or in all such files of a folder, sharded over a mesh.

    `sharding_spec` is as for `monarch.distribute`: a mapping of names to specs, or a function of name and
    shape; tensors without one are replicated. The path must lead to the same files on each host. Blocks
    until the headers are read; the values are read while the program continues.
    Raises TensorError if a file cannot be read, ValueError for a name that is in none.
    """
    first, *peers = mesh.execute(stored_in, str(path)).values()
    if any(peer.keys() != first.keys() for peer in peers):
        raise ValueError(f"{path}: the processes of the mesh see different files there")
    if isinstance(sharding_spec, Mapping):
        unknown = sorted(set(sharding_spec) - set(first))
        if unknown:
            raise ValueError(f"{path} has no tensor {', '.join(map(repr, unknown[:5]))}")
    loaded = {}
    for name, stored in first.items():
        spec = sharding_spec(name, stored.shape) if callable(sharding_spec) else (sharding_spec or {}).get(name)
        loaded[name] = mesh.from_parts(read_part, stored, size=stored.shape, dtype=stored.dtype, sharding_spec=spec)
    return loaded
