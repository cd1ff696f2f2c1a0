"""Values of tensors on their way in one process: from the worker that holds them to an actor, and between meshes.

The actor's message and the command of the tensors travel separately. The first to arrive waits for the other; then the
actor runs its endpoint, while the worker waits for its end. Between meshes, streams wait
for each other (`StreamOrder`).
"""

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from monarch_nb.runtime import EncodedObject, LentArguments, calls_of, current_runtime
from monarch_nb.settings import settings
from monarch_nb.tensor.commands import CallRemote, Turn
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.verbs import Failure, LostInputError, LostTensor

_POLL_S = 0.05  # between checks whether the other side can still arrive
_REGROUP_S = 5.0  # after the end of a process group, its commands arrive within this time or never
_HEADER = 67  # numbers: the loss, or dtype, dimensions and sizes, at most 64 in PyTorch
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)  # both ends have the same PyTorch
Tag = tuple[str, int]  # the issuing process, and a number


class _Placeholders(threading.local):
    """The values for the placeholders that this thread unpickles."""

    values: Sequence[torch.Tensor] = ()


_placeholders = _Placeholders()


def given_tensor(index: int) -> torch.Tensor:
    """Returns the value of this process for the placeholder of a tensor, which is unpickled by this function."""
    return _placeholders.values[index]


class NotGivenError(RuntimeError):
    """The values of tensors among the arguments of a call have not arrived."""


class TensorHandover:
    """One call, shared by its two sides."""

    def __init__(self) -> None:
        self.values: Sequence[torch.Tensor] = ()
        self.lost: Failure | None = None  # the failure of the sender
        self.withdrawn = ""  # why no values will be passed
        self.begun = False  # the actor has reached this call
        self.result: object = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._ready = threading.Event()
        self._callback: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def give(self, values: Sequence[torch.Tensor] = (), lost: Failure | None = None, withdrawn: str = "") -> None:
        """Ends the actor's wait. Called by the worker."""
        with self._lock:
            self.values, self.lost, self.withdrawn = values, lost, withdrawn
            self._ready.set()
            callback = self._callback
        if callback is not None:
            callback()

    @property
    def is_given(self) -> bool:
        """True once the actor need not wait."""
        return self._ready.is_set()

    def when_given(self, callback: Callable[[], object]) -> None:
        """Calls back once, on the worker's thread; does not if the values were passed before."""
        with self._lock:
            self._callback = callback

    def wait(self, seconds: float) -> bool:
        """Blocks until the values are passed, or for that long; returns whether they are."""
        return self._ready.wait(seconds)


class _Handovers:
    """The handovers of this process, until both sides have arrived."""

    def __init__(self) -> None:
        self._open: dict[Tag, TensorHandover] = {}
        self._lock = threading.Lock()

    def of(self, tag: Tag) -> TensorHandover:
        """Returns the handover with this tag; the first side to arrive makes it."""
        with self._lock:
            return self._open.setdefault(tag, TensorHandover())

    def close(self, tag: Tag) -> None:
        """Removes a handover: both sides have it, or one will not arrive."""
        with self._lock:
            self._open.pop(tag, None)


HANDOVERS = _Handovers()


class GivenArguments(LentArguments):
    """The arguments of a call whose tensors the worker of this process provides.

    `returns`: it takes the result.
    """

    def __init__(self, tag: Tag, encoded: EncodedObject, *, returns: bool) -> None:
        self._tag, self._encoded, self._returns = tag, encoded, returns

    def bound(self, method: Callable[..., object], *, replies: bool, is_async: bool) -> Callable[[], object]:
        """See `LentArguments`."""
        handover = HANDOVERS.of(self._tag)
        handover.begun = True

        def run() -> object:
            try:
                timeout = _RegroupTimeout()
                while not handover.wait(_POLL_S):
                    timeout.check()
                return self._finish(handover, self._call_method(handover, method))
            except BaseException as error:
                self._fail(handover, error, replies=replies)
                return None
            finally:
                HANDOVERS.close(self._tag)
                handover.done.set()

        async def run_on_loop() -> object:
            try:
                loop, arrival, timeout = asyncio.get_running_loop(), asyncio.Event(), _RegroupTimeout()
                handover.when_given(lambda: loop.call_soon_threadsafe(arrival.set))
                while not handover.is_given:
                    try:
                        await asyncio.wait_for(arrival.wait(), _POLL_S)
                    except TimeoutError:
                        timeout.check()
                value = self._call_method(handover, method)
                if inspect.isawaitable(value):
                    value = await value
                return self._finish(handover, value)
            except BaseException as error:
                self._fail(handover, error, replies=replies)
                return None
            finally:
                HANDOVERS.close(self._tag)
                handover.done.set()

        return run_on_loop if is_async else run

    def _call_method(self, handover: TensorHandover, method: Callable[..., object]) -> object:
        """Calls the method with the tensors, unless they are lost."""
        if handover.lost is not None:
            raise LostInputError(handover.lost)
        if handover.withdrawn:
            raise NotGivenError(handover.withdrawn)
        args, kwargs = _load(self._encoded, handover.values)
        return method(*args, **kwargs)

    def _finish(self, handover: TensorHandover, value: object) -> object:
        if self._returns:
            handover.result = value
            return None
        memories = {tensor.untyped_storage()._cdata for tensor in handover.values}

        def own_copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.untyped_storage()._cdata in memories else tensor

        return tree_map_only(torch.Tensor, own_copy, value)  # operations continue while the answer is sent

    def _fail(self, handover: TensorHandover, error: BaseException, *, replies: bool) -> None:
        handover.error = error
        by_operation = self._returns or isinstance(error, LostInputError | NotGivenError)  # its failure is reported
        if replies or not by_operation or not isinstance(error, Exception):
            raise error


