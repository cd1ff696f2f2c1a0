"""Ports: where values from other actors arrive; a port travels in messages, its receiver stays."""

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from monarch_nb.runtime.context import current
from monarch_nb.runtime.future import Future
from monarch_nb.wire import Header, Kind, Status, decode, encode, encode_exception

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Parcel

T = TypeVar("T")


class PortHandler(Protocol):
    """What stands behind a port number in its process."""

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """A reply or a value, on the reading thread."""


class PortTable:
    """The open ports of a process by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, PortHandler] = {}

    def open(self, handler: PortHandler) -> int:
        """Gives `handler` a number."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = handler
        return number

    def close(self, number: int) -> None:
        """Later values for it are dropped."""
        self._open.pop(number, None)

    def get(self, number: int) -> PortHandler | None:
        """The handler behind a number."""
        return self._open.get(number)

    def all(self) -> list[PortHandler]:
        """A snapshot of all handlers."""
        with self._lock:
            return list(self._open.values())

    def __len__(self) -> int:
        return len(self._open)


def _runtime() -> "Runtime":
    from monarch_nb.runtime.process import runtime

    return runtime()


class Port(Generic[T]):
    """Sends values to the receiver it was opened with, from any process, in order."""

    def __init__(self, address: str, number: int, rank: int = 0, once: bool = False) -> None:
        self._address = address
        self._number = number
        self._rank = rank
        self._once = once
        self.return_undeliverable = True

    def _send(self, status: Status, frames: list[Any]) -> None:
        runtime = _runtime()
        context = current.get() or runtime.root_context
        header = Header(
            Kind.PORT,
            self._address,
            runtime.address,
            port=self._number,
            index=self._rank,
            status=status,
            sender=context.actor_instance.stream,
            call=context.call,
        )
        runtime.send(header, runtime.node.snapshot(frames))

    def send(self, obj: T) -> None:
        """Sends one value; does not wait for it to arrive."""
        self._send(Status.VALUE, encode(obj, _runtime()))

    def exception(self, error: BaseException) -> None:
        """Makes the receiver's next `recv` raise `error`."""
        self._send(Status.EXCEPTION, encode_exception(error))

    def __reduce__(self) -> Any:
        return Port, (self._address, self._number, self._rank, self._once)

    def __repr__(self) -> str:
        return f"<Port {self._number} of {self._address}>"


class ReplyPort(Port[T]):
    """Answers one call: the port an endpoint with an explicit response port is given."""

    def __init__(self, request: Header) -> None:
        super().__init__(request.src, request.port, request.index)
        self._request = request

    def _send(self, status: Status, frames: list[Any]) -> None:
        if self._number:
            _runtime().reply(self._request, status, frames)

    def __reduce__(self) -> Any:
        return _ReplyFrom, (self._address, self._number, self._rank, self._request.call)


def _ReplyFrom(address: str, number: int, rank: int, call: str) -> "ReplyPort[Any]":  # noqa: N802 - names what a pickle makes
    return ReplyPort(Header(Kind.CALL, "", address, port=number, index=rank, call=call))


class PortReceiver(Generic[T]):
    """Where the values of one port arrive, in order."""

    ranked = False

    def __init__(self, once: bool = False) -> None:
        self._lock = threading.Lock()
        self._values: deque[Callable[[], Any]] = deque()
        self._claims: deque[Future[Any]] = deque()
        self._once = once
        self._number = 0

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """A value has come (reading thread)."""
        runtime = _runtime()

        def value() -> Any:
            try:
                obj = decode(parcel.frames, runtime)
            finally:
                runtime.node.consumed(parcel)
            if header.status != Status.VALUE:
                raise obj
            return (header.index, obj) if self.ranked else obj

        self._offer(value)
        if self._once:
            runtime.ports.close(self._number)

    def _offer(self, value: Callable[[], Any]) -> None:
        with self._lock:
            if not self._claims:
                self._values.append(value)
                return
            claim = self._claims.popleft()
        claim._set_lazy(value)

    def _claim(self, future: Future[Any]) -> None:
        with self._lock:
            if not self._values:
                self._claims.append(future)
                return
            value = self._values.popleft()
        future._set_lazy(value)

    def recv(self) -> Future[T]:
        """The next value. Lazy: a future nobody looks at claims nothing; they are served in the order observed."""
        future: Future[T] = Future._make(story=lambda: f"a value for port {self._number}")
        future._start = lambda: self._claim(future)
        return future

    def __del__(self) -> None:
        from monarch_nb.runtime import process

        if self._number and process._runtime is not None:
            process._runtime.ports.close(self._number)


class RankedPortReceiver(PortReceiver[T]):
    """Like PortReceiver; `recv` gives (rank, value)."""

    ranked = True


class _Held:
    """Keeps a port open for as long as its receiver lives, and no longer."""

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        import weakref

        self._receiver = weakref.ref(receiver)

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        receiver = self._receiver()
        if receiver is not None:
            receiver.arrive(header, parcel)


class Channel(Generic[T]):
    """Opens ports: `port, receiver = Channel[int].open()`."""

    @staticmethod
    def open(once: bool = False) -> "tuple[Port[T], PortReceiver[T]]":
        """A port to give away, and the receiver that stays here."""
        receiver: PortReceiver[T] = PortReceiver(once)
        return Channel._register(receiver, once), receiver

    @staticmethod
    def open_ranked(once: bool = False) -> "tuple[Port[T], RankedPortReceiver[T]]":
        """Like `open`, with the sender's rank beside each value."""
        receiver: RankedPortReceiver[T] = RankedPortReceiver(once)
        return Channel._register(receiver, once), receiver

    @staticmethod
    def _register(receiver: PortReceiver[Any], once: bool) -> "Port[Any]":
        runtime = _runtime()
        receiver._number = runtime.ports.open(_Held(receiver))
        return Port(runtime.address, receiver._number, 0, once)
