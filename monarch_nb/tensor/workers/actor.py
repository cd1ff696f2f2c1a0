"""The actor that executes tensor operations: one in each process of a mesh, with a thread of its own."""

import logging
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from monarch_nb.runtime import Actor, current, endpoint
from monarch_nb.tensor.commands import Open, decode_numbers
from monarch_nb.tensor.errors import Failure
from monarch_nb.tensor.groups.world import StoreAt, World
from monarch_nb.tensor.workers.session import Session
from monarch_nb.transport import held_back

# What comes back of a batch: the operations that failed on this rank, and what was asked for.
Receipt = tuple[list[Failure], list[Any]]


class TensorWorker(Actor):
    """Takes batches of commands; batches of several streams come in the order in which the controller sent them."""

    def __init__(self) -> None:
        for advice in ("_collective_utils", "_redistribute"):  # which the program cannot take: it has called neither
            logging.getLogger(f"torch.distributed.tensor.{advice}").setLevel(logging.ERROR)
        self._member = World()
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
        return self._member.keep_store(one_host)

    @endpoint
    def join(self, at: StoreAt, generation: int, size: int, per_host: int, device: str) -> None:
        """Becomes a member of the world's process group; all streams of an earlier one end."""
        self._sessions.clear()
        self._member.join(at, generation, self._rank(), size, per_host, device)

    @endpoint
    def batch(self, stream: int, number: int, first: int, numbers: bytes, objects: tuple[Any, ...]) -> Receipt:
        """Executes a batch of a stream, with interrupts held back: no rank stops where others go on."""
        if number <= self._taken.get(stream, -1):
            return self._last[stream]
        try:
            receipt = held_back(self._execute, stream, first, numbers, objects)
        except KeyboardInterrupt:  # it came while the batch ran, and the batch has run
            receipt = self._last[stream]
        self._taken[stream] = number
        return receipt

    @endpoint
    def close(self, stream: int) -> None:
        """Ends a stream: its tensors are gone."""
        self._sessions.pop(stream, None)
        self._last.pop(stream, None)
        self._taken.pop(stream, None)

    def __cleanup__(self, error: Exception | None) -> None:
        self._sessions.clear()
        self._member.leave()

    def _execute(self, stream: int, first: int, numbers: bytes, objects: tuple[Any, ...]) -> Receipt:
        session = self._sessions.get(stream)
        given = decode_numbers(numbers)
        if session is None:
            opening, *objects_left = objects
            assert isinstance(opening, Open)
            session = self._sessions[stream] = self._open(opening)
            given, first, objects = given[1:], first + 1, tuple(objects_left)
        receipt = self._last[stream] = session.run(first, given, objects)
        return receipt

    def _open(self, opening: Open) -> Session:
        layout = opening.layout
        ranks = torch.tensor(opening.ranks, dtype=torch.int).view(layout.shape)
        mesh = DeviceMesh(layout.device, ranks, mesh_dim_names=layout.names)
        return Session(mesh, opening.ranks.index(self._rank()))

    def _rank(self) -> int:
        """Its place in the proc mesh."""
        context = current.get()
        assert context is not None
        return context.actor_instance.base_rank
