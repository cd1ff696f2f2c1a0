"""Tensor meshes whose ranks are threads of this process: all of the product but its processes and its transport.

Batches of commands are the same, each rank has a session of its own, and collectives go through PyTorch's process
group for threads. A case costs milliseconds, and none of it goes over a socket.
"""

import contextlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from monarch_nb.mesh import ValueMesh
from monarch_nb.runtime import Future, resolved_future
from monarch_nb.shape import Extent
from monarch_nb.tensor import device
from monarch_nb.tensor.commands import WHOLE, PutTensor, decode_numbers, encode_numbers
from monarch_nb.tensor.errors import call_site
from monarch_nb.tensor.groups.world import TorchGroups
from monarch_nb.tensor.handle import MeshTensor, current, upload
from monarch_nb.tensor.kernels import prepare
from monarch_nb.tensor.propagation import MeshLayout, Placements, Propagator
from monarch_nb.tensor.seeds import Generators
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.workers.handover import StreamOrder, Transit
from monarch_nb.tensor.workers.session import WorkerSession

SILENT_S = 20.0  # after which ranks are taken to wait for each other


class RanksApart(BaseException):
    """Some ranks failed where others did not, or wait for others: this process is of no use any more."""


class Member:
    """What a session asks of the others."""

    over = None

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def all_failed(self, failure: Any, ranks: tuple[int, ...], begun: int | None = None) -> bool:
        try:
            self._barrier.wait(SILENT_S / 3)
        except threading.BrokenBarrierError:
            raise RanksApart(failure.line) from None
        return True


class Ranks:
    """Threads that take the place of workers. They are daemons, and last as long as the process."""

    def __init__(self, count: int) -> None:
        threaded._install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        self.count = count
        self._asked: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
        self._asking = threading.Lock()  # the thread that flushes sends batches of either mesh
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._sessions: list[dict[int, WorkerSession]] = [{} for _ in range(count)]
        self._worlds = [TorchGroups() for _ in range(count)]
        self.values: list[Any] = []  # what rank 0 has answered
        store = dist.HashStore()
        for rank in range(count):
            threading.Thread(target=self._run, args=(rank, store), daemon=True, name=f"rank {rank}").start()

    def mesh(self, layout: MeshLayout) -> Stream:
        """A mesh of the first of them. The same as the mesh of processes opens it."""
        prepare()
        group = SimpleNamespace(over=-1, observer=None, draws={})
        send = partial(self._send, layout)
        stream = Stream(str(layout.shape), Propagator(layout, leaf=MeshTensor), device.new_device(), send, group)  # type: ignore[arg-type]
        device.occupy(stream, SimpleNamespace(), lambda _: None)  # type: ignore[arg-type]
        barrier = threading.Barrier(layout.size)

        def open_one(rank: int) -> None:
            ranks = tuple(range(layout.size))
            mesh = self._worlds[rank].mesh(f"mesh {stream.number}", layout, ranks)
            member: Any = Member(barrier)
            sessions, nothing = self._sessions[rank], contextlib.nullcontext
            sessions[stream.number] = WorkerSession(
                stream.number,
                mesh,
                ranks,
                rank,
                member,
                nothing,
                Transit(),
                lambda: [each.env for each in sessions.values()],
                StreamOrder(lambda stream: 0, lambda: False),
                lambda: None,
                Generators(),
            )

        self._each(layout.size, open_one)
        return stream

    def _send(
        self,
        layout: MeshLayout,
        stream: Stream,
        batch: int,
        first: int,
        count: int,
        commands: Sequence[tuple[Any, ...]],
        objects: tuple[Any, ...],
    ) -> Future[Any]:
        given = decode_numbers(encode_numbers([*chain.from_iterable(commands)]))

        def run(rank: int) -> Any:
            own = tuple(
                replace(each, tensor=each.tensor.clone()) if isinstance(each, PutTensor) else each for each in objects
            )
            failures, values = self._sessions[rank][stream.number].run(first, given, own)  # processes share no memory
            return failures, values, -1

        answers = self._each(layout.size, run)
        self.values += answers[0][1]
        return resolved_future(ValueMesh(Extent(layout.names, layout.shape), answers))

    def _each(self, count: int, what: Any) -> list[Any]:
        found: dict[int, Any] = {}
        with self._asking:
            for rank in range(count):
                self._asked[rank].put(what)
            while len(found) < count:
                try:
                    rank, answer = self._answers.get(timeout=SILENT_S)
                except queue.Empty:
                    raise RanksApart(f"only ranks {sorted(found)} have answered") from None
                if isinstance(answer, BaseException):
                    raise RanksApart(f"rank {rank}: {type(answer).__name__}: {answer}") from answer
                found[rank] = answer
        return [found[rank] for rank in range(count)]

    def _run(self, rank: int, store: Any) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=self.count, store=store)
        world = self._worlds[rank]
        world.rank, world.size = rank, self.count
        while True:
            what = self._asked[rank].get()
            try:
                answer = what(rank)
            except BaseException as error:
                answer = error
            self._answers.put((rank, answer))


def distributed(stream: Stream, tensor: torch.Tensor, placements: Placements) -> MeshTensor:
    """A tensor of the mesh with these values. Where it is a sum of parts, each rank's part is another one."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    parts = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
    if not parts:
        return upload(stream, tensor, placements)
    sizes = [stream.layout.shape[dim] for dim in parts]
    finite = tensor.isfinite()
    factors = torch.tensor([2.0, *[0.0] * (torch.Size(sizes).numel() - 2), -1.0]).to(tensor.dtype)
    stacked = torch.stack(
        [torch.where(finite, tensor * each, tensor if each == 2 else torch.zeros_like(tensor)) for each in factors]
    ).view(*sizes, *tensor.shape)
    shards = [
        Shard(parts.index(dim)) if dim in parts else Shard(p.dim + len(parts)) if isinstance(p, Shard) else p
        for dim, p in enumerate(placements)
    ]
    with torch.no_grad():
        summed = upload(stream, stacked, tuple(shards)).sum(tuple(range(len(parts))))
    assert isinstance(summed, MeshTensor)
    assert summed.placements == placements, (summed.placements, placements)
    return summed


def fetched(ranks: Ranks, stream: Stream, tensors: Sequence[MeshTensor]) -> list[torch.Tensor]:
    """The whole of each, with one message. Raises what any operation raised."""
    if not tensors:
        return []
    *others, last = [current(tensor) for tensor in tensors]
    ranks.values.clear()
    for number in others:
        stream.issue((WHOLE, number), call_site())
    stream.fetch(last, "full_tensor")
    return list(ranks.values)
