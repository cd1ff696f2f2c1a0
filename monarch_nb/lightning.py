"""Lightning's `Trainer`, created in the controller and run on the ranks of a mesh.

`Trainer(strategy=MonarchStrategy(workers)).fit(model, data)` sends the trainer with its model to all ranks, runs it
there in DistributedDataParallel, and updates the local trainer: weights, metrics, checkpoints' paths, counters.
`MonarchModelParallelStrategy` does the same for models that FSDP2 and tensor parallelism shard.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from monarch_nb.actor import Future, ProcMesh, ValueMesh
from monarch_nb.lifecycle import interrupt
from monarch_nb.mesh import state_of
from monarch_nb.spmd import own_mesh, prepare
from monarch_nb.wire import kind_of

try:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.utilities.apply_func import move_data_to_device
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from lightning.pytorch.trainer.states import TrainerFn, TrainerState
    from torch.distributed.tensor import DTensor
except ImportError as error:
    needs = "monarch_nb.lightning needs Lightning 2.4 and PyTorch 2.5 or newer: pip install -U lightning torch"
    raise ImportError(f"{needs} ({error})") from error

__all__ = ["MonarchModelParallelStrategy", "MonarchStrategy"]

END_S = 10.0  # time for interrupted ranks to end
_OF_SHARDS = {  # arguments of Lightning's FSDPStrategy and ModelParallelStrategy
    *("auto_wrap_policy", "cpu_offload", "mixed_precision", "sharding_strategy", "state_dict_type", "device_mesh"),
    *("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint", "activation_checkpointing_policy"),
}


class _MeshEnvironment(ClusterEnvironment):
    """The position of a rank in the world, from its process's environment; the controller counts as rank 0."""

    def __init__(self, hosts: int = 1, per_host: int = 1) -> None:
        super().__init__()
        self.hosts, self.per_host = hosts, per_host

    @property
    def creates_processes_externally(self) -> bool:
        """True: the mesh has created the processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of the host of rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port at which ranks meet."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Returns False: the strategy brings it."""
        return False

    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.hosts * self.per_host

    def set_world_size(self, size: int) -> None:
        """Does nothing: the mesh has the size."""

    def global_rank(self) -> int:
        """Returns the rank of this process; 0 in the controller."""
        return int(os.environ.get("RANK", "0"))

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the mesh has the ranks."""

    def local_rank(self) -> int:
        """Returns the rank among those of its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        """Returns the number of the host."""
        return self.global_rank() // self.per_host


class _MeshStrategy(ParallelStrategy):
    """The base of the strategies below: their ranks are those of a mesh."""

    def __init__(self, mesh: ProcMesh | None = None, **arguments: Any) -> None:
        if mesh is not None and not isinstance(mesh, ProcMesh):
            raise TypeError(f"{type(self).__name__}() takes a mesh of processes, not {kind_of(mesh)}")
        self._mesh_launcher = _MeshLauncher(mesh)
        self._has_mesh = mesh is not None
        self._mesh_environment = _MeshEnvironment()
        if mesh is not None:
            *_, self._mesh_environment.per_host = mesh.extent.values() or (1,)
            self._mesh_environment.hosts = len(mesh) // self._mesh_environment.per_host
        self._devices: list[torch.device] | None = None
        super().__init__(**arguments)
        if self.cluster_environment is None:
            self.cluster_environment = self._mesh_environment

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of a host: one for each of its ranks."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and self._has_mesh:
            kind = torch.device(devices[0]).type
            indices = range(self._mesh_environment.per_host)
            devices = [torch.device(kind) if kind == "cpu" else torch.device(kind, index) for index in indices]
        elif devices:
            self._mesh_environment.per_host = self._mesh_launcher.procs = len(devices)
        self._devices = devices

    @property
    def num_nodes(self) -> int:
        """The number of hosts."""
        return self._mesh_environment.hosts

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = self._mesh_environment.hosts

    def _configure_launcher(self) -> None:
        self._launcher = self._mesh_launcher


class MonarchStrategy(_MeshStrategy, DDPStrategy):
    """Runs a `Trainer` on the ranks of a mesh, in DistributedDataParallel.

    `Trainer(strategy=MonarchStrategy(workers))` uses all ranks of the mesh, whatever `devices` and `num_nodes` are.
    Without a mesh it runs on `devices` processes of this machine, which stay for the next trainer. Further
    arguments are those of `DDPStrategy`. The trainer, its model and its data are sent by pickle, with classes that a
    notebook defines. `fit` and similar methods raise errors of ranks as ActorErrors. Stop ends the training on all
    ranks, and raises RuntimeError.
    """

    def __init__(self, mesh: ProcMesh | None = None, **arguments: Any) -> None:
        if sharding := sorted(_OF_SHARDS & arguments.keys()):
            raise TypeError(
                f"MonarchStrategy() has the whole model on each rank, and takes no {', '.join(sharding)}: use "
                "MonarchModelParallelStrategy(mesh, data_parallel_size=…, tensor_parallel_size=…) with FSDP2 "
                '(fully_shard) in configure_model(), or strategy="fsdp" in a cell of %%spmd'
            )
        super().__init__(mesh, **arguments)


