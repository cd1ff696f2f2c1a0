"""An agent's part in a cast: calls to the procs here, the rest to agents below, replies folded on the way back."""

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from monarch_nb.host import protocol as p
from monarch_nb.host.sender import AgentSender, SendingNode
from monarch_nb.host.verbs import CASTS
from monarch_nb.routing import Batch, Branch, Fold, branches_below, expand, indices, size_of
from monarch_nb.transport import Body, Parcel, UnreachableError, reason_of, reason_parcel
from monarch_nb.wire import Asker, Flags, Folded, Header, Kind, Lane, agent_of, fold, host_of, parse_address, unfold
from monarch_nb.wire.header import SKIP, CastPlan

LARGE = 64 * 1024  # bytes from which a reply travels alone
LATE_S = 2.0  # within which callers that watch a process have received the report of its end
FILL_S, FILL_MAX_S = 0.05, 16.0  # between attempts to report gaps; together as long as the wait for a gap
_REMEMBERED = 4096  # processes that have ended, and casts
AGAIN_S = 2.0  # between two requests for casts that may be lost: replies may be on their way

Reply = Folded[Body] | None  # None: sent on alone
K = TypeVar("K")


class _Cast(Struct, eq=False):
    """One cast whose replies are gathered here."""

    request: Header
    fold: Fold[Reply]
    local: dict[str, list[int]] = field(default_factory=dict)  # proc address -> positions
    plans_below: list[CastPlan] = field(default_factory=list)


