"""Messages that arrive at a process, each passed to its actor, port or engine verb, and those that never will."""

import logging
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from monarch_nb.routing import BROKEN_EARLY, Branch, branches_below, indices
from monarch_nb.runtime.actors.hosting import Hosting, PortHandler, PortTable, ProcessTables
from monarch_nb.runtime.calls import PendingCall
from monarch_nb.runtime.features import Features, Supervising
from monarch_nb.runtime.sender import MessageSender, caller_of
from monarch_nb.transport import (
    Clock,
    DescriptorLimitError,
    Parcel,
    Transport,
    TransportError,
    UnreachableError,
    lost_here,
    reason_of,
)
from monarch_nb.wire import REPLY, Flags, Handlers, Header, Kind, Lane, agent_of
from monarch_nb.wire.header import SKIP, CastPlan

logger = logging.getLogger(__name__)

FILL_AGAIN_S = 0.5  # between attempts to send skips of lost messages, while no descriptor is free
END_REPORT_S = 2.0  # within which the end of a process is reported, if that broke its connection
FILL_S, FILL_MAX_S = 0.05, 16.0  # the same while the receiver cannot be reached; in total the wait for a gap
SPAWN = "__spawn__"
_PORTS = frozenset({Kind.REPLY, Kind.FOLDED, Kind.PORT})


@runtime_checkable
class AnswerHandler(PortHandler, Protocol):
    """Waits for the answer to an engine message."""

    def lost(self, header: Header, reason: str) -> None:
        """Ends the request, which will not be answered."""


class Losses:
    """Handles lost messages; on any thread."""

    def __init__(
        self, local: ProcessTables, node: Transport, clock: Clock, ports: PortTable, supervisor: Supervising
    ) -> None:
        self._local, self._node, self._clock = local, node, clock
        self._ports, self._supervisor = ports, supervisor

    def lost(self, header: Header, reason: str) -> None:
        """Handles a message that was returned, or whose link failed: the waiter for its answer gets an error.

        If it may have ended its receiver, which never answered, the report of that end comes first, with the reason.
        """
        if reason == BROKEN_EARLY and header.kind != Kind.RETURNED:
            self._clock.later(END_REPORT_S, lambda: self._lost(header, reason))
        else:
            self._lost(header, reason)

    def _lost(self, header: Header, reason: str) -> None:
        kind = header.status if header.kind == Kind.RETURNED else header.kind
        if kind == Kind.CALL and header.seq >= 0:
            if header.method != SKIP:
                self._fill_gap(header)
            elif isinstance(lost_here(reason), DescriptorLimitError):
                self._clock.later(FILL_AGAIN_S, lambda: self._fill_gap(header))
        if kind == Kind.CAST and header.plan is not None and header.mesh and header.method != SKIP:
            self._fill_gaps(header, header.plan)
        if kind in (Kind.REPLY, Kind.FOLDED) or header.method == REPLY:
            return  # its receiver has ended; the port number is not of this process
        handler = self._ports.get(header.port) if header.port and kind != Kind.PORT else None
        if isinstance(handler, PendingCall):
            self._fail_call(handler, header, reason)
        elif kind == Kind.CONTROL or isinstance(handler, AnswerHandler):
            logger.debug("%s to %s: %s", header.method, header.dst, reason)
            _fail_request(handler, header, reason)
        elif kind == Kind.PORT:
            if not header.flags & Flags.UNRETURNED and not self._local.closed:
                self._supervisor.undeliverable(header, reason)
        elif header.port == 0 and header.method != SKIP and not self._local.closed:  # others have got an error
            self._supervisor.undeliverable(header, reason)

    def _fail_call(self, call: PendingCall[object], header: Header, reason: str) -> None:
        if header.kind == Kind.RETURNED and header.flags & Flags.REPORTED_ELSEWHERE:
            return
        positions: Iterable[int] = [header.index] if header.plan is None else indices(header.plan.runs)
        error: BaseException = lost_here(reason)
        answered = header.kind == Kind.RETURNED and header.src == self._local.address  # but the answer found no room
        elsewhere = header.kind == Kind.RETURNED and not answered
        if elsewhere or not (answered or isinstance(error, DescriptorLimitError)):
            error = self._supervisor.lost(header, reason, call)
        call.lose(positions, error)

    def host_lost(self, host: str, reason: str) -> None:
        """Fails calls to hosts that were sent through a lost host."""
        for call in tuple(self._local.calls.values()):
            for header in call.sent:
                if header.plan is None or header.plan.head != host or len(header.plan.hosts) < 2:
                    continue
                positions = [position for _, part in branches_below(header.plan) for position in indices(part.runs)]
                text = f"it was sent through host {host}, which is lost: {reason}"
                call.lose(positions, self._supervisor.lost(header, text, call))

    def _fill_gap(self, header: Header) -> None:
        """Fills the gap of a lost message, so that later ones do not wait for it."""
        dst = header.src if header.kind == Kind.RETURNED else header.dst
        skip = Header(
            Kind.CALL,
            dst,
            self._local.address,
            header.mesh,
            header.rank,
            header.incarnation,
            header.sender,
            header.seq,
            SKIP,
        )
        self._fill(skip, Lane.DATA, FILL_S)

    def _fill(self, skip: Header, lane: Lane, pause: float) -> None:
        if self._local.closed:
            return
        try:
            self._node.send(skip, Parcel([b""]), lane=lane)
        except DescriptorLimitError:  # the receiver lives, and waits
            self._clock.later(FILL_AGAIN_S, lambda: self._fill(skip, lane, pause))
        except UnreachableError:  # no receiver waits, unless others know already that its host is back
            if pause < FILL_MAX_S:
                self._clock.later(pause, lambda: self._fill(skip, lane, 2 * pause))
        except TransportError:
            return

    def _fill_gaps(self, header: Header, plan: CastPlan) -> None:
        """Fills the gaps of a lost cast, or of a part of one, even past a dead agent."""
        head = Branch(agent_of(plan.head), plan)
        for agent, part in (head, *branches_below(plan)):
            skip = Header(
                Kind.CAST,
                agent,
                self._local.address,
                header.mesh,
                sender=header.sender,
                method=SKIP,
                call=header.call,
                plan=part,
            )
            self._fill(skip, Lane.URGENT, FILL_S)


