"""Drives the supervision machine of a process: feeds it events, and carries its actions out, in order."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from monarch_nb.runtime import (
    ActorCell,
    ActorEnd,
    ActorState,
    Cause,
    CauseKind,
    Future,
    Instance,
    MeshState,
    PendingCall,
    ProcessTables,
    ProcState,
    error_of,
    fail_future,
    pending_future,
    resolve_future,
    stop_cause,
    when_done,
)
from monarch_nb.settings import settings
from monarch_nb.shape import Region, runs
from monarch_nb.supervision.actions import (
    Action,
    FailActor,
    FailCalls,
    Healed,
    HealRefused,
    OwnerSaid,
    Recreate,
    Respawn,
    RootFault,
    ShowFailure,
    StopOwnedMesh,
    Supervise,
    SupervisorEffects,
)
from monarch_nb.supervision.failure import (
    PROCS_STOPPED,
    HealError,
    MeshFailure,
    SupervisionError,
    UndeliverableMessage,
    gathered,
    log_failure,
    run_hook,
)
from monarch_nb.supervision.machine import SupervisionMachine
from monarch_nb.supervision.ranks import RankIncarnation
from monarch_nb.supervision.records import RankStatus
from monarch_nb.transport import Clock, held_back
from monarch_nb.wire import Flags, Frame, Header, Kind, error_line, format_exception, host_of, msgpack_decoder

if TYPE_CHECKING:
    from monarch_nb.supervision.ranks import Selection

logger = logging.getLogger(__name__)

# An actor with such an end has failed: a caller or its own process, whichever learns of it first, records that.
FAILED = frozenset({"exception", "init", "aborted", "unhandled", "raised"})


class Driver:
    """The supervisor of one process. Events may come from any thread; user code runs on its actor's own thread only."""

    def __init__(
        self,
        local: ProcessTables,
        clock: Clock,
        effects: SupervisorEffects,
        *,
        root: str | None = None,
        fatal: Callable[[MeshFailure], None] | None = None,
        show: Callable[[MeshFailure], None] | None = None,
    ) -> None:
        """`root` is the stream of code outside actors, where ownership begins. `show` takes non-fatal failures."""
        self.local = local
        self.machine = SupervisionMachine(root=root, root_policy="script")
        self._lock = threading.RLock()  # of the machine
        self._clock, self._effects = clock, effects
        self._fatal, self._show = fatal or log_failure, show or log_failure
        self.listeners: list[Callable[[Action | OwnerSaid | None], None]] = []  # None: something may have changed
        self._actions: deque[Action] = deque()
        self._acting = False
        self._heal_requests = HealRequests(effects, self.feed)

    def in_notebook(self, show: Callable[[MeshFailure], None]) -> None:
        """Keeps unhandled failures from ending the program: a call on these ranks raises them, or `show` gets them."""
        self.machine.root_policy = "notebook"
        self._show = show

    def raised_in_use(self, procs_uid: str) -> None:
        """Has failures of these procs raised where the procs are used, so that they do not end a script."""
        with self._lock:
            self.machine.raised_in_use.add(procs_uid)

    # -- events in, actions out -------------------------------------------------------------------------------------

    def feed(self, event: Callable[[SupervisionMachine], list[Action]]) -> None:
        """Gives the machine one event and carries out its actions; an interrupt is held back until then.

        An action that is never carried out, or a driver that stays marked as acting, would block all later events.
        """
        held_back(self._feed, event)

    def _feed(self, event: Callable[[SupervisionMachine], list[Action]]) -> None:
        with self._lock:
            self._actions.extend(event(self.machine))
            acting, self._acting = self._acting, True
        self._notify_observers(None)
        if acting:  # the acting thread carries these out too, in order
            return
        while True:
            with self._lock:
                if not self._actions:
                    self._acting = False
                    break
                action = self._actions.popleft()
            self._notify_observers(action)
            try:
                self._carry_out(action)
            except Exception:
                logger.exception("supervision: %s", action)

    def _notify_observers(self, event: "Action | OwnerSaid | None") -> None:
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                logger.exception("a display failed on %s", event)

    def _carry_out(self, action: Action) -> None:
        match action:
            case FailCalls(uid, incarnations, failure):
                self._fail_calls(uid, incarnations, failure)
            case Supervise(owner, failure):
                self._supervise(owner, failure)
            case FailActor(actor, cause):
                self._fail_actor(actor, cause)
            case StopOwnedMesh(uid):
                self._stop(uid)
            case RootFault(failure, route):
                if route == "fatal":
                    self._fatal(failure)
                elif route == "show":
                    self._show(failure)
            case ShowFailure(failure):
                self._show(failure)
            case Respawn() | Recreate() | Healed() | HealRefused():
                self._heal_requests.carry_out(action)

    def called(self, *ranks: int) -> tuple[set[str], set[str]]:
        """Returns meshes with a call that one of these ranks has not answered: those with awaited calls, and all."""
        targets = set(ranks)
        calls = [call for call in tuple(self.local.calls.values()) if call.waits_for(targets)]
        return {call.mesh for call in calls if call.watched}, {call.mesh for call in calls}

    def ranks_not_alive(self, uid: str | None = None) -> list[tuple[str, Cause | None, dict[int, RankStatus]]]:
        """Returns all known meshes, or one, with the cause of each one's end, if any, and its ranks with a record."""
        with self._lock:
            return self.machine.ranks_not_alive(uid)

    def owner_name(self, actor: str) -> str:
        """Returns the name of an owner."""
        with self._lock:
            return self.machine.owner_name(actor)

    def failed(self, uid: str) -> set[int]:
        """Returns the ranks of a mesh that have failed."""
        with self._lock:
            return {rank for rank, status in self.machine.status(uid).items() if status.state == "failed"}

    def since(self, uid: str) -> dict[int, int]:
        """Returns the number of a host's last loss, for each rank of a mesh that was healed after it."""
        with self._lock:
            return self.machine.since(uid)

    def lost_ranks(self, uid: str) -> set[int]:
        """Returns the ranks of a mesh that have failed, were stopped, or are being healed."""
        with self._lock:
            return {rank for rank, status in self.machine.status(uid).items() if status.state != "alive"}

    def proc_exited(self, uid: str, rank: int, incarnation: int, cause: Cause) -> None:
        """Notes the end of a process."""
        awaited, called = self.called(rank)
        self.feed(lambda machine: machine.proc_exited(uid, rank, incarnation, cause, awaited, called))

    def killed(self, uid: str, rank: int, incarnation: int, cause: Cause) -> None:
        """Ends a process that is to be healed: calls to it fail; no failure is shown, as the root has requested it."""
        self.feed(
            lambda machine: [
                action
                for action in machine.proc_exited(uid, rank, incarnation, cause)
                if not isinstance(action, RootFault)
            ]
        )

    def mark_stopped(self, state: MeshState, ranks: Collection[int] | None, reason: str, *, over: bool) -> None:
        """Marks a mesh, or some of its ranks, as stopped: later events there are no failures.

        Once its stop is `over`, calls that still wait end.
        """
        if ranks is None and isinstance(state, ProcState):
            for mesh in tuple(self.local.meshes.values()):
                if isinstance(mesh, ActorState) and mesh.procs is state and mesh.stopped is None:
                    mesh.stopped = PROCS_STOPPED
        if over:
            self.feed(lambda machine: machine.stopped(state.uid, ranks, reason))
        else:
            self.feed(lambda machine: machine.stopping(state.uid, ranks, reason))

    def on_actor_end(self, end: ActorEnd, awaited: set[str] | None = None) -> None:
        """Notes the end of an actor of any process; `awaited` are meshes with an awaited call."""
        if end.cause.kind == "stopped":
            return
        if awaited is None:
            awaited = self.called(end.rank)[0]
        self.feed(lambda machine: machine.actor_failed(end.mesh, end.rank, end.incarnation, end.cause, awaited))

    def _fail_calls(self, uid: str, incarnations: tuple[RankIncarnation, ...] | None, failure: MeshFailure) -> None:
        ranks = None if incarnations is None else {rank for rank, _ in incarnations}
        for call in tuple(self.local.calls.values()):
            indices = call.places_of(ranks) if call.mesh == uid and ranks is not None else []
            if call.mesh != uid or (ranks is not None and not indices):
                continue
            error = self._error(failure, call)
            error.reported_elsewhere = True  # by supervision, if the call is not awaited
            if ranks is None:
                call.fail(error)
            else:
                call.lose(indices, error)

    # -- causes, and the errors that calls raise for them --------------------------------------------------------------

    def cause_of(self, kind: str, error: BaseException, text: str, actor: ActorCell, method: str) -> Cause:
        """Returns the cause of an actor's failure."""
        if kind == "aborted":
            return Cause(kind="aborted", text=text, actor=str(actor.instance), host=self.local.host, at=time.time())
        cause_kind: CauseKind = "exception" if kind == "cleanup" else cast(CauseKind, kind)
        prefix = f"{actor.spec.name}.{method}: " if kind != "init" and method else ""
        return Cause(
            kind=cause_kind,
            text=f"{prefix}{error_line(error)}",
            traceback=text,
            actor=str(actor.instance),
            host=self.local.host,
            at=time.time(),
        )

    def stopped_cause(self, actor: ActorCell, reason: str) -> Cause:
        """Returns the cause for callers of a stopped actor."""
        return msgspec.structs.replace(stop_cause(reason), actor=str(actor.instance), host=self.local.host)

    def lost_cause(self, header: Header, reason: str) -> Cause:
        """Returns the cause for the sender of an undeliverable message."""
        state = self.local.meshes.get(header.mesh)
        # A returned message is addressed to this process; its mesh and rank are those of the destination.
        host = state.procs.layout.host_of(header.rank) if isinstance(state, ActorState) else host_of(header.dst)
        return Cause(kind="undeliverable", text=f"undeliverable: {reason}", host=host)

    def encode(self, cause: Cause, request: Header) -> bytes:
        """Returns the cause for refusing a call, as bytes; it names the called actor."""
        return msgspec.msgpack.encode(ActorEnd(request.mesh, request.rank, request.incarnation, cause))

    def reason(self, cause: Cause) -> str:
        """Returns a cause in a few words."""
        return f"{cause.actor} has ended: {cause.text or cause.kind}"

    def _error(self, failure: MeshFailure, call: PendingCall[object] | None) -> SupervisionError:
        if failure.failure_id:
            with self._lock:
                self.machine.mark_reported(failure.failure_id)
        return SupervisionError(failure.report(), endpoint=f"{call.title}()" if call else None, failure=failure)

    def lost(self, header: Header, reason: str, call: PendingCall[object]) -> BaseException:
        """Returns the error of a call whose message could not be delivered: the known failure, if there is one."""
        ranks = frozenset(call.missing_ranks())
        with self._lock:
            failure = self.machine.check(call.mesh, ranks)
        if failure is not None:
            return self._error(failure, call)
        return self._error(self._lost_failure(header, reason, call), call)

    def _lost_failure(self, header: Header, reason: str, call: PendingCall[object] | None) -> MeshFailure:
        """Returns the failure of a message that was lost on its way to ranks that are not known to have failed."""
        cause = self.lost_cause(header, reason)
        is_single = Kind.CALL in (header.kind, header.status if header.kind == Kind.RETURNED else -1)
        ranks = [header.rank] if is_single else [] if call is None else call.missing_ranks()
        with self._lock:
            failure = self.machine.describe(header.mesh, ranks, cause)
        name = call.title.partition(".")[0] if call is not None else header.mesh
        return failure or MeshFailure(mesh_name=name, mesh_uid=header.mesh, cause=cause)

    def error(self, data: Frame, call: PendingCall[object] | None) -> BaseException:
        """Returns the error that a call raises for an encoded cause."""
        end = msgpack_decoder(ActorEnd).decode(data)
        if call is None:
            return self._error(MeshFailure(mesh_name=end.cause.actor, cause=end.cause), None)
        has_failed = end.cause.kind in FAILED
        if has_failed:
            self.on_actor_end(end, {end.mesh} if call.watched else None)
            raised = error_of(call.future)
            if raised is not None:  # the machine has reported it already
                return raised
        with self._lock:
            if has_failed:
                failure = self.machine.check(call.mesh, {end.rank})
            else:
                failure = self.machine.describe(call.mesh, [end.rank], end.cause)
        return self._error(failure or self._remote_failure(end, call), call)

    def _remote_failure(self, end: ActorEnd, call: PendingCall[object]) -> MeshFailure:
        """Returns the failure of a call on a mesh that others own."""
        name, rank, region = call.title.partition(".")[0], end.rank, None
        state = self.local.meshes.get(call.mesh)
        if state is not None and rank in state.region.ranks():
            region = state.region
        return MeshFailure(
            mesh_name=name,
            mesh_uid=call.mesh,
            cause=end.cause,
            extent=((), ()) if region is None else (tuple(region.labels), tuple(region.ndslice.sizes)),
            places=(rank if region is None else region.ndslice.index(rank),),
        )

    def check(self, state: MeshState, region: Region, call: PendingCall[object] | None) -> SupervisionError | None:
        """Returns the error that a call on a slice raises at once, if any."""
        failure = None
        if not self.machine.sound(state.uid):
            with self._lock:
                failure = self.machine.check(state.uid, runs(region))
        if failure is None and state.stopped is not None:  # so long ago that its records are deleted
            full = state.region
            extent = (tuple(full.labels), tuple(full.ndslice.sizes))
            failure = MeshFailure(
                mesh_name=state.name, mesh_uid=state.uid, cause=stop_cause(state.stopped), extent=extent
            )
        return None if failure is None else self._error(failure, call)

    # -- owners -----------------------------------------------------------------------------------------------------

    def _cell(self, stream: str) -> ActorCell | None:
        for cell in tuple(self.local.cells.values()):
            if cell.instance.stream == stream:
                return cell
        return None

    def _supervise(self, owner: str, failure: MeshFailure) -> None:
        cell = self._cell(owner)
        if cell is None or cell.obj is None:
            self.feed(lambda machine: machine.owner_result(failure.failure_id, False))
            return
        hook = cell.obj.__supervise__

        def report(handled: bool) -> None:
            self._notify_observers(OwnerSaid(failure.failure_id, owner, handled))
            self.feed(lambda machine: machine.owner_result(failure.failure_id, handled))

        def failed(error: BaseException) -> None:
            text = "".join(format_exception(error))
            raised = self.cause_of("raised", error, text, cell, "__supervise__")
            if failure.preempted:  # which fails no owner
                logger.warning("%s: __supervise__ raised while it handled a preemption:\n%s", cell.instance, text)
            self._notify_observers(OwnerSaid(failure.failure_id, owner, False))
            self.feed(lambda machine: machine.owner_result(failure.failure_id, False, raised))

        run_hook(cell, lambda: hook(failure), report, failed)

    def _fail_actor(self, stream: str, cause: Cause) -> None:
        cell = self._cell(stream)
        if cell is None:
            return
        cell.fail_with(cause, RuntimeError(cause.text or "it did not handle the failure of a mesh it owns"))

    def _stop(self, uid: str) -> None:
        future = self._effects.stop_mesh(uid, "its owner ended")
        when_done(future, lambda _: self.feed(lambda machine: machine.stopped(uid)))

    # -- requests of the runtime (Supervising) ----------------------------------------------------------------------

    def actor_spawned(self, actor: ActorCell) -> None:
        """Registers a new actor of this process, which ends with the process of its owner."""
        if actor.spec.owner_process != self.local.address:
            self._effects.watch_owner(actor.spec.owner_process)

    def actor_failed(self, actor: ActorCell) -> None:
        """Ends the meshes of a failed actor of this process, and notifies its owner."""
        self.feed(lambda machine: machine.owner_stopped(actor.instance.stream))
        end = ActorEnd(actor.mesh, actor.rank, actor.incarnation, cast(Cause, actor.cause))
        if actor.spec.owner_process == self.local.address:
            self.on_actor_end(end)
        else:
            self._effects.report_to_owner(actor.spec.owner_process, end)

    def actor_ended(self, actor: ActorCell) -> None:
        """Notes the end of an actor of this process."""
        self.feed(lambda machine: machine.owner_stopped(actor.instance.stream))

    def stop_children(self, instance: Instance) -> None:
        """Stops the meshes of an ending actor; blocks until they have ended."""
        self.feed(lambda machine: machine.owner_stopped(instance.stream))
        self._effects.await_stops(instance)

    def undeliverable(self, header: Header, reason: str) -> None:
        """Runs the sender's hook for an undeliverable message that is not awaited."""
        cell = self._cell(header.sender)
        if cell is None or cell.obj is None:
            if not self.local.closed:
                self._undelivered(header, reason)
            return
        destination = header.src if header.kind == Kind.RETURNED else header.dst
        message = UndeliverableMessage(str(cell.instance), destination, header.mesh, header.method, reason)
        text = f"undeliverable: {header.method or 'a value'} to {destination}: {reason}"
        hook = cell.obj._handle_undeliverable_message
        # Lost messages of the hook itself run no hook: that could go on for ever.
        if getattr(hook, "_monarch_default", False) or header.flags & Flags.JUDGING:
            logger.warning("%s: %s", cell.instance, text)
            return

        def judge(handled: bool) -> None:
            if not handled:
                cause = self.cause_of("undeliverable", RuntimeError(text), "", cell, "")
                self._fail_actor(cell.instance.stream, cause)

        def failed(error: BaseException) -> None:
            method = "_handle_undeliverable_message"
            text = "".join(format_exception(error))
            self._fail_actor(cell.instance.stream, self.cause_of("exception", error, text, cell, method))

        run_hook(cell, lambda: hook(message), judge, failed, judging=True)

    def _undelivered(self, header: Header, reason: str) -> None:
        with self._lock:
            failure = self.machine.check(header.mesh, {header.rank})
        if failure is None and header.sender == self.machine.root and self.machine.root_policy == "notebook":
            self._show(self._lost_failure(header, reason, None))
            return
        # The owner has been notified of the failure or stop: this line is for debugging only.
        level = logging.WARNING if failure is None else logging.INFO
        logger.log(level, "undeliverable: %s to %s: %s", header.method or "a value", header.dst, reason)

    # -- heal -------------------------------------------------------------------------------------------------------

    def heal(self, uid: str, selection: "Selection" = None, *, await_hooks: bool = True) -> Future[None]:
        """Restores failed ranks of a mesh; the future fails with HealError if that fails."""
        return held_back(self._heal, uid, selection, await_hooks)

    def _heal(self, uid: str, selection: "Selection", await_hooks: bool) -> Future[None]:
        with self._lock:
            number, future = self._heal_requests.expect(await_hooks=await_hooks)
            self.machine.intensity.limit = settings.heal_max_restarts
            self.machine.intensity.window = settings.heal_window
        self.feed(lambda machine: machine.heal_requested(uid, self._clock.monotonic(), number, selection))
        return future


