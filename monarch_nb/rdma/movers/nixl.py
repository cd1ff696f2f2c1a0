"""For machines with RDMA devices: reads and writes memory of the other machine, by NIXL over UCX.

Each transfer needs a lease of the owner, by a message: the owner checks the secrets, registers the memory and retains
it until the lease is returned. The transfer then needs no thread of the owner. Bytes are not encrypted. `MemoryLeases`
is the side of the owner, `LeaseClient` that of the process whose device reads or writes.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from monarch_nb.mesh.requests import RequestError, UnansweredError, request
from monarch_nb.rdma.errors import BufferDroppedError, Limit, OwnerLostError, owner_lost
from monarch_nb.rdma.fabric import Fabric, LinkCutError, Span, Transfer
from monarch_nb.rdma.memory import Memory, memory_of
from monarch_nb.rdma.movers import CannotReachError, Move, is_of_host
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.verbs import (
    LEASE,
    RELEASE,
    RENEW,
    BufferHandle,
    LeaseReply,
    LeaseRequest,
    ReleaseMemoryLease,
    RenewMemoryLease,
    TransferOutcome,
)
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import TransportError

LEASE_S = 10.0  # until a lease expires after its last renewal
_DRIVEN_S = 0.0001  # between two polls of the agent while there is a lease
_STEP_S = 0.5  # the most time that one poll counts, since a stopped process receives no renewals


_POLL_S = 0.2
_PIECE = 16 << 20  # bytes in flight between two checks of the limit
_AT_ONCE = 256  # moves
_FIRST_S = 10.0  # for the first byte from a process, without which the devices are not connected
_SPIN_S, _NAP_S = 0.001, 0.00005  # polling for the end: without pauses, then with
_RENEWED_S = LEASE_S / 4
_ENDING_S = 2.0  # for bytes in flight when a transfer is cancelled
_KNOWN = 4096  # regions registered with a peer, above which the connection is made anew


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


class _Peer:
    """A connection to the agent of another process."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.granted: set[int] = set()  # regions that the agent has registered
        self.reached = False  # a byte has arrived from the peer
        self.busy = 0  # transfers in progress


