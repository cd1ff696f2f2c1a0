"""The data plane in one process: offered memory, movers, and requests of other processes."""

import functools
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from monarch_nb.gpu import GpuError, driver
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import RequestError, UnansweredError, request
from monarch_nb.rdma import verbs
from monarch_nb.rdma.errors import Limit, owner_lost
from monarch_nb.rdma.fabric import Fabric
from monarch_nb.rdma.memory import Memory
from monarch_nb.rdma.movers import CannotReachError
from monarch_nb.rdma.movers.nixl import LeaseClient, MemoryLeases
from monarch_nb.rdma.movers.streams import BulkListener
from monarch_nb.rdma.puts import Puts
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.routes import MOVERS, SOCKETS, MoverRoutes, Route, movers_named
from monarch_nb.rdma.verbs import (
    BufferHandle,
    DeviceRegion,
    Flow,
    OfferedMemory,
    TrafficReport,
    TransferOutcome,
    own_identity,
)
from monarch_nb.runtime import Feature, Instance, Runtime
from monarch_nb.settings import settings
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker, Verb, size_text

Q = TypeVar("Q", bound=msgspec.Struct)
_WORKERS = 4  # threads that execute requests, started on demand
_FETCHED_S = 15.0  # wait for another process of the host to fetch a value
_ASK_S = 10.0  # wait for the addresses of an owner
DONE = TransferOutcome("done")
ATOMIC_SIZE = 8  # bytes of an atomic operand
_REPORT_INTERVAL_S = 0.5
_OUTDATED_S = 3.0  # seconds after which a rate is outdated


class Traffic:
    """Flows of all processes, with their current rates."""

    def __init__(self) -> None:
        self.flows: dict[tuple[str, str, str], Flow] = {}
        self.offered: dict[str, OfferedMemory] = {}
        self._rates: dict[tuple[str, str, str], tuple[float, float]] = {}  # bytes per second, and when

    def add(self, report: TrafficReport) -> None:
        """Adds the report of a process."""
        for flow in report.flows:
            before = self.flows.get(flow.key)
            self.flows[flow.key] = flow
            seconds = flow.seconds - (before.seconds if before is not None else 0.0)
            moved = flow.size - (before.size if before is not None else 0)
            if moved > 0 and seconds > 0:
                self._rates[flow.key] = (moved / seconds, report.at)
        if report.offered.regions:
            self.offered[report.process] = report.offered
        else:
            self.offered.pop(report.process, None)

    def rate(self, flow: Flow, now: float) -> float:
        """Returns the bytes per second of the latest transfers; 0 if they are outdated."""
        rate, measured = self._rates.get(flow.key, (0.0, 0.0))
        return rate if now - measured < _OUTDATED_S else 0.0

    def forget(self, processes: Iterable[str]) -> None:
        """Removes processes that have ended."""
        ended = set(processes)
        for key in [key for key in self.flows if ended & set(key[:2])]:
            del self.flows[key]
            self._rates.pop(key, None)
        for process in ended:
            self.offered.pop(process, None)


