"""Detection and end of futile waits in process groups, and giving up these groups on all ranks of a mesh."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from monarch_nb.collectives.environment import RendezvousEnvironment, free_port, fresh_number
from monarch_nb.collectives.groups import PROCESS_GROUPS, Waiting
from monarch_nb.collectives.verbs import (
    BROKEN,
    END_WAITS,
    RENEW,
    WAITS,
    AskBroken,
    AskWaits,
    Broken,
    Ending,
    EndWaits,
    GroupKey,
    Renew,
    Renewed,
    ThreadWaits,
)
from monarch_nb.mesh.requests import ask_ranks
from monarch_nb.runtime import (
    ActorCell,
    ActorState,
    Future,
    PendingCall,
    ProcState,
    Runtime,
    pending_future,
    resolve_future,
    when_done,
)
from monarch_nb.settings import settings
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Asker, Done, Verb, error_line

_ANSWER_S = 3.0  # for ranks to report their waits; on a loaded machine they are late
_AGREE_S = 3.0  # for ranks to report and give up broken groups: later, they would cut groups that the next call uses
_ENDS_S = 3.0  # for a wait that was cut to raise, and the rank to answer
_LOOK_S = 0.01
_PATIENT_S = 0.1  # until a computing rank is asked again
_AGAIN_S = 0.5  # until computing ranks that have not answered a failed call are asked again; then longer
_NEVER_AGAIN_S = 600.0
_MOST_S = 15.0  # for groups to be given up
_UNWINDS_S = 0.4  # for a call that was cut to end
_CONNECTS_S = 6.0  # for groups to be reconnected, and half of it until silent ranks are asked again
_RELEASE_S = 30.0  # for ranks to be freed
_ROUNDS = 64  # through ranks that wait for ranks that wait for others

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Collectives:
    """The collectives of one process: answers for its ranks, and supervises the calls that it has made."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: dict[str, Future[Any]] = {}  # by uid of a mesh: the latest renewal of groups
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._number = 0  # of the latest renewal of this process's groups
        self._failed: tuple[GroupKey, ...] = ()  # in that renewal
        runtime.verbs.handle(WAITS, self._waits)
        runtime.verbs.handle(END_WAITS, self._end_waits)
        runtime.verbs.handle(BROKEN, self._broken)
        runtime.verbs.handle(RENEW, self._renew)

    # -- the ranks' side --------------------------------------------------------------------------------------------

    def interrupted(self, cell: ActorCell) -> bool:
        """Cuts the groups in which a call waits that an interrupt has not ended. Returns False if it waits in none."""
        waiting = self._wait_of(cell)
        return PROCESS_GROUPS.end_waits(cell.executor.thread.ident or 0, waiting, _began(cell))

    def _wait_of(self, cell: ActorCell) -> Waiting:
        running = cell.running
        if running is None or cell.on_interrupt is not None:
            return Waiting()
        cells = tuple(self._runtime.cells.values())
        alone = not any(peer.running_now() for peer in cells if peer is not cell)
        helpers = cell.spec.kind == "async"
        return PROCESS_GROUPS.waits(cell.executor.thread.ident or 0, _wall(running[2]), alone=alone, helpers=helpers)

    def _running(self, mesh: str, call: str) -> tuple[int, ActorCell] | None:
        """Returns the rank in this process that runs a call, and its cell."""
        cells = ((rank, cell) for (uid, rank), cell in tuple(self._runtime.cells.items()) if uid == mesh)
        return next(((rank, cell) for rank, cell in cells if call in cell.running_now()), None)

    def _waits(self, body: AskWaits, asker: Asker[ThreadWaits]) -> None:
        def answer() -> ThreadWaits:
            keys = PROCESS_GROUPS.keys()
            running = self._running(body.mesh, body.call)
            if running is None:
                return ThreadWaits(member_of=tuple(keys.values()))
            waiting = self._wait_of(running[1])
            groups, used = (
                tuple(keys[name] for name in sorted(names) if name in keys) for names in (waiting.groups, waiting.used)
            )
            return ThreadWaits(True, groups, waiting.joins, used, tuple(keys.values()))

        answer_aside(answer, asker, "groups")

    def _end_waits(self, body: EndWaits, asker: Asker[Done]) -> Done:
        running = self._running(body.mesh, body.call)
        for end in body.ends:
            if running is not None and running[0] in end.ranks:
                names = frozenset(key.name for key in end.groups)
                cell = running[1]
                PROCESS_GROUPS.end_waits(cell.executor.thread.ident or 0, Waiting(names, end.joins), _began(cell))
        return Done()

    def _broken(self, body: AskBroken, asker: Asker[Broken]) -> None:
        def answer() -> Broken:
            cells = [cell for rank in body.ranks if (cell := self._runtime.cells.get((body.mesh, rank))) is not None]
            for cell in cells:
                if cell.began is None or cell.began[0] != body.call:
                    continue
                used = PROCESS_GROUPS.used(cell.executor.thread.ident or 0, _wall(cell.began[1]))
                PROCESS_GROUPS.mark_broken(used, _wall(cell.began[1]))
            busy = self._busy(body.mesh)
            keys = PROCESS_GROUPS.keys()
            groups = tuple(keys[name] for name in sorted(PROCESS_GROUPS.broken) if name in keys)
            needs_port = groups or PROCESS_GROUPS.broken_joins
            ended = tuple(keys[name] for name in sorted(PROCESS_GROUPS.ended(busy)) if name in keys)
            return Broken(groups, PROCESS_GROUPS.broken_joins, free_port() if needs_port else 0, ended)

        answer_aside(answer, asker, "groups")

    def _busy(self, mesh: str) -> set[str]:
        """Returns groups that running calls may use: all if one runs on `mesh`, whose calls should have ended."""
        deadline = time.monotonic() + _UNWINDS_S
        while any(cell.running_now() for (uid, _), cell in tuple(self._runtime.cells.items()) if uid == mesh):
            if time.monotonic() > deadline:
                return set(PROCESS_GROUPS.keys())
            time.sleep(_LOOK_S)
        busy = [cell for (uid, _), cell in tuple(self._runtime.cells.items()) if uid != mesh and cell.running_now()]
        return set().union(*(PROCESS_GROUPS.used(cell.executor.thread.ident or 0, _began(cell)) for cell in busy))

    def _renew(self, body: Renew, asker: Asker[Renewed]) -> None:
        def renew() -> Renewed:
            with self._renewing:
                if body.number != self._number:  # else this is a duplicate of the message
                    self._number = body.number
                    PROCESS_GROUPS.give_up(body.number, body.groups, body.lost, again=body.again)
                    PROCESS_GROUPS.set_environment(self._environment(body))
                    self._failed = PROCESS_GROUPS.renew(body.again, body.number)
                return Renewed(tuple(sorted(PROCESS_GROUPS.orphans)), self._failed)

        answer_aside(renew, asker, "groups")

    def _environment(self, body: Renew) -> dict[str, str]:
        if body.world is None:
            return {"MASTER_PORT": str(body.port)} if body.port else {}
        console = (rank for mesh, rank in tuple(self._runtime.cells) if mesh == body.world.mesh)
        return {name: value for rank in console for name, value in body.world.environment(rank).items()}

    # -- the caller's side ------------------------------------------------------------------------------------------

    def release(self, call: PendingCall[object], callback: Callable[[], None]) -> None:
        """Frees ranks that wait in process groups for ranks that have raised in a call, and gives up the groups on all
        ranks. Calls `callback` once that is done, or has failed. Does not block."""
        state = self._runtime.meshes.get(call.mesh)
        procs = state.procs if isinstance(state, ActorState) else state
        if not isinstance(procs, ProcState):
            callback()
            return
        _Release(self, self._runtime, call, procs, callback).begin()

    def renew(self, procs: ProcState, mesh: str, call: str = "", broken_off: Sequence[int] = ()) -> Future[None]:
        """Reconnects broken groups on all ranks after calls have ended, or gives them up on all ranks.

        New groups use another store. `broken_off` are ranks whose collectives broke off in a call. Does not block.
        """
        done: Future[None] = pending_future(describe=lambda: f"process groups of {procs.name} are being given up")
        body, callback = AskBroken(mesh, call, tuple(broken_off)), partial(self._give_up, procs, done)
        self._in_turn(procs, done, lambda: self.ask(procs, procs.ranks, BROKEN, body, callback, _AGREE_S), None)
        return done

    def renew_after_loss(
        self, procs: ProcState, ranks: Sequence[int], world: RendezvousEnvironment | None, lost: tuple[int, ...]
    ) -> Future[set[str]]:
        """Gives up groups with lost members, and sets the environment of these ranks of a mesh again.

        `lost` are ranks of torch.distributed. Returns the actor meshes, by uid, whose `__init__` had created such a
        group. Does not block.
        """
        done: Future[set[str]] = pending_future(describe=lambda: f"process groups of {procs.name} are being given up")

        def begin() -> None:
            self.ask(procs, ranks, RENEW, Renew(fresh_number(), world=world, lost=lost), over, _AGREE_S)

        def over(replies: dict[int, Renewed]) -> None:
            resolve_future(done, {mesh for reply in replies.values() for mesh, _ in reply.makers})

        self._in_turn(procs, done, begin, set())
        return done

    def _in_turn(self, procs: ProcState, done: Future[T], begin: Callable[[], None], nothing: T) -> None:
        """Begins when the previous renewal is done: all ranks must agree on the store of their next groups."""
        with self._lock:
            before = self._last.get(procs.uid)
            self._last[procs.uid] = done
        self._runtime.later(_MOST_S, lambda: resolve_future(done, nothing))  # in case of a failure here
        if before is None:
            begin()
        else:
            when_done(before, lambda _: begin())

    def _give_up(self, procs: ProcState, done: Future[None], replies: dict[int, Broken]) -> None:
        keys = tuple({key: None for reply in replies.values() for key in reply.groups})
        if not keys and not any(reply.joins for reply in replies.values()):
            resolve_future(done, None)
            return
        first = next(iter(procs.ranks))
        port = replies[first].port if first in replies and replies[first].port else free_port()
        ended = {key for reply in replies.values() for key in reply.ended}
        again = tuple(key for key in keys if key not in ended) if len(replies) == len(procs.ranks) else ()

        def give_up(groups: tuple[GroupKey, ...]) -> None:
            body = Renew(fresh_number(), port, groups=groups)
            self.ask(procs, procs.ranks, RENEW, body, lambda _: resolve_future(done, None), _AGREE_S)

        def over(renewed: dict[int, Renewed]) -> None:
            failed = {key for reply in renewed.values() for key in reply.failed}
            if failed or len(renewed) < len(procs.ranks):
                give_up(again)
            else:
                resolve_future(done, None)

        if again:
            body = Renew(fresh_number(), port, groups=tuple(key for key in keys if key in ended), again=again)
            self.ask(procs, procs.ranks, RENEW, body, over, _CONNECTS_S)
        else:
            give_up(keys)

    def ask(
        self,
        procs: ProcState,
        ranks: Sequence[int],
        verb: Verb[Q, R],
        body: Q,
        callback: Callable[[dict[int, R]], object],
        within: float,
    ) -> None:
        """Asks ranks of a mesh, and calls `callback` with their replies `within` seconds. Does not block."""
        ask_ranks(self._runtime, procs, ranks, verb, body, lambda replies, _: callback(replies), within=within)