class HealRequests:
    """The heal requests of one process. `feed` gives its machine an event; any thread may call it."""

    def __init__(
        self, effects: SupervisorEffects, feed: Callable[[Callable[[SupervisionMachine], list[Action]]], None]
    ) -> None:
        self._effects, self._feed = effects, feed
        self._waiting: dict[int, Future[None]] = {}
        self._last = 0
        self._hasty: set[int] = set()  # heals that do not wait for the hooks of survivors

    def expect(self, *, await_hooks: bool) -> tuple[int, Future[None]]:
        """Returns the number of a new request for the machine, and its future; under the driver's lock."""
        self._last += 1
        future: Future[None] = pending_future(describe=lambda: "the heal is not done yet")
        self._waiting[self._last] = future
        if not await_hooks:
            self._hasty.add(self._last)
        return self._last, future

    def carry_out(self, action: Respawn | Recreate | Healed | HealRefused) -> None:
        """Carries out an action of a heal on its own thread; a refusal fails the request. Does not block."""
        match action:
            case Respawn(uid, back) | Recreate(uid, back):
                bring, done = self._effects.respawn, SupervisionMachine.respawned
                if isinstance(action, Recreate):
                    bring, done = self._effects.recreate, SupervisionMachine.recreated
                _start_heal_thread(
                    lambda: self._bring_back(uid, back, bring, done), lambda error: self._not_back(uid, back, error)
                )
            case Healed():
                _start_heal_thread(lambda: self._healed(action), lambda error: self._answer(action, error))
            case HealRefused(request, _, text, _):
                future = self._waiting.pop(request, None)
                if future is not None:
                    fail_future(future, HealError(text))

    def _bring_back(
        self,
        uid: str,
        incarnations: tuple[RankIncarnation, ...],
        bring: Callable[[str, Sequence[RankIncarnation]], None],
        done: Callable[[SupervisionMachine, str, Sequence[RankIncarnation]], list[Action]],
    ) -> None:
        try:
            bring(uid, incarnations)
        except BaseException as error:
            self._not_back(uid, incarnations, error)
            return
        self._feed(lambda machine: done(machine, uid, incarnations))

    def _not_back(self, uid: str, incarnations: tuple[RankIncarnation, ...], error: BaseException) -> None:
        cause = Cause(kind="spawn", text=error_line(error), at=time.time())
        if isinstance(error, SupervisionError) and error.failure is not None:
            cause = msgspec.structs.replace(error.failure.cause)
        self._feed(lambda machine: machine.heal_failed(uid, incarnations, cause))

    def _healed(self, action: Healed) -> None:
        error: BaseException | None = None
        try:
            if action.incarnations:
                self._effects.healed(action.incarnations, not self._hasty.intersection(action.requests))
        except BaseException as raised:
            error = raised
        self._answer(action, error)

    def _answer(self, action: Healed, error: BaseException | None) -> None:
        if action.again:
            failures = "\n".join(failure.report() for failure in gathered(action.again))
            error = HealError(f"not everything could be healed:\n{failures}", action.again)
        self._hasty.difference_update(action.requests)
        for request in action.requests:
            future = self._waiting.pop(request, None)
            if future is None:
                continue
            if error is None:
                resolve_future(future, None)
            else:
                fail_future(future, error)


def _start_heal_thread(function: Callable[[], None], failed: Callable[[RuntimeError], None]) -> None:
    """Runs a function on a thread of its own; if there can be none, calls `failed`, so that no heal waits for ever."""
    try:
        threading.Thread(target=function, name="monarch-heal", daemon=True).start()
    except RuntimeError as error:
        advice = "end other programs, or raise the limit (ulimit -u, pids of the container)"
        failed(RuntimeError(f"no thread could be started for the heal: {error}; {advice}"))
