"""The actors that execute tensor operations: one in each process of a mesh, and others there for further streams."""

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from types import FrameType
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from monarch_nb.runtime import Actor, Instance, current, current_runtime, endpoint
from monarch_nb.tensor.commands import Open, Receipt, Turn, decode_numbers
from monarch_nb.tensor.groups.world import GroupSpec, Membership, StoreAddress
from monarch_nb.tensor.replicas import StreamContents
from monarch_nb.tensor.seeds import BORROWED, THREAD, Generators
from monarch_nb.tensor.verbs import AskValues, LostTensor, MemoryUsed, Values
from monarch_nb.tensor.workers.handover import StreamOrder, Transit
from monarch_nb.tensor.workers.plans import Env
from monarch_nb.tensor.workers.session import WorkerSession

_VALUES_WAIT_S = 2.0  # for operations that were issued before values are read
_POLL_S = 0.01
_PIECE_SIZE = 1 << 22  # elements per step of the statistics, to avoid copies of large shards


def _values_of(value: object, edge: int) -> Values:
    """Corner and statistics of the object that a stream holds under a number, or None."""
    if isinstance(value, LostTensor):
        return Values("lost", value.failure.line)
    if not isinstance(value, DTensor):
        return Values("coming")
    with torch.no_grad():
        local = value.to_local()
        first = max(local.dim() - 2, 0)
        corner = local[tuple(slice(0, 1 if dim < first else edge) for dim in range(local.dim()))].cpu()
        shape = tuple(corner.shape)
        if corner.is_complex():
            corner = torch.view_as_real(corner.resolve_conj())
        numbers = corner.double() if corner.is_floating_point() else corner.long()
        statistics = _Statistics()
        for piece in _pieces(local):
            statistics.add(piece)
        return statistics.values(shape, tuple(numbers.flatten().tolist()))


def _pieces(local: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields all elements in memory order, which avoids a copy of most shards."""
    order = sorted(range(local.dim()), key=local.stride, reverse=True)
    flat = local.permute(order).reshape(-1)
    for start in range(0, flat.numel(), _PIECE_SIZE):
        yield flat[start : start + _PIECE_SIZE]


class _Statistics:
    """Statistics of all elements that were added."""

    def __init__(self) -> None:
        self._count = self._nan = self._infinite = 0
        self._sum, self._finite = 0.0, 0
        self._least: float | int | None = None
        self._most: float | int | None = None

    def add(self, piece: torch.Tensor) -> None:
        """Adds a non-empty one-dimensional piece."""
        self._count += piece.numel()
        if piece.is_complex():
            self._nan += int(piece.isnan().sum())
            self._infinite += int(piece.isinf().sum())
            return
        if not piece.is_floating_point():
            piece = piece.long()
            self._compare(*(int(bound) for bound in piece.aminmax()))
            self._sum, self._finite = self._sum + float(piece.double().sum()), self._finite + piece.numel()
            return
        piece = piece.float() if piece.dtype.itemsize < 4 else piece
        least, most = (float(bound) for bound in piece.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            missing = piece.isnan()
            self._nan += int(missing.sum())
            piece = piece[~missing]
            if not piece.numel():
                return
            least, most = (float(bound) for bound in piece.aminmax())
        self._compare(least, most)
        finite = piece if math.isfinite(least) and math.isfinite(most) else piece[piece.isfinite()]
        self._infinite += piece.numel() - finite.numel()
        self._sum, self._finite = self._sum + float(finite.sum(dtype=torch.float64)), self._finite + finite.numel()

    def _compare(self, least: float, most: float) -> None:
        self._least = least if self._least is None else min(self._least, least)
        self._most = most if self._most is None else max(self._most, most)

    def values(self, shape: tuple[int, ...], corner: tuple[float | int, ...]) -> Values:
        """Returns the result, with these first elements."""
        mean = self._sum / self._finite if self._finite and math.isfinite(self._sum) else None
        return Values(
            "there", "", False, shape, corner, self._count, self._least, self._most, mean, self._nan, self._infinite
        )


def warm_up() -> None:
    """Imports and runs once the code of the first group and the first operation, in a process without a rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"  # until the rank's environment is set
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        mesh = DeviceMesh("cpu", [0], mesh_dim_names=("rank",))
        with torch.no_grad():
            cast(DTensor, distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]).sum()).full_tensor()
    finally:
        dist.destroy_process_group()


