"""Leases of memory to RDMA devices of other processes: leased memory stays in place until it is returned.

`MemoryLeases` is the side of the owner, `LeaseClient` that of the process whose device reads or writes.
"""

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass

from monarch_nb.mesh.requests import RequestError, UnansweredError, request
from monarch_nb.rdma.errors import owner_lost
from monarch_nb.rdma.fabric import Fabric, Span
from monarch_nb.rdma.handle import BufferHandle
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.memory import Memory
from monarch_nb.rdma.movers import CannotReachError
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.verbs import (
    LEASE,
    RELEASE,
    RENEW,
    LeaseReply,
    LeaseRequest,
    ReleaseMemoryLease,
    RenewMemoryLease,
    TransferOutcome,
)
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import TransportError

LEASE_S = 10.0
_DRIVEN_S = 0.0001  # between two polls of the agent while there is a lease
_STEP_S = 0.5  # the most time that one poll counts, since a stopped process receives no renewals


@dataclass(slots=True)
class _Lease:
    numbers: set[int]  # of regions
    seconds_left: float


class MemoryLeases:
    """Leases that this process has granted. Polls the agent while there is a lease, and costs nothing otherwise."""

    def __init__(self, regions: Regions, fabric: Fabric, *, seconds: float = LEASE_S) -> None:
        self._regions, self._fabric = regions, fabric
        self._seconds = seconds  # until a lease expires after its last renewal
        self._tokens = itertools.count(1)
        self._changed = threading.Condition()
        self._leases: dict[int, _Lease] = {}
        self._returned = False  # leases have ended since the last release of memory
        self._registering = threading.Lock()
        self._spans: dict[int, Span] = {}  # of regions registered with the device
        self._driver: threading.Thread | None = None
        self._closed = False
        regions.retain_while(self._in_use)

    def lease(self, question: LeaseRequest) -> LeaseReply:
        """Registers regions; returns the data to reach them. Blocks; raises CannotReachError."""
        with self._changed:
            if self._closed:
                return LeaseReply("lost", "this process leaves the cluster")
            token = next(self._tokens)
            self._leases[token] = _Lease(set(), self._seconds)
            if self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="monarch-rdma-leases", daemon=True)
                self._driver.start()
            self._changed.notify_all()
        spans = []
        try:
            for index, (number, secret) in enumerate(question.regions):
                try:
                    with self._regions.use(number, secret, write=question.write) as memory:
                        self._add(token, number)
                        spans.append(self._register(memory, number))
                except (LookupError, PermissionError) as error:
                    self.release(ReleaseMemoryLease(token))
                    return LeaseReply("dropped", str(error), index=index)
            words = self._fabric.connection_data(spans)
        except BaseException:
            self.release(ReleaseMemoryLease(token))
            raise
        return LeaseReply("done", lease=token, agent=self._fabric.name, words=words)

    def renew(self, question: RenewMemoryLease) -> TransferOutcome:
        """Renews a lease."""
        with self._changed:
            lease = self._leases.get(question.lease)
            if lease is None:
                return TransferOutcome("dropped", "the lease has ended")
            lease.seconds_left = self._seconds
        return TransferOutcome("done")

    def release(self, message: ReleaseMemoryLease) -> None:
        """Ends a lease. Does not block."""
        with self._changed:
            self._leases.pop(message.lease, None)
            self._returned = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all leases."""
        with self._changed:
            self._closed = True
            self._leases.clear()
            self._changed.notify_all()
            driver = self._driver
        if driver is not None:
            driver.join(2 * _STEP_S)

    def _in_use(self, number: int) -> bool:
        """Returns whether a region is leased; deregisters it if not."""
        with self._changed:
            if any(number in lease.numbers for lease in self._leases.values()):
                return True
        with self._registering:
            span = self._spans.pop(number, None)
            if span is not None:
                self._fabric.deregister(span)
        return False

    def _add(self, token: int, number: int) -> None:
        with self._changed:
            lease = self._leases.get(token)
            if lease is not None:
                lease.numbers.add(number)

    def _register(self, memory: Memory, number: int) -> Span:
        with self._registering:
            if number not in self._spans:
                self._spans[number] = self._fabric.register(memory, number)
            return self._spans[number]

    def _drive(self) -> None:
        """Polls the agent and expires leases, on a thread of its own."""
        checked = time.monotonic()
        while True:
            with self._changed:
                while not self._leases and not self._returned and not self._closed:
                    self._changed.wait()
                    checked = time.monotonic()
                if self._closed:
                    return
                now = time.monotonic()
                self._age(min(now - checked, _STEP_S))
                checked = now
                returned, self._returned = self._returned, False
            if returned:
                self._regions.release_withdrawn()
            self._fabric.drive()
            time.sleep(_DRIVEN_S)

    def _age(self, seconds: float) -> None:
        for token, lease in tuple(self._leases.items()):
            lease.seconds_left -= seconds
            if lease.seconds_left <= 0:
                del self._leases[token]
                self._returned = True


_POLL_S = 0.2


class LeaseClient:
    """Requests leases from owners of buffers, for access by this process's RDMA device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def lease(self, handle: BufferHandle, question: LeaseRequest, limit: Limit) -> LeaseReply:
        """Requests a lease. Blocks; raises CannotReachError, OwnerLostError and what `Limit.remaining` raises."""
        future = request(self._runtime, handle.process, LEASE, question)
        while not future.wait(min(_POLL_S, limit.remaining())):
            pass
        try:
            return future.get()
        except UnansweredError as error:
            raise owner_lost(handle, str(error)) from None
        except RequestError as error:
            raise CannotReachError(f"its process: {error}") from None

    def renew(self, handle: BufferHandle, lease: int) -> Future[TransferOutcome]:
        """Renews a lease without blocking. The future fails with UnansweredError if the owner is lost."""
        return request(self._runtime, handle.process, RENEW, RenewMemoryLease(lease))

    def release(self, handle: BufferHandle, lease: int) -> None:
        """Returns a lease without blocking. It expires by itself if the message is lost."""
        with contextlib.suppress(TransportError):
            self._runtime.post(handle.process, RELEASE, ReleaseMemoryLease(lease))
