"""The processes of a proc mesh, as tensor meshes use them: one worker each, in one process group."""

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from monarch_nb.mesh import ActorMesh, ProcMesh, ValueMesh, as_it_is, part_of, region_of, state_of
from monarch_nb.runtime import Context, Future, ProcState, current, reported_elsewhere, runtime
from monarch_nb.shape import NDSlice, Region
from monarch_nb.supervision import Driver
from monarch_nb.tensor.commands import Open
from monarch_nb.tensor.errors import ContentsLostError, ended, gone, moved
from monarch_nb.tensor.groups.keeper import Keeper
from monarch_nb.tensor.groups.world import Place, StoreAt
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.workers.actor import TensorWorker
from monarch_nb.transport import held_back

_known: "dict[str, Processes]" = {}  # they stay in their group as long as they run, whoever uses it
_making = threading.Lock()


class Processes:
    """All processes of a proc mesh, whichever slice of it a tensor mesh is made of: groups are of all of them.

    Of one that was shrunk those that are left; `generation` is then the last that was made before.
    """

    def __init__(self, procs: ProcMesh, device: str, generation: int = -1) -> None:
        self.device = device
        self.generation = generation
        self._procs, self._state, self._engine = procs, state_of(procs), runtime()
        self._context: Context = runtime().context()  # one sender, so that what it sends stays in order
        self._members = tuple(region_of(procs).ranks())
        self.left_out = frozenset(self._state.ranks) - set(self._members)
        self._over = ""  # why nothing goes on in them
        runtime().part(Driver).raised_in_use(self._state.uid)
        workers: Any = procs.spawn(f"{procs.name}_workers", TensorWorker)
        self._spawned: ActorMesh[TensorWorker] = workers  # these grow with the processes
        self.workers: Any = as_it_is(workers)
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._openings: dict[int, Open] = {}
        self._lock = threading.RLock()
        keeper = self._keeper = Keeper(runtime(), self._state, self._members, weakref.WeakMethod(self._lose))
        try:
            self._compare_versions()
            self._group({})
        except BaseException:
            keeper.close()
            raise

    def _compare_versions(self) -> None:
        """Both sides work out placements by themselves, by the same code of PyTorch."""
        ours = torch.__version__
        other = [(point, theirs) for point, theirs in self._all(self.workers.version) if theirs != ours]
        if other:
            point, theirs = other[0]
            raise RuntimeError(
                f"{self._procs.name} runs torch {theirs} (rank {point.rank}, {len(other)} of {len(self._procs)}) and "
                f"its controller torch {ours}: sharded tensors need the same version on both sides"
            )

    def _all(self, endpoint: Any, *args: Any) -> ValueMesh[Any]:
        """What all workers answer; blocks."""
        return self._send(endpoint, *args).get()

    # -- generations ------------------------------------------------------------------------------------------------

    def _group(self, streams: Mapping[int, tuple[Open, int, int]]) -> None:
        """Makes a new process group of all of them; these streams go on, from where all ranks have come to."""
        layout = self._state.layout
        workers: ActorMesh[TensorWorker] = self.workers
        first: Any = part_of(workers, Region((), NDSlice(self._members[0], (), ())))
        [at] = self._all(first.keep_store, len(layout.hosts) == 1).values()
        number = self.generation + 1
        place = Place(self._state.uid, runtime().address, number, self._members, layout.per_host, self.device)
        held_back(self._join, at, place, dict(streams)).get()

    def _join(self, at: StoreAt, place: Place, streams: dict[int, tuple[Open, int, int]]) -> Future[ValueMesh[Any]]:
        self._keeper.generation = place.generation
        joined = self._send(self.workers.join, at, place, streams)
        self.generation = place.generation  # workers go on in it, whether somebody waits for that or not
        return joined

    def use(self, stream: Stream, opening: Open) -> None:
        """From now on a stream goes on in each generation, for as long as somebody has it."""
        with self._lock:
            for number in self._openings.keys() - set(self._streams.keys()):  # nobody has these any more
                del self._openings[number]
                self._send(self.workers.close, number)
        self._streams[stream.number] = stream
        self._openings[stream.number] = opening

    def regroup(self, over: int) -> None:
        """The generation after `over`, whose collectives were ended; does nothing where it is there already. Blocks.

        Raises DeviceMeshError where processes are missing.
        """
        with self._lock:
            if self.generation > over:
                return
            self._group(self._going_on())

    def _going_on(self) -> dict[int, tuple[Open, int, int]]:
        """Where the streams are, once all that was sent is done."""
        reached = self._all(self.workers.reached)
        going_on: dict[int, tuple[Open, int, int]] = {}
        for number in sorted(self._streams):
            of_ranks = [streams[number] for streams in reached.values() if number in streams] or [(0, 0)]
            start, stop = min(done for done, _ in of_ranks), max(begun for _, begun in of_ranks)
            going_on[number] = (self._openings[number], start, stop)
        return going_on

    def follow(self) -> bool:
        """Takes the processes in with which their mesh has grown since; tensors stay where they are. Blocks.

        False where the mesh has shrunk, or these were some of its processes alone: others have to take their place.
        """
        with self._lock:
            now = tuple(rank for rank in self._state.ranks if rank not in self.left_out)
            if self._over or now[: len(self._members)] != self._members:
                return False
            if len(now) > len(self._members):
                if tuple(region_of(self._spawned).ranks()) != now:
                    return False
                going_on = self._going_on()
                self._members, self.workers = now, as_it_is(self._spawned)
                self._keeper.take_in(now)
                self._compare_versions()
                self._group(going_on)
            return True

    def revive(self, stream: Stream) -> None:
        """Has a stream that was lost go on, where the mesh has been healed since; its tensors are gone.

        Blocks. Raises ContentsLostError where the mesh has not been healed.
        """
        with self._lock:
            if stream.lost is None:
                return
            failed = runtime().part(Driver).failed(self._state.uid)
            over = self._over or self._state.stopped is not None or self._has_shrunk
            if over or not failed.isdisjoint(self._members):
                raise ContentsLostError(stream.lost)
            self.regroup(self.generation)
            for each in tuple(self._streams.values()):
                each.begin_anew()

    def _lose(self, reason: str) -> None:
        """A process is gone, and with it a part of all tensors (engine thread)."""
        state = self._state
        if state.stopped is not None:
            why = ended(state.stopped)
        elif self._has_shrunk:
            why = moved(state.name, "shrunk")
        else:
            why = self._over or gone(state.name, reason)
        for stream in tuple(self._streams.values()):  # the word of a death may come after the end
            stream.lost = why

    @property
    def _has_shrunk(self) -> bool:
        return not set(self._members) <= set(self._state.ranks)

    @property
    def over(self) -> int:
        """The generation that is now, where it has been ended; -1 where it goes on."""
        return self._keeper.over

    @property
    def has_ended(self) -> bool:
        """Whether there are no such processes any more."""
        return self._state.stopped is not None or self._engine.closed

    def close(self) -> None:
        """Nobody makes a mesh of them any more."""
        self._keeper.close()

    def end(self, why: str) -> None:
        """Ends the workers of these processes, of which others take the place, and tells `why`. Blocks."""
        self._over = why
        self._lose(why)
        self._keeper.close()
        self.workers.stop(why).get()

    def places(self, region: Region) -> tuple[int, ...]:
        """Which members of the group the ranks of a slice are. Raises ValueError where some are none."""
        ranks = tuple(region.ranks())
        if not set(ranks) <= set(self._members):
            raise ValueError(
                f"{self._state.name} was shrunk, and some of these processes were left out: make slices of the mesh "
                "that heal_mesh(mesh, shrink=True) gave, or another mesh on new processes"
            )
        return tuple(map(self._members.index, ranks))

    def sender(self, region: Region) -> Callable[..., Future[ValueMesh[Any]]]:
        """What hands a batch to the workers of some of the processes."""
        workers: Any = part_of(self.workers, region)
        return partial(self._send, workers.batch)

    def _send(self, endpoint: Any, *args: Any) -> Future[ValueMesh[Any]]:
        token = current.set(self._context)
        try:
            future: Future[ValueMesh[Any]] = endpoint.call(*args)
        finally:
            current.reset(token)
        reported_elsewhere(future)  # where the mesh is used next
        return future