class _Executor(Actor):
    """An actor whose thread executes batches of commands, in the order in which the controller sent them to it."""

    __inner__ = True

    def __init__(self) -> None:
        self.busy = 0  # number of the current run, 0 if idle
        self._run_numbers = count(1)
        self._executing: WorkerSession | None = None

    def operation_in(self, frame: FrameType) -> tuple[int, int] | None:
        """Returns the stream and the number of the operation that runs in this frame; None if unknown."""
        return None if self._executing is None else self._executing.operation_in(frame)

    def operation_name(self, frame: FrameType) -> str:
        """Returns the operation that runs in this frame, such as `aten.mm.default`; "" for none. Thread-safe."""
        executing = self._executing
        return "" if executing is None else executing.operation_name(frame)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.busy, THREAD.runs_operations = next(self._run_numbers), True
        try:
            yield
        finally:
            self.busy, THREAD.runs_operations = 0, False

    @contextmanager
    def _executing_session(self, session: WorkerSession) -> Iterator[None]:
        self._executing = session
        try:
            yield
        finally:
            self._executing = None

    @staticmethod
    def _instance() -> Instance:
        context = current.get()
        assert context is not None
        return context.actor_instance


class TensorWorker(_Executor):
    """Executes the batches of main streams, and holds the state that all streams of the process share."""

    def __init__(self) -> None:
        super().__init__()
        for advice in ("_collective_utils", "_redistribute"):  # advice for functions that the program has not called
            logging.getLogger(f"torch.distributed.tensor.{advice}").setLevel(logging.ERROR)
        self.member = self._member = Membership(
            current_runtime(), self._progress, self._running_number, self._usage, self._values, self._settle
        )
        self._sessions: dict[int, WorkerSession] = {}
        self._ended: set[int] = set()  # streams that are closed
        self._joined = 0  # the last stream that there was when this process joined its generation
        self._order = StreamOrder(self._done, lambda: self._member.over is not None)
        self._transit = Transit()
        self._stream_workers: weakref.WeakSet[StreamWorker] = weakref.WeakSet()
        self._own = Generators()  # for operations of the main stream
        self._generators: weakref.WeakValueDictionary[int, Generators] = weakref.WeakValueDictionary({0: self._own})
        self._interrupts = False  # True while this process is being interrupted
        self._batches: dict[int, int] = {}  # the last batch of each stream
        self._receipts: dict[int, Receipt] = {}  # its receipt, since a batch may arrive twice

    def _settle(self) -> None:
        for session in tuple(self._sessions.values()):
            session.settle()

    def local_tensors(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Yields the tensors that the streams hold in this process, by the numbers of stream and tensor."""
        for stream, session in tuple(self._sessions.items()):
            for number, value in tuple(session.env.items()):
                if isinstance(value, DTensor):
                    yield (stream, int(number)), value._local_tensor

    @endpoint
    def version(self) -> str:
        """Returns the version of torch."""
        return torch.__version__

    @endpoint
    def keep_store(self, one_host: bool) -> StoreAddress:
        """Starts the store through which processes find each other. Called on rank 0."""
        return self._member.world.keep_store(one_host)

    @endpoint
    def reached(self) -> dict[int, tuple[int, int]]:
        """Numbers of operations done and begun, by stream, without streams whose tensors this process lacks."""
        return {stream: session.reached for stream, session in self._sessions.items() if session.is_whole}

    @endpoint
    def held(self) -> dict[int, tuple[tuple[int, int], list[int]]]:
        """Like `reached`, each with the tensors whose shards are here."""
        return {
            stream: (session.reached, session.held()) for stream, session in self._sessions.items() if session.is_whole
        }

    def _restore(self, contents: dict[int, StreamContents]) -> str:
        try:
            with self._running():
                for stream, session in sorted(self._sessions.items()):
                    if stream in contents:
                        session.restore(contents[stream])
        except Exception as error:
            self._member.world.connections.cut()  # frees ranks that wait for this one
            return f"{type(error).__name__}: {error}"
        return ""

    @endpoint
    def join(
        self,
        store: StoreAddress,
        spec: GroupSpec,
        streams: dict[int, tuple[Open, int, int]],
        contents: dict[int, StreamContents],
    ) -> str:
        """Joins the next generation.

        `streams` has for each stream that continues: its mesh, the first operation that some rank has not done, and the
        first that none has begun. Other streams end. After a heal, `contents` are exchanged with other ranks; returns
        the error of that exchange, or "".
        """
        for stream in self._sessions.keys() - streams.keys():
            self.end_stream(stream)
        for stream, session in self._sessions.items():
            session.resume(*streams[stream][1:])
        self._transit.clear()
        rank = spec.members.index(self._instance().base_rank)
        with self._running():
            self._member.join(store, spec, rank)
        for stream, (opening, _, _) in sorted(streams.items()):
            if stream not in self._sessions and rank in opening.ranks:
                self._open(stream, opening, is_whole=stream not in contents)
        self._joined = max(streams, default=0)
        return self._restore(contents)

    @endpoint
    def batch(
        self,
        stream: int,
        number: int,
        first: int,
        numbers: bytes,
        objects: tuple[object, ...],
        turn: Turn | None = None,
    ) -> Receipt:
        """Executes a batch of a stream; with a turn, streams of this process run at the same time."""
        return self.execute(self, stream, number, first, numbers, objects, turn)

    @endpoint
    def close(self, stream: int) -> None:
        """Ends a stream and drops its tensors."""
        self.end_stream(stream)

    def __interrupted__(self) -> None:
        """Handles an interrupt, which ends functions by itself, but not collectives. Called on any thread."""
        self._member.interrupted(lambda: self.busy)
        self.interrupt_others(self)

    def interrupt_others(self, first: _Executor) -> None:
        """Interrupts the code of other streams of the process, too, when one is interrupted."""
        if self._interrupts:
            return
        self._interrupts = True
        try:
            targets = {id(executor) for executor in (self, *self._stream_workers)} - {id(first)}
            for cell in tuple(current_runtime().cells.values()):
                if id(cell.obj) in targets:
                    cell.interrupt()
        finally:
            self._interrupts = False

    def __cleanup__(self, error: Exception | None) -> None:
        self._sessions.clear()
        self._member.world.leave()

    def end_stream(self, stream: int) -> None:
        """Ends a stream, on the thread that executes its batches."""
        self._sessions.pop(stream, None)
        self._receipts.pop(stream, None)
        self._batches.pop(stream, None)
        self._ended.add(stream)
        self._member.world.drop(_mesh_name(stream))

    def execute(
        self,
        executor: _Executor,
        stream: int,
        number: int,
        first: int,
        numbers: bytes,
        objects: tuple[object, ...],
        turn: Turn | None,
    ) -> Receipt:
        """Executes a batch on the thread of an executor of this process."""
        if number <= self._batches.get(stream, -1):
            return self._receipts[stream]
        with executor._running():
            session = self._sessions.get(stream)
            commands = decode_numbers(numbers)
            if session is None:
                opening, *objects_left = objects
                assert isinstance(opening, Open)
                session = self._open(stream, opening, connected=not opening.in_turn)
                commands, first, objects = commands[1:], first + 1, tuple(objects_left)
                turn = None if turn is None else Turn(turn.begin - 1, turn.end - 1, turn.after)
            with executor._executing_session(session):
                failures, values = session.run(first, commands, objects, turn)
        self._order.advanced()
        over = self._member.world.generation if session.is_halted else -1
        receipt = self._receipts[stream] = (failures, values, over)
        self._batches[stream] = number
        return receipt

    def _open(self, stream: int, opening: Open, *, is_whole: bool = True, connected: bool = True) -> WorkerSession:
        member, name = self._member, _mesh_name(stream)
        mesh = member.world.mesh(name, opening.layout, opening.ranks, connected=connected)
        rank = opening.ranks.index(member.world.rank)
        session = self._sessions[stream] = WorkerSession(
            stream,
            mesh,
            opening.ranks,
            rank,
            member,
            self._interruptible,
            self._transit,
            self._envs,
            self._order,
            lambda: member.world.connect(name),
            self._generators.setdefault(opening.lane, Generators(shared=False)),
            is_whole=is_whole,
        )
        return session

    @classmethod
    def _interruptible(cls) -> AbstractContextManager[None]:
        """Returns a context that an interrupt of the executor that runs it may end."""
        cell = cls._instance().cell
        assert cell is not None
        return cell.interruptible()

    def _envs(self) -> list[Env]:
        return [session.env for session in tuple(self._sessions.values())]

    def add_executor(self, executor: "StreamWorker") -> None:
        """Registers the thread of another stream."""
        self._stream_workers.add(executor)

    def _running_number(self) -> int:
        return next(filter(None, (executor.busy for executor in (self, *self._stream_workers))), 0)

    def _done(self, stream: int) -> int | None:
        """Returns how many operations a stream has done: sys.maxsize if it has ended; None if it has not begun."""
        session = self._sessions.get(stream)
        if session is not None:
            return session.done
        return sys.maxsize if stream in self._ended or stream <= self._joined else None

    def _progress(self, stream: int) -> int:
        session = self._sessions.get(stream)
        return session.done if session is not None else 0

    def _usage(self, stream: int) -> MemoryUsed:
        session = self._sessions.get(stream)
        return session.usage() if session is not None else MemoryUsed()

    def _values(self, query: AskValues) -> Values:
        """Reads values after the operations issued before, or after a time-out. Called on a thread of its own."""
        until = time.monotonic() + _VALUES_WAIT_S
        while self._progress(query.stream) < query.after and time.monotonic() < until:
            time.sleep(_POLL_S)
        is_behind = self._progress(query.stream) < query.after
        session = self._sessions.get(query.stream)
        values = _values_of(None if session is None else session.env.get(query.number), query.edge)
        return msgspec.structs.replace(values, behind=is_behind)


class StreamWorker(_Executor):
    """Executes the batches of further streams of the program on a thread of its own, beside the worker of its process.

    `main` is the uid of the mesh of workers.
    """

    def __init__(self, main: str) -> None:
        super().__init__()
        BORROWED.share()
        self._main = main
        self._main_worker: TensorWorker | None = None

    @property
    def _worker(self) -> TensorWorker:
        if self._main_worker is None:
            instance = self._instance()
            self._main_worker = cast(TensorWorker, current_runtime().cells[self._main, instance.base_rank].obj)
            self._main_worker.add_executor(self)
        return self._main_worker

    @endpoint
    def batch(
        self,
        stream: int,
        number: int,
        first: int,
        numbers: bytes,
        objects: tuple[object, ...],
        name: str,
        turn: Turn | None = None,
    ) -> Receipt:
        """Executes a batch of a stream; `name` is the stream's."""
        worker, recorder, began = self._worker, current_runtime().recorder, time.monotonic()
        threading.current_thread().name = f"stream {name}"
        try:
            return worker.execute(self, stream, number, first, numbers, objects, turn)
        finally:
            if recorder is not None:
                recorder.stretch("span", f"stream {name}", began)

    @endpoint
    def close(self, stream: int) -> None:
        """Ends a stream and drops its tensors."""
        self._worker.end_stream(stream)

    @endpoint
    def rest(self) -> None:
        """Replies when all batches that were sent before are done."""

    def __interrupted__(self) -> None:
        """See `TensorWorker`."""
        worker = self._main_worker
        if worker is not None:
            worker.member.interrupted(lambda: self.busy)
            worker.interrupt_others(self)


def _mesh_name(stream: int) -> str:
    """Name prefix of the groups of a stream's mesh."""
    return f"mesh {stream:09}"  # sorted as the numbers are
