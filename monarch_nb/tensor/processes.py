"""The processes of a proc mesh for tensor meshes: one worker in each, all in one process group."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch

from monarch_nb.host.protocol import KeepSpares
from monarch_nb.host.verbs import SPARES
from monarch_nb.mesh import ActorMesh, AnyMesh, Endpoint, ProcMesh, ValueMesh, as_it_is, part_of, region_of, state_of
from monarch_nb.runtime import Context, Future, ProcState, current, current_runtime, reported_elsewhere
from monarch_nb.shape import NDSlice, Region
from monarch_nb.supervision import Driver
from monarch_nb.tensor.commands import (
    Await,
    CallRemote,
    Cell,
    Define,
    DrawFrom,
    GiveBack,
    Locals,
    Making,
    Name,
    Open,
    PutTensor,
    Receipt,
    Revive,
    RunFunction,
    Send,
    Take,
    Turn,
    encode_numbers,
    meeting,
)
from monarch_nb.tensor.compiled.program import Trace
from monarch_nb.tensor.errors import CallSite, ContentsLostError, TensorError, lost_text, replaced_text, stopped_text
from monarch_nb.tensor.groups.coordinator import GroupCoordinator
from monarch_nb.tensor.groups.world import GroupSpec, StoreAddress
from monarch_nb.tensor.propagation import OWN_VALUE
from monarch_nb.tensor.replicas import StreamContents
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.workers.actor import StreamWorker, TensorWorker
from monarch_nb.transport import UnreachableError, held_back
from monarch_nb.wire import agent_of

if TYPE_CHECKING:
    from monarch_nb.tensor.ranks.streams import Stream as Lane

_THREADS = 8  # of a process for streams beside the main one; further streams share them
P = ParamSpec("P")
R = TypeVar("R")
_WARM_UP = "monarch_nb.tensor.workers.actor:warm_up"
_registry: "dict[str, MeshProcesses]" = {}  # by uid of the proc mesh; the group lasts as long as the processes
_registry_lock = threading.Lock()


class Observer(NamedTuple):
    """Callbacks: `issued` gets the call site of each issued operation and returns its own form of it, `sent` a stream,
    its first operation sent and the call sites, and `joined` follows when further actors execute operations."""

    issued: Callable[[CallSite | None], CallSite | None]
    sent: Callable[[int, int, Sequence[CallSite | None]], None]
    joined: Callable[[], None]


class Meeting(NamedTuple):
    """A part of a batch in which ranks may wait for each other: operations that its stream has run then, and ranks."""

    stream: int
    operations: int
    ranks: frozenset[int]


class MeshProcesses:
    """The workers of a whole proc mesh, also for tensor meshes on slices of it, since groups span all processes.

    For a proc mesh that was shrunk, these are the workers of the remaining processes; `generation` continues.
    """

    def __init__(self, procs: ProcMesh, device: str, generation: int = -1) -> None:
        self.device = device
        self.generation = generation
        self._procs, self._state, self._runtime = procs, state_of(procs), current_runtime()
        self._context: Context = current_runtime().context()  # one sender keeps its messages in order
        self._members = tuple(region_of(procs).ranks())
        self.left_out = frozenset(self._state.ranks) - set(self._members)
        self._spares = 0
        self.observer: Observer | None = None
        self.draws: dict[int, DrawFrom] = {}  # generators of the program's streams, by their numbers
        self._store: tuple[tuple[str, bool], StoreAddress] | None = None  # of a process; whether on one host only
        self._loss_reason = ""  # the last reason why contents were lost
        self._end_reason = ""  # why these workers were ended
        current_runtime().part(Driver).raised_in_use(self._state.uid)
        workers: Any = procs.spawn(f"{procs.name}_workers", TensorWorker)
        self._spawned: ActorMesh[TensorWorker] = workers  # grows with the processes
        self.workers = as_it_is(self._spawned)
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._openings: dict[int, Open] = {}
        self._lock = threading.RLock()
        # Streams of the program other than the main one are executed concurrently with it.
        self._lane_threads: weakref.WeakKeyDictionary[Lane, ActorMesh[StreamWorker]] = weakref.WeakKeyDictionary()
        self._threads: list[ActorMesh[StreamWorker]] = []
        self._stream_threads: dict[int, ActorMesh[StreamWorker]] = {}  # by command stream
        self._order = threading.RLock()  # held while a batch is sent
        self._operation_counts: dict[int, int] = {}  # operations, by stream
        self._tag_generations: dict[int, int] = {}  # the generation in which a value was sent, by its tag
        self._meetings: list[Meeting] = []  # the latest ones, which follow all earlier ones
        self._programs: set[tuple[int, object]] = set()  # compiled steps without waits between ranks, by stream
        coordinator = self._coordinator = GroupCoordinator(
            current_runtime(), self._state, self._members, weakref.WeakMethod(self._lose)
        )
        try:
            self._compare_versions()
            self._group({})
        except BaseException:
            coordinator.cut("not all of its ranks could join")
            coordinator.close()
            raise

    def _compare_versions(self) -> None:
        """Checks that both sides run the same PyTorch, since each computes placements by itself."""
        ours = torch.__version__
        mismatches = [(point, theirs) for point, theirs in self._all(self.workers.version) if theirs != ours]
        if mismatches:
            point, theirs = mismatches[0]
            raise RuntimeError(
                f"{self._procs.name} runs torch {theirs} (rank {point.rank}, {len(mismatches)} of {len(self._procs)}) "
                f"and its controller torch {ours}: sharded tensors need the same version on both sides"
            )

    def _all(self, endpoint: Endpoint[P, R], *args: P.args, **kwargs: P.kwargs) -> ValueMesh[R]:
        """Returns the replies of all workers; blocks."""
        return self._send(endpoint, *args, **kwargs).get()

    # -- generations ------------------------------------------------------------------------------------------------

    def _group(
        self, streams: Mapping[int, tuple[Open, int, int]], contents: Mapping[int, StreamContents] | None = None
    ) -> str:
        """Makes a process group of all workers, in which these streams continue from the state of all ranks.

        `contents` are restored after a heal; returns the error of the restoration, or "".
        """
        layout = self._state.layout
        first = part_of(self.workers, Region((), NDSlice(self._members[0], (), ())))
        process = (self._state.address(self._members[0]), len(layout.hosts) == 1)
        if self._store is None or self._store[0] != process:  # a heal or growth has changed it
            [address] = self._all(first.keep_store, len(layout.hosts) == 1).values()
            self._store = (process, address)
        store = self._store[1]
        number = self.generation + 1
        spec = GroupSpec(
            self._state.uid, current_runtime().address, number, self._members, layout.per_host, self.device
        )
        joined = held_back(self._join, store, spec, dict(streams), dict(contents or {})).get()
        return next(filter(None, joined.values()), "")

    def _join(
        self,
        store: StoreAddress,
        spec: GroupSpec,
        streams: dict[int, tuple[Open, int, int]],
        contents: dict[int, StreamContents],
    ) -> Future[ValueMesh[str]]:
        self._coordinator.begin(spec.generation)
        joined: Future[ValueMesh[str]] = self._send(self.workers.join, store, spec, streams, contents)
        self.generation = spec.generation  # workers continue in it whether or not the caller waits
        return joined

    def add_stream(self, stream: Stream, opening: Open) -> None:
        """Continues a stream in each later generation, while something refers to it."""
        with self._lock:
            for number in self._openings.keys() - set(self._streams.keys()):  # unreferenced streams
                del self._openings[number]
                self._operation_counts.pop(number, None)
                self._programs = {program for program in self._programs if program[0] != number}
                self._send(self._stream_threads.pop(number, self.workers).close, number)
        self._streams[stream.number] = stream
        self._openings[stream.number] = opening

    @property
    def streams_beside(self) -> list[Stream]:
        """The streams that are executed concurrently with the main one."""
        return [stream for stream in tuple(self._streams.values()) if stream.lane is not None]

    def failure(self, stream: int, number: int) -> TensorError | None:
        """Returns the error of an operation of a stream, if it is known to have failed, and marks it as seen."""
        command_stream = self._streams.get(stream)
        return None if command_stream is None else command_stream.failure(number)

    def keep_spares(self, count: int) -> None:
        """Makes each host keep at least `count` processes ready to replace lost ranks. Does not block."""
        self._spares = max(count, self._spares)
        if not self._spares:
            return
        request = KeepSpares(mesh=self._state.uid, owner=self._runtime.address, count=self._spares, prepare=_WARM_UP)
        for host in self._state.layout.hosts:
            with contextlib.suppress(UnreachableError):
                self._runtime.post(agent_of(host), SPARES, request)

    def regroup(self, over: int) -> None:
        """Makes the generation after `over`, whose collectives were stopped, unless it exists. Blocks.

        Raises DeviceMeshError if processes are missing.
        """
        with self._lock, self._sending_paused():
            if self.generation > over:
                return
            self._group(self._settled_progress())

    @contextlib.contextmanager
    def _sending_paused(self) -> Iterator[None]:
        """Prevents sending in a `with` block, where streams run at the same time."""
        if not self._threads:
            yield
            return
        with self._order:
            yield

    def _settle(self) -> None:
        """Waits until streams beside the main one have run all sent operations."""
        for future in [self._send(as_it_is(threads).rest) for threads in self._threads]:
            future.get()

    def _settled_progress(self) -> dict[int, tuple[Open, int, int]]:
        """Returns the progress of each stream once all sent operations have run."""
        self._settle()
        return self._progress(list(self._all(self.workers.reached).values()))

    def _progress(self, reached: Sequence[Mapping[int, tuple[int, int]]]) -> dict[int, tuple[Open, int, int]]:
        progress: dict[int, tuple[Open, int, int]] = {}
        for number in sorted(self._streams):
            positions = [streams[number] for streams in reached if number in streams] or [(0, 0)]
            start, stop = min(done for done, _ in positions), max(begun for _, begun in positions)
            progress[number] = (self._openings[number], start, stop)
        return progress

    def follow_growth(self) -> bool:
        """Adds the processes by which the proc mesh has grown; tensors stay in place. Blocks.

        Returns False if the mesh has shrunk, or if these were a part of it: new workers are then necessary.
        """
        with self._lock, self._sending_paused():
            ranks = tuple(rank for rank in self._state.ranks if rank not in self.left_out)
            if self._end_reason or ranks[: len(self._members)] != self._members:
                return False
            if len(ranks) > len(self._members):
                executors: list[ActorMesh[Any]] = [self._spawned, *self._threads]
                if any(tuple(region_of(executor).ranks()) != ranks for executor in executors):
                    return False
                progress = self._settled_progress()
                self._members, self.workers = ranks, as_it_is(self._spawned)
                self._coordinator.add_members(ranks)
                self._compare_versions()
                self._group(progress)
            return True

    def revive(self, stream: Stream) -> None:
        """Resumes a stream after the mesh was healed, with the tensors of which each part is on a surviving rank.

        Blocks. Raises ContentsLostError if the mesh has not been healed.
        """
        with self._lock:
            if stream.lost is None:
                return
            failed = current_runtime().part(Driver).failed(self._state.uid)
            ended = self._end_reason or self._state.stopped is not None or self._has_shrunk
            if ended or not failed.isdisjoint(self._members):
                raise ContentsLostError(stream.lost)
            self._restore()

    def _restore(self) -> None:
        """Makes the group anew, and restores contents of lost streams on new processes from other ranks. Blocks."""
        streams = {number: stream for number, stream in sorted(self._streams.items()) if stream.lost is not None}
        for stream in streams.values():
            stream.end_sending()
        with self._sending_paused():
            contents, error = self._regroup_lost(streams)
        if error:  # on a living rank: out of memory, for example
            self._coordinator.cut(f"contents could not be restored: {error}")
            for number, stream in streams.items():
                stream.held.lose(contents[number].moved, f"it could not be restored from other ranks: {error}")
            self._restore()
            return
        for stream in streams.values():
            stream.reset_after_heal()
        self.keep_spares(0)  # on hosts that have replaced others

    def _regroup_lost(self, streams: Mapping[int, Stream]) -> tuple[dict[int, StreamContents], str]:
        """Makes the group anew with the remaining contents of lost streams; returns these, and an error. Blocks."""
        if self._threads:
            self._coordinator.cut(self._loss_reason or "contents were lost")  # threads may wait for what was not sent
            self._settle()
        reports = list(self._all(self.workers.held).values())  # in the order of `_members`
        progress = self._progress([{n: reached for n, (reached, _) in report.items()} for report in reports])
        contents: dict[int, StreamContents] = {}
        for number, stream in streams.items():
            ranks = enumerate(self._openings[number].ranks)
            holdings = {index: reports[member][number][1] for index, member in ranks if number in reports[member]}
            contents[number] = stream.contents_after_heal(progress[number][1], holdings, self._loss_reason)
        return contents, self._group(progress, contents)

    def _lose(self, reason: str) -> None:
        """Marks all streams as lost, since a process and its shards are lost. Called on a runtime thread."""
        self._loss_reason, state = reason, self._state
        if state.stopped is not None:
            text = stopped_text(state.stopped)
        elif self._has_shrunk:
            text = replaced_text(state.name, "shrunk")
        else:
            text = self._end_reason or lost_text(state.name, reason)
        for stream in tuple(self._streams.values()):  # a loss may be reported after the end
            stream.lost = text

    @property
    def _has_shrunk(self) -> bool:
        return not set(self._members) <= set(self._state.ranks)

    @property
    def over(self) -> int:
        """The current generation if it was stopped, else -1."""
        return self._coordinator.over

    @property
    def has_ended(self) -> bool:
        """True once the processes have stopped."""
        return self._state.stopped is not None or self._runtime.closed

    def close(self) -> None:
        """Ends the coordination of the group; no further meshes use the processes."""
        self._coordinator.close()

    def end(self, reason: str) -> None:
        """Ends the workers, which others replace; later errors have this `reason`. Blocks."""
        self._end_reason = reason
        self._lose(reason)
        self._coordinator.cut(reason)  # first: a rank that waits for the others could not end
        self._coordinator.close()
        for threads in self._threads:
            threads.stop(reason).get()
        self.workers.stop(reason).get()

    def members_of(self, region: Region) -> tuple[int, ...]:
        """Returns ranks in the group of the ranks of a slice. Raises ValueError if some are not in the group."""
        ranks = tuple(region.ranks())
        if not set(ranks) <= set(self._members):
            raise ValueError(
                f"{self._state.name} was shrunk, and some of these processes were left out: make slices of the mesh "
                "that heal_mesh(mesh, shrink=True) gave, or another mesh on new processes"
            )
        return tuple(map(self._members.index, ranks))

    def sender(self, region: Region, lane: "Lane | None" = None) -> Callable[..., Future[ValueMesh[Receipt]]]:
        """Returns a function that sends batches to the workers of a slice; `lane` is the program's stream, or None.

        Blocks briefly at the first sender of another stream, which ranks execute on a thread of its own.
        """
        ranks = frozenset(self.members_of(region))
        if lane is None:
            return partial(self._send_batch, part_of(self.workers, region).batch, None, (), ranks)
        threads = as_it_is(self._threads_of(lane))
        return partial(self._send_batch, part_of(threads, region).batch, threads, (lane.name,), ranks)

    def _threads_of(self, lane: "Lane") -> ActorMesh[StreamWorker]:
        """Returns the actors that execute the batches of a stream of the program."""
        actors, added = self._lane_threads.get(lane), False
        if actors is None:
            with self._order:
                if (actors := self._lane_threads.get(lane)) is not None:  # another thread was faster
                    return actors
                if not self._threads:
                    self._meetings = [
                        Meeting(number, operations, frozenset(self._openings[number].ranks))
                        for number, operations in self._operation_counts.items()
                        if number in self._openings
                    ]
                used = {id(threads) for threads in self._lane_threads.values()}
                actors = next((threads for threads in self._threads if id(threads) not in used), None)
                if actors is None and len(self._threads) < _THREADS:
                    procs = ProcMesh(self._state, region_of(self._spawned))  # with those added by growth
                    spawned: Any = procs.spawn(f"{procs.name}_streams", StreamWorker, state_of(self._spawned).uid)
                    actors = spawned
                    self._threads.append(spawned)
                    added = True
                elif actors is None:
                    actors = self._threads.pop(0)  # the first stream may have ended
                    self._threads.append(actors)
                self._lane_threads[lane] = actors
        if added and self.observer is not None:
            self.observer.joined()
        return actors

    def executors(self, region: Region) -> list[AnyMesh]:
        """Returns the actors that execute operations on a slice: the workers, and those of further streams."""
        return [part_of(actors, region) for actors in (self.workers, *map(as_it_is, self._threads))]

    def _send_batch(
        self,
        endpoint: Endpoint[..., Receipt],
        threads: ActorMesh[StreamWorker] | None,
        names: tuple[str, ...],
        ranks: frozenset[int],
        stream: Stream,
        number: int,
        first: int,
        operations: int,
        commands: Sequence[tuple[object, ...]],
        objects: tuple[object, ...],
    ) -> Future[ValueMesh[Receipt]]:
        """Sends a batch. Ranks exchange values in the order of batches."""
        numbers = encode_numbers([*chain.from_iterable(commands)])
        with self._order:
            self._operation_counts[stream.number] = first + operations
            if threads is not None:
                self._stream_threads[stream.number] = threads
            if objects:
                self._note_programs(stream.number, objects)
                objects = tuple(map(self._note_transfer, objects))
            if not self._threads:
                return self._send(endpoint, stream.number, number, first, numbers, objects)
            try:
                turn = self._turn(stream, ranks, first, commands, objects)
                if objects and isinstance(objects[0], Open):
                    objects = (replace(objects[0], in_turn=True), *objects[1:])
                return self._send(endpoint, stream.number, number, first, numbers, objects, *names, *turn)
            except BaseException:
                self._coordinator.cut("a batch could not be sent")  # others would wait for it
                raise

    def _note_transfer(self, command: object) -> object:
        """Records the generation of a sent value; marks a `Take` as late if that generation has ended."""
        if isinstance(command, Send):
            self._tag_generations[command.tag] = self.generation
        elif isinstance(command, Take) and self._tag_generations.pop(command.tag, self.generation) != self.generation:
            return replace(command, late=True)
        return command

    def _note_programs(self, stream: int, objects: Sequence[object]) -> None:
        """Records the compiled steps among these objects in which ranks do not wait for each other."""
        for command in objects:
            if isinstance(command, Trace) and all(meta.is_own for meta in command.program.metas):
                self._programs.add((stream, command.number))

    def _turn(
        self,
        stream: Stream,
        ranks: frozenset[int],
        first: int,
        commands: Sequence[tuple[object, ...]],
        objects: Sequence[object],
    ) -> tuple[Turn, ...]:
        """Returns the turn of a batch if ranks may wait for each other in it, and records it as the latest."""

        def meets(command: object) -> bool:
            return self._meets(stream, command)

        bounds = meeting(commands, objects, meets, first)
        if bounds is None:
            return ()
        begin, end, done = bounds
        after = tuple(
            (number, operations, None if ranks <= members else tuple(sorted(ranks & members)))
            for number, operations, members in self._meetings
            if number != stream.number and not ranks.isdisjoint(members)
        )
        remaining = [earlier for earlier in self._meetings if not earlier.ranks <= ranks]
        self._meetings = [*remaining, Meeting(stream.number, done, ranks)]
        return (Turn(begin, end, after),)

    def _meets(self, stream: Stream, command: object) -> bool:
        """Returns whether ranks may wait for each other in a command: a plan's number, a `REPLAY`, or an object."""
        match command:
            case int():
                plan = stream.defined.get(command)
                if isinstance(plan, Define):
                    return plan.agrees or not plan.own
                return plan is None or not plan.made.is_own
            case tuple():
                return (stream.number, command[1]) not in self._programs
            case CallRemote():
                return command.joined
            case RunFunction():
                return command.function is not bool  # `bool` only waits for the operations before
            case Trace():
                return (stream.number, command.number) not in self._programs
            case Locals() | Revive():
                return not command.made.is_own
            case PutTensor():
                return any(not (placement == OWN_VALUE or placement.is_replicate()) for placement in command.placements)
            case Define() | Making() | Name() | Cell() | Send() | Take() | GiveBack() | Await() | Open() | DrawFrom():
                return False
        return True

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Sends issued operations; messages to workers in the block arrive in order with them. May block."""
        for stream in tuple(self._streams.values()):
            stream.flush()
        token = current.set(self._context)
        try:
            yield
        finally:
            current.reset(token)

    def _send(self, endpoint: Endpoint[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        token = current.set(self._context)
        try:
            future = endpoint.call(*args, **kwargs)
        finally:
            current.reset(token)
        reported_elsewhere(future)  # at the next use of the mesh
        return future


def workers_on(procs: ProcState) -> list[ActorMesh[TensorWorker]]:
    """Returns the tensor workers of a proc mesh, if it has any."""
    group = _registry.get(procs.uid)
    return [] if group is None else [group.workers]


def processes_of(procs: ProcMesh, device: str) -> MeshProcesses:
    """Returns the workers of a proc mesh or slice, spawned at first use, which blocks.

    Raises RuntimeError if the versions of torch differ.
    """
    state = state_of(procs)
    with _registry_lock:
        group, generation = _registry.get(state.uid), -1
        for uid, processes in tuple(_registry.items()):
            if processes.has_ended:
                _registry.pop(uid).close()
        if group is not None and group.left_out.isdisjoint(region_of(procs).ranks()) and not group.follow_growth():
            group.end(replaced_text(state.name, "other hosts, and another mesh for tensors was made on them"))
            generation, group = group.generation, None
        if group is None:
            group = _registry[state.uid] = MeshProcesses(as_it_is(ProcMesh(state, state.region)), device, generation)
        if group.device != device:
            raise ValueError(f"{state.name} holds tensors on {group.device} already: its meshes cannot be on {device}")
        return group


def shrunk(procs: ProcMesh, device: str) -> MeshProcesses:
    """Returns new workers on these processes only, after others of their proc mesh were lost. Blocks."""
    state = state_of(procs)
    with _registry_lock:
        old = _registry.pop(state.uid, None)
        generation = -1
        if old is not None:
            old.end(lost_text(state.name, "it was shrunk, and its other processes are a mesh of their own now"))
            generation = old.generation
        group = _registry[state.uid] = MeshProcesses(procs, device, generation)
        return group
