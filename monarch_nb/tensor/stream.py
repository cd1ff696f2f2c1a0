"""One mesh's operations on their way to its workers: numbered, in order, in batches, and never too far ahead.

Any thread may issue. What is issued is appended to a queue, which costs next to nothing; batches are cut from it when
it is long, when somebody waits for a result, and else within a millisecond. Each batch is answered by all ranks: with
the operations that failed there, and with what was asked for.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain, count
from typing import Any, Protocol, cast

import torch

from monarch_nb.mesh import ValueMesh
from monarch_nb.runtime import Context, Future, current, runtime
from monarch_nb.supervision import SupervisionError
from monarch_nb.tensor.batch import Batch, Group, Item, Sites, Watcher, flat
from monarch_nb.tensor.commands import (
    FREE,
    NUMBER,
    OBJECT,
    SHARDS,
    WHOLE,
    Cell,
    Define,
    Making,
    Makings,
    Run,
    encode_numbers,
    nbytes_of,
)
from monarch_nb.tensor.errors import ContentsLostError, TensorError, broken, by_operation, gone
from monarch_nb.tensor.failure import Failure
from monarch_nb.tensor.origin import Place, origin_of, place
from monarch_nb.tensor.propagation import Meta, Propagator
from monarch_nb.tensor.references import Held, Memory, Reference
from monarch_nb.tensor.seeds import seed_number
from monarch_nb.tensor.table import TensorTable
from monarch_nb.transport import held_back, uninterrupted

BATCH = 256  # commands that are sent together
AHEAD = 4096  # commands that may be under way: the controller waits then
BYTES_AHEAD = 64 << 20  # of tensors on their way to workers
TOLD, KEPT = 3, 256  # further failed operations that an error names, and those that are remembered

logger = logging.getLogger(__name__)
WAIT_S = 0.001
TICK_S = 0.5  # after which workers let go of tensors that ended since, though nothing else is sent


class Flushed(Protocol):
    """What has something to send."""

    def flush_aside(self) -> None:
        """Sends it, without waiting for anything."""

    def tick(self) -> None:
        """Nothing has been sent for a while."""


class Flusher:
    """Its thread begins with the first use, and sleeps while there is nothing to do."""

    def __init__(self) -> None:
        self._due: deque[Flushed] = deque()
        self._known: weakref.WeakSet[Flushed] = weakref.WeakSet()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def know(self, one: Flushed) -> None:
        """Has it told of the time, for as long as it lives."""
        self._known.add(one)

    def soon(self, one: Flushed) -> None:
        """Has it flushed within a millisecond or so."""
        self._due.append(one)
        self._wake.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="monarch-tensor-flush", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while True:
            if self._wake.wait(TICK_S):
                self._wake.clear()
                time.sleep(WAIT_S)
            else:
                for one in tuple(self._known):
                    one.tick()
            for _ in range(len(self._due)):
                self._due.popleft().flush_aside()


_flusher = Flusher()
_numbers = count(1)


class Stream:
    """The controller's end of one mesh. `title` is the mesh's name; `send` hands a batch to the workers."""

    def __init__(
        self, title: str, propagator: Propagator, device: Any, send: Callable[..., Future[ValueMesh[Any]]], group: Group
    ) -> None:
        self.number = next(_numbers)
        self.title, self.propagator, self.device = title, propagator, device
        self.layout = propagator.layout
        self.table = TensorTable()
        self.held = Held(self.table.entries)
        self.queue: deque[Item] = deque()
        self.told: dict[int, Define | Making] = {}  # plans that the workers know
        self.watcher: Watcher | None = None
        self.makings = Makings()
        self.noticed: set[str] = set()  # operations of whose cost the user was told
        self.seed = 0  # of the random operations to come, in 63 bits
        self.drawn = 0  # random operations since it was set
        self.quiet = True  # nothing waits to be sent
        self.lost: str | None = None  # why its tensors are gone
        self.has_failed = False  # something: contents may be lost
        self.lives = 0  # how often it has gone on after a heal
        self.viewed: weakref.WeakSet[Memory] = weakref.WeakSet()  # with views that may become stale
        self._send, self._group = send, group
        self._context: Context = runtime().context()
        self._batches: deque[Batch] = deque()  # not answered yet
        self._batch, self._issued = count(), 0  # numbers of batches; operations that were sent
        self._over = -1  # the generation of process groups that is over
        self._failed: dict[int, TensorError] = {}  # by operation, the last of them
        self._untold: deque[TensorError] = deque()  # those that have not been raised yet
        self._lock = threading.RLock()  # of sending
        self._taking = threading.RLock()  # of answers
        _flusher.know(self)

    # -- issuing ----------------------------------------------------------------------------------------------------

    def issue(self, command: tuple[Any, ...], where: Place | None) -> None:
        """Appends an operation. Blocks, interruptibly, only where workers are far behind.

        Raises ContentsLostError where the mesh is gone.
        """
        if self.lost is not None:
            raise ContentsLostError(self.lost)
        if self.held.ended:
            self.held.free(self.queue.append)
        if self.watcher is not None:
            self.watcher.issued(command, where)
        self.queue.append((command, where))
        if self.quiet or len(self.queue) >= BATCH:
            self._stir()

    def free(self) -> None:
        """Has workers let go of what nobody refers to any more."""
        self.held.free(self.queue.append)

    def _stir(self) -> None:
        if len(self.queue) >= BATCH:
            self.flush()
        if self.quiet:
            self.quiet = False
            _flusher.soon(self)

    def tell(self, command: object) -> None:
        """Appends what is no operation: a `Command`, or what workers know besides."""
        self.issue((OBJECT, command), place())

    def begin_cell(self) -> None:
        """What is issued from now on is another cell's, for the record. Sent with what is issued next."""
        self.table.clear()
        if self.lost is None:
            self.queue.append(((OBJECT, Cell(self.table.cell)), None))

    def tell_plan(self, plan: Define | Making) -> None:
        """Appends the definition of a plan that workers do not know yet."""
        if self.told.get(plan.number) != plan:
            self.tell(plan)
            self.told[plan.number] = plan

    def draw(self) -> int:
        """The seed of the next random operation."""
        self.drawn += 1
        return seed_number(self.seed, self.drawn)

    def reseed(self, seed: int) -> None:
        """Random operations from now on follow from this number."""
        self.seed, self.drawn = seed % (1 << 63), 0

    def hold(self, meta: Meta, where: Place | None) -> Reference:
        """A reference to a tensor that the next command makes."""
        self.come_back()
        return self.held.hold(self, meta, where)

    def hold_aside(self) -> Reference:
        """A reference to what the next command makes, which is no tensor."""
        return self.held.hold_aside(self)

    # -- sending ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends what was issued. Blocks, interruptibly, while workers are far behind."""
        self.draw_near()
        with self._lock:
            held_back(self._cut)

    def repeat(self, command: tuple[Any, ...], sites: "Sites") -> None:
        """Sends a command that runs many operations, and what was issued before it. Waits for nobody: `draw_near` does.

        Raises ContentsLostError where the mesh is gone.
        """
        if self.lost is not None:
            raise ContentsLostError(self.lost)
        with self._lock:
            self.queue.append((command, sites))
            self._cut()

    def draw_near(self) -> None:
        """Blocks, interruptibly, while workers are far behind. Raises what broke the mesh."""
        self._heed()
        self._keep_close()

    def flush_aside(self) -> None:
        """The same on a thread that must not wait: what cannot be sent now is sent a little later."""
        self.quiet = True
        if self.lost is not None or self._is_over():
            return
        if self._is_far() or not self._lock.acquire(blocking=False):
            self.quiet = False
            _flusher.soon(self)
            return
        try:
            self._cut()
        except Exception:  # the mesh is broken, which is raised where it is used next
            logger.debug("a batch for %s could not be sent", self.title, exc_info=True)
        finally:
            self._lock.release()

    def sent(self) -> int:
        """How many operations were sent, with all that could be sent now. Called on a thread that must not wait."""
        self.flush_aside()
        with self._lock:  # another thread may be sending
            return self._issued

    def tick(self) -> None:
        """Tensors that ended are let go, though nothing else is issued."""
        if self.held.ended and self.quiet:
            self.flush_aside()

    def _cut(self) -> Batch | None:
        """Sends all that is in the queue, as one batch."""
        self.free()
        queue = self.queue
        items = [queue.popleft() for _ in range(len(queue))]
        if not items or self.lost is not None:
            return None
        commands, objects = [command for command, _ in items], list[Any]()
        for at, command in enumerate(commands):
            if command[0] == OBJECT:
                objects.append(command[1])
                commands[at] = (OBJECT,)
        nbytes = sum(map(nbytes_of, objects))
        places = flat(where for command, where in items if command[0] != FREE)
        first, self._issued = self._issued, self._issued + len(places)
        numbers, token = encode_numbers([*chain.from_iterable(commands)]), current.set(self._context)
        try:
            future = self._send(self.number, next(self._batch), first, numbers, tuple(objects))
        except BaseException as error:
            self.lose(gone(self.title, f"a batch could not be sent ({error})"))
            raise
        finally:
            current.reset(token)
        future.watched += 1  # what breaks it is raised where the mesh is used next
        batch = Batch(first, places, nbytes, future)
        self._batches.append(batch)
        return batch

    def _is_far(self) -> bool:
        batches = tuple(self._batches)
        return sum(len(one.places) for one in batches) > AHEAD or sum(one.nbytes for one in batches) > BYTES_AHEAD

    def _is_over(self) -> bool:
        """A group has ended, as is known here. What is sent now would not run: who issues sees to the next group."""
        if self._group.over >= 0:
            return True
        for batch in tuple(self._batches):
            if not batch.future.done() or batch.future.exception(0) is not None:
                return False
            if any(over >= 0 for _, (_, _, over) in batch.future.get(0)):
                return True
        return False

    def _keep_close(self) -> None:
        while self._is_far() and self._batches:
            self._take(self._batches[0])

    # -- answers ----------------------------------------------------------------------------------------------------

    def _heed(self) -> None:
        """Takes what has been answered, and what soon is, since its group has ended. Raises what broke the mesh."""
        while self._batches and (self._batches[0].future.done() or self._group.over >= 0):
            self._take(self._batches[0])
        if self.lost is None:
            self._over = max(self._over, self._group.over)
        self._go_on()

    def _take(self, batch: Batch) -> ValueMesh[Any]:
        """The answers to a batch, and to all before it; waits for them."""
        with self._taking:
            while self._batches and self._batches[0].first < batch.first:
                self._take(self._batches[0])
            try:
                answers: ValueMesh[Any] = batch.future.get()
            except KeyboardInterrupt:
                if batch.future.done():  # ranks were interrupted, too, and have answered
                    self._heed()
                raise
            except SupervisionError as error:
                self.lose(gone(self.title, "a process of it has ended"))
                raise broken(self.title, error, batch.places) from None
            except Exception as error:
                if batch.future.done():  # and not stopped in the debugger, to go on later
                    self.lose(gone(self.title, str(error)))
                raise
            uninterrupted(self._settle, batch, answers)
            self._go_on()
            return answers

    def _settle(self, batch: Batch, answers: ValueMesh[Any]) -> None:
        if not self._batches or self._batches[0] is not batch:
            return
        self._batches.popleft()
        self._over = max(self._over, *(over for _, (_, _, over) in answers))
        failures = [failure for _, (each, _, _) in answers for failure in each]
        self.has_failed = self.has_failed or bool(failures) or self._over >= 0
        for number, of_ranks in by_operation(failures).items():
            where = batch.places[number - batch.first]
            error = TensorError(of_ranks[0].operation, origin_of(where), of_ranks, self.title)
            self._failed[number] = error
            if any(failure.type_name != "KeyboardInterrupt" for failure in of_ranks):  # who interrupts knows
                self._untold.append(error)
        while len(self._failed) > KEPT:
            del self._failed[next(iter(self._failed))]

    def _go_on(self) -> None:
        """Not all ranks failed: whoever waited for them was freed, and their group is of no use any more."""
        if self._over >= 0:
            self._group.regroup(self._over)
            self._over = -1

    def lose(self, reason: str) -> None:
        """Nothing of it can be used any more."""
        if self.lost is None:
            self.lost = reason
        self.queue.clear()
        self._batches.clear()

    def come_back(self) -> None:
        """Goes on where the mesh was lost, and has been healed since; blocks then. Raises ContentsLostError if not."""
        if self.lost is not None:
            self._group.revive(self)

    def begin_anew(self) -> None:
        """The mesh has been healed: what is made from now on is there, and what there was is gone until restored."""
        if self.lost is None:
            return
        with self._lock:  # the flusher's thread may have been about to send when it was lost
            self._batches.clear()
            self.queue.clear()
            why, self.lost = self.lost, None
            self.lives += 1
            self.told.clear()
            self.makings = Makings()
            self.held.stale.clear()
            self.free()
            self.held.all_gone(why, self.queue.append)

    # -- synchronising ----------------------------------------------------------------------------------------------

    def run_everywhere(self, command: Run) -> ValueMesh[Any]:
        """What a function gives on each rank. As `ask` does."""
        return self.ask((OBJECT, command), "execute")

    def ask(self, command: tuple[Any, ...], what: str) -> ValueMesh[Any]:
        """What each rank answers to a command; blocks until all that was issued before has run.

        Raises TensorError for an operation that failed, DeviceMeshError where the mesh is broken.
        """
        where = place()
        self.table.synchronised(where, what)
        if self.watcher is not None:
            self.watcher.asked(what, where)
        self.come_back()
        answers = self._take(self._send_asking(command, where))
        self.raise_failures()
        values = ValueMesh(answers.extent, [values[-1] for _, (_, values, _) in answers])
        lost = [value for _, value in values if isinstance(value, Failure)]
        if lost:
            known = self._failed.get(lost[0].number) if lost[0].stream == self.number else None
            raise known.again() if known is not None else TensorError(lost[0].operation, None, lost, self.title)
        return values

    def fetch(self, number: int, what: str) -> torch.Tensor:
        """The whole of a tensor, as a local one; `what` is how the program asked for it. As `ask` does."""
        return cast(torch.Tensor, self._of((WHOLE, number), what).get(0))

    def number_in(self, number: int, what: str) -> Any:
        """The one element of a tensor, as Python's. As `ask` does."""
        return self._of((NUMBER, number), what).get(0)

    def shards_of(self, number: int) -> ValueMesh[torch.Tensor]:
        """What each rank holds of a tensor. As `ask` does."""
        return self._of((SHARDS, number), "local_shards")

    def _of(self, command: tuple[int, int], what: str) -> ValueMesh[Any]:
        self.come_back()
        self.held.refuse_gone(command[1:])
        return self.ask(command, what)

    def _send_asking(self, command: tuple[Any, ...], where: Place | None) -> Batch:
        """Sends all that was issued, and then a command, whose answer is the last in that of the batch."""
        self.draw_near()
        with self._lock:
            self.queue.append((command, where))
            batch = held_back(self._cut)
        if batch is None:
            raise ContentsLostError(self.lost or f"{self.title} was lost")
        return batch

    def synchronise(self) -> None:
        """Waits until all that was issued has run. Raises TensorError for what failed of it."""
        self.flush()
        while self._batches:
            self._take(self._batches[0])
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raises the first failure that nobody was told of; the others are told with it."""
        if not self._untold:
            return
        error, *others = self._untold
        self._untold.clear()
        for other in others[:TOLD]:
            error.add_note(f"then: {other.summary}")
        if len(others) > TOLD:
            error.add_note(f"and {len(others) - TOLD} operations more")
        raise error
