"""The processes of a proc mesh, as tensor meshes use them: one worker each, in one process group."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from monarch_nb.mesh import ActorMesh, ProcMesh, ValueMesh, part_of, region_of, state_of
from monarch_nb.runtime import Future
from monarch_nb.shape import Region
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.workers.actor import TensorWorker

_known: "weakref.WeakValueDictionary[str, Processes]" = weakref.WeakValueDictionary()
_making = threading.Lock()


class Processes:
    """All processes of a proc mesh, whichever slice of it a tensor mesh is made of: groups are of all of them."""

    def __init__(self, procs: ProcMesh, device: str) -> None:
        self.device = device
        self._procs = procs
        self.workers: Any = procs.spawn("tensors", TensorWorker)
        self.generation = -1
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._compare_versions()
        self.group()

    def _compare_versions(self) -> None:
        """Both sides work out placements by themselves, by the same code of PyTorch."""
        ours = torch.__version__
        other = [(point, theirs) for point, theirs in self.workers.version.call().get() if theirs != ours]
        if other:
            point, theirs = other[0]
            raise RuntimeError(
                f"{self._procs.name} runs torch {theirs} (rank {point.rank}, {len(other)} of {len(self._procs)}) and "
                f"its controller torch {ours}: sharded tensors need the same version on both sides"
            )

    def group(self) -> None:
        """Makes a new process group of all of them, the next generation; what the last one's streams held is gone."""
        layout = state_of(self._procs).layout
        one_host = len(layout.hosts) == 1
        workers: ActorMesh[TensorWorker] = self.workers
        first: Any = part_of(workers, region_of(workers).flatten("rank").slice(rank=0))
        at = first.keep_store.call_one(one_host).get()
        self.generation += 1
        self.workers.join.call(at, self.generation, len(self._procs), layout.per_host, self.device).get()

    def use(self, stream: Stream) -> None:
        """The stream's tensors last as long as this generation."""
        self._streams.add(stream)

    def regroup(self) -> None:
        """The next generation, unless another mesh on these processes has made it already since it lost its tensors.

        Raises DeviceMeshError where processes are missing.
        """
        if any(stream.lost is None for stream in self._streams):
            return
        self.group()

    def sender(self, region: Region) -> Callable[..., Future[ValueMesh[Any]]]:
        """What hands a batch to the workers of some of the processes."""
        workers: Any = part_of(self.workers, region)
        return partial(self._send, workers.batch)

    def _send(self, batch: Any, *args: Any) -> Future[ValueMesh[Any]]:
        return batch.call(*args)  # type: ignore[no-any-return]


def processes_of(procs: ProcMesh, device: str) -> Processes:
    """Those of a proc mesh, or of a slice; their workers are spawned when they are first needed. Blocks then.

    Raises RuntimeError where the versions of torch differ.
    """
    state = state_of(procs)
    with _making:
        found = _known.get(state.uid)
        if found is None:
            found = _known[state.uid] = Processes(ProcMesh(state, state.region), device)
        if found.device != device:
            raise ValueError(f"{state.name} holds tensors on {found.device} already: its meshes cannot be on {device}")
        return found
