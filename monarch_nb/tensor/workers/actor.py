"""The actor that executes tensor operations: one in each process of a mesh, with a thread of its own."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from monarch_nb.runtime import Actor, Instance, current, endpoint, runtime
from monarch_nb.tensor.commands import Open, decode_numbers
from monarch_nb.tensor.failure import Failure
from monarch_nb.tensor.groups.member import Membership
from monarch_nb.tensor.groups.world import Place, StoreAt
from monarch_nb.tensor.verbs import AskValues, Used, Values
from monarch_nb.tensor.workers.lost import Lost
from monarch_nb.tensor.workers.session import Session

# What comes back of a batch: the operations that failed on this rank, what was asked for, and the generation of process
# groups that was over before all had run; -1 for none.
Receipt = tuple[list[Failure], list[Any], int]
_PATIENCE_S = 2.0  # for operations that were issued before somebody looks at a tensor
_LOOK_S = 0.01
_PIECE = 1 << 22  # elements that are looked at together: a large shard must not be copied whole


def _values_of(held: Any, edge: int) -> Values:
    """What there is of what a stream holds under a number; None stands for nothing."""
    if isinstance(held, Lost):
        return Values("lost", held.failure.line)
    if not isinstance(held, DTensor):
        return Values("coming")
    with torch.no_grad():
        local = held.to_local()
        first = max(local.dim() - 2, 0)
        corner = local[tuple(slice(0, 1 if dim < first else edge) for dim in range(local.dim()))].cpu()
        shape = tuple(corner.shape)
        if corner.is_complex():
            corner = torch.view_as_real(corner.resolve_conj())
        numbers = corner.double() if corner.is_floating_point() else corner.long()
        found = _Statistics()
        for piece in _pieces(local):
            found.add(piece)
        return found.values(shape, tuple(numbers.flatten().tolist()))


def _pieces(local: torch.Tensor) -> Iterator[torch.Tensor]:
    """All elements, in the order of memory: most shards need not be copied for that."""
    order = sorted(range(local.dim()), key=local.stride, reverse=True)
    flat = local.permute(order).reshape(-1)
    for at in range(0, flat.numel(), _PIECE):
        yield flat[at : at + _PIECE]


class _Statistics:
    """Of all elements that were added, piece by piece."""

    def __init__(self) -> None:
        self._count = self._nan = self._infinite = 0
        self._sum, self._finite = 0.0, 0
        self._least: float | int | None = None
        self._most: float | int | None = None

    def add(self, piece: torch.Tensor) -> None:
        """Elements of one dimension, at least one."""
        self._count += piece.numel()
        if piece.is_complex():
            self._nan += int(piece.isnan().sum())
            self._infinite += int(piece.isinf().sum())
            return
        if not piece.is_floating_point():
            piece = piece.long()
            self._compare(*(int(one) for one in piece.aminmax()))
            self._sum, self._finite = self._sum + float(piece.double().sum()), self._finite + piece.numel()
            return
        piece = piece.float() if piece.dtype.itemsize < 4 else piece
        least, most = (float(one) for one in piece.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            missing = piece.isnan()
            self._nan += int(missing.sum())
            piece = piece[~missing]
            if not piece.numel():
                return
            least, most = (float(one) for one in piece.aminmax())
        self._compare(least, most)
        finite = piece if math.isfinite(least) and math.isfinite(most) else piece[piece.isfinite()]
        self._infinite += piece.numel() - finite.numel()
        self._sum, self._finite = self._sum + float(finite.sum(dtype=torch.float64)), self._finite + finite.numel()

    def _compare(self, least: float, most: float) -> None:
        self._least = least if self._least is None else min(self._least, least)
        self._most = most if self._most is None else max(self._most, most)

    def values(self, shape: tuple[int, ...], corner: tuple[float | int, ...]) -> Values:
        """What it came to."""
        mean = self._sum / self._finite if self._finite and math.isfinite(self._sum) else None
        return Values(
            "there", "", False, shape, corner, self._count, self._least, self._most, mean, self._nan, self._infinite
        )


class TensorWorker(Actor):
    """Takes batches of commands; batches of several streams come in the order in which the controller sent them."""

    __inner__ = True

    def __init__(self) -> None:
        for advice in ("_collective_utils", "_redistribute"):  # which the program cannot take: it has called neither
            logging.getLogger(f"torch.distributed.tensor.{advice}").setLevel(logging.ERROR)
        self._member = Membership(runtime(), self._progress, lambda: self._busy, self._usage, self._values)
        self._busy = 0  # what it does now: another number each time, 0 for nothing
        self._does = count(1)
        self._sessions: dict[int, Session] = {}
        self._taken: dict[int, int] = {}  # the last batch of each stream
        self._last: dict[int, Receipt] = {}  # what came of it: a batch may come twice

    @endpoint
    def version(self) -> str:
        """Which torch this is."""
        return torch.__version__

    @endpoint
    def keep_store(self, one_host: bool) -> StoreAt:
        """Starts what the processes find each other through, on rank 0."""
        return self._member.world.keep_store(one_host)

    @endpoint
    def reached(self) -> dict[int, tuple[int, int]]:
        """Of each stream, how many operations are done, and how many have begun."""
        return {stream: session.reached for stream, session in self._sessions.items()}

    @endpoint
    def join(self, at: StoreAt, place: Place, streams: dict[int, tuple[Open, int, int]]) -> None:
        """Becomes a member of the next generation.

        Of each stream that goes on: its mesh, the first operation that some rank has not done, and the first that none
        has begun. Others end.
        """
        for stream in self._sessions.keys() - streams.keys():
            self._close(stream)
        for stream, session in self._sessions.items():
            session.resume(*streams[stream][1:])
        rank = place.members.index(self._instance().base_rank)
        with self._doing():
            self._member.join(at, place, rank)
        for stream, (opening, _, _) in sorted(streams.items()):
            if stream not in self._sessions and rank in opening.ranks:
                self._open(stream, opening)

    @endpoint
    def batch(self, stream: int, number: int, first: int, numbers: bytes, objects: tuple[Any, ...]) -> Receipt:
        """Executes a batch of a stream."""
        if number <= self._taken.get(stream, -1):
            return self._last[stream]
        with self._doing():
            receipt = self._execute(stream, first, numbers, objects)
        self._taken[stream] = number
        return receipt

    @endpoint
    def close(self, stream: int) -> None:
        """Ends a stream: its tensors are gone."""
        self._close(stream)

    def __interrupted__(self) -> None:
        """Somebody interrupts what runs: functions of the program's end by that, collectives by this (any thread)."""
        self._member.interrupted()

    def __cleanup__(self, error: Exception | None) -> None:
        self._sessions.clear()
        self._member.world.leave()

    def _close(self, stream: int) -> None:
        self._sessions.pop(stream, None)
        self._last.pop(stream, None)
        self._taken.pop(stream, None)
        self._member.world.drop(_name(stream))

    def _execute(self, stream: int, first: int, numbers: bytes, objects: tuple[Any, ...]) -> Receipt:
        session = self._sessions.get(stream)
        given = decode_numbers(numbers)
        if session is None:
            opening, *objects_left = objects
            assert isinstance(opening, Open)
            session = self._open(stream, opening)
            given, first, objects = given[1:], first + 1, tuple(objects_left)
        failures, values = session.run(first, given, objects)
        over = self._member.world.generation if session.is_halted else -1
        receipt = self._last[stream] = (failures, values, over)
        return receipt

    def _open(self, stream: int, opening: Open) -> Session:
        member = self._member
        mesh = member.world.mesh(_name(stream), opening.layout, opening.ranks)
        rank = opening.ranks.index(member.world.rank)
        cell = self._instance().cell
        assert cell is not None
        session = self._sessions[stream] = Session(stream, mesh, opening.ranks, rank, member, cell.interruptible)
        return session

    def _progress(self, stream: int) -> int:
        session = self._sessions.get(stream)
        return session.done if session is not None else 0

    def _usage(self, stream: int) -> Used:
        session = self._sessions.get(stream)
        return session.usage() if session is not None else Used()

    def _values(self, asked: AskValues) -> Values:
        """Waits for the operations that were issued before, unless that takes long. Called on a thread of its own."""
        until = time.monotonic() + _PATIENCE_S
        while self._progress(asked.stream) < asked.after and time.monotonic() < until:
            time.sleep(_LOOK_S)
        behind = self._progress(asked.stream) < asked.after
        session = self._sessions.get(asked.stream)
        found = _values_of(None if session is None else session.env.get(asked.number), asked.edge)
        return msgspec.structs.replace(found, behind=behind)

    @contextmanager
    def _doing(self) -> Iterator[None]:
        self._busy = next(self._does)
        try:
            yield
        finally:
            self._busy = 0

    @staticmethod
    def _instance() -> Instance:
        context = current.get()
        assert context is not None
        return context.actor_instance


def _name(stream: int) -> str:
    """How the groups of a stream's mesh are called."""
    return f"mesh {stream:09}"  # sorted as the numbers are
