"""Ports: receivers of values from other actors; a port travels in messages, its receiver stays."""

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from monarch_nb.runtime.calls import PendingCall, answered
from monarch_nb.runtime.context import current_runtime
from monarch_nb.runtime.future import Future
from monarch_nb.transport import TransportError, raised_by_handler
from monarch_nb.wire import (
    ActorError,
    Flags,
    Header,
    InFrame,
    Kind,
    MemoryFrame,
    Status,
    decode,
    decode_exception,
    encode,
    encode_exception,
    pickle_failure,
    unfold_each,
)

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Parcel

T = TypeVar("T")
PRUNED = 16  # claims, after which those that were given up are dropped


class Port(Generic[T]):
    """Sends values to the receiver it was opened with, from any process, in order.

    With `return_undeliverable` a value that cannot be delivered goes to `_handle_undeliverable_message` of its sender.
    A port opened with `once` sends one value: another raises RuntimeError, also in a process that gets the port later.
    """

    def __init__(self, address: Any, number: Any, return_undeliverable: bool = True, once: bool = False) -> None:
        if not isinstance(address, str):  # a reference written by hand; what follows is its sender and a rank
            number, return_undeliverable = address.port_id.port, address.return_undeliverable
            address = str(address.port_id)
        self._address = address
        self._number = number
        self.return_undeliverable = return_undeliverable
        self._once = once
        self._used = False

    def _use(self) -> None:
        """Marks a once-port as used, before its value is sent."""
        if self._once and self._used:
            raise RuntimeError(f"port {self._number} of {self._address} takes one value (once=True), and has been used")
        self._used = True

    def _send(self, status: Status, frames: list[MemoryFrame], rank: int | None = None) -> None:
        sender = current_runtime()
        context = sender.context()
        header = Header(
            Kind.PORT,
            self._address,
            sender.address,
            port=self._number,
            index=context.message_rank.rank if rank is None else rank,
            status=status,
            sender=context.actor_instance.stream,
            call=context.call,
            flags=0 if self.return_undeliverable else Flags.UNRETURNED,
        )
        if context.judging:
            header.flags |= Flags.JUDGING
        sender.check_size(self._address, frames)
        sender.send(header, sender.node.snapshot(frames))

    def _asks(self, answer: Header) -> Header:
        """Returns the call that an answer for another process's port would have belonged to."""
        return Header(Kind.CALL, "", self._address, port=self._number, index=answer.index, call=answer.call)

    def send(self, obj: T) -> None:
        """Sends one value; does not wait for it to arrive. Raises RuntimeError for a second one of a once-port."""
        try:
            frames = encode(obj, current_runtime())
        except Exception as error:
            if raised_by_handler(error):
                raise
            failure = pickle_failure(error, obj, "the `value` for a port")
            raise failure from failure.__cause__
        self._use()
        self._send(Status.VALUE, frames)

    def exception(self, obj: BaseException) -> None:
        """Makes the receiver's next `recv` raise `obj`. Raises TypeError unless that is an exception."""
        if not isinstance(obj, BaseException):
            raise TypeError(f"a port's exception must be an exception, not {type(obj).__name__}: send() sends values")
        frames = encode_exception(obj)
        self._use()
        self._send(Status.EXCEPTION, frames)

    def __reduce__(self) -> tuple[object, ...]:
        state = {"_used": True} if self._once and self._used else None
        return Port, (self._address, self._number, self.return_undeliverable, self._once), state

    def __repr__(self) -> str:
        return f"<Port {self._number} of {self._address}>"


class ReplyPort(Port[T]):
    """Answers one call: the port that an endpoint with an explicit response port gets."""

    def __init__(self, request: Header) -> None:
        super().__init__(request.src, request.port)
        self._request = request

    def _send(self, status: Status, frames: list[MemoryFrame], rank: int | None = None) -> None:
        if self._number:
            current_runtime().check_size(self._request.src, frames)
            current_runtime().reply(self._request, status, frames)

    def _asks(self, answer: Header) -> Header:
        return self._request

    def __reduce__(self) -> tuple[object, ...]:
        return _reply_from, (self._address, self._number, self._request.index, self._request.call)


def _reply_from(address: str, number: int, rank: int, call: str) -> "ReplyPort[Any]":
    return ReplyPort(Header(Kind.CALL, "", address, port=number, index=rank, call=call))


