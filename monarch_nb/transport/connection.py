"""The connection to a peer that its link writes to: a socket dialled by this process, or the connection that the peer
dialled; renewed after a loss.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard

from monarch_nb.routing.actions import Action, Transmit
from monarch_nb.routing.link import Link
from monarch_nb.transport.errors import NotConnectedError, TransportError
from monarch_nb.transport.packing import Item
from monarch_nb.transport.streams import Message, UnixStream
from monarch_nb.wire import Frame

if TYPE_CHECKING:
    from monarch_nb.transport.tcp.sockets import DialledChannel, InboundChannel

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.5  # seconds between two attempts to reach a process of this host
_STARVED_S = 5.0  # without a descriptor for a connection, after which its messages fail


class FrameSink(Protocol):
    """A sink for multipart messages. Called under the peer's lock; never blocks."""

    def write(self, frame0: bytes, frames: Sequence[Frame]) -> None:
        """Queues one message. Raises NotConnectedError without a connection for it."""

    def close(self, linger_ms: int) -> None:
        """Closes the sink; queued messages may leave within `linger_ms`."""


def _is_dialled(channel: object) -> "TypeGuard[DialledChannel]":
    return getattr(channel, "is_dialled", False) is True


def is_inbound(channel: object) -> "TypeGuard[InboundChannel]":
    """Returns whether a channel is the connection that the peer dialled by TCP."""
    return getattr(channel, "is_dialled", True) is False


class Connection:
    """Executes the writes of a link. All methods are called under the peer's lock."""

    def __init__(
        self,
        link: Link[Item],
        endpoint: str,
        *,
        dial: "Callable[[], DialledChannel | UnixStream | None]",
        readable: Callable[[], bool],
        keep_time: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`dial` opens a connection, or returns None while nobody listens; `readable` reads one of ZeroMQ's.

        `keep_time` starts the link's ticks.
        """
        self._link = link
        self._dial, self._readable, self._keep_time, self._clock = dial, readable, keep_time, clock
        self.channel: FrameSink | None = None
        self._theirs: UnixStream | None = None  # inside the host: dialled by the peer, although also dialled from here
        self._starved: tuple[float, str] | None = None  # start of the lack of descriptors, and the error
        self._again_at = 0.0  # the earliest time of the next attempt
        self._pause = _FIRST_PAUSE
        self._aim(endpoint)

    def _aim(self, endpoint: str) -> None:
        self.endpoint = endpoint  # address to dial; "": the peer dials this process
        self.over_tcp = endpoint.startswith("tcp:")
        self.inside = endpoint.startswith("ipc:")  # dialled by a unix socket

    # dialling

    def open(self) -> FrameSink | None:
        """Dials; None if the peer dials this process, or cannot be reached now. Raises TransportError."""
        if not self.endpoint:
            return None
        if self.inside:
            return self._open_inside()
        channel = self._dial()
        if _is_dialled(channel):
            self.channel = channel
            channel.listen(self._readable)
        return channel

    def _open_inside(self) -> FrameSink | None:
        now = self._clock()
        if now < self._again_at:
            return None
        try:
            channel = self._dial()
        except TransportError:
            self._link.disconnected(now)
            if self._theirs is None:
                raise
            return self._answer_there(now)
        if type(channel) is not UnixStream:
            self._link.disconnected(now)
            self._again_at = now + self._pause
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            return self._answer_there(now)
        self._pause = _FIRST_PAUSE
        self.channel = channel
        channel.listen()
        self.transmit(self._link.connected(now))
        return channel

    def _answer_there(self, now: float) -> FrameSink | None:
        """Writes to the connection that the peer has dialled: one side has no descriptor for ours."""
        if self._theirs is None or self._theirs.closed:
            return None
        self.channel = self._theirs
        self.transmit(self._link.connected(now))
        return self.channel

    def reach(self) -> FrameSink | None:
        """Dials without raising: while no descriptors are left there is no connection."""
        if self.inside and self._clock() < self._again_at:
            return None
        try:
            channel = self.open()
        except TransportError as error:
            since = self._clock() if self._starved is None else self._starved[0]
            self._starved = (since, str(error))
            self._keep_time()
            return None
        self._starved = None
        return channel

    def starved(self, now: float) -> str | None:
        """Returns once why the connection has been missing so long that waiting messages must fail; else None."""
        if self._starved is None or now - self._starved[0] < _STARVED_S:
            return None
        reason, self._starved = self._starved[1], None
        return reason

    def reach_now(self) -> FrameSink | None:
        """Dials without a pause after failed attempts: the peer has begun to listen."""
        self._again_at, self._pause = 0.0, _FIRST_PAUSE
        return self.reach()

    def dial_at(self, endpoint: str) -> None:
        """Dials the peer from now on, at `endpoint`."""
        channel, self.channel = self.channel, None
        if _is_dialled(channel):
            channel.close(0)
        self._link.dial(self._clock())
        self._aim(endpoint)

    # connections that the peer has dialled

    def attach(self, channel: FrameSink, *, unreachable: bool) -> None:
        """Uses a connection that the peer has dialled, perhaps again, unless this process dials it, or it is gone."""
        if not self.endpoint and not unreachable:
            if is_inbound(self.channel):
                self.channel.close(0)  # unwritten frames are kept: the dialling side first reports missing ones
            self.channel = channel
        elif type(channel) is UnixStream and not _is_dialled(self.channel):
            self._theirs = channel

    def cut(self, stream: UnixStream) -> bool:
        """Records that a connection inside the host is gone; returns whether it was the one to write to."""
        if self._theirs is stream:
            self._theirs = None
        if self.channel is not stream:
            return False
        self.channel = None
        self._link.disconnected(self._clock())
        if stream.turned_away:
            self._answer_there(self._clock())
        return True

    def close(self, linger_ms: int) -> None:
        """Closes the connection."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close(linger_ms)

    def read(self, limit: int) -> list[Message]:
        """Returns at most `limit` messages that have arrived on the connection that this process has dialled."""
        channel, messages = self.channel, list[Message]()
        while _is_dialled(channel) and len(messages) < limit and (message := channel.read()) is not None:
            messages.append(message)
        return messages

    # writing

    def put(self, channel: FrameSink, frame0: bytes, frames: Sequence[Frame], may_wait: bool) -> UnixStream | None:
        """Writes one message, or queues it in the stream that it returns, for a `push` without the lock."""
        try:
            if type(channel) is UnixStream:
                return channel if channel.put(frame0, frames, may_wait=may_wait) else None
            channel.write(frame0, frames)
        except NotConnectedError:
            self.lost(channel)
        return None

    def write(self, channel: FrameSink, frame0: bytes, frames: Sequence[Frame]) -> None:
        """Writes one message at once; the link keeps it if the connection is gone."""
        try:
            channel.write(frame0, frames)
        except NotConnectedError:
            self.lost(channel)

    def lost(self, channel: FrameSink) -> None:
        """Records that a channel could not be written to; its watcher will report that too."""
        self._link.disconnected(self._clock())
        if type(channel) is UnixStream and self.channel is channel:
            self.channel = None
            channel.close(0)

    def transmit(self, actions: Sequence[Action[Item]]) -> list[Action[Item]]:
        """Executes writes, in order; returns the other actions, which are executed without the lock."""
        rest = []
        for action in actions:
            if type(action) is Transmit:
                channel = self.channel or self.reach()
                item = action.item
                if channel is None:
                    continue
                if item is None:
                    self.write(channel, action.prefix, ())
                else:
                    self.write(channel, action.prefix + item.head, item.frames)
            else:
                rest.append(action)
        return rest