class Nixl:
    """Moves bytes between machines that both have an RDMA device, or between any if the settings name this mover."""

    alone = False

    def __init__(self, fabric: Fabric, lease_client: LeaseClient, asked_for: Callable[[], bool]) -> None:
        self._fabric, self._lease_client, self._asked_for = fabric, lease_client, asked_for
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Reads memory of the owner into memory of this process."""
        self._carry(moves, limit, write=False)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Writes memory of this process into memory of the owner."""
        self._carry(moves, limit, write=True)

    def close(self) -> None:
        """Does nothing: the agent belongs to the fabric."""

    def _carry(self, moves: Sequence[Move], limit: Limit, *, write: bool) -> None:
        """Transfers bytes, with a second attempt on a new connection, since an existing one may have died."""
        if not is_of_host(moves):
            raise CannotReachError  # without a text: a GPU's memory is not registered with RDMA devices
        self._fabric.check(asked_for=self._asked_for())
        cut = ""
        for _ in range(2):
            lease = self._lease(moves, limit, write=write)
            peer = self._peer(lease.agent, len(moves))
            try:
                self._exchange(peer, lease, moves, limit, write=write)
                return
            except LinkCutError as error:
                cut = str(error)
                self._forget(peer)
            finally:
                with self._lock:
                    peer.busy -= 1
                self._lease_client.release(moves[0].handle, lease.lease)
        limit.remaining()
        raise CannotReachError(f"its process answers, but bytes do not arrive ({cut})")

    def _peer(self, agent: str, count: int) -> _Peer:
        """Returns a connection, marked busy. An idle one with too many regions is replaced."""
        with self._lock:
            peer = self._peers.get(agent)
            if peer is not None and len(peer.granted) + count > _KNOWN and not peer.busy:
                self._fabric.forget(agent)
                peer = None
            if peer is None:
                peer = self._peers[agent] = _Peer(agent)
            peer.busy += 1
            return peer

    def _lease(self, moves: Sequence[Move], limit: Limit, *, write: bool) -> LeaseReply:
        handles = list({move.handle.number: move.handle for move in moves}.values())
        question = LeaseRequest(tuple((handle.number, handle.secret) for handle in handles), write, self._asked_for())
        lease = self._lease_client.lease(handles[0], question, limit)
        if lease.how == "done":
            return lease
        handle = handles[lease.index]
        if lease.how == "dropped":
            raise BufferDroppedError(f"{handle} was dropped; its owner offers it no longer ({lease.text})")
        if lease.how == "lost":
            raise owner_lost(handle, lease.text)
        raise CannotReachError(f"at its process: {lease.text}")

    def _exchange(self, peer: _Peer, lease: LeaseReply, moves: Sequence[Move], limit: Limit, *, write: bool) -> None:
        first = moves[0].handle
        watch = _Watch(self._lease_client, first, lease.lease)
        local: list[Span] = []
        try:
            self._fabric.connect(peer.agent, lease.words)
            peer.granted.update(move.handle.number for move in moves)
            if not peer.reached:
                self._first_byte(peer, first, limit, watch)
                peer.reached = True
            for move in moves:
                local.append(self._fabric.register(move.local))
            for source, target in _batches(moves, local):
                self._wait(self._fabric.start(peer.agent, source, target, write=write), peer, limit, watch)
        finally:
            for span in local:
                self._fabric.deregister(span)

    def _first_byte(self, peer: _Peer, handle: BufferHandle, limit: Limit, watch: "_Watch") -> None:
        """Connects, as NIXL does in the first transfer, which never ends if the devices are not connected."""
        byte = memory_of(bytearray(1))
        span = self._fabric.register(byte)
        soon = Limit(min(_FIRST_S, limit.remaining()), "connecting to", handle)
        try:
            target = (handle.address, 1, handle.number)
            self._wait(self._fabric.start(peer.agent, [span], [target], write=False), peer, soon, watch)
        except TimeoutError:
            limit.remaining()
            self._forget(peer)
            raise CannotReachError(f"no byte has come through the RDMA devices within {soon.seconds:g} s") from None
        finally:
            self._fabric.deregister(span)

    def _wait(self, transfer: Transfer, peer: _Peer, limit: Limit, watch: "_Watch") -> None:
        """Waits for all bytes. After an error the transfer is over when this returns."""
        spinning = time.monotonic() + _SPIN_S
        try:
            while not transfer.over():
                limit.remaining()
                if time.monotonic() > spinning:
                    watch.check()
                    time.sleep(_NAP_S)
        except BaseException as error:
            self._end(transfer, peer, lost=isinstance(error, (LinkCutError, OwnerLostError)))
            raise
        transfer.release()

    def _end(self, transfer: Transfer, peer: _Peer, *, lost: bool) -> None:
        end = time.monotonic() + _ENDING_S
        try:
            while not lost and time.monotonic() < end and not transfer.over():
                time.sleep(_NAP_S)
        except LinkCutError:
            pass
        if transfer.release():
            return
        self._forget(peer)  # which ends its transfers
        end = time.monotonic() + _ENDING_S
        while not transfer.release() and time.monotonic() < end:
            self._fabric.drive()
            time.sleep(_NAP_S)

    def _forget(self, peer: _Peer) -> None:
        """Ends a connection. Other transfers on it are cut, and retried on a new one."""
        with self._lock:
            if self._peers.get(peer.agent) is peer:
                del self._peers[peer.agent]
                self._fabric.forget(peer.agent)


class _Watch:
    """Renews a lease during a transfer, which also detects a lost owner."""

    def __init__(self, lease_client: LeaseClient, handle: BufferHandle, lease: int) -> None:
        self._lease_client, self._handle, self._lease = lease_client, handle, lease
        self._next = time.monotonic() + _RENEWED_S
        self._renewal: Future[TransferOutcome] | None = None

    def check(self) -> None:
        """Raises OwnerLostError if the owner is lost, LinkCutError if it has ended the lease."""
        if self._renewal is not None and self._renewal.done():
            error = self._renewal.exception(0)
            if error is not None:
                raise owner_lost(self._handle, str(error))
            if self._renewal.get().how != "done":
                raise LinkCutError("the owner has ended the lease")
            self._renewal = None
        if self._renewal is None and time.monotonic() > self._next:
            self._next = time.monotonic() + _RENEWED_S
            self._renewal = self._lease_client.renew(self._handle, self._lease)


def _batches(moves: Sequence[Move], local: Sequence[Span]) -> Iterator[tuple[list[Span], list[Span]]]:
    """Divides moves into batches of up to 256 spans and 16 MB."""
    sources: list[Span] = []
    targets: list[Span] = []
    room = _PIECE
    for move, (address, size, number) in zip(moves, local, strict=True):
        remote = move.handle.address + move.offset
        for start in range(0, size, _PIECE):
            piece = min(_PIECE, size - start)
            if sources and (piece > room or len(sources) == _AT_ONCE):
                yield sources, targets
                sources, targets, room = [], [], _PIECE
            sources.append((address + start, piece, number))
            targets.append((remote + start, piece, move.handle.number))
            room -= piece
    if sources:
        yield sources, targets
