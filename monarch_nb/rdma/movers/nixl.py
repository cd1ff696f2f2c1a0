"""Between machines with RDMA devices: one reads and writes the other's memory through them, by NIXL over UCX.

The owner is asked once per transfer, by a message, for a lease: it checks the secrets, registers the memory and keeps
it until the lease is given back. The bytes then need nobody's help. They are not encrypted.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from monarch_nb.rdma.errors import BufferDroppedError, OwnerLostError, owner_lost
from monarch_nb.rdma.fabric import Fabric, LinkCutError, Span, Transfer
from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.leases import LEASE_S
from monarch_nb.rdma.lessor import Lessor
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.memory import memory_of
from monarch_nb.rdma.movers.mover import CannotReachError, Move
from monarch_nb.rdma.verbs import Leased, Leasing, Outcome
from monarch_nb.runtime import Future

__all__ = ["Nixl"]

_PIECE = 16 << 20  # bytes under way between two looks at the limit
_AT_ONCE = 256  # moves
_FIRST_S = 10.0  # for the first byte from a process: where it does not come, there is no way through the devices
_SPIN_S, _NAP_S = 0.001, 0.00005  # looking for the end: without a pause, and then with
_RENEWED_S = LEASE_S / 4
_ENDING_S = 2.0  # for bytes that are under way when a transfer is given up
_KNOWN = 4096  # regions of a process that are remembered; with more one begins anew


class _Peer:
    """A connection to another process's agent."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.known: set[int] = set()  # regions of which the agent has heard
        self.reached = False  # whether a byte has come from there
        self.busy = 0  # transfers under way


class Nixl:
    """For buffers of processes whose machine, as this one, has an RDMA device; or of any, where it is asked for."""

    alone = False

    def __init__(self, fabric: Fabric, lessor: Lessor, asked_for: Callable[[], bool]) -> None:
        self._fabric, self._lessor, self._asked_for = fabric, lessor, asked_for
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """From the owner's memory into that of this process."""
        self._carry(moves, limit, write=False)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """From memory of this process into the owner's."""
        self._carry(moves, limit, write=True)

    def close(self) -> None:
        """The process's agent is given up by whoever made it."""

    def _carry(self, moves: Sequence[Move], limit: Limit, *, write: bool) -> None:
        """With a second try on a new connection: one that was kept may have died since."""
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
                self._lessor.release(moves[0].handle, lease.lease)
        limit.left()
        raise CannotReachError(f"its process answers, but bytes do not arrive ({cut})")

    def _peer(self, agent: str, count: int) -> _Peer:
        """The connection there, which is busy now. One that knows too many regions is replaced when it is at rest."""
        with self._lock:
            peer = self._peers.get(agent)
            if peer is not None and len(peer.known) + count > _KNOWN and not peer.busy:
                self._fabric.forget(agent)
                peer = None
            if peer is None:
                peer = self._peers[agent] = _Peer(agent)
            peer.busy += 1
            return peer

    def _lease(self, moves: Sequence[Move], limit: Limit, *, write: bool) -> Leased:
        handles = list({move.handle.number: move.handle for move in moves}.values())
        question = Leasing(tuple((handle.number, handle.secret) for handle in handles), write, self._asked_for())
        lease = self._lessor.lease(handles[0], question, limit)
        if lease.how == "done":
            return lease
        handle = handles[lease.place]
        if lease.how == "dropped":
            raise BufferDroppedError(f"{handle} was dropped; its owner offers it no longer ({lease.text})")
        if lease.how == "lost":
            raise owner_lost(handle, lease.text)
        raise CannotReachError(f"at its process: {lease.text}")

    def _exchange(self, peer: _Peer, lease: Leased, moves: Sequence[Move], limit: Limit, *, write: bool) -> None:
        first = moves[0].handle
        watch = _Watch(self._lessor, first, lease.lease)
        local: list[Span] = []
        try:
            self._fabric.meet(peer.agent, lease.words)
            peer.known.update(move.handle.number for move in moves)
            if not peer.reached:
                self._first_byte(peer, first, limit, watch)
                peer.reached = True
            for move in moves:
                local.append(self._fabric.register(move.local))
            for here, there in _batches(moves, local):
                self._wait(self._fabric.start(peer.agent, here, there, write=write), peer, limit, watch)
        finally:
            for span in local:
                self._fabric.deregister(span)

    def _first_byte(self, peer: _Peer, handle: Handle, limit: Limit, watch: "_Watch") -> None:
        """Connects, as NIXL does with the first transfer, which may take for ever where no cable leads there."""
        byte = memory_of(bytearray(1))
        span = self._fabric.register(byte)
        soon = Limit(min(_FIRST_S, limit.left()), "connecting to", handle)
        try:
            there = (handle.address, 1, handle.number)
            self._wait(self._fabric.start(peer.agent, [span], [there], write=False), peer, soon, watch)
        except TimeoutError:
            limit.left()
            self._forget(peer)
            raise CannotReachError(f"no byte has come through the RDMA devices within {soon.seconds:g} s") from None
        finally:
            self._fabric.deregister(span)

    def _wait(self, transfer: Transfer, peer: _Peer, limit: Limit, watch: "_Watch") -> None:
        """Until all bytes are there. What is given up is not under way any more when this returns."""
        spinning = time.monotonic() + _SPIN_S
        try:
            while not transfer.over():
                limit.left()
                if time.monotonic() > spinning:
                    watch.look()
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
        self._forget(peer)  # which ends what is under way
        end = time.monotonic() + _ENDING_S
        while not transfer.release() and time.monotonic() < end:
            self._fabric.drive()
            time.sleep(_NAP_S)

    def _forget(self, peer: _Peer) -> None:
        """Ends a connection; what others have begun on it meanwhile is cut, and tried again on a new one."""
        with self._lock:
            if self._peers.get(peer.agent) is peer:
                del self._peers[peer.agent]
                self._fabric.forget(peer.agent)


class _Watch:
    """Renews a lease while bytes are under way, and learns so whether the owner lives."""

    def __init__(self, lessor: Lessor, handle: Handle, lease: int) -> None:
        self._lessor, self._handle, self._lease = lessor, handle, lease
        self._next = time.monotonic() + _RENEWED_S
        self._asked: Future[Outcome] | None = None

    def look(self) -> None:
        """Raises OwnerLostError where the owner is gone, LinkCutError where it has ended the lease."""
        if self._asked is not None and self._asked.done():
            error = self._asked.exception(0)
            if error is not None:
                raise owner_lost(self._handle, str(error))
            if self._asked.get().how != "done":
                raise LinkCutError("the owner has ended the lease")
            self._asked = None
        if self._asked is None and time.monotonic() > self._next:
            self._next = time.monotonic() + _RENEWED_S
            self._asked = self._lessor.renew(self._handle, self._lease)


def _batches(moves: Sequence[Move], local: Sequence[Span]) -> Iterator[tuple[list[Span], list[Span]]]:
    """What is under way at a time: up to 256 spans here and there, or up to 16 MB of one."""
    here: list[Span] = []
    there: list[Span] = []
    room = _PIECE
    for move, (address, size, number) in zip(moves, local, strict=True):
        remote = move.handle.address + move.offset
        for start in range(0, size, _PIECE):
            piece = min(_PIECE, size - start)
            if here and (piece > room or len(here) == _AT_ONCE):
                yield here, there
                here, there, room = [], [], _PIECE
            here.append((address + start, piece, number))
            there.append((remote + start, piece, move.handle.number))
            room -= piece
    if here:
        yield here, there