def _fail_request(handler: PortHandler | None, header: Header, reason: str) -> None:
    if isinstance(handler, AnswerHandler):
        handler.lost(header, reason)


class Arrivals:
    """Passes messages on. `take` runs on the reading thread, and runs no user code."""

    def __init__(
        self,
        local: ProcessTables,
        node: Transport,
        ports: PortTable,
        verbs: Handlers,
        *,
        features: Features,
        hosting: Hosting,
        losses: Losses,
        sender: MessageSender,
    ) -> None:
        self._local, self._node, self._ports = local, node, ports
        self._verbs, self._features = verbs, features
        self._hosting, self._losses, self._sender = hosting, losses, sender

    def take(self, header: Header, parcel: Parcel) -> None:
        """Passes one message to its receiver."""
        kind = header.kind
        self._local.traffic.received += parcel.nbytes
        if kind == Kind.CALL:
            if header.unread:
                self._local.stored_answers.discard_read(caller_of(header.call), header.unread)
            cell = self._local.cells.get((header.mesh, header.rank))
            if cell is not None and cell.incarnation == header.incarnation:
                cell.arrive(header, parcel)
            elif header.method == SPAWN:
                for message in self._hosting.spawn(header, parcel):
                    self.take(*message)
            else:
                self._hosting.absent(header, parcel, self.take)
        elif kind in _PORTS:
            handler = self._ports.get(header.port)
            if handler is not None:
                handler.arrive(header, parcel)
                return
            if kind == Kind.PORT:
                self._sender.send_back(header, "nothing receives from that port any more")
            self._node.consumed(parcel)
        elif kind == Kind.CONTROL:
            self._serve(header, parcel)
        elif kind == Kind.RETURNED:
            reason = reason_of(parcel)
            self._node.consumed(parcel)
            self._losses.lost(header, reason)

    def _serve(self, header: Header, parcel: Parcel) -> None:
        if header.method == REPLY:
            handler = self._ports.get(header.port)
            if handler is not None:
                handler.arrive(header, parcel)
        elif header.method not in self._verbs and self._features.load_for(header, parcel, self.take):
            return
        else:
            self._verbs.take(header, parcel.frames[0] if parcel.frames else b"")
        self._node.consumed(parcel)
