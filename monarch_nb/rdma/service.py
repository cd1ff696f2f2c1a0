"""One process's part in the data plane: the memory it offers, the movers it has, the requests that it takes."""

import functools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec

from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import RequestError, UnansweredError, request
from monarch_nb.rdma import verbs
from monarch_nb.rdma.errors import owner_lost
from monarch_nb.rdma.fabric import Fabric
from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.ladder import LADDER, movers_named
from monarch_nb.rdma.leases import Leases
from monarch_nb.rdma.lessor import Lessor
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.listener import Listener
from monarch_nb.rdma.memory import Memory
from monarch_nb.rdma.movers import CannotReachError
from monarch_nb.rdma.place import here
from monarch_nb.rdma.puts import Puts
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.routes import SOCKETS, Route, Routes
from monarch_nb.rdma.traffic import Flow, Offered, Report, Traffic
from monarch_nb.rdma.verbs import Outcome
from monarch_nb.runtime import Feature, Instance, Runtime
from monarch_nb.settings import settings
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker, Verb

__all__ = ["Service", "attach"]

_WORKERS = 4  # threads that carry out requests of others, made when needed
_FETCHED_S = 15.0  # that one waits for another process of its host to fetch a value
_ASK_S = 10.0  # for the answer to where streams are to be opened
DONE = Outcome("done")
WORD = 8  # bytes of what is changed atomically
_TOLD_S = 0.5