class TrafficReporter:
    """Reports the transfers of a process to the process that started it.

    In the controller, `traffic` has the transfers of the whole cluster.
    """

    def __init__(self, runtime: Runtime, regions: Regions) -> None:
        self._runtime, self._regions = runtime, regions
        self._lock = threading.Lock()
        self._flows: dict[tuple[str, str, str], Flow] = {}
        self._changed: set[tuple[str, str, str]] = set()
        self._planned = False
        self.traffic = Traffic()
        self._listeners: list[Callable[[], None]] = []
        runtime.verbs.handle(verbs.MOVED, self._arrived)

    def moved(self, process: str, mover: str, size: int, seconds: float, *, write: bool) -> None:
        """Counts a finished transfer between this process and another."""
        own, traffic = self._runtime.address, self._runtime.local.traffic
        if write:
            traffic.sent += size
        else:
            traffic.received += size
        source, target = (own, process) if write else (process, own)
        key = (source, target, mover)
        with self._lock:
            flow = self._flows.get(key)
            if flow is None:
                flow = self._flows[key] = Flow(source, target, mover)
            flow.size += size
            flow.transfers += 1
            flow.seconds += seconds
            self._changed.add(key)
        if (recorder := self._runtime.recorder) is not None:
            name = f"{size_text(size)} {'to' if write else 'from'} {process} by {mover}"
            recorder.stretch("transfer", name, time.monotonic() - seconds)
        self.schedule()

    def schedule(self) -> None:
        """Schedules a report, which also covers later changes until it is sent."""
        if self._planned or self._runtime.closed:
            return
        self._planned = True
        self._runtime.later(_REPORT_INTERVAL_S, self._report_now)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener()`, which must not block, after each report. The result removes the listener."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def known(self) -> Traffic:
        """Returns the traffic known now, including that of this process."""
        self._report_now()
        return self.traffic

    def _report(self) -> TrafficReport:
        flows = [msgspec.structs.replace(self._flows[key]) for key in self._changed]
        self._changed.clear()
        sizes = [region.memory.size for region in self._regions if region.memory is not None]
        return TrafficReport(self._runtime.address, flows, OfferedMemory(len(sizes), sum(sizes)), time.time())

    def _report_now(self) -> None:
        with self._lock:
            self._planned = False
            report = self._report()
        self._deliver(report)

    def _arrived(self, report: TrafficReport, asker: Asker[None]) -> None:
        self._deliver(report)

    def _deliver(self, report: TrafficReport) -> None:
        home = self._runtime.part(MeshRegistry).started_by
        if home and home != self._runtime.address:
            try:
                self._runtime.post(home, verbs.MOVED, report)
            except TransportError:
                return  # the controller is gone
            return
        with self._lock:
            self.traffic.add(report)
        for listener in tuple(self._listeners):
            listener()


class RdmaService:
    """The data plane of one process that offers memory or transfers memory of others."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.address: str = runtime.address
        self.regions: Regions = Regions()
        self._atomics = threading.Lock()
        self._listener = BulkListener(self.regions)
        self.fabric: Fabric = Fabric(self.address)
        self.lease_client: LeaseClient = LeaseClient(runtime)
        self._leases = MemoryLeases(self.regions, self.fabric)
        self._movers = {name: make(self) for name, make in MOVERS.items()}
        self.traffic_reporter = TrafficReporter(runtime, self.regions)
        self.routes = MoverRoutes(self._movers, self._allowed, self._moved)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._workers = 0
        self._idle = 0
        self._lock = threading.Lock()
        self.puts = Puts(self)
        runtime.on_actor_end(self._actor_ended)
        runtime.verbs.handle(verbs.READ, self._later(self._read))
        runtime.verbs.handle(verbs.WRITE, self._later(self._write))
        runtime.verbs.handle(verbs.ATOMIC, self._later(self._atomic))
        runtime.verbs.handle(verbs.DROP, self._later(self._drop))
        runtime.verbs.handle(verbs.DIAL, self._later(self._dialled))
        runtime.verbs.handle(verbs.LEASE, self._later(self._leased))
        runtime.verbs.handle(verbs.RENEW, self._later(self._leases.renew))
        runtime.verbs.handle(verbs.RELEASE, lambda message, asker: self._leases.release(message))
        runtime.verbs.handle(verbs.LOCATE, self.puts.where)
        runtime.verbs.handle(verbs.HOLDS, self.puts.holds)
        runtime.verbs.handle(verbs.FORGET, self.puts.forget)

    # -- offered memory ---------------------------------------------------------------------------------------------

    def offer(self, memory: Memory, owner: Instance, *, readonly: bool) -> BufferHandle:
        """Offers memory of this process for an actor, until the buffer is dropped or the actor ends."""
        region = self.regions.offer(memory, str(owner), owner.cell, readonly=readonly)
        self.traffic_reporter.schedule()
        return BufferHandle(
            process=self.runtime.address,
            owner=region.owner,
            number=region.number,
            secret=region.secret,
            size=memory.size,
            readonly=region.readonly,
            identity=own_identity(),
            address=memory.address,
            mark=region.mark,
            guard=self.regions.guard.descriptor,
            device=None if memory.device is None else _lent(memory, memory.device),
        )

    def withdraw(self, number: int) -> None:
        """Ends an offer of this process; idempotent."""
        if self.regions.withdraw(number):
            self.traffic_reporter.schedule()

    def _moved(self, route: Route, size: int, seconds: float, write: bool) -> None:
        self.traffic_reporter.moved(route.process, route.mover, size, seconds, write=write)

    def _actor_ended(self, cell: object) -> None:
        if self.regions.withdraw_all(lambda region: region.actor is cell):
            self.puts.sweep()
            self.traffic_reporter.schedule()

    # -- requests to other processes --------------------------------------------------------------------------------

    def ask(
        self, handle: BufferHandle, verb: Verb[Q, TransferOutcome], question: Q
    ) -> Callable[[Limit], TransferOutcome]:
        """Sends a request to the owner of a buffer; the returned function waits for the reply."""
        future = request(self.runtime, handle.process, verb, question)

        def wait(limit: Limit) -> TransferOutcome:
            while not future.wait(min(0.2, limit.remaining())):
                pass
            try:
                return future.get()
            except UnansweredError as error:
                return TransferOutcome("lost", str(error))
            except RequestError as error:
                return TransferOutcome("refused", str(error))

        return wait

    def dial(self, handle: BufferHandle, limit: Limit) -> verbs.StreamAddresses:
        """Asks the owner of a buffer for its addresses for streams. Blocks; raises CannotReachError, OwnerLostError."""
        future = request(
            self.runtime, handle.process, verbs.DIAL, verbs.Dial(own_identity(), not settings.rdma_encrypt_streams)
        )
        if not future.wait(min(_ASK_S, limit.remaining())):
            limit.remaining()
            raise CannotReachError(f"its process has not answered within {_ASK_S:g} s where it listens")
        try:
            return future.get()
        except UnansweredError as error:
            raise owner_lost(handle, str(error)) from None
        except RequestError as error:
            raise CannotReachError(f"its process cannot listen: {error}") from None

    def where(self, handle: BufferHandle, question: verbs.LocateValue, limit: Limit) -> verbs.ValueLocation | None:
        """Asks the owner for the location of a value; None if the process that should fetch it does not."""
        future = request(self.runtime, handle.process, verbs.LOCATE, question)
        again = time.monotonic() + _FETCHED_S
        while not future.wait(min(0.2, limit.remaining())):
            if time.monotonic() > again:
                return None
        try:
            return future.get()
        except UnansweredError as error:
            raise owner_lost(handle, str(error)) from None

    # -- requests of other processes --------------------------------------------------------------------------------

    def _later(self, function: Callable[[Q], object]) -> Callable[[Q, Asker[Any]], None]:
        """Wraps a function as a handler that runs on a worker thread, so that the receiving thread does not block."""

        def handle(question: Q, asker: Asker[Any]) -> None:
            def work() -> None:
                try:
                    asker.reply(function(question))
                except (LookupError, PermissionError) as error:
                    asker.reply(TransferOutcome("dropped", str(error)))
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
                self._work.put(None)  # for the next thread
                return
            work()

    def _read(self, question: verbs.ReadRequest) -> TransferOutcome:
        with self.regions.use(question.number, question.secret) as memory:
            _check(memory, question.offset, question.size)
            return TransferOutcome("done", data=memory.part(question.offset, question.size).read())

    def _write(self, question: verbs.WriteRequest) -> TransferOutcome:
        with self.regions.use(question.number, question.secret, write=True) as memory:
            _check(memory, question.offset, len(question.data))
            memory.part(question.offset, len(question.data)).write(question.data)
        return DONE

    def _atomic(self, question: verbs.Atomic) -> TransferOutcome:
        with self._atomics, self.regions.use(question.number, question.secret, write=True) as memory:
            _check(memory, question.offset, ATOMIC_SIZE)
            word = memory.part(question.offset, ATOMIC_SIZE)
            before = word.read()
            value = int.from_bytes(before, "little", signed=True)
            if question.expected is None:
                value += question.operand
            elif value == question.expected:
                value = question.operand
            word.write((value & (2**64 - 1)).to_bytes(ATOMIC_SIZE, "little"))
        return TransferOutcome("done", data=before)

    def _drop(self, question: verbs.DropBuffer) -> TransferOutcome:
        with self.regions.use(question.number, question.secret):
            pass
        self.withdraw(question.number)
        return DONE

    def _dialled(self, question: verbs.Dial) -> verbs.StreamAddresses:
        plain = question.plain and not settings.rdma_encrypt_streams
        return verbs.StreamAddresses(*self._listener.open_for(question.identity, plain=plain))

    def _leased(self, question: verbs.LeaseRequest) -> verbs.LeaseReply:
        try:
            self.fabric.check(asked_for=question.asked_for)
            return self._leases.lease(question)
        except CannotReachError as error:
            return verbs.LeaseReply("refused", str(error))

    def _allowed(self) -> tuple[str, ...]:
        """Returns the movers that the settings allow now, in order of preference."""
        return _chosen(tuple(self._movers), movers_named(), settings.rdma_allow_tcp_fallback)

    def close(self) -> None:
        """Ends all offers and closes all streams."""
        self._work.put(None)
        self.puts.close()
        self._listener.close()
        for mover in self._movers.values():
            mover.close()
        self._leases.close()
        self.regions.withdraw_all(lambda region: True)
        self.fabric.close()
        self.regions.guard.close()


def _lent(memory: Memory, device: int) -> DeviceRegion:
    gpu = driver()
    assert gpu is not None
    try:
        start, _ = gpu.range_of(memory.address)
        return DeviceRegion(gpu.identity(device), gpu.lend(start), memory.address - start)
    except GpuError as error:
        if error.sticky:
            raise
        return DeviceRegion(gpu.identity(device), b"", 0)  # expandable segments: others read it through the host


def _check(memory: Memory, offset: int, size: int) -> None:
    if not 0 <= offset <= offset + size <= memory.size:
        raise ValueError(f"bytes {offset:,} to {offset + size:,} are outside of the buffer, which has {memory.size:,}")


@functools.lru_cache(maxsize=4)
def _chosen(movers: tuple[str, ...], names: tuple[str, ...], sockets: bool) -> tuple[str, ...]:
    """Returns the movers that the settings allow; without `sockets` only those that use none."""
    return tuple(name for name in movers if (not names or name in names) and (sockets or name not in SOCKETS))


RDMA: Feature[RdmaService] = Feature("rdma")


def attach(runtime: Runtime) -> RdmaService:
    """Registers the handlers of `rdma` messages."""
    return RdmaService(runtime)