class Caster:
    """Spreads casts and gathers replies. All but `proc_gone` and `relay_changed` is called on the node's reader thread,
    where sending never blocks; `call_later(seconds, call)` runs a call on some thread of the agent, by the clock that
    `monotonic` reads."""

    def __init__(
        self,
        node: SendingNode,
        sender: AgentSender,
        call_later: Callable[[float, Callable[[], None]], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._node, self._sender = node, sender
        self._address = sender.address
        self._host = host_of(sender.address)
        self._call_later = call_later
        self._monotonic = monotonic
        self._ports = itertools.count(1000)
        self._casts: dict[int, _Cast] = {}
        self._ended_procs: dict[str, None] = {}  # processes here; each incarnation has its own address
        self._complete_casts: dict[tuple[str, int], None] = {}  # casts, by their sender and its port
        self._refused_casts: dict[tuple[str, int], None] = {}  # casts that arrived too late
        self._unsent: Counter[tuple[str, int]] = Counter()  # replies that are sent later, by the same
        self._lock = threading.RLock()  # `_send` runs with and without it
        self._armed = False

    def cast(self, header: Header, parcel: Parcel) -> None:
        """Passes a cast on: a call to each proc here, a smaller cast to each agent below. The body is shared."""
        assert header.plan is not None
        if header.port and (header.src, header.port) in self._refused_casts:
            return
        deliveries, branches = expand(header.plan, self._host)
        src, port = header.src, 0
        if header.port:
            src, port = self._address, next(self._ports)
            cast = _Cast(header, Fold(size_of(header.plan.runs)))
            for delivery in deliveries:
                cast.local.setdefault(delivery.address, []).append(delivery.index)
            cast.plans_below = [plan for _, plan in branches]
            with self._lock:
                self._casts[port] = cast
        for agent, plan in branches:
            self._send(replace(header, dst=agent, src=src, port=port, plan=plan, buffers=()), parcel)
        kind = Kind.CONTROL if header.flags & Flags.TO_ENGINES else Kind.CALL
        call = replace(header, kind=int(kind), src=src, port=port, plan=None, buffers=())
        for to in deliveries:
            self._send(replace(call, dst=to.address, rank=to.rank, incarnation=to.incarnation, seq=to.seq,
                               index=to.index), parcel)  # fmt: skip

    def reply(self, header: Header, parcel: Parcel) -> None:
        """A REPLY, FOLDED or RETURNED for a call or cast of this agent."""
        if header.kind == Kind.RETURNED:
            self.lost(header, reason_of(parcel), reported_elsewhere=bool(header.flags & Flags.REPORTED_ELSEWHERE))
            return
        with self._lock:
            cast = self._casts.get(header.port)
            if cast is None:
                return
            if header.kind == Kind.FOLDED:
                # All at once: overdue replies go with those that complete the cast.
                batch = cast.fold.folded(Batch(_unfolded(header, parcel)), self._monotonic())
            elif parcel.nbytes >= LARGE:
                self._forward(cast, header, parcel)
                batch = cast.fold.reply(header.index, None, self._monotonic())
            else:
                batch = cast.fold.reply(header.index, Folded.of(header, parcel.bodies), self._monotonic())
            self._settle(header.port, cast, batch)

    def lost(self, header: Header, reason: str, *, reported_elsewhere: bool = False) -> None:
        """Handles a lost message: its callers get an error, and later messages go on.

        If a local process has ended, its watchers are notified first: an error that arrived before, by another
        route, could be healed for before the death is known, which would then hit the healed process.
        """
        self._skip(header)
        positions = [header.index] if header.plan is None else list(indices(header.plan.runs))
        if header.kind == Kind.CALL and header.dst in self._ended_procs and not reported_elsewhere:
            self._call_later(LATE_S, lambda: self._lose(header.port, positions, reason, reported_elsewhere=False))
        else:
            self._lose(header.port, positions, reason, reported_elsewhere)

    def proc_gone(self, address: str, reason: str) -> None:
        """Handles the end of a process here: its replies are no longer waited for, since its watchers are notified."""
        with self._lock:
            _remember(self._ended_procs, address)
            affected = [(port, cast.local[address]) for port, cast in self._casts.items() if address in cast.local]
        for port, positions in affected:
            self._lose(port, positions, reason, reported_elsewhere=True)

    def host_lost(self, host: str, reason: str) -> None:
        """Fails replies that were expected through another host's agent."""
        with self._lock:
            affected = [(port, cast.request, plan) for port, cast in self._casts.items() for plan in cast.plans_below
                   if plan.head == host]  # fmt: skip
        for port, request, plan in affected:
            text = f"it was sent through host {host}, which is lost: {reason}"
            self._lose(port, list(indices(plan.runs)), text, reported_elsewhere=False)
            self._skip(replace(request, plan=plan))

    def states(self, request: p.AskCasts, asker: Asker[p.CastStates]) -> p.CastStates:
        """Returns the states of the sender's casts, after all replies that were passed on to it before."""
        with self._lock:
            casts = {cast.request.port: cast for cast in self._casts.values() if cast.request.src == asker.src}
            states = [self._state((asker.src, port), casts.get(port), request.final) for port in request.ports]
            return p.CastStates(tuple(states))

    def _state(self, key: tuple[str, int], cast: _Cast | None, final: bool) -> p.CastState:
        if key in self._unsent:
            return p.CastState(True, None)
        if cast is None:
            arrived = key in self._complete_casts
            if not arrived and final:
                _remember(self._refused_casts, key)
            return p.CastState(arrived)
        assert cast.request.plan is not None
        return p.CastState(True, tuple(cast.fold.waits_for(indices(cast.request.plan.runs))))

    def relay_changed(self, relay: str) -> None:
        """Asks for messages that were on their way to other hosts, and may be lost with a relay that was replaced."""
        self._ask_below(relay, {})

    def _ask_below(self, relay: str, suspected: dict[tuple[int, int], str]) -> None:
        """Asks the agents below for casts whose replies are missing; those in `suspected` seemed lost already."""
        parts_by_host: dict[str, list[tuple[int, CastPlan]]] = {}
        with self._lock:
            for port, cast in self._casts.items():
                for plan in cast.plans_below:
                    positions = cast.fold.waits_for(indices(plan.runs))
                    if positions if not suspected else any((port, position) in suspected for position in positions):
                        parts_by_host.setdefault(plan.head, []).append((port, plan))
        for host, parts in parts_by_host.items():
            request = p.AskCasts(tuple(port for port, _ in parts), final=bool(suspected))
            self._sender.request(
                agent_of(host), CASTS, request, functools.partial(self._take_states, relay, parts, suspected)
            )

    def _take_states(
        self, relay: str, parts: list[tuple[int, CastPlan]], suspected: dict[tuple[int, int], str], reply: p.CastStates
    ) -> None:
        """Counts replies as lost once an agent below has said twice that it will not send them."""
        doubtful: dict[tuple[int, int], str] = {}
        for (port, plan), state in zip(parts, reply.states, strict=True):
            with self._lock:
                cast = self._casts.get(port)
                missing = [] if cast is None else cast.fold.waits_for(indices(plan.runs))
            if cast is None:
                continue
            reason = lost_with(relay, arrived=state.came)
            lost = [position for position in missing if not state.waits_for(position)]
            doubtful |= {(port, position): reason for position in lost}
            certain = [position for position in lost if suspected.get((port, position)) == reason]
            if certain and not state.came:
                self._skip(replace(cast.request, plan=plan))
            if certain:
                self._lose(port, certain, reason, reported_elsewhere=False)
        if doubtful and not suspected:
            self._call_later(AGAIN_S, lambda: self._ask_below(relay, doubtful))

    def _skip(self, header: Header) -> None:
        """Keeps a lost message from blocking others of its sender."""
        kind = header.status if header.kind == Kind.RETURNED else header.kind
        if header.method == SKIP or not header.mesh:  # messages to engines have no order
            return
        if kind == Kind.CALL and header.seq >= 0:
            dst = header.src if header.kind == Kind.RETURNED else header.dst
            self._stand_in(replace(header, kind=int(Kind.CALL), dst=dst))
        elif kind == Kind.CAST and header.plan is not None:
            plan = header.plan
            head = Branch(agent_of(plan.head), plan)
            for agent, part in (head, *branches_below(plan)):
                self._stand_in(replace(header, kind=int(Kind.CAST), dst=agent, plan=part))

    def _stand_in(self, header: Header, pause: float = FILL_S) -> None:
        skip = replace(header, src=self._address, method=SKIP, port=0, status=0, flags=0, buffers=())
        try:
            self._node.send(skip, Parcel([b""]), lane=Lane.URGENT)
        except UnreachableError:  # no receiver waits, unless other hosts know already that its host is back
            if pause < FILL_MAX_S:
                self._call_later(pause, lambda: self._stand_in(header, 2 * pause))
        except Exception:
            return

    def _lose(self, port: int, positions: Iterable[int], reason: str, reported_elsewhere: bool) -> None:
        with self._lock:
            cast = self._casts.get(port)
            if cast is None:
                return
            missing = cast.fold.waits_for(positions)
            batch = cast.fold.lost(missing, reason, self._monotonic())
            request = cast.request
            if not reported_elsewhere or request.flags & Flags.TO_ENGINES or parse_address(request.src).is_agent:
                for position in missing:
                    self._return(request, position, reason, Flags.REPORTED_ELSEWHERE if reported_elsewhere else 0)
            self._settle(port, cast, batch)

    def _settle(self, port: int, cast: _Cast, batch: "Batch[Reply] | None") -> None:
        if batch is not None:
            self._pass_on(cast, batch)
        if cast.fold.complete:
            self._casts.pop(port, None)
            _remember(self._complete_casts, (cast.request.src, cast.request.port))
        elif cast.fold.deadline is not None and not self._armed:
            self._armed = True
            self._call_later(cast.fold.deadline - self._monotonic(), self._tick)

    def _tick(self) -> None:
        with self._lock:
            self._armed = False
            now = self._monotonic()
            for port, cast in list(self._casts.items()):
                self._settle(port, cast, cast.fold.tick(now))

    def _pass_on(self, cast: _Cast, batch: "Batch[Reply]") -> None:
        replies = [item._replace(places=(positions,)) for positions, item in batch.replies if item is not None]
        if len(replies) == 1 and len(replies[0].places[0]) == 1:
            [reply] = replies
            self._forward(cast, replace(reply.header, index=reply.places[0].start), Parcel(list(reply.frames)))
        elif replies:
            request = cast.request
            body = fold(replies)
            self._send(Header(kind=Kind.FOLDED, dst=request.src, src=self._address, port=request.port,
                              call=request.call), Parcel(body))  # fmt: skip

    def _forward(self, cast: _Cast, header: Header, parcel: Parcel) -> None:
        forwarded = replace(header, dst=cast.request.src, port=cast.request.port, buffers=())
        self._send(forwarded, parcel)

    def _return(self, request: Header, position: int, reason: str, flags: int) -> None:
        assert request.plan is not None
        rank = next((run.rank + (position - run.index) // (run.index_stride or 1) * run.stride
                     for run in request.plan.runs
                     if position in _positions(run.index, run.count, run.index_stride)), 0)  # fmt: skip
        flags |= request.flags & (Flags.JUDGING | Flags.TO_ENGINES)
        self._send(Header(kind=Kind.RETURNED, dst=request.src, src=self._address, mesh=request.mesh, rank=rank,
                          sender=request.sender, method=request.method, port=request.port, index=position,
                          call=request.call, flags=flags),
                   reason_parcel(reason))  # fmt: skip

    def _send(self, header: Header, parcel: Parcel, pause: float = FILL_S) -> None:
        lane = Lane.URGENT if header.flags & Flags.TO_ENGINES else Lane.DATA
        try:
            self._node.send(header, parcel, lane=lane)
        except Exception as error:
            if header.kind in (Kind.CALL, Kind.CAST, Kind.CONTROL) and header.src == self._address:
                reason = str(error)
                self._call_later(0.0, lambda: self.lost(header, reason))  # not here: the lock may be held
            elif isinstance(error, UnreachableError) and pause < (FILL_MAX_S if parcel.nbytes < LARGE else 1.0):
                # A reply: its receiver may be on a host that is back, which this one does not know yet.
                key = header.dst, header.port
                with self._lock:
                    self._unsent[key] += 1
                self._call_later(pause, lambda: self._send_again(key, header, parcel, 2 * pause))

    def _send_again(self, key: tuple[str, int], header: Header, parcel: Parcel, pause: float) -> None:
        self._send(header, parcel, pause)
        with self._lock:
            self._unsent[key] -= 1
            if self._unsent[key] <= 0:
                del self._unsent[key]


def _unfolded(header: Header, parcel: Parcel) -> list[tuple[range, Reply]]:
    replies: list[tuple[range, Reply]] = []
    for reply in unfold(header, parcel.bodies):
        for number, positions in enumerate(reply.places):
            replies.append((positions, reply._replace(logs=() if number else reply.logs)))
    return replies


def _remember(entries: dict[K, None], key: K) -> None:
    while len(entries) >= _REMEMBERED:
        del entries[next(iter(entries))]
    entries[key] = None


def lost_with(relay: str, *, arrived: bool) -> str:
    """Returns why a call that went to another host has no answer."""
    if arrived:
        return f"its answer was passed on by {relay}, which has ended, and never arrived: it has run"
    return f"it was passed on by {relay}, which has ended, and never arrived: it has not run"


def _positions(first: int, count: int, stride: int) -> range:
    return range(first, first + count * stride, stride) if stride else range(first, first + 1)