class _Release:
    """A call in which some ranks have raised."""

    def __init__(
        self,
        service: Collectives,
        runtime: Runtime,
        call: PendingCall[object],
        procs: ProcState,
        callback: Callable[[], None],
    ) -> None:
        self._service, self._runtime, self._call, self._procs, self._callback = service, runtime, call, procs, callback
        self._rounds = 0
        self._patience = int(settings.call_error_window / _PATIENT_S)
        self._cut = False
        self._again_s = _AGAIN_S
        self._completed = False
        runtime.later(_RELEASE_S, self._complete)  # in case of a failure here

    def begin(self) -> None:
        """Asks ranks that have not answered the call in which groups they wait."""
        missing = self._call.missing_ranks()
        self._rounds += 1
        if not missing or self._rounds > _ROUNDS:
            self._finish()
            return
        self._ask(missing, partial(self._waited, frozenset(missing)))

    def _ask(self, ranks: Sequence[int], callback: Callable[[dict[int, ThreadWaits]], None]) -> None:
        self._service.ask(self._procs, ranks, WAITS, AskWaits(self._call.mesh, self._call.call), callback, _ANSWER_S)

    def _waited(self, missing: frozenset[int], waits: dict[int, ThreadWaits]) -> None:
        running = [wait for wait in waits.values() if wait.runs]
        computes = [wait for wait in running if wait.member_of and not (wait.groups or wait.joins or wait.used)]
        if computes and self._patience > 0:  # it may still begin a collective, which would meet the next call's
            self._patience -= 1
            self._runtime.later(_PATIENT_S, self.begin)
            return
        if not any(wait.groups or wait.joins or wait.used for wait in running):
            self._finish(running=bool(running) or len(waits) < len(missing))
            return
        answered = [rank for rank in self._call.base_ranks() if rank not in missing]
        self._ask(answered, lambda more: self._decide(missing, {**waits, **more}))

    def _decide(self, missing: frozenset[int], waits: dict[int, ThreadWaits]) -> None:
        ends = deserted(waits, missing)
        if not ends:
            self._finish(running=True)
            return
        self._cut = True
        alike: dict[tuple[tuple[GroupKey, ...], bool], list[int]] = {}
        for rank, end in ends.items():
            alike.setdefault(end, []).append(rank)
        endings = (Ending(tuple(ranks), groups, joins) for (groups, joins), ranks in alike.items())
        body = EndWaits(self._call.mesh, self._call.call, tuple(endings))
        deadline = time.monotonic() + _ENDS_S
        waited = {rank for rank in ends if waits[rank].groups or waits[rank].joins}
        self._service.ask(self._procs, list(ends), END_WAITS, body, lambda _: self._check(waited, deadline), _ANSWER_S)

    def _check(self, ended: set[int], deadline: float) -> None:
        """Continues when the freed ranks have answered."""
        waiting = ended & set(self._call.missing_ranks())
        if waiting and time.monotonic() < deadline:
            self._runtime.later(_LOOK_S, lambda: self._check(ended, deadline))
        elif not ended or len(waiting) == len(ended):  # their programs continue nevertheless
            self._finish(running=True)
        else:
            self.begin()

    def _finish(self, *, running: bool = False) -> None:

        def over(_: object = None) -> None:
            self._complete()
            if running and not self._runtime.closed and self._call.missing_ranks():  # a collective may follow
                self._rounds, self._cut = 0, False
                self._again_s *= 1.5
                if self._again_s < _NEVER_AGAIN_S and self._procs.stopped is None:
                    self._runtime.later(self._again_s, self.begin)

        if not self._cut and not self._call.is_broken_off:
            over()
        else:
            call = self._call
            when_done(self._service.renew(self._procs, call.mesh, call.call, call.broken_off()), over)

    def _complete(self) -> None:
        if not self._completed:
            self._completed = True
            self._callback()