class ArgumentsByRank:
    """Arguments with tensors of which each rank gets a value of its own, by rank in the whole mesh.

    Unpickled in an actor they are the arguments of its rank.
    """

    def __init__(self, encoded: EncodedObject, values: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._encoded, self._values = encoded, values

    def __reduce__(self) -> tuple[object, ...]:
        return _of_this_rank, (self._encoded, dict(self._values))


def _of_this_rank(encoded: EncodedObject, values: Mapping[int, Sequence[torch.Tensor]]) -> object:
    return _load(encoded, values[current_runtime().context().actor_instance.base_rank])


def _load(encoded: EncodedObject, values: Sequence[torch.Tensor]) -> tuple[Sequence[object], dict[str, object]]:
    """Returns arguments with these tensors in place of placeholders."""
    _placeholders.values = values
    try:
        args, kwargs = encoded.load(current_runtime())
        return args, kwargs
    finally:
        _placeholders.values = ()


class _RegroupTimeout:
    """The time that an actor waits for a worker whose group is over."""

    def __init__(self) -> None:
        self._over_since: float | None = None

    def check(self) -> None:
        """Raises NotGivenError once no values can arrive any more."""
        membership = current_runtime().feature(GROUPS).membership
        over = None if membership is None else membership.over
        if over is None and self._over_since is None:
            return
        self._over_since = self._over_since or time.monotonic()
        if time.monotonic() > self._over_since + _REGROUP_S:
            reason = "the mesh was grouped anew" if over is None else over.reason
            raise NotGivenError(f"the tensors among the arguments have not come: {reason}")


class CallActor:
    """Calls an actor of the same process, as a function of tensors: passes them, and waits for the end of the call.

    With `returns` it returns the actor's result, and raises its error.
    """

    def __init__(self, tag: Tag, actors: str, call: str, name: str, *, returns: bool) -> None:
        self._tag, self._actors, self._call, self._returns = tag, actors, call, returns
        self.__name__ = name
        self._is_given = False

    def __call__(self, *tensors: torch.Tensor) -> object:
        """Runs it; blocks."""
        handover, since = HANDOVERS.of(self._tag), time.monotonic()
        self._is_given = True
        handover.give(tensors)
        while not handover.done.wait(_POLL_S):
            if not handover.begun and self._is_dropped(since):
                HANDOVERS.close(self._tag)
                if self._returns:
                    raise NotGivenError(f"{self.__name__} did not run: the actor has ended, or it was cancelled")
                return None
        if self._returns and handover.error is not None:
            raise handover.error
        return handover.result

    def withdraw(self, failure: Failure) -> None:
        """Keeps the actor from running the call, since a tensor is lost; does nothing if the values were passed."""
        if not self._is_given:
            HANDOVERS.of(self._tag).give(lost=failure)

    def _is_dropped(self, since: float) -> bool:
        """Returns whether the actor will not run it. Its message, and the actor itself, may still arrive."""
        runtime = current_runtime()
        ends = [cause for _, cause in runtime.latest_actors({self._actors}).values()]
        if self._call in runtime.cancelled or (ends and None not in ends):
            return True
        if time.monotonic() < since + settings.message_delivery_timeout + _REGROUP_S:
            return False
        cells = [cell for (mesh, _), cell in tuple(runtime.cells.items()) if mesh == self._actors]
        return not any(self._call in calls_of(cell) for cell in cells)


def withdraw(command: object, failure: Failure) -> None:
    """Keeps the actor that a command was to call from waiting for it."""
    if isinstance(command, CallRemote) and isinstance(command.function, CallActor):
        command.function.withdraw(failure)


class Withdraw:
    """Keeps the actor from running a call whose message has not reached all."""

    def __init__(self, tag: Tag, reason: str) -> None:
        self._tag, self._why = tag, reason

    def __call__(self) -> None:
        """Ends the actor's wait."""
        HANDOVERS.of(self._tag).give(withdrawn=self._why)


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

    Each stream of the program runs on a thread of its own, the main one on that of the worker. Streams of the same
    ranks exchange values by the same process groups, and gloo and NCCL match operations of ranks by the order in which
    each of them begins them. So the parts of batches in which ranks may wait for each other (`Turn`) run one after the
    other, on each rank in the order in which they were sent; everything else runs when its stream reaches it. Beyond
    that, a stream waits where a borrow begins or ends, or where it receives a value from another stream (`Await`).

    No rank waits forever: a command waits only for commands that were sent before it, on this rank (its turn, a borrow,
    its place in its thread) or on others (the same exchange, or a value that was sent). So of all unfinished commands,
    the one that was sent first can go on. A command that could not be sent ends the generation of process groups, and
    with it each wait here.

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