def workers_on(procs: ProcState) -> list[ActorMesh[TensorWorker]]:
    """What executes operations on tensors in the processes of a proc mesh; none where it has none."""
    found = _known.get(procs.uid)
    return [] if found is None else [found.workers]


def processes_of(procs: ProcMesh, device: str) -> Processes:
    """Those of a proc mesh, or of a slice; their workers are spawned when they are first needed. Blocks then.

    Raises RuntimeError where the versions of torch differ.
    """
    state = state_of(procs)
    with _making:
        found, generation = _known.get(state.uid), -1
        for uid, each in tuple(_known.items()):
            if each.has_ended:
                _known.pop(uid).close()
        if found is not None and found.left_out.isdisjoint(region_of(procs).ranks()) and not found.follow():
            found.end(moved(state.name, "other hosts, and another mesh for tensors was made on them"))
            generation, found = found.generation, None
        if found is None:
            found = _known[state.uid] = Processes(as_it_is(ProcMesh(state, state.region)), device, generation)
        if found.device != device:
            raise ValueError(f"{state.name} holds tensors on {found.device} already: its meshes cannot be on {device}")
        return found


def shrunk(procs: ProcMesh, device: str) -> Processes:
    """These processes and no others of their proc mesh, some of which are gone. Blocks."""
    state = state_of(procs)
    with _making:
        before = _known.pop(state.uid, None)
        generation = -1
        if before is not None:
            before.end(gone(state.name, "it was shrunk, and its other processes are a mesh of their own now"))
            generation = before.generation
        found = _known[state.uid] = Processes(procs, device, generation)
        return found
