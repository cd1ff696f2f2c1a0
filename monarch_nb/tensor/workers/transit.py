"""Values of ranks' own on their way between meshes on the same processes, and waits of the streams of a process.

Each stream of the program runs on a thread of its own, the main one on that of the worker. Streams of the same ranks
exchange values by the same process groups, and gloo and NCCL match operations of ranks by the order in which each of
them begins them. So the parts of batches in which ranks may wait for each other (`Turn`) run one after the other, on
each rank in the order in which they were sent; everything else runs when its stream reaches it. Beyond that, a stream
waits where a borrow begins or ends, or where it receives a value from another stream (`Await`).

No rank waits forever: a command waits only for commands that were sent before it, on this rank (its turn, a borrow,
its place in its thread) or on others (the same exchange, or a value that was sent). So of all unfinished commands, the
one that was sent first can go on. A command that could not be sent ends the generation of process groups, and with it
each wait here.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from monarch_nb.tensor.commands import Turn
from monarch_nb.tensor.failure import Failure, LostTensor

_POLL_S = 0.05  # between two checks of a waiting thread for the end of the generation
_HEADER = 67  # numbers: the loss, or dtype, dimensions and sizes, at most 64 in PyTorch
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)  # both ends have the same PyTorch


class Transit:
    """The values that one process sends to others of its group. A new generation begins with none."""

    def __init__(self) -> None:
        self._own_values: dict[int, torch.Tensor | LostTensor] = {}  # for this process itself, by tag
        self._pending: deque[tuple[Any, torch.Tensor]] = deque()
        self._lock = threading.Lock()  # of the pending sends: each stream has its own thread

    def clear(self) -> None:
        """Forgets the values sent in an ended generation."""
        self._own_values.clear()
        self._pending.clear()

    def send(
        self, value: torch.Tensor | LostTensor, targets: tuple[int, ...], own: int, tag: int, lends: bool = False
    ) -> None:
        """Sends a copy of a value, or notice of its loss, to members of the group, of which this is number `own`.

        With `lends` it sends the value itself, for this process.
        """
        if lends:
            self._own_values[tag] = value
            return
        with self._lock:
            while self._pending and self._pending[0][0].is_completed():
                self._pending.popleft()
        if not targets:
            return
        if isinstance(value, LostTensor):
            failure = value.failure
            header, data = [1, failure.number, failure.stream, failure.rank], None
        else:
            data = value.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
            header = [0, _DTYPES.index(data.dtype), data.dim(), *data.shape]
        head = torch.tensor(header + [0] * (_HEADER - len(header)))
        for target in targets:
            if target == own:
                self._own_values[tag] = value if data is None else data.clone()
                continue
            self._post(head, target, tag)
            if data is not None and data.numel():
                self._post(data.view(-1).view(torch.uint8), target, tag)

    def _post(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        self._pending.append((dist.isend(tensor, target, tag=tag), tensor))

    def take(self, source: int, own: int, tag: int, lost: Failure | None = None) -> torch.Tensor | LostTensor:
        """Returns the value from a member; blocks. `lost`: it was sent in an ended generation."""
        if lost is not None:
            return LostTensor(lost)
        if source == own:
            return self._own_values.pop(tag)
        header = torch.empty(_HEADER, dtype=torch.int64)
        dist.recv(header, source, tag=tag)
        lost, *fields = header.tolist()
        if lost:
            number, stream, rank = fields[:3]
            text = "what another mesh was to give is lost"
            return LostTensor(Failure(number, "to_mesh", rank, "LostInputError", text, "", stream, True))
        value = torch.empty(fields[2 : 2 + fields[1]], dtype=_DTYPES[fields[0]])
        if value.numel():
            dist.recv(value.view(-1).view(torch.uint8), source, tag=tag)
        return value


class StreamOrder:
    """Waits of the threads of one process for each other.

    `done` returns the number of operations that a stream has done, None for a stream that is not open yet; `is_over`
    returns whether the generation of process groups has ended.
    """

    def __init__(self, done: Callable[[int], int | None], is_over: Callable[[], bool]) -> None:
        self._done, self._is_over = done, is_over
        self._changed = threading.Condition()
        self._waiting = 0

    def advanced(self) -> None:
        """Wakes the waiting threads: a stream has done operations that they may wait for."""
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def await_done(self, stream: int, operations: int) -> None:
        """Blocks until a stream has done `operations` operations. Raises RuntimeError if the generation ends first."""
        if self._has_done(stream, operations):
            return
        with self._changed:
            self._waiting += 1
            try:
                while not self._has_done(stream, operations):
                    if self._is_over():
                        raise RuntimeError("the group of processes has ended, and with it what this waits for")
                    self._changed.wait(_POLL_S)
            finally:
                self._waiting -= 1

    def await_turn(self, turn: Turn, member: int) -> None:
        """Blocks until it is the turn of a batch on this member of the group; raises as `await_done`."""
        for stream, operations, members in turn.after:
            if members is None or member in members:
                self.await_done(stream, operations)

    def _has_done(self, stream: int, operations: int) -> bool:
        done = self._done(stream)
        return done is not None and done >= operations
