"""Updates of owners to processes: healed ranks, changed extents and stops of meshes, and a new owner of their mesh."""

import logging
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from monarch_nb.code.reload import ClassVersions
from monarch_nb.host import protocol as p
from monarch_nb.host.verbs import NEW_OWNER
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.mesh_events import MeshEvents, OwnerChanged
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import request
from monarch_nb.mesh.verbs import (
    ACTOR_FAILED,
    RESULT,
    RESULTS,
    STOPPED,
    SUBSCRIBE,
    UPDATE,
    ResultBody,
    StopUpdate,
    StoredResult,
    StoredResults,
    Subscribe,
    Update,
    WantedResult,
    WantedResults,
)
from monarch_nb.runtime import ActorCell, Future, MeshState, ProcState, RunsOn, Runtime, calls_of
from monarch_nb.runtime.sender import caller_of
from monarch_nb.runtime.verbs import UNREAD, UnreadState
from monarch_nb.shape import RegionForm
from monarch_nb.supervision import Action, ActorEnd, Driver, RankIncarnation, SupervisionMachine
from monarch_nb.transport import TransportError, UnreachableError
from monarch_nb.wire import Asker, Done, Status, parse_address

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds to wait for holders to confirm a heal


class ReferenceUpdates:
    """Records the processes that hold references to meshes owned here, and updates them."""

    def __init__(self, runtime: Runtime, driver: Driver, watcher: ProcessWatcher, versions: ClassVersions) -> None:
        self._runtime, self._driver, self._watcher, self._versions = runtime, driver, watcher, versions
        self._holders = versions.holders
        self._runtime.verbs.handle(SUBSCRIBE, self._subscribe)
        self._runtime.verbs.handle(UPDATE, self._update)
        self._runtime.verbs.handle(STOPPED, self._stopped)

    def forget(self, uid: str) -> None:
        """Forgets the holders of a mesh that was stopped long ago, all of which have been updated."""
        self._holders.pop(uid, None)

    def holders(self, uid: str) -> frozenset[str]:
        """Returns the processes that have subscribed."""
        return frozenset(self._holders.get(uid, ()))

    def subscribe(self, state: MeshState) -> None:
        """Subscribes this process at the owner of a mesh."""
        self._runtime.post(state.owner_process, SUBSCRIBE, Subscribe(state.uid))

    def announce(self, state: MeshState) -> None:
        """Sends the state of a mesh to all holders, without waiting for them."""
        for process in tuple(self._holders.get(state.uid, ())):
            self._send_update(state, process)

    def _send_update(self, state: MeshState, holder: str) -> None:
        try:
            self._runtime.post(holder, UPDATE, self._update_of(state, ()))
        except UnreachableError:
            self._holders[state.uid].discard(holder)

    def healed(self, incarnations: Sequence[tuple[str, Sequence[RankIncarnation]]]) -> None:
        """Sends heals to all holders, and blocks until they confirm."""
        requests: list[tuple[str, str, Future[object]]] = []
        for uid, back in incarnations:
            state = self._runtime.meshes.get(uid)
            if state is None:
                continue
            update = self._update_of(state, tuple(back))
            for process in tuple(self._holders.get(uid, ())):
                requests.append((process, uid, request(self._runtime, process, UPDATE, update)))
        deadline = time.monotonic() + PATIENCE
        for process, uid, future in requests:
            try:
                future.get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                continue  # it receives this heal, and later ones, when it continues
            except Exception:
                self._holders[uid].discard(process)

    def _update_of(self, state: MeshState, back: tuple[RankIncarnation, ...]) -> Update:
        region = RegionForm.of(state.region) if state.resized else None
        hosts = state.layout.hosts if state.resized and isinstance(state, ProcState) else ()
        since = self._driver.since(state.uid)
        return Update(state.uid, state.incarnations, state.version, back, since, region, hosts)

    def stopped(self, state: MeshState, ranks: Sequence[int] | None, reason: str, *, over: bool) -> None:
        """Notifies all holders that a mesh stops, without waiting for them."""
        message = StopUpdate(state.uid, None if ranks is None else tuple(ranks), reason, over)
        for process in tuple(self._holders.get(state.uid, ())):
            try:
                self._runtime.post(process, STOPPED, message)
            except UnreachableError:
                self._holders[state.uid].discard(process)

    # -- reading thread ---------------------------------------------------------------------------------------------

    def _subscribe(self, message: Subscribe, asker: Asker[None]) -> None:
        uid, holder = message.uid, asker.src
        self._holders.setdefault(uid, set()).add(holder)
        state = self._runtime.meshes.get(uid)
        if state is None:
            return
        if state.version:
            self._send_update(state, holder)
        self._versions.greet(holder, uid)
        if state.stopped is not None and not state.detached:
            self._runtime.post(holder, STOPPED, StopUpdate(uid, None, state.stopped, True))

    def _update(self, update: Update, asker: Asker[Done]) -> Done:
        state = self._runtime.meshes.get(update.uid)
        if state is not None:
            region = None if update.region is None else update.region.region
            layout = (
                replace(state.layout, hosts=update.hosts) if update.hosts and isinstance(state, ProcState) else None
            )
            self._runtime.part(MeshRegistry).renew(state, update.incarnations, update.version, region, layout)
            back = update.back or tuple(update.incarnations.items())
            method = "respawned" if isinstance(state, ProcState) else "recreated"

            def follow(machine: SupervisionMachine) -> list[Action]:
                machine.came_after(update.uid, update.since)
                actions: list[Action] = getattr(machine, method)(update.uid, back)
                return actions

            self._driver.feed(follow)
            if isinstance(state, ProcState):
                for rank, _ in back:
                    self._runtime.node.learn(state.layout.host_of(rank))  # it has returned, if it was lost
                    self._watcher.host_back(state.layout.host_of(rank), update.since.get(rank, 0))
                self._watcher.watch(*(state.address(rank) for rank, _ in back))
        return Done()

    def _stopped(self, message: StopUpdate, asker: Asker[None]) -> None:
        state = self._runtime.meshes.get(message.uid)
        if state is None:
            return
        if message.ranks is None:
            state.stopped = message.reason
        self._driver.mark_stopped(state, message.ranks, message.reason, over=message.over)


