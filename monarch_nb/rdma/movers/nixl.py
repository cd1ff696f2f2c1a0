"""For machines with RDMA devices: reads and writes memory of the other machine, by NIXL over UCX.

Each transfer needs a lease of the owner, by a message: the owner checks the secrets, registers the memory and retains
it until the lease is returned. The transfer then needs no thread of the owner. Bytes are not encrypted.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from monarch_nb.rdma.errors import BufferDroppedError, OwnerLostError, owner_lost
from monarch_nb.rdma.fabric import Fabric, LinkCutError, Span, Transfer
from monarch_nb.rdma.handle import BufferHandle
from monarch_nb.rdma.leases import LEASE_S, LeaseClient
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.memory import memory_of
from monarch_nb.rdma.movers.mover import CannotReachError, Move, is_of_host
from monarch_nb.rdma.verbs import LeaseReply, LeaseRequest, TransferOutcome
from monarch_nb.runtime import Future

_PIECE = 16 << 20  # bytes in flight between two checks of the limit
_AT_ONCE = 256  # moves
_FIRST_S = 10.0  # for the first byte from a process, without which the devices are not connected
_SPIN_S, _NAP_S = 0.001, 0.00005  # polling for the end: without pauses, then with
_RENEWED_S = LEASE_S / 4
_ENDING_S = 2.0  # for bytes in flight when a transfer is cancelled
_KNOWN = 4096  # regions registered with a peer, above which the connection is made anew


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