def deserted(
    waits: Mapping[int, ThreadWaits], missing: Collection[int]
) -> dict[int, tuple[tuple[GroupKey, ...], bool]]:
    """Returns the broken groups of the ranks of a call: groups of which some rank has answered.

    Waits in them do not end by themselves; and a computing rank that begins a collective of one later would meet
    another call there. `waits` are the reports of all ranks, `missing` the ranks that have not answered. The result
    has the groups by rank, and whether the rank waits for others to join.
    """
    members: dict[GroupKey, set[int]] = {}
    for rank, thread in waits.items():
        for key in thread.member_of:
            members.setdefault(key, set()).add(rank)
    answered = set(waits) - set(missing)
    ends: dict[int, tuple[tuple[GroupKey, ...], bool]] = {}
    for rank in missing:
        wait = waits.get(rank)
        if wait is None or not wait.runs:
            continue
        mine = dict.fromkeys((*wait.groups, *wait.used))
        groups = tuple(key for key in mine if members.get(key, set()) & answered)
        joins = wait.joins and bool(answered)
        if groups or joins:
            ends[rank] = (groups, joins)
    return ends


def answer_aside(compute: Callable[[], Q], asker: Asker[Q], name: str) -> None:
    """Answers on a thread of that name, so that slow work does not block the reading thread."""

    def run() -> None:
        try:
            result = compute()
        except Exception as error:
            logger.exception("an answer of the thread %s", name)
            answer = partial(asker.refuse, error_line(error))
        else:
            answer = partial(asker.reply, result)
        with contextlib.suppress(UnreachableError):  # this process, or the requester, has left meanwhile
            answer()

    threading.Thread(target=run, name=f"monarch-{name}", daemon=True).start()


def _wall(monotonic: float) -> int:
    """Converts a time of the monotonic clock to the wall clock's, in nanoseconds."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


def _began(cell: ActorCell) -> int:
    """Returns the start of the running call in nanoseconds of the wall clock; 0 if there is none."""
    running = cell.running
    return 0 if running is None else _wall(running[2])


def attach(runtime: Runtime) -> Collectives:
    """Registers the handlers of process groups in this process."""
    return Collectives(runtime)