class Handover:
    """Handles announcements of new owners, and their requests, on the reading thread; one per process."""

    def __init__(self, runtime: Runtime, driver: Driver, registry: MeshRegistry, watcher: ProcessWatcher,
                 updates: ReferenceUpdates, events: MeshEvents) -> None:  # fmt: skip
        self._runtime, self._driver, self._updates = runtime, driver, updates
        self._registry, self._watcher, self._events = registry, watcher, events
        self._turns: dict[str, int] = {}  # by mesh
        runtime.verbs.handle(NEW_OWNER, self._on_new_owner)
        runtime.verbs.handle(RESULTS, self._results)
        runtime.verbs.handle(RESULT, self._result)
        runtime.verbs.handle(UNREAD, self._on_unread)

    def report_to_owner(self, process: str, end: ActorEnd) -> None:
        """Reports a failed actor to its owner, unless the owner has detached: the next owner requests all states."""
        if process not in self._runtime.local.away:
            self._runtime.post(process, ACTOR_FAILED, end)

    def _on_new_owner(self, news: p.NewOwner, asker: Asker[p.Welcome]) -> p.Welcome:
        states = [state for uid in news.meshes if (state := self._runtime.meshes.get(uid)) is not None]
        outdated = any(news.turn < self._turns.get(uid, 0) for uid in news.meshes)
        if not outdated:
            self._turns.update(dict.fromkeys(news.meshes, news.turn))
            if news.owner:
                self._take_over(states, news)
            elif self._belongs_to(news):
                self._release({state.owner_process for state in states}, news.unread)
                self._events.publish(OwnerChanged(""))
        return self._welcome(set(news.meshes)) if asker.waits else p.Welcome()

    def _belongs_to(self, news: p.NewOwner) -> bool:
        """Returns whether this process belongs to the mesh, rather than to another one whose actors refer to it."""
        return parse_address(self._runtime.address).mesh in news.meshes

    def _take_over(self, states: list[MeshState], news: p.NewOwner) -> None:
        local, owner = self._runtime.local, news.owner
        former = {state.owner_process for state in states} - {owner}
        for state in states:
            state.owner_process = owner
        belongs = self._belongs_to(news)
        if belongs:
            self._obey(owner, former, [cell for cell in tuple(local.cells.values()) if cell.mesh in news.meshes])
        self._driver.feed(lambda machine: machine.handed_over(news.meshes, owner))
        for state in states:  # the new owner does not know the holders of references
            try:
                self._updates.subscribe(state)
            except TransportError:
                logger.debug("%s cannot be informed of a reference", owner, exc_info=True)
        if belongs:
            self._events.publish(OwnerChanged(owner))

    def _obey(self, owner: str, former: set[str], cells: list[ActorCell]) -> None:
        """Makes a process the owner of this one's actors; answers for earlier ones are stored."""
        local = self._runtime.local
        for cell in cells:
            former.add(cell.spec.owner_process)
            cell.hand_over(owner)
        former.discard(owner)
        # Calls of the mesh's former controller belong to this one too.
        self._release({process for process in former if parse_address(process).is_controller})
        if cells:
            self._watcher.watch_owner(owner)
        if owner in local.away:  # the same owner has returned, but no longer waits for its former calls
            calls = [call for cell in tuple(local.cells.values()) for call in calls_of(cell)]
            local.orphans.update(call for call in calls if caller_of(call) == owner)
            local.away.discard(owner)

    def _release(self, processes: set[str], unread: tuple[int, ...] = ()) -> None:
        """Stores answers for processes that have left; answers that they may not have read count as not received."""
        self._runtime.local.away.update(processes)
        stored = self._runtime.local.stored_answers
        for process in processes if unread else ():
            stored.discard_read(process, unread)
        stored.release(processes)

    def _on_unread(self, state: UnreadState, asker: Asker[None]) -> None:
        self._runtime.local.stored_answers.discard_read(asker.src, state.unread)

    def _welcome(self, meshes: set[str]) -> p.Welcome:
        local = self._runtime.local
        missed = tuple(
            p.UndeliveredReply(mesh=answer.mesh, rank=answer.rank, endpoint=answer.endpoint, at=answer.at,
                     well=answer.status == Status.VALUE, stored=answer.frames is not None, error=answer.error)
            for answer in local.stored_answers.take_new(meshes)
        )  # fmt: skip
        now, wall = time.monotonic(), time.time()
        running = tuple(
            (cell.mesh, cell.rank, runs[1], wall - (now - runs[2]))
            for cell in tuple(local.cells.values())
            if cell.mesh in meshes and (runs := cell.running) is not None
        )
        actors = tuple(
            p.ActorThere(mesh, rank, incarnation, b"" if cause is None else msgspec.msgpack.encode(cause))
            for (mesh, rank), (incarnation, cause) in self._runtime.latest_actors(meshes).items()
        )
        return p.Welcome(missed, running, actors, self._never_set_up())

    def _results(self, query: WantedResults, asker: Asker[StoredResults]) -> StoredResults:
        stored = self._runtime.local.stored_answers
        stored.forget(query.forget)
        return StoredResults(
            tuple(
                StoredResult(number=answer.number, mesh=answer.mesh, rank=answer.rank, endpoint=answer.endpoint,
                     call=answer.call, index=answer.index, extent=answer.extent, at=answer.at, size=answer.size,
                     stored=answer.frames is not None, error=answer.error)
                for answer in stored.of(query.meshes)
            )
        )  # fmt: skip

    def _result(self, query: WantedResult, asker: Asker[ResultBody]) -> ResultBody:
        frames = self._runtime.local.stored_answers.body(query.number)
        return ResultBody(None if frames is None else tuple(frames))

    def _never_set_up(self) -> bool:
        """Returns whether this process still lacks its set-up."""
        consoles = [cell for cell in tuple(self._runtime.cells.values()) if cell.spec.runs_on is RunsOn.MAIN_THREAD]
        idle = all(not cell.queued() and not cell.calls for cell in consoles)
        return idle and self._registry.started_in is None