class MonarchModelParallelStrategy(_MeshStrategy, ModelParallelStrategy):
    """Runs a `Trainer` on the ranks of a mesh, with a model that its `configure_model` shards there.

    This is for FSDP2 and tensor parallelism; see `MonarchStrategy` for the rest. Further arguments are
    those of `ModelParallelStrategy`: `MonarchModelParallelStrategy(workers, data_parallel_size=4,
    tensor_parallel_size=2)`. After `fit` the weights are gathered tensor by tensor into the local model.
    """


@dataclass(frozen=True)
class _Result:
    """The state of a trainer on rank 0 after a run."""

    value: object
    weights: Mapping[str, torch.Tensor] | None  # of a fit
    state: TrainerState
    metrics: Mapping[str, torch.Tensor]
    callbacks: Mapping[str, Mapping[str, object]]
    progress: Mapping[str, object]


class _MeshLauncher(_Launcher):
    """Runs a function of a trainer on all ranks of a mesh, and copies the state of rank 0's trainer to this one."""

    def __init__(self, mesh: ProcMesh | None) -> None:
        self._mesh = mesh
        self.procs = 1  # of this machine, without a mesh
        self._has_fit = False
        self._is_on_rank = False

    @property
    def is_interactive_compatible(self) -> bool:
        """True: nothing is forked, and classes of a notebook are sent along."""
        return True

    def launch(
        self, function: Callable[..., object], *args: object, trainer: pl.Trainer | None = None, **more: object
    ) -> object:
        """Runs a function and blocks. Raises ActorError with errors of ranks; RuntimeError if it is interrupted, or a
        trainer is to fit twice."""
        if self._is_on_rank:
            return function(*args, **more)
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fits and self._has_fit:
            raise RuntimeError(
                "this trainer has run fit() before, and the states of its optimizers have ended with that run. Make a "
                "new Trainer and strategy, and call fit(ckpt_path=…) to go on from a checkpoint"
            )
        mesh = own_mesh(self.procs) if self._mesh is None else self._mesh
        prepare(mesh)
        running = mesh.run(_run_on_rank, trainer, partial(function, *args, **more))
        try:
            result = next(iter(running.get().values()))
        except KeyboardInterrupt:  # Lightning would turn it into an exit, and ignore Stop from then on
            raise RuntimeError(_interrupted(mesh, running)) from None
        if not isinstance(result, _Result) or trainer is None:
            return result
        self._has_fit |= fits
        _restore(trainer, result)
        return result.value

    def kill(self, signum: object) -> None:
        """Does nothing: the processes are those of the mesh."""

    def __getstate__(self) -> dict[str, object]:
        return {"_mesh": None, "procs": self.procs, "_has_fit": False, "_is_on_rank": True}


def _interrupted(mesh: ProcMesh, running: Future[ValueMesh[object]]) -> str:
    """Interrupts the ranks; returns a text that says whether they have ended."""
    interrupt(mesh)
    name = state_of(mesh).name
    running.exception(END_S)
    if not running.done():
        return f"the training on {name} was interrupted, and has not ended yet: heal_mesh({name}, kill=True) ends it"
    return f"the training on {name} was interrupted; its processes can be used again"


def _run_on_rank(trainer: pl.Trainer | None, function: Callable[[], object]) -> object:
    value = function()
    if trainer is None:
        return value
    fits = trainer.state.fn == TrainerFn.FITTING
    weights = trainer.lightning_module.state_dict() if fits else None  # on all ranks: metrics in it are reduced
    strategy: Strategy = trainer.strategy
    if weights is not None and isinstance(strategy, ModelParallelStrategy):
        weights = _gathered(weights, strategy.is_global_zero)
    if not strategy.is_global_zero:
        return None
    return _Result(
        move_data_to_device(value, "cpu"),
        move_data_to_device(weights, "cpu"),
        trainer.state,
        move_data_to_device(dict(trainer.callback_metrics), "cpu"),
        {callback.state_key: move_data_to_device(callback.state_dict(), "cpu") for callback in _callbacks(trainer)},
        trainer.fit_loop.state_dict() if fits else {},
    )


def _gathered(weights: Mapping[str, object], is_wanted: bool) -> dict[str, object]:
    """Returns whole tensors in the host's memory, gathered one by one. All ranks call it; only some keep the result."""
    gathered: dict[str, object] = {}
    for name, tensor in weights.items():
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_wanted:
            gathered[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    return gathered


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return list(vars(trainer)["callbacks"])  # set by Lightning, but not declared


def _restore(trainer: pl.Trainer, result: _Result) -> None:
    if result.weights is not None:
        # The ranks may have added or removed layers.
        trainer.lightning_module.load_state_dict(result.weights, strict=False)
    trainer.state = result.state
    trainer.callback_metrics.update(result.metrics)
    for callback in _callbacks(trainer):
        if state := result.callbacks.get(callback.state_key):
            if getattr(callback, "dirpath", "") is None:  # the folder of checkpoints, chosen by the ranks
                vars(callback)["dirpath"] = state.get("dirpath")
            callback.load_state_dict(dict(state))
    if result.progress:
        trainer.fit_loop.load_state_dict(dict(result.progress))
