"""Translates events and the current state of one runtime into events of the store."""

import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from monarch_nb.lifecycle.watching import HostNotices, ProcessWatcher
from monarch_nb.mesh.mesh_events import (
    Event,
    HostBack,
    HostLost,
    HostNoticed,
    HostNoticeWithdrawn,
    MeshEvents,
    MeshResized,
    MeshSpawned,
    MeshStarting,
    MeshStopped,
    ProcResponsive,
    ProcStarted,
    ProcUnresponsive,
    RankPaused,
    RankResumed,
)
from monarch_nb.runtime import ActorState, MeshState, PendingCall, ProcState, Runtime, proc_state_of, when_done
from monarch_nb.shape import RegionForm
from monarch_nb.store import events as e
from monarch_nb.store.failures import record
from monarch_nb.store.history import UsageHistory, UsageSample
from monarch_nb.store.records import FailureState
from monarch_nb.store.verbs import ACTIVITY, WATCH, Activity, ResourcesUsed, WatchActivity
from monarch_nb.supervision import Action, Cause, Driver, MeshFailure, RankStatus
from monarch_nb.supervision.actions import OwnerSaid, RootFault, ShowFailure, Supervise
from monarch_nb.supervision.failure import facts
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker, parse_address

WIDEST = 10_000  # calls with more missing answers are ignored


