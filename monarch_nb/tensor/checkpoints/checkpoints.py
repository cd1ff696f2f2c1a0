"""`monarch.checkpoint`: saves a model and its optimizer during training, and restores them."""

import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.tensor import Replicate

from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.checkpoints import workers
from monarch_nb.tensor.checkpoints.workers import all_of
from monarch_nb.tensor.commands import RunFunction, TensorOf
from monarch_nb.tensor.factories import make, refilling
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.propagation import Placements
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import rewriting

aten = torch.ops.aten


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
            tensors[path] = value
            return TensorPlaceholder(path, value.meta.shape, value.meta.dtype, value.meta.placements)
        if isinstance(value, dict):
            return {key: replace(item, _key_path(path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(replace(item, _key_path(path, index)) for index, item in enumerate(value))
        return value

    return replace(state, path), tensors


def _restored_state(rest: object, tensor: Callable[[TensorPlaceholder], object]) -> object:
    """Returns the state with `tensor(placeholder)` in place of each placeholder."""
    if isinstance(rest, TensorPlaceholder):
        return tensor(rest)
    if isinstance(rest, dict):
        return {key: _restored_state(item, tensor) for key, item in rest.items()}
    if isinstance(rest, list | tuple) and not hasattr(rest, "_fields"):
        return type(rest)(_restored_state(item, tensor) for item in rest)
    return rest


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

        Raises ContentsLostError where contents are lost.
        """
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
        metadata = pickle.loads(checkpoint[1])
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
        state = {name: _restored_state(part, lambda spec: tensors[spec.name]) for name, part in rest.items()}
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
            raise CheckpointError(
                f"the checkpoint of step {number} in {self.folder} cannot be read: {error}"
            ) from error