class Telling:
    """One per process. In the first of them all, `traffic` is what is known of the whole cluster."""

    def __init__(self, engine: Runtime, regions: Regions) -> None:
        self._engine, self._regions = engine, regions
        self._lock = threading.Lock()
        self._flows: dict[tuple[str, str, str], Flow] = {}
        self._changed: set[tuple[str, str, str]] = set()
        self._planned = False
        self.traffic = Traffic()
        self._listeners: list[Callable[[], None]] = []
        engine.verbs.handle(verbs.MOVED, self._arrived)

    def moved(self, process: str, mover: str, size: int, seconds: float, *, write: bool) -> None:
        """A transfer of this process is over: from another process, or to it."""
        here = self._engine.address
        source, target = (here, process) if write else (process, here)
        key = (source, target, mover)
        with self._lock:
            flow = self._flows.get(key)
            if flow is None:
                flow = self._flows[key] = Flow(source, target, mover)
            flow.size += size
            flow.transfers += 1
            flow.seconds += seconds
            self._changed.add(key)
        self.soon()

    def soon(self) -> None:
        """Something has changed: it is told with what else changes in the next moment."""
        if self._planned or self._engine.closed:
            return
        self._planned = True
        self._engine.later(_TOLD_S, self._tell)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener()` when something has come; the result ends that. It must not block."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def known(self) -> Traffic:
        """What is known now, with this process's own flows as they are."""
        self._tell()
        return self.traffic

    def _report(self) -> Report:
        flows = [msgspec.structs.replace(self._flows[key]) for key in self._changed]
        self._changed.clear()
        sizes = [region.memory.size for region in self._regions if region.memory is not None]
        return Report(self._engine.address, flows, Offered(len(sizes), sum(sizes)), time.time())

    def _tell(self) -> None:
        with self._lock:
            self._planned = False
            report = self._report()
        self._take(report)

    def _arrived(self, report: Report, asker: Asker[None]) -> None:
        self._take(report)

    def _take(self, report: Report) -> None:
        home = self._engine.part(MeshRegistry).started_by
        if home and home != self._engine.address:
            try:
                self._engine.tell(home, verbs.MOVED, report)
            except TransportError:
                return  # nobody is there to hear it
            return
        with self._lock:
            self.traffic.add(report)
        for listener in tuple(self._listeners):
            listener()


class Service:
    """One per process that offers memory or reaches for that of others."""

    def __init__(self, engine: Runtime) -> None:
        self.engine, self.address = engine, engine.address
        self.regions = Regions()
        self._atomics = threading.Lock()
        self._listener = Listener(self.regions)
        self.fabric, self.lessor = Fabric(self.address), Lessor(engine)
        self._leases = Leases(self.regions, self.fabric)
        self._movers = {name: make(self) for name, make in LADDER.items()}
        self.telling = Telling(engine, self.regions)
        self.routes = Routes(self._movers, self._allowed, self._moved)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._workers = 0
        self._idle = 0
        self._lock = threading.Lock()
        self.puts = Puts(self)
        engine.on_actor_end(self._actor_ended)
        engine.verbs.handle(verbs.READ, self._later(self._read))
        engine.verbs.handle(verbs.WRITE, self._later(self._write))
        engine.verbs.handle(verbs.ATOMIC, self._later(self._atomic))
        engine.verbs.handle(verbs.DROP, self._later(self._drop))
        engine.verbs.handle(verbs.DIAL, self._later(self._dialled))
        engine.verbs.handle(verbs.LEASE, self._later(self._leased))
        engine.verbs.handle(verbs.RENEW, self._later(self._leases.renew))
        engine.verbs.handle(verbs.RELEASE, lambda message, asker: self._leases.release(message))
        engine.verbs.handle(verbs.WHERE, self.puts.where)
        engine.verbs.handle(verbs.HOLDS, self.puts.holds)
        engine.verbs.handle(verbs.FORGET, self.puts.forget)

    # -- what this process offers -----------------------------------------------------------------------------------

    def offer(self, memory: Memory, owner: Instance, *, readonly: bool) -> Handle:
        """Offers memory of this process on behalf of an actor, until it is dropped or the actor ends."""
        region = self.regions.offer(memory, str(owner), owner.cell, readonly=readonly)
        self.telling.soon()
        return Handle(
            process=self.engine.address,
            owner=region.owner,
            number=region.number,
            secret=region.secret,
            size=memory.size,
            readonly=region.readonly,
            place=here(),
            address=memory.address,
            mark=region.mark,
            guard=self.regions.guard.descriptor,
        )

    def withdraw(self, number: int) -> None:
        """Ends an offer of this process; once is enough."""
        if self.regions.withdraw(number):
            self.telling.soon()

    def _moved(self, route: Route, size: int, seconds: float, write: bool) -> None:
        self.telling.moved(route.process, route.mover, size, seconds, write=write)

    def _actor_ended(self, cell: object) -> None:
        if self.regions.withdraw_all(lambda region: region.actor is cell):
            self.puts.sweep()
            self.telling.soon()

    # -- what it asks of others -------------------------------------------------------------------------------------

    def ask(self, handle: Handle, verb: Verb[Any, Outcome], question: Any) -> Callable[[Limit], Outcome]:
        """Sends a request to the owner of a buffer; the result waits for the answer."""
        future = request(self.engine, handle.process, verb, question)

        def wait(limit: Limit) -> Outcome:
            while not future.wait(min(0.2, limit.left())):
                pass
            try:
                return future.get()
            except UnansweredError as error:
                return Outcome("lost", str(error))
            except RequestError as error:
                return Outcome("refused", str(error))

        return wait

    def dial(self, handle: Handle, limit: Limit) -> verbs.Listening:
        """Where streams to the owner of a buffer are to be opened. Blocks; raises CannotReachError, OwnerLostError."""
        future = request(self.engine, handle.process, verbs.DIAL, verbs.Dial(here(), not settings.rdma_encrypt_streams))
        if not future.wait(min(_ASK_S, limit.left())):
            limit.left()
            raise CannotReachError(f"its process has not said within {_ASK_S:g} s where it listens")
        try:
            return future.get()
        except UnansweredError as error:
            raise owner_lost(handle, str(error)) from None
        except RequestError as error:
            raise CannotReachError(f"its process cannot listen: {error}") from None

    def where(self, handle: Handle, question: verbs.WhereIs, limit: Limit) -> verbs.Where | None:
        """Asks the owner of a value where it lies; None if that takes long: another is to fetch it, and does not."""
        future = request(self.engine, handle.process, verbs.WHERE, question)
        again = time.monotonic() + _FETCHED_S
        while not future.wait(min(0.2, limit.left())):
            if time.monotonic() > again:
                return None
        try:
            return future.get()
        except UnansweredError as error:
            raise owner_lost(handle, str(error)) from None

    # -- what others ask of it --------------------------------------------------------------------------------------

    def _later(self, function: Callable[[Any], Any]) -> Callable[[Any, Asker[Any]], None]:
        """A handler that has the work done aside: the reading thread does not wait."""

        def handle(question: Any, asker: Asker[Any]) -> None:
            def work() -> None:
                try:
                    asker.reply(function(question))
                except (LookupError, PermissionError) as error:
                    asker.reply(Outcome("dropped", str(error)))
                except Exception as error:
                    asker.refuse(f"{type(error).__name__}: {error}")

            with self._lock:
                if self._work.qsize() >= self._idle and self._workers < _WORKERS:
                    self._workers += 1
                    threading.Thread(target=self._worker, name="monarch-rdma-owner", daemon=True).start()
            self._work.put(work)

        return handle

    def _worker(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            work = self._work.get()
            with self._lock:
                self._idle -= 1
            if work is None:
                self._work.put(None)  # for the next one
                return
            work()

    def _read(self, question: verbs.Reading) -> Outcome:
        with self.regions.use(question.number, question.secret) as memory:
            _check(memory, question.offset, question.size)
            return Outcome("done", data=bytes(memory.part(question.offset, question.size).view()))

    def _write(self, question: verbs.Writing) -> Outcome:
        with self.regions.use(question.number, question.secret, write=True) as memory:
            _check(memory, question.offset, len(question.data))
            memory.part(question.offset, len(question.data)).view()[:] = question.data
        return DONE

    def _atomic(self, question: verbs.Atomic) -> Outcome:
        with self._atomics, self.regions.use(question.number, question.secret, write=True) as memory:
            _check(memory, question.offset, WORD)
            word = memory.part(question.offset, WORD).view()
            before = bytes(word)
            value = int.from_bytes(before, "little", signed=True)
            if question.expected is None:
                value += question.operand
            elif value == question.expected:
                value = question.operand
            word[:] = (value & (2**64 - 1)).to_bytes(WORD, "little")
        return Outcome("done", data=before)

    def _drop(self, question: verbs.Drop) -> Outcome:
        with self.regions.use(question.number, question.secret):
            pass
        self.withdraw(question.number)
        return DONE

    def _dialled(self, question: verbs.Dial) -> verbs.Listening:
        plain = question.plain and not settings.rdma_encrypt_streams
        return verbs.Listening(*self._listener.open_for(question.place, plain=plain))

    def _leased(self, question: verbs.Leasing) -> verbs.Leased:
        try:
            self.fabric.check(asked_for=question.asked_for)
            return self._leases.lease(question)
        except CannotReachError as error:
            return verbs.Leased("refused", str(error))

    def _allowed(self) -> tuple[str, ...]:
        """The movers that may be used now, the best first."""
        return _chosen(tuple(self._movers), movers_named(), settings.rdma_allow_tcp_fallback)

    def close(self) -> None:
        """Ends all offers and streams."""
        self._work.put(None)
        self.puts.close()
        self._listener.close()
        for mover in self._movers.values():
            mover.close()
        self._leases.close()
        self.regions.withdraw_all(lambda region: True)
        self.fabric.close()
        self.regions.guard.close()


def _check(memory: Memory, offset: int, size: int) -> None:
    if not 0 <= offset <= offset + size <= memory.size:
        raise ValueError(f"bytes {offset:,} to {offset + size:,} are outside of the buffer, which has {memory.size:,}")


@functools.lru_cache(maxsize=4)
def _chosen(movers: tuple[str, ...], names: tuple[str, ...], sockets: bool) -> tuple[str, ...]:
    """The movers that two settings leave."""
    return tuple(name for name in movers if (not names or name in names) and (sockets or name not in SOCKETS))


RDMA: Feature[Service] = Feature("rdma")


def attach(engine: Runtime) -> Service:
    """Takes `rdma` messages from now on."""
    return Service(engine)