class Pending:
    """Compares the calls that wait for answers with those of the last check.

    Called when the state is read: reports of workers, while they are watched, arrive a little later.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._calls: dict[tuple[str, int], e.CallPending] = {}

    @property
    def any(self) -> bool:
        """True if calls were waiting at the last check."""
        return bool(self._calls)

    def changes(self) -> Iterator[e.CallPending]:
        """Yields calls that began or ended since the last check."""
        waited = self._waiting(tuple(self._runtime.calls.values()))
        for key, event in tuple(self._calls.items()):
            if key not in waited:
                del self._calls[key]
                yield e.CallPending(event.uid, event.rank, event.incarnation, now())
        for key, event in waited.items():
            before = self._calls.get(key)
            if before is None or (before.incarnation, before.endpoint) != (event.incarnation, event.endpoint):
                self._calls[key] = event
                yield event

    def _waiting(self, calls: Iterable[PendingCall[object]]) -> dict[tuple[str, int], e.CallPending]:
        waited: dict[tuple[str, int], e.CallPending] = {}
        for call in calls:
            state: MeshState | None = self._runtime.meshes.get(call.mesh)
            endpoint = call.title.rpartition(".")[2] if "[" not in call.title else "cell"
            if state is None or endpoint == "__init__" or call.missing > WIDEST:
                continue
            for rank in call.missing_ranks():
                event = e.CallPending(call.mesh, rank, state.incarnation(rank), now(), endpoint)
                waited.setdefault((call.mesh, rank), event)
        return waited


RECHECK_S = 0.1  # between checks of calls that wait for answers, while there are watchers
REPORT_S = 0.01  # supervision acts in bursts
FORGET_S = 30.0  # for which an ended mesh stays visible
PROMPT = 1000  # processes that report ten times a second; with more, each reports proportionally less often
USED_PROMPT = 400  # the same for the resources that they use


class Collector:
    """Listens to meshes, supervision and the workers of one runtime; calls `put` on their threads."""

    def __init__(self, runtime: Runtime, put: Callable[[e.Event], None], history: UsageHistory) -> None:
        self._runtime = runtime
        self._put = put
        self._history, self._measured = history, False  # whether it is kept even without watchers
        self.readable: Callable[[str], str] = str  # replaces file names in tracebacks by display names
        self._driver, self._watcher = runtime.part(Driver), runtime.part(ProcessWatcher)
        self._events = runtime.part(MeshEvents)
        self._odd: dict[str, dict[int, RankStatus]] = {}  # by mesh, the ranks that are not alive, as last reported
        self._starting: dict[str, MeshState] = {}  # meshes that the store shows as starting
        self._ended: set[str] = set()
        self._failures: set[int] = set()  # reported failures
        self._hit: dict[int, set[tuple[str, int]]] = {}  # by failure, the ranks it has hit that are not back
        self._report_due = False
        self._watched = False
        self._recheck_due = False  # a check of pending calls is scheduled
        self._pending = Pending(runtime)
        runtime.verbs.handle(ACTIVITY, self._activity)
        self._events.listeners.append(self._on_event)
        self._driver.listeners.append(self._on_supervision)
        for state in tuple(runtime.meshes.values()):
            self._spawned(state)
            self._spawning(state)
        for address, pid in tuple(self._watcher.pids.items()):
            self._started(address, pid)
        for address, since in tuple(self._watcher.unresponsive.items()):
            self._put(e.ResponsivenessChanged(*rank_of(address), since, now()))
        self.report_ranks()

    def close(self) -> None:
        """Removes all listeners."""
        if self._on_event in self._events.listeners:
            self._events.listeners.remove(self._on_event)
        if self._on_supervision in self._driver.listeners:
            self._driver.listeners.remove(self._on_supervision)
        self._runtime.verbs.release(ACTIVITY)
        self._measured = False
        self.watch(on=False)

    def refresh(self) -> None:
        """Reports unreported changes, for a reader of the present state."""
        self.report_ranks()
        for uid, state in tuple(self._starting.items()):
            if is_ready(state):
                self._ready(uid)
        for event in self._pending.changes():
            self._put(event)
        if self._watched and self._pending.any and not self._recheck_due:
            self._recheck_due = True
            self._runtime.later(RECHECK_S, self._recheck)

    def _recheck(self) -> None:
        """Reports the end of calls that `refresh` has shown to watchers."""
        self._recheck_due = False
        if self._watched and not self._runtime.closed:
            self.refresh()

    # -- workers ----------------------------------------------------------------------------------------------------

    def watch(self, *, on: bool) -> None:
        """Asks the workers to start or stop reporting their activity."""
        self._watched = on
        self._ask_all()

    def measure(self) -> None:
        """Asks the workers to report the resources that they use, even if their activity is not watched."""
        if not self._measured:
            self._measured = True
            if not self._watched:
                self._ask_all()

    def _ask_all(self) -> None:
        if self._runtime.closed:
            return
        for state in tuple(self._runtime.meshes.values()):
            if isinstance(state, ProcState) and state.spawn_spec is not None and state.stopped is None:
                for rank in state.ranks:
                    self._ask(state.address(rank))

    def _ask(self, address: str) -> None:
        if self._watcher.pids.get(address):  # others are asked once they run
            try:
                pace, used_pace = (max(1.0, len(self._watcher.pids) / prompt) for prompt in (PROMPT, USED_PROMPT))
                on = self._watched or self._measured
                self._runtime.post(address, WATCH, WatchActivity(on, pace, not self._watched, used_pace))
            except TransportError:
                return  # the process has ended

    def _activity(self, activity: Activity, asker: Asker[None]) -> None:
        for doing in activity.doings:
            self._put(e.ActivityChanged(*msgspec.structs.astuple(doing)))
        if activity.used is not None:
            (uid, rank), used = rank_of(asker.src), activity.used
            sample = UsageSample(now(), used.cpu, used.memory, used.gpu, used.gpu_memory, used.received, used.sent)
            self._history.add(uid, rank, sample)
            if self._watched:
                self._put(e.Usage(uid, rank, *_shown(used)))

    # -- meshes -----------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case MeshSpawned(state):
                self._spawned(state)
            case MeshStarting(state):
                self._spawning(state)
            case MeshResized(state):
                self._resized(state)
            case ProcStarted(address, pid):
                self._started(address, pid)
            case MeshStopped(state) if state.stopped is not None:
                self._runtime.later(FORGET_S, lambda: self._forget(state))
            case ProcUnresponsive(address, since):
                self._put(e.ResponsivenessChanged(*rank_of(address), since, now()))
            case ProcResponsive(address):
                self._put(e.ResponsivenessChanged(*rank_of(address), None, now()))
            case HostLost(host):
                self._put(e.HostSeen(host, why="it cannot be reached"))
            case HostNoticed(host, by, until):
                self._put(e.HostSeen(host, notice=by, until=until or 0.0))
            case HostBack(host) | HostNoticeWithdrawn(host):
                self._put(e.HostSeen(host))
            case RankPaused(session, mesh, rank, blocks_actor=True):
                location = {"actor": event.actor, "file": event.file, "line": event.line, "function": event.function}
                self._put(e.SessionOpened(session, mesh, rank, event.since or now(), location))
            case RankResumed(session):
                self._put(e.SessionClosed(session, now()))
            case _:
                return

    def _spawned(self, state: MeshState) -> None:
        if state.spawn_spec is not None and state.stopped is None:
            self._ended.discard(state.uid)
            self._put(mesh_description(self._runtime, state))

    def _resized(self, state: MeshState) -> None:
        """Reports a mesh again: events of new ranks came before the store knew these."""
        if state.spawn_spec is None or state.stopped is not None:
            return
        self._put(e.MeshRedescribed(mesh_description(self._runtime, state, ready=True)))
        self._odd.pop(state.uid, None)
        if isinstance(state, ProcState):
            for rank in state.ranks:
                if pid := self._watcher.pids.get(state.address(rank)):
                    self._started(state.address(rank), pid)
        self._on_supervision(None)

    def _spawning(self, state: MeshState) -> None:
        spawn_spec = state.spawn_spec
        if spawn_spec is not None and state.stopped is None:
            self._starting[state.uid] = state
            when_done(spawn_spec.initialized, lambda _: self._ready(state.uid))

    def _ready(self, uid: str) -> None:
        if self._starting.pop(uid, None) is not None:
            self._put(e.MeshReady(uid, now()))

    def _started(self, address: str, pid: int) -> None:
        self._put(e.ProcessStarted(*rank_of(address), pid, now()))
        if self._watched or self._measured:
            self._ask(address)

    def _forget(self, state: MeshState) -> None:
        if state.stopped is None:  # this process has attached to it again
            return
        for uid in (*(state.actors if isinstance(state, ProcState) else ()), state.uid):
            self._odd.pop(uid, None)
            self._starting.pop(uid, None)
            self._put(e.MeshForgotten(uid))

    # -- supervision ------------------------------------------------------------------------------------------------

    def _on_supervision(self, event: Action | OwnerSaid | None) -> None:
        match event:
            case None:
                if not self._report_due:
                    self._report_due = True
                    self._runtime.later(REPORT_S, self.report_ranks)
            case Supervise(owner, failure) if not failure.preempted:
                self._failed(failure)
                self._owner(failure.failure_id, owner, "asked")
            case RootFault(failure, route):
                self._failed(failure)
                how = "asked" if route == "call" else "shown"
                self._put(e.OwnerNotified(str(failure.failure_id), "a call" if route == "call" else "<root>", how))
            case ShowFailure(failure):
                self._put(e.OwnerNotified(str(failure.failure_id), "<root>", "shown"))
            case OwnerSaid(failure_id, owner, handled):
                self._owner(failure_id, owner, "handled" if handled else "not handled")

    def _owner(self, failure_id: int, owner: str, how: str) -> None:
        self._put(e.OwnerNotified(str(failure_id), self._driver.owner_name(owner), how))

    def _failed(self, failure: MeshFailure) -> None:
        if failure.failure_id in self._failures or not failure.failure_id:
            return
        self._failures.add(failure.failure_id)
        state = self._runtime.meshes.get(failure.mesh_uid)
        ranks: list[int] = [] if state is None else list(state.ranks)
        hit = tuple(ranks[index] for index in failure.places if index < len(ranks))
        self._put(
            e.MeshFailed(str(failure.failure_id), failure.mesh_uid, hit, record(failure, now(), self.readable), failure)
        )

    def report_ranks(self) -> None:
        """Reports ranks whose state in supervision has changed since the last call."""
        self._report_due = False
        timestamp = now()
        for uid, ended, odd in self._driver.ranks_not_alive():
            reported = self._odd.setdefault(uid, {})
            for rank, status in odd.items():
                if reported.get(rank) is not status:
                    self._rank_changed(uid, rank, status, timestamp)
            self._odd[uid] = odd
            if ended is not None and uid not in self._ended:
                self._ended.add(uid)
                self._put(e.MeshEnded(uid, ended.text or ended.kind, timestamp, ended.kind != "stopped"))
                for failure_id, hit in tuple(self._hit.items()):
                    self._settle(failure_id, {key for key in hit if key[0] == uid}, "stopped", timestamp)

    def _rank_changed(self, uid: str, rank: int, status: RankStatus, timestamp: float) -> None:
        event = rank_state_changed(uid, rank, status, timestamp)
        self._put(event)
        key = (uid, rank)
        if event.failure:
            self._hit.setdefault(status.failure_id, set()).add(key)
            state: FailureState = "healing" if status.state == "healing" else "open"
            self._put(e.FailureStateChanged(event.failure, state, timestamp))
        for failure_id, hit in tuple(self._hit.items()):
            if key in hit and (not event.failure or failure_id != status.failure_id):
                self._settle(failure_id, {key}, "stopped" if status.state == "stopped" else "healed", timestamp)

    def _settle(self, failure_id: int, ranks: set[tuple[str, int]], how: FailureState, timestamp: float) -> None:
        remaining = self._hit[failure_id]
        remaining -= ranks
        if not remaining:
            del self._hit[failure_id]
            self._put(e.FailureStateChanged(str(failure_id), how, timestamp))


def _shown(used: ResourcesUsed) -> tuple[float, int, float, int, int, str]:
    """Returns the fields that the state shows."""
    return used.cpu, used.memory, used.gpu, used.gpu_memory, used.gpu_total, used.memory_kind


# -- current state ----------------------------------------------------------------------------------------------------


def now() -> float:
    """Returns the present time in the form of events."""
    return round(time.time(), 3)


def rank_of(address: str) -> tuple[str, int]:
    """Returns the proc mesh and base rank of a process."""
    uid, rank, _ = parse_address(address).place
    return uid, rank


def is_ready(state: MeshState) -> bool:
    """Returns whether the start of a mesh, its set-up code or constructors, has ended, even by a failure."""
    return state.spawn_spec is None or state.spawn_spec.initialized.done()


def mesh_description(runtime: Runtime, state: MeshState, *, ready: bool = False) -> e.MeshDescription:
    """Returns the event for a spawned mesh."""
    spawn_spec = state.spawn_spec
    form = RegionForm.of(state.region)
    procs = isinstance(state, ProcState)
    return e.MeshDescription(
        uid=state.uid,
        name=state.name,
        kind="procs" if procs else "actors",
        ranks=state.ranks,
        labels=form.labels,
        sizes=form.sizes,
        offset=form.offset,
        strides=form.strides,
        picked=form.ranks,
        actor_class=state.cls.__name__ if isinstance(state, ActorState) else "",
        on=state.procs.uid if isinstance(state, ActorState) else "",
        inner=state.inner,
        hosts=state.hosts if isinstance(state, ProcState) else (),
        per_host=state.layout.per_host if isinstance(state, ProcState) else 1,
        owner="" if spawn_spec is None else str(spawn_spec.instance),
        mine=state.owner_process == runtime.address,
        ready=ready,
        at=now(),
    )


def rank_state_changed(uid: str, rank: int, status: RankStatus, timestamp: float) -> e.RankStateChanged:
    """Returns the event for the condition of a rank in supervision."""
    cause, failed = status.cause, status.state == "failed"
    return e.RankStateChanged(
        uid,
        rank,
        status.state,
        status.incarnation,
        round(cause.at, 3) if failed and cause is not None and cause.at else timestamp,
        end_text(cause) if failed and cause is not None else "",
        str(status.failure_id) if status.failure_id and status.state in ("failed", "healing") else "",
    )


def end_text(cause: Cause) -> str:
    """Returns the reason for the end of a rank, in a few words."""
    origin = cause.origin
    ended = dict(facts(origin)).get("ended", "")
    if ended:
        used = f"; it used {origin.memory}" if origin.memory else ""
        return f"it ended {ended}" + (f", out of memory{used}" if origin.oom else "")
    lines = (origin.text or cause.text or cause.kind).strip().splitlines()
    return lines[0] if lines else cause.kind


def facts_of(runtime: Runtime, state: MeshState) -> Iterator[e.Event]:
    """Yields all facts about one mesh and, for actors, about their processes: for callers without a live store."""
    watcher = runtime.part(ProcessWatcher)
    procs = proc_state_of(state)
    states: list[MeshState] = [procs] if procs is state else [procs, state]
    for shown in states:
        yield mesh_description(runtime, shown, ready=is_ready(shown))
    for noticed in runtime.part(HostNotices).of(procs.hosts):
        yield e.HostSeen(noticed.host, notice=noticed.by, until=noticed.until or 0.0)
    for rank in procs.ranks:
        address = procs.address(rank)
        if address in watcher.pids:
            yield e.ProcessStarted(procs.uid, rank, watcher.pids[address], now())
        if address in watcher.unresponsive:
            yield e.ResponsivenessChanged(procs.uid, rank, watcher.unresponsive[address], now())
    for rank in state.region.ranks():
        location = runtime.held_at(state.uid, rank)
        if location:
            yield e.SessionOpened(f"{state.uid}.{rank}", state.uid, rank, now(), {"place": location})
    for shown in states:
        for uid, ended, odd in runtime.part(Driver).ranks_not_alive(shown.uid):
            for rank, status in odd.items():
                yield rank_state_changed(uid, rank, status, now())
            if ended is not None:
                yield e.MeshEnded(uid, ended.text or ended.kind, now(), ended.kind != "stopped")
        if shown.stopped is not None:
            yield e.MeshEnded(shown.uid, shown.stopped, now())
