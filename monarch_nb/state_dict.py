"""State dicts between sharded tensors of a mesh and tensors of the ranks' own programs, without the controller.

with share(model) as shared:             # a model on a mesh; names the shards where they are
    trainers.load.call(shared).get()     # each rank: shared.load(self.model), local tensors or DTensors

shared = SharedStateDict.join(trainers.share.call().get())   # each rank: return share(self.model)
shared.load(model)                       # each process of the mesh reads its own shards
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_nb.mesh import ValueMesh
from monarch_nb.rdma import Shard
from monarch_nb.rdma.parameters import OfferedShards
from monarch_nb.tensor.checkpoints.checkpoints import run_on_shards
from monarch_nb.tensor.checkpoints.workers import in_pieces
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import placed_otherwise

__all__ = ["SharedStateDict", "share"]

_TIMEOUT_S = 60.0
State = torch.nn.Module | Mapping[str, Any]


class SharedStateDict:
    """Tensors by name, offered in the memory of the processes that have them; made by `share`.

    Send it to any process. At the end of a `with` block the memory is no longer offered.
    """

    def __init__(self, shards: OfferedShards) -> None:
        self._offered = shards

    @classmethod
    def join(cls, shared: "ValueMesh[SharedStateDict] | Iterable[SharedStateDict]") -> "SharedStateDict":
        """Returns the tensors that several ranks share. Of a tensor that is not a DTensor, each rank has the whole.

        Raises ValueError for a tensor that has different shapes or dtypes on two ranks.
        """
        several = shared.values() if isinstance(shared, ValueMesh) else shared
        return cls(OfferedShards.join(state._offered for state in several))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return self._offered.shapes

    def load(self, into: State, *, timeout: float = _TIMEOUT_S) -> None:
        """Copies values into the tensors of a module or a state dict, each part from a process that has it; blocks.

        On a rank: its own tensors, and its shards of DTensors. At the controller: sharded tensors of
        a mesh, whose processes read their shards. Placements may differ. Shared tensors that are not in `into` are
        ignored.

        Raises KeyError for a tensor that is not shared, ValueError where shapes or dtypes differ, both before a value
        is changed; OwnerLostError if the only process with a part is lost; TensorError for failures on a mesh.
        """
        tensors = _named(into)
        for name, tensor in tensors.items():
            self._offered.check(name, tuple(tensor.shape), str(tensor.dtype))
        sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, MeshTensor)}
        for part in _by_mesh(sharded):
            run_on_shards(part, _load, self._offered, timeout, written=True)
        own = {name: tensor for name, tensor in tensors.items() if name not in sharded}
        if own:
            _load(own, self._offered, timeout)

    def local_shards(self) -> dict[str, torch.Tensor]:
        """Returns the shards in this process, by name, in the memory that the mesh uses, without copies."""
        local = self._offered.local_shards()
        return {name: shard for name, shard in local.items() if isinstance(shard, torch.Tensor)}

    def drop(self) -> None:
        """Ends the offer of the memory, from any process; blocks."""
        self._offered.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"<SharedStateDict of {len(self.shapes)} tensors>"


def share(state: State) -> SharedStateDict:
    """Offers the tensors of a module, or of a state dict, to other processes, without a copy if they are contiguous.

    At the controller for sharded tensors of a mesh: blocks until issued operations have run. On a rank for its own
    tensors and DTensors, by all ranks of the DTensors' meshes. Dictionaries and lists inside have names with dots, such
    as `state.0.exp_avg`; values other than tensors are left out. Change the tensors after others have read them.

    Raises ContentsLostError for a tensor whose contents are lost.
    """
    tensors = _named(state)
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, MeshTensor)}
    offered: list[OfferedShards] = []
    for part in _by_mesh(sharded):
        offered += run_on_shards(part, _offer).values()
    own = {name: tensor for name, tensor in tensors.items() if name not in sharded}
    if own:
        offered.append(_offer(own))
    return SharedStateDict(OfferedShards.join(offered))


def _named(state: State) -> dict[str, torch.Tensor]:
    if not isinstance(state, torch.nn.Module | Mapping):
        raise TypeError(f"a module, or tensors by name, are wanted, not {type(state).__name__}")
    tensors = dict(_tensors(state.state_dict() if isinstance(state, torch.nn.Module) else state, ""))
    if not tensors:
        raise ValueError("there is no tensor in this state")
    return tensors


def _tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    listed = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in value.items() if isinstance(value, Mapping) else listed:
        yield from _tensors(item, f"{path}.{key}" if path else str(key))


def _by_mesh(tensors: Mapping[str, MeshTensor]) -> Iterable[dict[str, MeshTensor]]:
    parts: dict[object, dict[str, MeshTensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(tensor.reference.stream, {})[name] = tensor
    return parts.values()


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _offer(tensors: Mapping[str, torch.Tensor]) -> OfferedShards:
    return OfferedShards.offer(
        {name: _shard(in_pieces(t) if isinstance(t, DTensor) else t) for name, t in tensors.items()}
    )


def _load(tensors: Mapping[str, torch.Tensor], shared: OfferedShards, timeout: float) -> None:
    """Reads the parts of this rank into its tensors; uses copies for several pieces, and for memory with gaps."""
    pieces = {name: in_pieces(tensor) if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    shards = {name: _shard(tensor) for name, tensor in pieces.items()}
    shared.read_into(shards, timeout)
    with torch.no_grad():
        for name, piece in pieces.items():
            local = _local(piece)
            if local.data_ptr() != shards[name].tensor.data_ptr():
                local.copy_(shards[name].tensor)
            tensor = tensors[name]
            if isinstance(tensor, DTensor) and isinstance(piece, DTensor) and piece is not tensor:
                _local(tensor).copy_(_local(placed_otherwise(piece, tensor.placements)))


def _shard(tensor: torch.Tensor) -> Shard:
    """Returns the part of a tensor that this rank has, in memory without gaps: the tensor's own, or else a copy."""
    local = _local(tensor).resolve_conj().resolve_neg().contiguous()
    start: tuple[int, ...] = (0,) * tensor.dim()
    if isinstance(tensor, DTensor) and local.numel():
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(local, start=start, of=tuple(tensor.shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
