"""One life of one actor in its process: its inbox, its object, and how its messages are run."""

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_nb.routing import Inbox, InboxOverflow
from monarch_nb.runtime.actors.answering import AnsweringActor
from monarch_nb.runtime.actors.cell_host import CellHost
from monarch_nb.runtime.actors.endpoint import endpoints_of, kind_of, undeclared
from monarch_nb.runtime.actors.executors import AsyncExecutor, SyncExecutor
from monarch_nb.runtime.actors.exposure import Exposure
from monarch_nb.runtime.actors.life import RunsOn, SpawnActor
from monarch_nb.runtime.context import Ancestor, Context, Instance, current
from monarch_nb.runtime.ports import ReplyPort
from monarch_nb.runtime.spans import continued, instrumented
from monarch_nb.settings import settings
from monarch_nb.shape import Extent, Point
from monarch_nb.wire import (
    Header,
    Status,
    decode,
    encode,
    encode_exception,
)
from monarch_nb.wire.header import SKIP

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

logger = logging.getLogger(__name__)

EXEC = "__cell__"  # runs a cell's source between messages
HOOK = "__healed__"  # tells survivors who was re-created
ANEW = "__anew__"  # makes the object again, of the same arguments
RELOAD = "__reload__"  # gives the actor a new class between messages
STRUCK = "__interrupted__"  # of actors of the library whose endpoints are hit by interrupts only where they say so


