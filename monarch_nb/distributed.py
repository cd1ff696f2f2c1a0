"""Sharded tensors that are used like local ones: `Mesh`, and functions that distribute tensors over it.

mesh = Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))
t = monarch.distribute(torch.randn(1024, 1024), mesh, sharding_spec=["data_parallel", None])
result = t @ t.T                     # runs in all processes of the mesh

PyTorch is imported when the first of these names is used.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_nb._package import lazy_names, refuse_old_torch

if TYPE_CHECKING:
    import torch

    from monarch_nb.mesh import ValueMesh
    from monarch_nb.tensor.checkpoints import CheckpointError, Checkpoints
    from monarch_nb.tensor.checkpoints.checkpoints import load, load_safetensors, save
    from monarch_nb.tensor.errors import (
        CompileError,
        CompileWarning,
        ContentsLostError,
        GatherWarning,
        RankTensorError,
        TensorError,
    )
    from monarch_nb.tensor.handle import MeshTensor
    from monarch_nb.tensor.lanes import coalescing
    from monarch_nb.tensor.mesh import Mesh
    from monarch_nb.tensor.modules.gathering import no_sync
    from monarch_nb.tensor.modules.plan import Plan
    from monarch_nb.tensor.modules.to_mesh import module_to_mesh
    from monarch_nb.tensor.ranks.active import get_active_mesh, no_mesh
    from monarch_nb.tensor.ranks.engine import spawn_tensor_engine
    from monarch_nb.tensor.ranks.exchanging import reduce, reduce_, slice_mesh, to_mesh
    from monarch_nb.tensor.ranks.gradients import grad_function, grad_generator, remote_autograd_function
    from monarch_nb.tensor.ranks.opaque import OpaqueModule, OpaqueObject, opaque_method
    from monarch_nb.tensor.ranks.remote import (
        RemoteProcessGroup,
        call_on_shard_and_fetch,
        fetch_shard,
        function_resolvers,
        inspect,
        remote,
        show,
    )
    from monarch_nb.tensor.ranks.streams import Borrow, Stream, get_active_stream
    from monarch_nb.tensor.ranks.tensor import Tensor
    from monarch_nb.tensor.simulated.simulator import Simulator, SimulatorBackendMode, SimulatorTraceMode, set_meta
    from monarch_nb.tensor.verify import Verification, verify
    from monarch_nb.tensor.workers.calls import OpaqueRef

__all__ = [
    "Borrow",
    "CheckpointError",
    "Checkpoints",
    "CompileError",
    "CompileWarning",
    "ContentsLostError",
    "GatherWarning",
    "Mesh",
    "MeshTensor",
    "OpaqueModule",
    "OpaqueObject",
    "OpaqueRef",
    "Plan",
    "RankTensorError",
    "RemoteProcessGroup",
    "Simulator",
    "SimulatorBackendMode",
    "SimulatorTraceMode",
    "Stream",
    "Tensor",
    "TensorError",
    "Verification",
    "call_on_shard_and_fetch",
    "checkpoint",
    "coalescing",
    "compile",
    "distribute",
    "fetch_shard",
    "from_local",
    "function_resolvers",
    "get_active_mesh",
    "get_active_stream",
    "grad_function",
    "grad_generator",
    "inspect",
    "load",
    "load_safetensors",
    "module_to_mesh",
    "no_mesh",
    "no_sync",
    "opaque_method",
    "reduce",
    "reduce_",
    "remote",
    "remote_autograd_function",
    "save",
    "set_meta",
    "show",
    "slice_mesh",
    "spawn_tensor_engine",
    "to_mesh",
    "verify",
]

_HOMES = {
    "checkpoints.checkpoints": ("CheckpointError", "Checkpoints", "load", "load_safetensors", "save"),
    "errors": (
        "CompileError",
        "CompileWarning",
        "ContentsLostError",
        "GatherWarning",
        "RankTensorError",
        "TensorError",
    ),
    "handle": ("MeshTensor",),
    "lanes": ("coalescing",),
    "ranks.active": ("get_active_mesh", "no_mesh"),
    "ranks.engine": ("spawn_tensor_engine",),
    "ranks.opaque": ("OpaqueModule", "OpaqueObject", "opaque_method"),
    "workers.calls": ("OpaqueRef",),
    "ranks.exchanging": ("reduce", "reduce_", "slice_mesh", "to_mesh"),
    "ranks.gradients": ("grad_function", "grad_generator", "remote_autograd_function"),
    "ranks.remote": (
        "RemoteProcessGroup",
        "call_on_shard_and_fetch",
        "fetch_shard",
        "function_resolvers",
        "inspect",
        "remote",
        "show",
    ),
    "ranks.streams": ("Borrow", "Stream", "get_active_stream"),
    "ranks.tensor": ("Tensor",),
    "mesh": ("Mesh",),
    "modules.plan": ("Plan",),
    "modules.gathering": ("no_sync",),
    "modules.to_mesh": ("module_to_mesh",),
    "simulated.simulator": ("Simulator", "SimulatorBackendMode", "SimulatorTraceMode", "set_meta"),
    "verify": ("Verification", "verify"),
}
_look_up = lazy_names("monarch_nb.tensor", _HOMES)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = _look_up(name)
    except ImportError as error:
        refuse_old_torch(error)
        raise
    return value


def distribute(tensor: "torch.Tensor", mesh: "Mesh", sharding_spec: Any = None) -> "MeshTensor":
    """Returns the tensor, sharded over the processes of a mesh.

    `sharding_spec` has an entry for each dimension of the tensor: the name of the mesh dimension that shards it, a
    tuple of several, or None where it is whole. `["data_parallel", None]` shards the rows; None alone puts a copy on
    each process. PyTorch's placements are accepted, too: `[Shard(0), Replicate()]`, one for each dimension of the mesh.
    Blocks only for large tensors, until they are sent. Raises ValueError for a spec that does not fit.
    """
    return mesh.distribute(tensor, sharding_spec)


def from_local(
    local_tensors: "torch.Tensor | Sequence[torch.Tensor] | ValueMesh[Any]", mesh: "Mesh", placements: Any
) -> "MeshTensor":
    """Returns the tensor whose local tensors on the processes of a mesh are these, as `t.local_shards()` returns them.

    `local_tensors` has one for each rank, or is one that all hold. `placements` has an entry for each dimension of the
    mesh: shards (`Shard(dim)`), copies, or parts of a sum (`Partial()`); or is a sharding spec. Blocks only for large
    tensors, until they are sent. All ranks receive all of them: create large parts where they belong, by
    `mesh.from_parts`. Raises ValueError where sizes do not fit together, or copies differ.
    """
    return mesh.from_local(local_tensors, placements)


def compile(  # noqa: A001 - as torch.compile
    step: Callable[..., object] | None = None, *, backend: str = "python", check_every: int = 1000
) -> Any:
    """Returns a step on sharded tensors that is one message, and runs no Python, once two runs were equal.

    `step = monarch.compile(step)`, or a decorator. The first runs (three, as a rule) are as written; the operations
    that they issue are compared. Workers then run generated code: of the operations one by one (`backend="python"`), of
    a graph of them (`"fx"`), compiled by PyTorch's inductor (`"inductor"`, which needs a C++ compiler there and takes a
    minute), or as a CUDA graph (`"cudagraphs"`, on GPUs). Every `check_every`-th call runs the Python again and
    compares; 0 never does. Arguments of other shapes or placements, and other values of what the step reads where a
    change can be seen, are captured anew.

    Raises CompileError where numbers change from call to call, with their line; a step that waits for values runs as
    written, with one CompileWarning.
    """
    from monarch_nb.tensor.compiled.step import compile_step

    return compile_step(step, backend=backend, check_every=check_every)


def checkpoint(
    model: Any,
    optimizer: "torch.optim.Optimizer | None" = None,
    *,
    every: int | None = None,
    folder: str | None = "checkpoints",
    keep: int = 2,
) -> "Checkpoints":
    """Returns checkpoints of a model on a mesh, or of a dictionary of tensors and values, and of its optimizer.

    `saves.step(n)` after each step saves each `every`-th; `saves.save(n)` saves at once; `saves.restore()` restores the
    latest, also on a mesh of another shape, and returns its step. `folder` is on the workers' disks: with several
    hosts, a shared one. It is for one run: the latest is that of the highest step, also of a former run, and the `keep`
    latest stay. Does not block, and neither does a save. Raises ValueError if no part of it is sharded; `wait()` and
    `restore()` of the result raise CheckpointError.

    With `folder=None`, the latest is a copy in the memory of the processes: a heal restores it where each part of it is
    also on a living rank. A save then waits for the step.
    """
    from monarch_nb.tensor.checkpoints import Checkpoints

    return Checkpoints(model, optimizer, every, folder, keep)
