"""The stream of operations from the controller to the workers of one mesh: numbered, ordered, batched, in a window.

Any thread may issue. Issuing appends to a queue, which is cheap. The queue is sent as a batch when it is long, when a
caller waits for a result, and otherwise within a few milliseconds. All ranks reply to each batch, with the failed
operations and the requested values.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, repeat, starmap
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from monarch_nb.mesh import ValueMesh
from monarch_nb.runtime import (
    Context,
    Future,
    current,
    current_runtime,
    derived_future,
    explain_stop,
    unretrieved,
    when_done,
)
from monarch_nb.supervision import SupervisionError
from monarch_nb.tensor.commands import (
    FLUSHER,
    FREE,
    NUMBER,
    OBJECT,
    OWN,
    SHARDS,
    WHOLE,
    BatchesInFlight,
    Cell,
    CommandBatch,
    Define,
    Making,
    Makings,
    Receipt,
    RunFunction,
    nbytes_of,
)
from monarch_nb.tensor.errors import (
    CallSite,
    ContentsLostError,
    StreamFailures,
    TensorError,
    broken_mesh,
    by_operation,
    call_site,
    lost_text,
    origin_of,
)
from monarch_nb.tensor.lanes import ACTIVE, check_fetching
from monarch_nb.tensor.propagation import Meta, Propagator
from monarch_nb.tensor.references import (
    UNSENT,
    CallSites,
    HeldObjects,
    Item,
    LiveEntry,
    LogicalMemory,
    Reference,
    StreamGroup,
    TensorTable,
    WriteRecord,
)
from monarch_nb.tensor.replicas import StreamContents, contents_of
from monarch_nb.tensor.seeds import StreamDraws
from monarch_nb.tensor.summary import memory_note
from monarch_nb.tensor.verbs import Failure
from monarch_nb.transport import held_back, uninterrupted

if TYPE_CHECKING:
    from monarch_nb.tensor.compiled.capture import Recording
    from monarch_nb.tensor.handle import MeshTensor
    from monarch_nb.tensor.ranks.streams import Stream as Lane

BATCH_SIZE = 1024  # commands that are sent without delay
BATCH_PART = 512  # the same while workers have one batch, and for the first batch after a value was read
FAILURE_WAIT_S = 2.0  # for the error of an operation whose results are lost

T = TypeVar("T")
logger = logging.getLogger(__name__)


def _raise(error: Exception) -> None:
    raise error


_numbers = count(1)


class Stream:
    """Command stream from the controller to the workers of one mesh.

    `title` is the name of the mesh; `send` sends a batch to the workers.
    """

    is_simulated = False

    def __init__(
        self,
        title: str,
        propagator: "Propagator[MeshTensor]",
        device: torch.device,
        send: Callable[..., Future[ValueMesh[Receipt]]],
        group: StreamGroup,
    ) -> None:
        self.lane: Lane | None = None  # the program's stream; None for the main one
        self.draws = StreamDraws(group)
        self.number = next(_numbers)
        self.title, self.propagator, self.device = title, propagator, device
        self.layout = propagator.layout
        self.table = TensorTable()
        self.queue: deque[Item] = deque()
        self.held = HeldObjects(self.table.entries, self.queue.append)
        self.defined: dict[int, Define | Making] = {}  # plans that the workers have
        self.watcher: Recording | None = None
        self.makings = Makings()
        self.noticed: set[str] = set()  # operations that were warned of
        self.quiet = True  # no flush is scheduled
        self.awaits_reply = False  # the scheduled flush is put off until a reply
        self.due = 0.0  # time of the scheduled flush, by the monotonic clock
        self._full = BATCH_PART  # length of the queue at which it may be sent without delay
        self.coalesces = False  # the queue is sent at the end of a block of the program
        self.lost: str | None = None  # why the tensors are lost, if they are
        self.has_failed = False  # an operation has failed, so that contents may be lost
        self.heals = 0  # number of heals that the stream has survived
        self.viewed: weakref.WeakSet[LogicalMemory] = weakref.WeakSet()  # memory with views that can become stale
        self._send, self._group = send, group
        self._context: Context = current_runtime().context()
        self._batches = BatchesInFlight()
        self._batch_numbers, self._issued, self._bytes = count(), 0, 0  # batch numbers; operations and bytes sent
        # The ranks' choices for attention, by their arguments.
        self.kernels: dict[tuple[object, ...], int] = {}
        self._checked_until = 0  # operations whose replies confirm the group
        self._over = -1  # the generation of process groups that has ended, or -1
        self._failures = StreamFailures()
        self._lock = threading.RLock()  # held while sending
        self._settling = threading.RLock()  # held while replies are processed
        unretrieved.ready()
        FLUSHER.register(self)

    # -- issuing ----------------------------------------------------------------------------------------------------

    def issue(self, command: tuple[object, ...], site: CallSite | None, written: Sequence[WriteRecord] = ()) -> None:
        """Appends an operation, with records of its writes. Blocks, interruptibly, only while the window is exceeded.

        Raises ContentsLostError if the mesh is lost.
        """
        if self.lost is not None:
            raise ContentsLostError(self.lost)
        if self.watcher is not None:
            self.watcher.issued(command, site)
        if self._group.observer is not None:
            site = self._group.observer.issued(site)
        if ACTIVE.coalesced is not None:
            self.coalesces = True
            ACTIVE.coalesced.add(self)
        elif len(self.queue) >= self._full:
            if self._full == BATCH_SIZE or self._batches.unanswered < 2:
                self.flush()  # before: a command whose issue raises is not sent
            else:
                self._full = BATCH_SIZE
        self.queue.append((command, site, written))
        if self.quiet:
            self.quiet = False
            FLUSHER.schedule(self)

    def free(self) -> None:
        """Removes the records of unreferenced tensors, which the next batch frees on the workers."""
        self.held.forget([item.number for item in self.queue.copy() if type(item) is LiveEntry])

    def issue_object(self, command: object) -> None:
        """Appends a command that is sent as an object, such as `Put` or `RunFunction`."""
        self.issue((OBJECT, command), call_site())

    def handed_out(self, reference: Reference, func: torch._ops.OpOverload) -> None:
        """Records another handle of a tensor, by `detach` or `alias`, which workers do not need."""

    def begin_cell(self) -> None:
        """Starts the records of another cell; sent with the next command."""
        self.table.clear()
        if self.lost is None:
            self.queue.append(((OBJECT, Cell(self.table.cell)), None, ()))

    def define(self, plan: Define | Making) -> None:
        """Appends the definition of a plan unless the workers have it."""
        if self.defined.get(plan.number) != plan:
            self.issue_object(plan)
            self.defined[plan.number] = plan

    def hold(self, meta: Meta, site: CallSite | None) -> Reference:
        """Returns a reference to a tensor that the next command makes."""
        self.resume_if_healed()
        return self.held.hold(self, meta, site)

    def hold_object(self) -> Reference:
        """Returns a reference to an object other than a tensor that the next command makes."""
        return self.held.hold_object(self)

    # -- sending ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends issued operations. Blocks, interruptibly, while the window is exceeded."""
        self.wait_for_window()
        with self._lock:
            held_back(self._send_batch)

    def repeat(self, command: tuple[object, ...], sites: CallSites, written: Sequence[WriteRecord]) -> None:
        """Sends a command that runs many operations, after those issued before. Does not wait for the window.

        Raises ContentsLostError if the mesh is lost.
        """
        if self.lost is not None:
            raise ContentsLostError(self.lost)
        with self._lock:
            self.queue.append((command, sites, written))
            self._send_batch()

    def wait_for_window(self) -> None:
        """Blocks, interruptibly, while the window is exceeded. Raises SupervisionError if the mesh is broken."""
        self._process_replies()
        self._drain_to_window()

    @property
    def in_flight(self) -> int:
        """The number of batches that some rank has not replied to, or 2 if there are more."""
        return self._batches.unanswered

    def flush_nowait(self) -> None:
        """As `flush`, without blocking: reschedules commands that cannot be sent now."""
        self.quiet = True
        if self.lost is not None or self.coalesces or self._is_over():
            return
        if self._batches.exceed_window(self._issued, self._bytes) or not self._lock.acquire(blocking=False):
            self.quiet = False
            FLUSHER.schedule(self)
            return
        try:
            self._send_batch()
        except Exception:  # a broken mesh is reported at its next use
            logger.debug("a batch for %s could not be sent", self.title, exc_info=True)
        finally:
            self._lock.release()

    def sent(self) -> int:
        """Sends commands that can be sent without waiting, and returns the number of operations sent so far."""
        self.flush_nowait()
        with self._lock:  # another thread may be sending
            return self._issued

    def tick(self) -> None:
        """Frees unreferenced tensors although nothing else is issued, and reports failures of unfetched results."""
        if self.queue and self.quiet:
            self.flush_nowait()
        if self._settling.acquire(blocking=False):
            try:
                self._settle_replied()
            finally:
                self._settling.release()
        for error in self._failures.overdue():  # a program that fetches results does so within a tick
            unretrieved.forget(partial(_raise, error))

    def _settle_replied(self) -> None:
        """Processes replies that have arrived, without acting on them."""
        while self._batches and self._batches[0].future.done() and self._batches[0].future.exception(0) is None:
            batch = self._batches[0]
            self._settle_batch(batch, batch.future.get(0))

    def _send_batch(self) -> CommandBatch | None:
        """Sends the whole queue as one batch."""
        items = self._take_queue()
        if not items:
            return None
        if self.lost is not None:
            self._discard(items)
            return None
        first_byte, first = self._bytes, self._issued
        commands: list[tuple[object, ...]] = []
        objects: list[object] = []
        sites: list[CallSite | None] = []
        freed: list[int] = []
        for item in items:
            if type(item) is LiveEntry:
                freed.append(item.number)
                commands.append((FREE, item.number))
                continue
            command, site, written = item
            if command[0] == OBJECT:
                objects.append(command[1])
                command = (OBJECT,)
            commands.append(command)
            for record in written:
                record.written = first + len(sites)
            if type(site) is CallSites:
                sites += site
            else:
                sites.append(site)
        self.held.forget(freed)
        self._bytes += sum(map(nbytes_of, objects))
        if self._group.observer is not None:
            self._group.observer.sent(self.number, first, sites)
        self._issued += len(sites)
        number, token = next(self._batch_numbers), current.set(self._context)
        try:
            future = self._send(self, number, first, len(sites), commands, tuple(objects))
        except BaseException as error:
            self._discard(items)  # some ranks may have them
            self.lose(lost_text(self.title, f"a batch could not be sent ({error})"))
            raise
        finally:
            current.reset(token)
        # Waiting workers are faster than the controller, and each batch wakes them: larger ones are better.
        self._full = BATCH_PART if self._batches.unanswered else BATCH_SIZE
        future.watched += 1  # its error is raised at the next use of the mesh
        when_done(future, self._on_reply)
        batch = CommandBatch(number, first, sites, first_byte, future)
        self._batches.append(batch)
        return batch

    def _take_queue(self) -> list[Item]:
        """Empties the queue. Other threads may append to it meanwhile, or empty it because the stream is lost."""
        items: list[Item] = []
        with suppress(IndexError):
            items.extend(starmap(self.queue.popleft, repeat((), len(self.queue))))
        return items

    def _on_reply(self, _: object) -> None:
        if self.awaits_reply:
            self.awaits_reply = False
            FLUSHER.schedule(self)

    def _is_over(self) -> bool:
        """Returns whether the group is known to have ended, so that commands sent now would not run."""
        if self._group.over >= 0:
            return True
        for batch in tuple(self._batches):
            if batch.first < self._checked_until:
                continue
            if not batch.future.done() or batch.future.exception(0) is not None:
                return False
            if any(over >= 0 for _, (_, _, over) in batch.future.get(0)):
                return True
            self._checked_until = batch.first + len(batch.sites)
        return False

    def _drain_to_window(self) -> None:
        while self._batches and self._batches.exceed_window(self._issued, self._bytes):
            self._settle_up_to(self._batches[0])

    # -- replies ----------------------------------------------------------------------------------------------------

    def _process_replies(self) -> None:
        """Processes replies that have arrived, or soon will if the group has ended. Raises if the mesh is broken."""
        while self._batches and (self._batches[0].future.done() or self._group.over >= 0):
            self._settle_up_to(self._batches[0])
        if self.lost is None:
            self._over = max(self._over, self._group.over)
        self._regroup_if_over()

    def _settle_up_to(self, batch: CommandBatch) -> ValueMesh[Receipt]:
        """Waits for the replies to a batch and all earlier ones; returns those to the batch."""
        with self._settling:
            while self._batches and self._batches[0].number < batch.number:
                self._settle_up_to(self._batches[0])
            try:
                replies = batch.future.get()
            except KeyboardInterrupt:
                if batch.future.done():  # the ranks were interrupted, too, and have replied
                    self._process_replies()
                raise
            except SupervisionError as error:
                self.lose(lost_text(self.title, "a process of it has ended"))
                raise broken_mesh(self.title, error, batch.sites) from None
            except Exception as error:
                if batch.future.done():  # else stopped in the debugger, to continue later
                    self.lose(lost_text(self.title, str(error)))
                raise
            uninterrupted(self._settle_batch, batch, replies)
            self._regroup_if_over()
            return replies

    def _settle_batch(self, batch: CommandBatch, replies: ValueMesh[Receipt]) -> None:
        if not self._batches or self._batches[0] is not batch:
            return
        self._batches.popleft()
        self._over = max(self._over, *(over for _, (_, _, over) in replies))
        failures = [failure for _, (rank_failures, _, _) in replies for failure in rank_failures]
        self.has_failed = self.has_failed or bool(failures) or self._over >= 0
        for number, operation_failures in by_operation(failures).items():
            site = batch.sites[number - batch.first]
            operation, note = operation_failures[0].operation, memory_note(self, operation_failures)
            error = TensorError(operation, origin_of(site), operation_failures, self.title, note)
            self._failures.add(number, error, operation_failures)

    def _regroup_if_over(self) -> None:
        """Makes a new process group if the current one has ended."""
        if self._over >= 0:
            self._group.regroup(self._over)
            self._over = -1

    def lose(self, reason: str) -> None:
        """Marks all tensors as lost, and drops queued commands and batches in flight."""
        if self.lost is None:
            self.lost = reason
        self._drop()

    def resume_if_healed(self) -> None:
        """Resumes a lost stream, which blocks. Raises ContentsLostError if the mesh has not been healed."""
        if self.lost is not None:
            self._group.revive(self)

    def _drop(self) -> None:
        """Drops the batches in flight and queued commands, except those that free tensors."""
        self._batches.clear()
        self._discard(self._take_queue())

    def _discard(self, items: Sequence[Item]) -> None:
        """Drops commands except those that free tensors, which survivors of a heal hold."""
        for item in items:
            if type(item) is LiveEntry:
                self.queue.append(item)
                continue
            for record in item[2]:
                record.written = UNSENT

    def end_sending(self) -> None:
        """Blocks while a thread sends a batch, and drops queued commands; the stream is lost."""
        with self._lock:
            self._drop()

    def contents_after_heal(self, start: int, ranks: Mapping[int, Collection[int]], reason: str) -> StreamContents:
        """Returns the tensors that have contents after a heal; marks the others as lost, for this reason.

        All surviving ranks have run the operations before `start`; `ranks` are the tensors that each of them holds.
        """
        self._drop()
        self.free()
        return contents_of(self.held, self.layout, start, ranks, reason)._replace(operations=self._issued)

    def reset_after_heal(self) -> None:
        """Restarts after a heal, with the tensors whose contents were restored."""
        with self._lock:
            self._drop()
            self.lost = None
            self.heals += 1
            self.draws.forget()
            self.defined.clear()
            self.held.steps.clear()
            self.makings = Makings()

    # -- synchronising ----------------------------------------------------------------------------------------------

    def run_everywhere(self, command: RunFunction[T], written: Iterable[Reference] = ()) -> ValueMesh[T]:
        """Runs a function that may write to `written` on each rank; returns the results; blocks and raises as `ask`."""
        self.resume_if_healed()
        self.draws.announce(self)
        return self.ask((OBJECT, command), "execute", [reference.writes for reference in written])

    def ask(self, command: tuple[object, ...], operation: str, written: Sequence[WriteRecord] = ()) -> ValueMesh[Any]:
        """Returns the value of a command by rank; blocks until all earlier operations have run.

        `operation` names it in records. Raises TensorError for an operation that failed, DeviceMeshError if the
        mesh is broken.
        """
        check_fetching()
        site = call_site()
        self.table.synchronised(site, operation)
        if self.watcher is not None:
            self.watcher.asked(operation, site)
        self.resume_if_healed()
        replies = self._finish(lambda: self._settle_up_to(self._send_request(command, site, written)))
        values: ValueMesh[Any] = ValueMesh(replies.extent, [values[-1] for _, (_, values, _) in replies])
        self._raise_lost([value for _, value in values if isinstance(value, Failure)])
        return values

    def _raise_lost(self, lost: Sequence[Failure]) -> None:
        """Raises the error of the operation whose lost results were requested."""
        for failure in lost:
            error = self._group.failure(failure.stream, failure.number)
            if error is not None:
                raise error.copy()
        if lost:
            raise TensorError(lost[0].operation, None, lost, self.title)

    def failure(self, number: int) -> TensorError | None:
        """Returns the error of an operation that failed on some rank, if known soon; it then counts as seen."""
        deadline = time.monotonic() + FAILURE_WAIT_S  # the reply of another stream may have been faster
        for batch in tuple(self._batches):
            if batch.first <= number:
                batch.future.wait(max(0.0, deadline - time.monotonic()))
        with self._settling:
            self._settle_replied()
        return self._failures.error_of(number)

    def requested(self, commands: Sequence[tuple[object, ...]], operation: str) -> Future[list[ValueMesh[Any]]]:
        """Sends requests after issued operations; returns the values by rank, once all of these have run.

        Blocks only while the window is exceeded. The future raises as `ask`, except failures of operations on which the
        requested values do not depend.
        """
        check_fetching()
        site = call_site()
        if self.watcher is not None:
            self.watcher.asked(operation, site)
        self.resume_if_healed()
        self.wait_for_window()
        with self._lock:
            self.queue.extend((command, site, ()) for command in commands)
            batch = held_back(self._send_batch)
        if batch is None:
            raise ContentsLostError(self.lost or f"{self.title} was lost")
        count = len(commands)

        def values() -> list[ValueMesh[Any]]:
            replies = self._settle_up_to(batch)
            rows = [[*values[len(values) - count :]] for _, (_, values, _) in replies]
            self._raise_lost([value for of_rank in rows for value in of_rank if isinstance(value, Failure)])
            return [ValueMesh(replies.extent, list(column)) for column in zip(*rows, strict=True)]

        return derived_future(batch.future, values, lambda: f"{operation} at {origin_of(site)}")

    def own_of(self, numbers: Sequence[int], rank: int) -> Future[list[ValueMesh[Any]]]:
        """Requests one rank's values of tensors; see `requested`."""
        self.resume_if_healed()
        self.held.require_contents(numbers)
        commands: list[tuple[object, ...]] = [(OWN, number, rank) for number in numbers]
        return self.requested(commands or [(OBJECT, RunFunction(bool, (), {}))], "fetch_shard")

    def fetch(self, number: int, operation: str) -> torch.Tensor:
        """Returns a whole tensor as a local one; blocks and raises as `ask`."""
        tensor: torch.Tensor = self._fetch((WHOLE, number), operation).get(0)
        return tensor

    def number_in(self, number: int, operation: str) -> complex:
        """Returns the only element of a tensor as a Python number; blocks and raises as `ask`."""
        value: complex = self._fetch((NUMBER, number), operation).get(0)
        return value

    def shards_of(self, number: int) -> ValueMesh[torch.Tensor]:
        """Returns the shard of each rank; blocks and raises as `ask`."""
        return self._fetch((SHARDS, number), "local_shards")

    def _fetch(self, command: tuple[int, int], operation: str) -> ValueMesh[Any]:
        self.resume_if_healed()
        self.held.require_contents(command[1:])
        return self.ask(command, operation)

    def _send_request(
        self, command: tuple[object, ...], site: CallSite | None, written: Sequence[WriteRecord]
    ) -> CommandBatch:
        """Sends issued operations and a command, whose value is the last of the batch."""
        self.wait_for_window()
        with self._lock:
            self.queue.append((command, site, written))
            batch = held_back(self._send_batch)
        if batch is None:
            raise ContentsLostError(self.lost or f"{self.title} was lost")
        return batch

    def synchronise(self) -> None:
        """Blocks until all issued operations have run. Raises TensorError for one that failed."""
        self._finish(self._settle_all)

    def _settle_all(self) -> None:
        self.flush()
        while self._batches:
            self._settle_up_to(self._batches[0])

    def _finish(self, wait: Callable[[], T]) -> T:
        """Waits for operations, and raises the first failure that was not raised yet.

        Explains a Ctrl-C between two waits, as while output is shown, like one in the wait for the last batch.
        """
        try:
            result = wait()
        except KeyboardInterrupt as stop:
            explained = stop.args or getattr(stop, "__notes__", ())
            if self._batches and not explained and not (last := self._batches[-1].future).done():
                explain_stop(last, stop)
            raise
        self._full = BATCH_PART
        self._failures.raise_first()
        return result

    def raise_unseen(self) -> None:
        """Waits for all issued operations, and raises the first failure whose result was not fetched."""
        self.synchronise()
        self._failures.raise_unseen()