class ActorCell(AnsweringActor):
    """Hosts one actor. `arrive` is called by the reading thread; all user code runs on the executor's thread."""

    def __init__(self, process: CellHost, spec: SpawnActor, header: Header, parcel: "Parcel | None") -> None:
        super().__init__(process, spec)
        self.process = process
        self.mesh, self.rank, self.incarnation = header.mesh, header.rank, header.incarnation
        self.inbox: Inbox[Any] = Inbox()
        self.running = None
        self.began: tuple[str, float] | None = None  # the last call, and when
        self.constructing = False  # its `__init__` runs
        self.calls = 0  # messages that were begun, for statistics
        self.errors = 0  # those that raised
        self.task: asyncio.Task[Any] | None = None
        self.watch: Callable[[Any], Any] | None = None  # wraps methods while a debugger has breakpoints here
        self._calls: dict[str, asyncio.Task[Any] | None] = {}  # async endpoints that run, by call
        self._exposure = Exposure(process.clock)
        self._unanswered: Header | None = None  # the message that a sync endpoint runs
        self._spawn = (header, parcel)
        labels, sizes = spec.region.labels, spec.region.sizes
        point = spec.region.region.point_of_base_rank(header.rank)
        shown = f"<{spec.class_name} {spec.name}{point if labels else ''}>"
        itself = Ancestor(shown, spec.name, spec.class_name, labels, sizes, point.rank)
        self.instance = Instance(
            process,
            stream=f"{header.mesh}.{header.rank}.{header.incarnation}",
            lineage=(*spec.creators, itself),
            rank=point,
            mesh=header.mesh,
            base_rank=header.rank,
            incarnation=header.incarnation,
            cell=self,
        )
        self.endpoints: dict[str, Any] = {}
        self.cell_namespace: dict[str, Any] = {"__name__": "__main__"}  # of cells run on this actor
        self.executor: SyncExecutor | AsyncExecutor = (
            AsyncExecutor(self, process.node.flush)
            if spec.kind == "async"
            else SyncExecutor(self, process.node.flush, main=spec.runs_on is RunsOn.MAIN_THREAD)
        )

    # -- reading thread ---------------------------------------------------------------------------------------------

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Takes a message in; it is queued as soon as all before it have come."""
        if self.cause is not None:
            self.refuse(header, parcel)
            return
        with self._arriving:  # the reading thread, and actors of this process that send to it
            if header.seq < 0:
                self._enqueue(header, parcel)
                return
            try:
                ready = self.inbox.arrive(header.sender, header.seq, (header, parcel), self.process.clock.monotonic())
            except InboxOverflow as error:
                self.process.node.consumed(parcel)
                self.process.refuse(header, self.process.supervisor.lost_cause(header, str(error)))
                return
            for message in ready:
                self._enqueue(*message)
            waits = self.inbox.waiting
        if waits:
            self.process.watch_gap(self)

    def expire_gaps(self, now: float) -> list[Any]:
        """Gaps that will not be filled any more; what came after them is run."""
        with self._arriving:
            gaps = list(self.inbox.expired(now, settings.message_delivery_timeout))
            for gap in gaps:
                for message in self.inbox.skip(gap.sender, now):
                    self._enqueue(*message)
        return gaps

    def queued(self) -> list[Any]:
        """Messages that wait, for diagnosis."""
        return self.executor.waiting()

    def _enqueue(self, header: Header, parcel: "Parcel") -> None:
        if header.method == SKIP:  # only keeps the numbers whole
            self.process.node.consumed(parcel)
            return
        self.executor.put((header, parcel))
        if self.cause is not None:  # it ended in between: nobody else will look into the queue
            self.refuse_queued()

    # -- the executor's thread --------------------------------------------------------------------------------------

    def construct(self) -> None:
        """Makes the object; on failure the actor fails with the error as its cause."""
        header, parcel = self._spawn
        origin = header.chain[0] if header.chain else header.call
        token = current.set(Context(self.instance, self.instance.rank, cause=origin))
        self.process.log.begin(origin)
        try:
            if header.src != self.process.address:  # what the set-up itself spawns here is a part of it
                self.process.await_setup()
            if self.obj is None and parcel is not None:
                cls, args, kwargs = self.process.decode_spawn(parcel)
                self.endpoints = endpoints_of(cls)
                obj = _new(cls, args, kwargs)
                self.process.arm(self, cls)
                init = obj.__init__ if self.watch is None else self.watch(obj.__init__)
                self.constructing = True
                self._exposure.begin()
                init(*args, **kwargs)
                self._exposure.end()
                self.obj = obj
            else:
                self.endpoints = endpoints_of(type(self.obj))
            if self.cause is None:
                self.state = "alive"
            self._reply(header, Status.VALUE, encode(None))
        except BaseException as error:
            self._exposure.end()
            if self.cause is None:
                self.fail("init", error, header)
            else:  # it was stopped before it had begun
                self._refuse_current(header)
        finally:
            self.constructing = False
            self._spawn = (header, None)
            self.process.log.end(origin)
            current.reset(token)
            if parcel is not None:
                self.process.node.consumed(parcel)

    def is_concurrent(self, method: str) -> bool:
        """True for endpoints that do not hold up the next message."""
        endpoint = self.endpoints.get(method)
        return endpoint is not None and endpoint._concurrent

    def _open(self, header: Header, parcel: "Parcel") -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The method and arguments of a message."""
        try:
            args, kwargs = decode(parcel.parts, self.process)
        finally:
            self.process.node.consumed(parcel)
        if header.method == EXEC:
            return self.process.run_in_actor, (self.obj, self.cell_namespace, *args), kwargs
        if header.method == RELOAD:
            return self._reload, args, kwargs
        if header.method == ANEW:
            return self._make_anew, args, kwargs
        if header.method == HOOK:
            return self.obj.__healed__, args, kwargs
        endpoint = self.endpoints.get(header.method)
        if endpoint is None:
            endpoint = undeclared(type(self.obj), header.method)
            if endpoint is None:
                raise AttributeError(f"{self.spec.class_name} has no endpoint {header.method!r} in this process")
            self.endpoints[header.method] = endpoint
        method = endpoint._method.__get__(self.obj)
        if endpoint._instrument:
            method = instrumented(method, header.method.lstrip("@!"))
        if self.watch is not None:
            method = self.watch(method)
        if endpoint._explicit_response_port:
            args = (ReplyPort(header), *args)
        return method, args, kwargs

    def _reload(self, cls: type) -> Any:
        """The object gets a new class and keeps its state; its `__reload__(old)` hook runs then, if it has one.

        Raises TypeError where the two cannot be swapped: another kind of actor, or other slots.
        """
        old = type(self.obj)
        kind = kind_of(cls)
        if kind != self.spec.kind:
            raise TypeError(f"{cls.__name__} is {kind} now and was {self.spec.kind}: spawn a new mesh")
        self.obj.__class__ = cls
        self.endpoints = endpoints_of(cls)
        hook = getattr(self.obj, RELOAD, None)
        return hook(old) if hook is not None else None

    def _make_anew(self, cls: type, arguments: Any) -> None:
        """Another object of the same arguments takes the place of the one there is."""
        args, kwargs = arguments.load(self.process)
        obj = _new(cls, args, kwargs)
        self.constructing = True
        try:
            obj.__init__(*args, **kwargs)
        finally:
            self.constructing = False
        self.obj, self.endpoints = obj, endpoints_of(cls)

    def _begin(self, header: Header, parcel: "Parcel") -> tuple[Any, Any] | None:
        """None where the message names a place that there is not; its sender has been told."""
        try:
            return self._enter(header)
        except Exception as error:
            self.process.node.consumed(parcel)
            self._reply(header, Status.EXCEPTION, encode_exception(error))
            return None

    def _enter(self, header: Header) -> tuple[Any, Any]:
        extent = header.extent
        point = _place(header.index, extent) if extent is not None else self.instance.rank
        self.running = (header.call, header.method, time.monotonic())
        self.began = (header.call, self.running[2])
        self.calls += 1
        chain = (*header.chain, header.call)
        self.process.log.begin(chain[0])
        return current.set(Context(self.instance, point, header.call, chain, header.trace)), self.running

    def run_sync(self, header: Header, parcel: "Parcel") -> None:
        """Runs one message to its end and answers it."""
        if header.call in self.process.cancelled:
            self._drop(header, parcel)
            return
        entered = self._begin(header, parcel)
        if entered is None:
            return
        token, _ = entered
        left = continued(header.trace) if header.trace else None
        self._unanswered = header
        try:
            if self.struck is None:
                self._exposure.begin()
            method, args, kwargs = self._open(header, parcel)
            result = method(*args, **kwargs)
            self._exposure.end()
            self._answer(header, result)
            self._unanswered = None
        except BaseException as error:
            self._exposure.end()
            self._unanswered = None
            self._raised(header, error)
        finally:
            if left is not None:
                left()
            self.running = None
            self._leave(header, token)

    def cut_off(self) -> None:
        """An interrupt broke off even the end of a message: whoever waits for its answer is told. On its thread."""
        self._exposure.end()
        header, self._unanswered = self._unanswered, None
        if header is not None:
            self.running = None
            self._raised(header, KeyboardInterrupt())

    async def run_async(self, header: Header, parcel: "Parcel") -> None:
        """Like `run_sync` on the actor's loop."""
        if header.call in self.process.cancelled:
            self._drop(header, parcel)
            return
        entered = self._begin(header, parcel)
        if entered is None:
            return
        token, mine = entered
        left = continued(header.trace) if header.trace else None
        self._calls[header.call] = asyncio.current_task()
        try:
            method, args, kwargs = self._open(header, parcel)
            result = method(*args, **kwargs)
            self._answer(header, await result if inspect.isawaitable(result) else result)
        except BaseException as error:
            self._raised(header, error)
        finally:
            if left is not None:
                left()
            self._calls.pop(header.call, None)
            if self.running is mine:
                self.running = None
            self._leave(header, token)

    def _leave(self, header: Header, token: Any) -> None:
        answered = header.port != 0 and not self._explicit(header)
        self.process.log.end(header.chain[0] if header.chain else header.call, answered=answered)
        current.reset(token)

    def cancel(self, call: str, then: Callable[[], None]) -> None:
        """Cancels an `async def` endpoint that runs for this call, and does `then` (reading thread).

        One that is `def` goes on. `then` ends what the endpoint waits for, on its loop: an endpoint that is just on its
        way to an `await` would else see the end of that call there, and not its own cancellation.
        """
        if not isinstance(self.executor, AsyncExecutor):
            then()
            return

        def cancel() -> None:
            task = self._calls.get(call)
            if task is not None:
                task.cancel("the call was cancelled")
            then()

        self.executor.urge(cancel)

    def running_now(self) -> dict[str, object]:
        """The calls whose endpoints run, each with a mark that no other run of them has."""
        running = self.running
        return {**self._calls, running[0]: running} if running is not None else dict(self._calls)

    @property
    def struck(self) -> Callable[[], None] | None:
        """What the actor does itself when it is interrupted; None for most. Its calls are never left out."""
        return getattr(self.obj, STRUCK, None)

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the running endpoint, or in `__init__`; best effort where that sits in C code."""
        executor = self.executor
        if self.struck is not None:
            self.struck()
        if isinstance(executor, AsyncExecutor):
            executor.urge(lambda: [task.cancel() for task in tuple(self._calls.values()) if task is not None])
        if executor.thread.ident is not None:
            self._exposure.strike(executor.thread)

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """What runs inside of it is what `interrupt` hits. On its thread."""
        return self._exposure.interruptible()


_extent = functools.lru_cache(maxsize=64)(Extent)  # those of the slices it is called on, again and again


@functools.lru_cache(maxsize=256)
def _place(index: int, extent: tuple[tuple[str, ...], tuple[int, ...]]) -> Point:
    return Point(index, _extent(*extent))


def _new(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An object that is not initialized yet; `object.__new__` takes no arguments."""
    return object.__new__(cls) if cls.__new__ is object.__new__ else cls.__new__(cls, *args, **kwargs)
