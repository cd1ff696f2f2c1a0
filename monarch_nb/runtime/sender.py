"""Sends messages of a process: calls, answers, and messages between engines."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from monarch_nb.runtime.actors.hosting import ProcessTables
from monarch_nb.runtime.cause import Cause
from monarch_nb.runtime.features import Supervising
from monarch_nb.runtime.output.own_log import OwnLog
from monarch_nb.transport import Parcel, Transport, TransportError, UnreachableError, reason_parcel
from monarch_nb.wire import (
    REPLY,
    Flags,
    Header,
    Kind,
    Lane,
    OutFrame,
    Status,
    Verb,
    check_size,
    encode_body,
    encode_exception,
    parse_address,
)

logger = logging.getLogger(__name__)


def caller_of(call: str) -> str:
    """Returns the process that made a call."""
    return call.rpartition(":")[0]


Q = TypeVar("Q", bound=msgspec.Struct)
_NOTHING = Parcel()


class MessageSender:
    """Sends from any thread."""

    def __init__(
        self,
        local: ProcessTables,
        node: Transport,
        log: OwnLog,
        supervisor: Supervising,
        on_lost: Callable[[Header, str], None],
        *,
        unanswered: frozenset[str],
    ) -> None:
        """`on_lost` is called for messages without a receiver; those of `unanswered` methods are not sent back."""
        self._local, self._node, self._log = local, node, log
        self._supervisor, self._on_lost = supervisor, on_lost
        self._unanswered = unanswered
        self._inner_host = ""
        self._take_inside: Callable[[Header, Parcel], None]

    def attach_inner_host(self, host: str, take: Callable[[Header, Parcel], None]) -> None:
        """Keeps messages for this host, which is simulated here, in this process: `take` gets those for its agent or
        one of its processes, and raises UnreachableError.
        """
        self._inner_host, self._take_inside = host, take

    def send(self, header: Header, parcel: Parcel, lane: Lane = Lane.DATA) -> None:
        """Sends from any thread; blocks, interruptibly, only while the receiver's credits are used up.

        If nothing can be reached any more, waiters for the answer get an error, as of a death a moment later.
        """
        try:
            if self._inner_host and header.dst.startswith(self._inner_host):
                self._take_inside(header, parcel)
            else:
                self._node.send(header, parcel, lane=lane)
                self._local.traffic.sent += parcel.nbytes
        except UnreachableError as error:
            if header.kind in (Kind.CONTROL, Kind.REPLY):
                raise
            self._on_lost(header, str(error))

    def check_size(self, dst: str, frames: Sequence[OutFrame]) -> None:
        """Raises MessageTooLargeError for a body that is too large to leave this process for an address.

        Bodies between actors of one process have no bound, as they do not become frames.
        """
        if not self.is_local(dst):
            check_size(frames)

    def is_local(self, dst: str) -> bool:
        """Returns whether a message to an address stays in this process."""
        return dst == self._local.address or (self._inner_host != "" and dst.startswith(self._inner_host))

    def post(self, dst: str, verb: Verb[Q, object], request: Q, *, port: int = 0) -> None:
        """Sends an engine message, whose answer arrives at `port`. Raises UnreachableError."""
        header = Header(Kind.CONTROL, dst, self._local.address, method=verb.name, port=port)
        self._send_control(header, request, verb.lane)

    def answer(self, request: Header, status: Status, body: msgspec.Struct, lane: Lane) -> None:
        """Answers an engine message, if its sender waits for an answer."""
        if request.port:
            src = self._local.address
            header = Header(Kind.CONTROL, request.src, src, method=REPLY, port=request.port, status=status)
            if request.flags & Flags.TO_ENGINES:  # an agent gathers it
                header.kind, header.index, header.method = int(Kind.REPLY), request.index, ""
            self._send_control(header, body, lane)

    def _send_control(self, header: Header, body: msgspec.Struct, lane: Lane) -> None:
        try:
            self.send(header, self._node.snapshot([encode_body(body)]), lane)
        except UnreachableError:
            raise
        except TransportError:
            if not self._local.closed:
                raise
            raise UnreachableError(f"{header.dst} cannot be reached: this process has left the cluster") from None

    def reply(self, request: Header, status: Status, frames: Sequence[OutFrame]) -> None:
        """Answers a CALL, if its caller waits for an answer."""
        if request.port == 0:
            return
        if (self._local.away or self._local.orphans) and self._is_away(request):
            self._local.orphans.discard(request.call)
            self._local.stored_answers.store(request, status, frames)
            if parse_address(request.src).is_agent:
                self._report_cast(request)
            return
        if request.unread:
            self._local.stored_answers.store(request, status, frames, caller_of(request.call))
        header = Header(
            Kind.REPLY,
            request.src,
            self._local.address,
            port=request.port,
            index=request.index,
            status=status,
            call=request.call,
            log=self._log.position(),
        )
        try:
            self.send(header, self._node.snapshot(frames))
        except Exception as error:
            if self._local.closed:
                return
            if isinstance(error, UnreachableError):  # the receiver has left
                if (
                    parse_address(request.src).is_controller and not request.unread
                ):  # a controller, which may have left its meshes to others
                    self._local.stored_answers.store(request, status, frames)
                return
            if not isinstance(error, TransportError):
                logger.exception("an answer to %s could not be sent", request.src)
            address = self._local.address
            unsent = type(error)(f"the `result` of {request.method} could not be sent by {address}: {error}")
            header.status = Status.EXCEPTION
            self.send(header, self._node.snapshot(encode_exception(unsent)))

    def _is_away(self, request: Header) -> bool:
        """Returns whether the caller has left: a cast comes from an agent, but its id names the calling process."""
        local = self._local
        return request.call in local.orphans or request.src in local.away or caller_of(request.call) in local.away

    def _report_cast(self, request: Header) -> None:
        """Reports to the agent that gathers the answers of a cast that this answer will not come."""
        header = Header(
            Kind.RETURNED, request.src, self._local.address, port=request.port, index=request.index,
            status=int(Kind.CALL), call=request.call, flags=int(Flags.REPORTED_ELSEWHERE),
        )  # fmt: skip
        with contextlib.suppress(TransportError):
            self._node.send(header, reason_parcel("who called has left"), lane=Lane.URGENT)

    def refuse(self, request: Header, cause: Cause) -> None:
        """Reports to the sender of a CALL that it will never be run."""
        if request.port:
            self.reply(request, Status.FAILURE, [self._supervisor.encode(cause, request)])
        elif request.method not in self._unanswered:
            self.send_back(request, self._supervisor.reason(cause))

    def send_back(self, header: Header, reason: str) -> None:
        """Sends back a message without a waiter for its answer."""
        if not self._local.closed:
            self._node.undeliverable(header, _NOTHING, reason)