class _Queue:
    """The values of one port, and the receives that wait for them. The port is open while a receiver refers to this."""

    def __init__(self, once: bool) -> None:
        receiver = self._process = current_runtime()
        self._lock = threading.Lock()
        self._values: deque[tuple[int, Callable[[], object]]] = deque()  # rank of the sender, value
        # A cancelled receive takes no value.
        self._claims: deque[tuple[weakref.ref[Future[object]], bool]] = deque()
        self._prune_at = PRUNED
        self._once = once
        self._taken = False  # its only value was received
        self.calls: dict[str, PortCall] = {}  # those that were sent with its port, and have not been answered
        self.number = receiver.ports.open(_OpenPort(self))
        self._close = functools.partial(receiver.ports.close, self.number)

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Takes a value, or several folded by a host agent (reading thread)."""
        if header.kind == Kind.FOLDED:
            for reply, frames in unfold_each(header, parcel.frames):
                self._arrive(reply, frames, None)
            self._process.node.consumed(parcel)
        else:
            self._arrive(header, parcel.frames, parcel)

    def _arrive(self, header: Header, frames: Sequence[InFrame], parcel: "Parcel | None") -> None:
        receiver = self._process
        call = self.calls.get(header.call)
        if call is not None:
            call.answered(header.index)

        def value() -> object:
            try:
                return _open(header, frames, receiver)
            finally:
                if parcel is not None:
                    receiver.node.consumed(parcel)

        self._add(header.index, value)

    def fail(self, rank: int, error: BaseException) -> None:
        """Takes an error in place of a value (any thread)."""

        def value() -> NoReturn:
            raise error

        self._add(rank, value)

    def _add(self, rank: int, value: Callable[[], object]) -> None:
        if self._once:
            self._close()
        with self._lock:
            self._values.append((rank, value))
        self._match()

    @property
    def watched(self) -> bool:
        """True while a receive waits for a value."""
        return any(_stands(reference()) for reference, _ in tuple(self._claims))

    def claim(self, future: Future[object], ranked: bool) -> None:
        """Assigns the next value to this future."""
        with self._lock:
            refused = self._taken
            if not refused:
                if len(self._claims) >= self._prune_at:  # polls with a time-out leave one each
                    self._claims = deque(claim for claim in self._claims if _stands(claim[0]()))
                    self._prune_at = 2 * len(self._claims) + PRUNED
                self._claims.append((weakref.ref(future), ranked))
        if refused:
            self._refuse(future)
        else:
            self._match()

    def _match(self) -> None:
        """Gives the values that are there to the receives that wait, in order."""
        while True:
            with self._lock:
                if not (self._values and self._claims):
                    return
                reference, ranked = self._claims.popleft()
                future = reference()
                if future is None or not _stands(future):
                    continue
                rank, value = self._values.popleft()
            if _give(future, ranked, rank, value):
                self._on_received()
            else:  # it was cancelled just now
                with self._lock:
                    self._values.appendleft((rank, value))

    def _on_received(self) -> None:
        """Handles a received value: after that of a once-port, present and later receives fail."""
        if not self._once:
            return
        with self._lock:
            self._taken = True
            waiting = [reference() for reference, _ in self._claims]
            self._claims.clear()
        for future in waiting:
            if future is not None:
                self._refuse(future)

    def _refuse(self, future: Future[object]) -> None:
        future._fail(ValueError(f"port {self.number} takes one value (once=True), which was received already"))

    def __del__(self) -> None:
        self._close()
        for call in tuple(self.calls.values()):
            call.close()


def _give(future: Future[object], ranked: bool, rank: int, value: Callable[[], object]) -> bool:
    return future._set_lazy((lambda: (rank, value())) if ranked else value)


def _stands(claim: Future[object] | None) -> bool:
    """Returns whether a receive still waits: it was not dropped, cancelled, or left by its only waiter."""
    return claim is not None and not claim._done and claim._start is None


class _OpenPort:
    """Keeps a port open exactly while its queue lives."""

    def __init__(self, queue: _Queue) -> None:
        self.queue = weakref.ref(queue)

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        queue = self.queue()
        if queue is not None:
            queue.arrive(header, parcel)


def _open(header: Header, frames: Sequence[InFrame], receiver: "Runtime") -> object:
    """Decodes a message to a port: a value, or an exception to raise."""
    if header.status == Status.VALUE:
        return decode(frames, receiver)
    if header.status == Status.FAILURE:
        raise receiver.failure(frames)
    error = decode_exception(frames, receiver)
    raise error if header.kind == Kind.PORT else ActorError(error)


class PortCall(PendingCall[None]):
    """A call whose answers go to a port. The error of a rank that can give none goes there in its place."""

    def __init__(
        self, process: "Runtime", title: str, mesh: str, ranks: Callable[[], Sequence[int]], size: int, port: Port[Any]
    ) -> None:
        super().__init__(process, title, mesh, ranks, size, lambda replies: None)
        self.future.describe = None  # no caller waits for it, and a cycle would wait for a garbage collection
        self._port = port
        self._taking = threading.Lock()  # answers arrive on the reading thread, failures on any
        own = type(port) is Port and port._address == process.address
        handler = process.ports.get(port._number) if own else None
        self._is_local = own
        self._queue: Callable[[], _Queue | None] = handler.queue if isinstance(handler, _OpenPort) else lambda: None
        if own:  # the queue gets the answers, of which a rank may send several
            process.ports.close(self.number)
            self.number = port._number
            queue = self._queue()
            if queue is None:
                self.close()
            else:
                queue.calls[self.call] = self

    @property
    def watched(self) -> bool:
        """True while a receive of this process waits for a value of the port."""
        queue = self._queue()
        return queue is not None and queue.watched

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """Passes an answer, or several, on to another process (reading thread)."""
        folded = header.kind == Kind.FOLDED
        for reply, frames in unfold_each(header, parcel.frames) if folded else [(header, parcel.frames)]:
            self._process.reply(self._port._asks(reply), Status(reply.status), frames)
            self.answered(reply.index)
        self._process.node.consumed(parcel)

    def answered(self, index: int) -> bool:
        """Notes an answer of a rank. Returns whether it is the first."""
        with self._taking:
            if not 0 <= index < self.size or self._replies[index] is not None:
                return False
            self._take(index, answered)
        if not self.missing:
            self.close()
        return True

    def lose(self, positions: Iterable[int], error: BaseException) -> None:
        """Gives the port an error in place of each answer that will not come."""
        for position in positions:
            if not self.answered(position):
                continue
            queue = self._queue()
            if queue is not None:
                queue.fail(position, error)
            elif not self._is_local:
                with contextlib.suppress(TransportError):  # the receiver has ended
                    self._port._send(Status.EXCEPTION, encode_exception(error), position)

    def fail(self, error: BaseException) -> bool:
        """Ends the call with an error in place of all answers that have not come."""
        waited = self.waits
        self.lose(range(self.size), error)
        return waited

    def cancel(self, _: Future[object] | None = None) -> bool:
        """Does nothing: its caller does not wait for it, and so it is not cancelled with that."""
        return False

    def close(self) -> None:
        """Waits for no more answers; a queue of this process still takes what comes."""
        if not self._is_local:
            self._process.ports.close(self.number)
        queue = self._queue()
        if queue is not None:
            queue.calls.pop(self.call, None)
        self._process.calls.pop(self.call, None)
        if self._process.recorder is not None:
            self._process.recorder.answered(self.call)


class PortReceiver(Generic[T]):
    """The receiver of the values of one port, in order."""

    _ranked = False

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def recv(self) -> Future[T]:
        """Returns a future of the next value. Lazy: only observed futures claim values, in order of observation.

        A cancelled future claims none either. One whose `get` was interrupted, or whose `await` was cancelled, claims
        anew when it is observed again.
        """
        queue, ranked = self._queue, self._ranked
        future: Future[T] = Future._make(describe=lambda: f"no value has come for port {queue.number} yet")
        waiting = weakref.ref(future)  # a future that refers to itself would not be freed

        def start() -> None:
            observed = waiting()
            if observed is not None:
                queue.claim(observed, ranked)

        future._start = future._restart = start
        future._cancel = Future._give_up
        return future

    def ranked(self) -> "RankedPortReceiver[T]":
        """Returns the same receiver, for (rank, value)."""
        return RankedPortReceiver(self._queue)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PortReceiver stays where it was opened: send its Port instead")


class RankedPortReceiver(PortReceiver[tuple[int, T]], Generic[T]):
    """A PortReceiver whose `recv` gives (rank, value): the sender's position in the slice it was called in."""

    _ranked = True


class Channel(Generic[T]):
    """Opens ports: `port, receiver = Channel[int].open()`."""

    @staticmethod
    def open(once: bool = False) -> "tuple[Port[T], PortReceiver[T]]":
        """Returns a port to send to others, and the receiver that stays here."""
        queue = _Queue(once)
        return Port(current_runtime().address, queue.number, once=once), PortReceiver(queue)

    @staticmethod
    def open_ranked(once: bool = False) -> "tuple[Port[T], RankedPortReceiver[T]]":
        """Returns a port and receiver as `open`, with the sender's rank beside each value."""
        queue = _Queue(once)
        return Port(current_runtime().address, queue.number, once=once), RankedPortReceiver(queue)
